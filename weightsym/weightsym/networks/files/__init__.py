"""Networks in files: one tensor at a time, or all networks of a folder as one stack."""

"""The symmetry group of a network: its description, its elements, and their action on weights."""

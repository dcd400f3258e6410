"""The group of a network: what it is, its elements, and how they act on weights."""

"""Bring networks into one frame: permutations by weights or activations, and lines between them."""

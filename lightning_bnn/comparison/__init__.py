"""Posteriors on disk against a reference: reading, distances, rows and tables."""

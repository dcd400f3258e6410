"""Posteriors on disk against a reference: reading them, their distances, rows and tables."""

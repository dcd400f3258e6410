"""Reproduction of the papers: tables, figures, claims, and the sampling of references."""

__version__ = "0.1.0"

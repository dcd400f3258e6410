"""The papers once more: tables, figures, claims, and how the references are sampled."""

__version__ = "0.1.0"

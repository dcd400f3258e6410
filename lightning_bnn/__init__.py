"""Bayesian neural networks in PyTorch Lightning, up to the symmetries of their weights.

Sub-packages are imported on first use, so that this import stays light.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

__all__ = [
    "bank",
    "callbacks",
    "compare",
    "datamodules",
    "evaluation",
    "hub",
    "likelihoods",
    "methods",
    "metrics",
    "models",
    "modules",
    "params",
    "plots",
    "posteriors",
    "samplers",
    "sklearn",
    "symmetry",
    "testing",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "compare":
        return importlib.import_module("lightning_bnn.evaluation.compare").compare
    if name in __all__:
        return importlib.import_module(f"lightning_bnn.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])

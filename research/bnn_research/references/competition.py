"""HMC predictions of the NeurIPS 2021 competition."""

from __future__ import annotations

import os

import numpy as np
import torch
from torch import Tensor

_ROUNDED = 1e-3
"""Tolerance of the sum of probabilities in a file."""


def read_competition(path: str | os.PathLike[str]) -> Tensor:
    """Read HMC predictions, as published for the competition on approximate inference.

    `lightning_bnn.metrics.agreement` and `total_variation` are its two metrics for classes.

    Args:
        path: ``probs.csv`` of CIFAR-10, IMDB or MedMNIST: a row of probabilities for each example
            of its test set.

    References:
        | Evaluating Approximate Inference in Bayesian Deep Learning (Wilson et al., 2022)
        | https://proceedings.mlr.press/v176/wilson22a.html

    >>> import tempfile
    >>> from pathlib import Path
    >>> path = Path(tempfile.mkdtemp()) / "probs.csv"
    >>> np.savetxt(path, [[0.9, 0.1], [0.4, 0.6]], delimiter=",")
    >>> read_competition(path).argmax(-1)
    tensor([0, 1])
    """
    try:
        rows = np.loadtxt(path, delimiter=",", ndmin=2)
    except ValueError as error:
        raise ValueError(f"{path} is not a table of numbers: {error}.") from None
    probs = torch.from_numpy(rows)
    if len(probs) and probs.shape[1] < 2:
        raise ValueError(f"{path} must have a column for each class, but has one column.")
    odd = ((probs.sum(-1) - 1).abs() > _ROUNDED) | (probs < 0).any(-1) | probs.isnan().any(-1)
    if not len(probs) or bool(odd.any()):
        raise ValueError(
            f"{path} must hold a row of probabilities for each example, but "
            f"{int(odd.sum())} of {len(probs)} rows are not (the files of UCI hold draws "
            "of targets instead)."
        )
    return probs

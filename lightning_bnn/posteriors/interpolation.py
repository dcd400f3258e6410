r"""Does a Gaussian sit on one mode, or between modes that are permutations of each other?

.. math:: \frac{E_q \|\omega - P \omega\|^2 - \|\mu - P \mu\|^2}{E_q \|\omega - P \omega\|^2}

where P replaces every unit by the mean of its layer: the part of the differences between units that
is noise. It is 0 when the units are told apart for certain, and 1 when their means are all the
same, so that the Gaussian lies between all modes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_bnn.params import Params
from lightning_bnn.posteriors.unit_layers import UnitLayer

__all__ = ["interpolation"]


def interpolation(layers: Sequence[UnitLayer], mean: Params, log_std: Params) -> Tensor:
    """The measure for every Gaussian of a stack.

    Args:
        layers: whose units are compared.
        mean: of the Gaussians, as a stack.
        log_std: logarithms of their standard deviations.
    """
    first = next(iter(mean.values()))
    signal = torch.zeros(len(first), dtype=torch.float64, device=first.device)
    noise = signal.clone()
    for layer in layers:
        rows = layer.rows(mean).double()
        signal += (rows - rows.mean(1, keepdim=True)).square().sum((1, 2))
        variances = (2 * layer.rows(log_std).double()).exp()
        noise += (1 - 1 / layer.units) * variances.sum((1, 2))
    return noise / (signal + noise)

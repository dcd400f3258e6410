"""Carry optimizers along when their networks are permuted, flipped or rescaled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_bnn.params import Params
from lightning_bnn.symmetry.actions import Element, flip, permute, rescale
from lightning_bnn.symmetry.groups import Symmetries

__all__ = ["scale_optimizer_state", "transform_optimizer_state"]


# ------------------------------------------------------------ optimizer state
def transform_optimizer_state(
    optimizer: torch.optim.Optimizer,
    names: Mapping[str, Tensor],
    sym: Symmetries,
    *,
    permutations: Element | None = None,
    signs: Element | None = None,
) -> None:
    """Carry an optimizer along when its network is permuted or flipped: training goes on as before.

    Every buffer of a parameter's shape moves with it; second moments keep their sign.

    Args:
        optimizer: the optimizer, changed in place.
        names: the live parameters by name, ``dict(module.named_parameters())``.
        sym: what `discover` returned.
        permutations: as in `permute`.
        signs: as in `flip`.
    """
    for key in _buffer_names(optimizer, names):
        buffers = _buffers(optimizer, names, key)
        if permutations is not None:
            buffers = permute(buffers, sym, permutations)
        if signs is not None and key not in _SECOND_MOMENTS:
            buffers = flip(buffers, sym, signs)
        _write_back(optimizer, names, key, buffers)


def scale_optimizer_state(
    optimizer: torch.optim.Optimizer, names: Mapping[str, Tensor], sym: Symmetries, scales: Element
) -> None:
    """Carry an optimizer along when its network is rescaled: momentum inversely, squares squared.

    Gradients scale inversely to weights, so this keeps the buffers meaningful. Scalings do not
    commute with training: the run that follows is a different one.
    """
    for key in _buffer_names(optimizer, names):
        power = -2 if key in _SECOND_MOMENTS else -1
        buffers = _buffers(optimizer, names, key)
        _write_back(optimizer, names, key, rescale(buffers, sym, [s**power for s in scales]))


_SECOND_MOMENTS = frozenset(("exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum", "acc_delta"))


def _buffer_names(optimizer: torch.optim.Optimizer, names: Mapping[str, Tensor]) -> list[str]:
    return sorted(
        {k for p in names.values() for k, v in optimizer.state.get(p, {}).items() if _follows(v, p)}
    )


def _follows(value: Any, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == parameter.shape and value.ndim > 0


def _buffers(optimizer: torch.optim.Optimizer, names: Mapping[str, Tensor], key: str) -> Params:
    return {
        n: optimizer.state[p][key]
        for n, p in names.items()
        if _follows(optimizer.state.get(p, {}).get(key), p)
    }


def _write_back(
    optimizer: torch.optim.Optimizer, names: Mapping[str, Tensor], key: str, new: Params
) -> None:
    for name, value in new.items():
        optimizer.state[names[name]][key] = value

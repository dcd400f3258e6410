"""Carry optimizers along when their networks are permuted, flipped or rescaled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_bnn.params import Params
from lightning_bnn.symmetry.actions import Element, multiply, permute_some
from lightning_bnn.symmetry.groups import Symmetries
from lightning_bnn.symmetry.validation import check_permutations, check_scales, check_signs

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
        names: the live parameters, ``dict(module.named_parameters())`` of the module that the
            symmetries were found on.
        sym: what `discover` returned.
        permutations: as in `permute`.
        signs: as in `flip`.
    """
    _check_names(optimizer, names, sym)
    for key in _buffer_names(optimizer, names):
        buffers = _buffers(optimizer, names, key)
        if permutations is not None:
            buffers = permute_some(buffers, sym, check_permutations(permutations, sym))
        if signs is not None and key not in _SECOND_MOMENTS:
            buffers = multiply(buffers, sym, {"signs": check_signs(signs, sym)})
        _write_back(optimizer, names, key, buffers)


def scale_optimizer_state(
    optimizer: torch.optim.Optimizer, names: Mapping[str, Tensor], sym: Symmetries, scales: Element
) -> None:
    """Carry an optimizer along when its network is rescaled: momentum inversely, squares squared.

    Gradients scale inversely to weights, so this keeps the buffers meaningful. Scalings do not
    commute with training: the run that follows is a different one.
    """
    _check_names(optimizer, names, sym)
    scales = check_scales(scales, sym)
    for key in _buffer_names(optimizer, names):
        power = -2 if key in _SECOND_MOMENTS else -1
        buffers = _buffers(optimizer, names, key)
        _write_back(
            optimizer, names, key, multiply(buffers, sym, {"scalings": [s**power for s in scales]})
        )


_SECOND_MOMENTS = frozenset(("exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum", "acc_delta"))


def _check_names(
    optimizer: torch.optim.Optimizer, names: Mapping[str, Tensor], sym: Symmetries
) -> None:
    """Names that do not fit would silently leave the momenta where they are."""
    missing = [n for n in sym.weights if n not in names]
    if missing:
        held = next(iter(names), None)
        raise ValueError(
            f"`names` lacks {missing[0]!r} (it holds {held!r}): give the `named_parameters()` "
            "of the module that the symmetries were found on."
        )
    held_by_optimizer = {id(p) for group in optimizer.param_groups for p in group["params"]}
    strangers = [n for n in sym.weights if id(names[n]) not in held_by_optimizer]
    if len(strangers) == len(sym.weights):
        raise ValueError(f"`names[{strangers[0]!r}]` is not a parameter of the optimizer.")


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

"""Carry optimizers along when their networks are permuted, flipped, rescaled or mixed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from weightsym.groups.actions import Element, multiply, permute_some
from weightsym.groups.mixing import mixed_axis
from weightsym.groups.symmetries import Symmetries
from weightsym.groups.validation import check_element
from weightsym.params import Params, is_stacked

__all__ = ["transform_optimizer_state"]


def transform_optimizer_state(
    optimizer: torch.optim.Optimizer,
    names: Mapping[str, Tensor],
    sym: Symmetries,
    *,
    permutations: Element | None = None,
    signs: Element | None = None,
    scales: Element | None = None,
    matrices: Element | None = None,
) -> None:
    r"""Carry an optimizer along when its network is permuted, flipped, rescaled or mixed.

    Every buffer of a parameter's shape moves with it; second moments and sizes keep their sign. An
    optimizer with other state (LBFGS, Adafactor) is refused. A gradient is divided by the scale of
    its weight, and multiplied by the inverse transpose of its matrix; so is momentum,

    .. math:: m' = m / s, \quad v' = v / s^2, \qquad m' = G^{-T} m, \quad
        v'_i = \textstyle\sum_j (G^{-T})_{ij}^2 v_j

    After permutations and flips, training goes on as before, and so does gradient descent with
    momentum after rotations. Scales and other matrices do not commute with training: the run that
    follows is a different one. Second moments, those of Adam, cannot be mixed exactly: they have no
    cross terms, and the squared entries are right for gradients that are uncorrelated.

    Args:
        optimizer: the optimizer, changed in place.
        names: the live parameters, ``dict(module.named_parameters())`` of the module that the
            symmetries were found on.
        sym: what `discover` returned.
        permutations: as in `permute`.
        signs: as in `flip`.
        scales: as in `rescale`.
        matrices: as in `mix`, after all others.

    >>> from torch import nn
    >>> from weightsym import discover, transform_optimizer_state
    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> sym, adam = discover(net, torch.randn(8, 2)), torch.optim.Adam(net.parameters())
    >>> net(torch.randn(8, 2)).sum().backward(), adam.step()
    (None, None)
    >>> old = adam.state[net[0].bias]["exp_avg"]
    >>> names = dict(net.named_parameters())
    >>> transform_optimizer_state(adam, names, sym, permutations=[torch.tensor([2, 0, 1])])
    >>> torch.equal(adam.state[net[0].bias]["exp_avg"], old[[2, 0, 1]])
    True
    """
    _check_names(optimizer, names, sym)
    stacked = is_stacked(names, sym.shapes)
    members = next(iter(names.values())).shape[0] if stacked else None
    elements = {
        "permutations": permutations,
        "signs": signs,
        "scalings": scales,
        "linear": matrices,
    }
    order, flips, factors, mixings = (
        None if values is None else check_element(field, values, sym, members)
        for field, values in elements.items()
    )

    def move(key: str, buffers: Params) -> Params:
        if flips is not None and key not in _WITHOUT_SIGN:
            buffers = multiply(buffers, sym, {"signs": flips})
        if factors is not None:
            power = (2 if key in _SECOND_MOMENTS else 1) * (1 if key in _LIKE_WEIGHTS else -1)
            buffers = multiply(buffers, sym, {"scalings": [s**power for s in factors]})
        buffers = buffers if order is None else permute_some(buffers, sym, order)
        return buffers if mixings is None else _mixed(key, buffers, sym, mixings)

    _change_buffers(optimizer, names, move)


def _mixed(key: str, buffers: Params, sym: Symmetries, matrices: Element) -> Params:
    """Buffers of one kind after matrices: gradients take the inverse transpose."""
    result = dict(buffers)
    for group, g in zip(sym.linear, matrices, strict=True):
        inverse = torch.linalg.inv(g.double()).mT
        for placement in group.placements:
            name = sym.axes[placement.axis].tensor
            if name in result:
                factor = g if (placement.exponent == 1) == (key in _LIKE_WEIGHTS) else inverse
                if key in _WITHOUT_SIGN:
                    factor = factor**2 if key in _SECOND_MOMENTS else factor.abs()
                result[name] = mixed_axis(result[name], sym, placement, factor)
    return result


_SECOND_MOMENTS = frozenset(("exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum", "acc_delta"))
_WITHOUT_SIGN = _SECOND_MOMENTS | {"exp_inf", "step_size"}
_LIKE_WEIGHTS = frozenset(("acc_delta", "step_size", "ax"))  # all others are made of gradients
_COUNTERS = frozenset(("step", "eta", "mu", "mu_product"))


def _check_names(
    optimizer: torch.optim.Optimizer, names: Mapping[str, Tensor], sym: Symmetries
) -> None:
    """Names that do not fit would silently leave the momenta where they are."""
    missing = [n for n in sym.weights if n not in names]
    if missing:
        first = next(iter(names), None)
        raise ValueError(
            f"`names` lacks {missing[0]!r} (it holds {first!r}): give the `named_parameters()` "
            "of the module that the symmetries were found on."
        )
    held_by_optimizer = {id(p) for group in optimizer.param_groups for p in group["params"]}
    strangers = [n for n in sym.weights if id(names[n]) not in held_by_optimizer]
    if len(strangers) == len(sym.weights):
        raise ValueError(f"`names[{strangers[0]!r}]` is not a parameter of the optimizer.")


def _change_buffers(
    optimizer: torch.optim.Optimizer,
    names: Mapping[str, Tensor],
    change: Callable[[str, Params], Params],
) -> None:
    """Replace, kind by kind, the buffers that have the shape of their parameter."""
    kinds: dict[str, Params] = {}
    for name, parameter in names.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if key in _COUNTERS:
                continue
            _refuse_other_shapes(optimizer, key, value, parameter)
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                kinds.setdefault(key, {})[name] = value
    for key, buffers in kinds.items():
        for name, value in change(key, buffers).items():
            optimizer.state[names[name]][key] = value


def _refuse_other_shapes(
    optimizer: torch.optim.Optimizer, key: str, value: Any, parameter: Tensor
) -> None:
    """Histories of all parameters at once, and factored moments, would stay behind silently."""
    is_history = isinstance(value, list) and bool(value)
    if is_history or (
        isinstance(value, Tensor) and value.ndim > 0 and value.shape != parameter.shape
    ):
        raise ValueError(
            f"The state {key!r} of {type(optimizer).__name__} has not the shape of a parameter and "
            "cannot be carried along: start a new optimizer."
        )

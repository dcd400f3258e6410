"""Transform the state of optimizers along with their networks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from weightsym.groups.element import Element
from weightsym.groups.symmetries import Symmetries
from weightsym.params import Params, is_stacked


def transform_optimizer_state(
    optimizer: torch.optim.Optimizer, names: Mapping[str, Tensor], element: Element
) -> None:
    r"""Transform the state of an optimizer along with its network.

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
        element: of the group, without shifts.

    >>> from torch import nn
    >>> from weightsym import Element, discover, transform_optimizer_state
    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> sym, adam = discover(net, torch.randn(8, 2)), torch.optim.Adam(net.parameters())
    >>> net(torch.randn(8, 2)).sum().backward(), adam.step()
    (None, None)
    >>> old = adam.state[net[0].bias]["exp_avg"]
    >>> element = Element.of_groups(sym, permutations=[torch.tensor([2, 0, 1])])
    >>> transform_optimizer_state(adam, dict(net.named_parameters()), element)
    >>> torch.equal(adam.state[net[0].bias]["exp_avg"], old[[2, 0, 1]])
    True
    """
    if not isinstance(element, Element):
        raise ValueError(f"`element` must be an `Element`, got {type(element).__name__}.")
    _check_names(optimizer, names, element.sym)
    is_stacked(names, element.sym.shapes)
    gradients = element.dual

    def move(key: str, buffers: Params) -> Params:
        acting = element if key in _LIKE_WEIGHTS else gradients
        if key in _SECOND_MOMENTS:
            return acting.squares.on_some(buffers)
        return (acting.sizes if key in _SIZES else acting).on_some(buffers)

    _change_buffers(optimizer, names, move)


_SECOND_MOMENTS = frozenset(("exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum", "acc_delta"))
_SIZES = frozenset(("exp_inf", "step_size"))
_LIKE_WEIGHTS = frozenset(("acc_delta", "step_size", "ax"))  # all others are made of gradients
_COUNTERS = frozenset(("step", "eta", "mu", "mu_product"))


def _check_names(
    optimizer: torch.optim.Optimizer, names: Mapping[str, Tensor], sym: Symmetries
) -> None:
    """Refuse incomplete names, which would leave momenta unchanged without notice."""
    missing = [n for n in sym.weights if n not in names]
    if missing:
        first = next(iter(names), None)
        raise ValueError(
            f"`names` lacks {missing[0]!r} (it has {first!r}): pass the `named_parameters()` of "
            "the module whose symmetries these are."
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
    """Refuse joint histories and factored moments, which would be left unchanged without notice."""
    is_history = isinstance(value, list) and bool(value)
    if is_history or (
        isinstance(value, Tensor) and value.ndim > 0 and value.shape != parameter.shape
    ):
        raise ValueError(
            f"The state {key!r} of {type(optimizer).__name__} does not have the shape of a "
            "parameter and cannot be transformed: start a new optimizer."
        )

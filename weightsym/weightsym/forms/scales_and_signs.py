"""The scale and sign of every unit, from its incoming weights in graph order."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Literal, get_args

import torch
from torch import Tensor

from weightsym.forms.min_mass import min_mass
from weightsym.forms.signs import joint_signs
from weightsym.groups.element import Element, Kind
from weightsym.groups.symmetries import Group, Placement, Symmetries
from weightsym.groups.units import (
    Statistic,
    by_kernel,
    is_other_side,
    side_by_side,
    statistic,
    twin_places,
    unit_rows,
    writer,
)
from weightsym.groups.validation import check_finite, check_params
from weightsym.networks.dicts import Computed

Scaling = Literal["unit-norm", "unit-std", "min-mass"]
_ROUNDING = 64  # units in the last place
_EXTREMES, _AT_ONCE = 64, 2**16  # numbers that are compared before all, of as many at once
_log = logging.getLogger(__name__)


def canonical_scales_and_signs(
    params: Mapping[str, Tensor],
    sym: Symmetries,
    scaling: Scaling | None,
    target: float = 1.0,
    *,
    unscaled: Sequence[Tensor] | None = None,
) -> tuple[list[Tensor], list[Tensor]]:
    r"""Return scales that bring every unit to the target, and signs of the canonical form.

    .. math:: s_u = t / \|w_u\|, \quad \sigma_u = \mathrm{sign}\, w_{u j}, \quad
        j = \arg\max_i |w_{u i}|

    The sign of a unit makes its largest incoming weight, in absolute value, positive. If several
    signs meet in one weight, `joint_signs` solves for all. Units without incoming weight keep their
    scale, with a warning.

    If these differ within an orbit, `canonicalise` refuses the network, but this function does not.

    Args:
        params: one network or a stack.
        sym: result of `discover`.
        scaling: as in `canonicalise`; ``None`` leaves all scales at one.
        target: norm or standard deviation of every unit.
        unscaled: for every group of scalings, a mask of the units whose scale remains one.

    >>> from weightsym import params as P
    >>> from torch import nn
    >>> from weightsym import discover
    >>> net = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))
    >>> w = P.of(net) | {"0.weight": torch.tensor([[3.0, 4.0], [0.0, 0.5]])}
    >>> scales, signs = canonical_scales_and_signs(w, discover(net, torch.randn(8, 2)), "unit-norm")
    >>> scales, signs
    ([tensor([0.2000, 2.0000])], [])
    """
    _check_options(scaling, target)
    check_params(params, sym)
    if not isinstance(params, Computed):
        check_finite(params, sym)
    device = next(iter(params.values())).device
    factors: dict[Kind, list[Tensor]] = {
        "scalings": [torch.ones(g.units, device=device) for g in sym.scalings],
        "signs": [torch.ones(g.units, device=device) for g in sym.signs],
    }
    measure: Statistic = "std" if scaling == "unit-std" else "norm"
    if scaling == "min-mass" and sym.scalings:
        least, target = min_mass(params, sym, tolerance=1e-16), 1.0
        factors["scalings"] = list(least.scales)
        unscaled = [~falling for falling in least.falling]
    dead: list[Tensor] = []
    sizes: list[tuple[str, Tensor]] = []
    for _, field, index, placement in sorted(_writers(sym), key=lambda w: w[:3]):
        group = sym.scalings[index] if field == "scalings" else sym.signs[index]
        names = [sym.axes[p.axis].tensor for p in twin_places(sym, group, placement)]
        moved = Element.of_values(sym, factors, params[names[0]], names)
        twins = [moved.of(name, params.__getitem__) for name in names]
        w = side_by_side(twins, sym, sym.axes[placement.axis])
        if field == "signs":
            factors[field][index] = _sign_of_largest(params, sym, sym.signs[index], placement, w)
        elif scaling is not None:
            size, before = statistic(params, sym, placement, measure, w), factors[field][index]
            sizes.append((sym.axes[placement.axis].tensor, size))
            scale = _scale(size, target, placement.exponent)
            fixed = unscaled[index].to(size.device) if unscaled else torch.zeros_like(size > 0)
            factors[field][index] = torch.where(fixed, before, before * scale)
            dead.append((~(size > 0) & ~fixed).sum())
    _check_sizes(sizes)
    if not _signs_in_turn(sym):
        scaled = Element.of_values(sym, {"scalings": factors["scalings"]}).view(params)
        factors["signs"] = joint_signs(dict(scaled), sym)
    _warn(int(torch.stack(dead).sum()) if dead else 0)
    return factors["scalings"], factors["signs"]


def _scale(size: Tensor, target: float, exponent: int) -> Tensor:
    """Return factors that bring sizes to a target, exactly one for sizes at the target."""
    scale = torch.where(size > 0, target / torch.where(size > 0, size, 1), 1)
    scale = scale if exponent == 1 else scale ** (1 / exponent)
    is_one = (scale - 1).abs() <= _ROUNDING * torch.finfo(size.dtype).eps
    return torch.where(is_one, 1, scale)  # again changes nothing


def unit_norms(
    params: Mapping[str, Tensor], sym: Symmetries, units: Sequence[Tensor]
) -> list[Tensor]:
    """Return scales that normalise the masked units of every group.

    Args:
        params: one network or a stack.
        sym: result of `discover`.
        units: masks, one per group.
    """
    if not any(bool(some.any()) for some in units):
        return [torch.ones_like(some, dtype=torch.float64) for some in units]
    others = [~some for some in units]
    return canonical_scales_and_signs(params, sym, "unit-norm", unscaled=others)[0]


def _check_options(scaling: Scaling | None, target: float) -> None:
    if scaling is not None and scaling not in get_args(Scaling):
        raise ValueError(
            f"`scaling` must be one of {', '.join(get_args(Scaling))} or None, got {scaling!r}."
        )
    if not 0 < target < float("inf"):
        raise ValueError(f"`target` must be positive and finite, got {target}.")


def _warn(count: int) -> None:
    if count:
        _log.warning("%d units have no incoming weight and keep their scale.", count)


def _check_sizes(sizes: Sequence[tuple[str, Tensor]]) -> None:
    finite = [size.isfinite().all() for _, size in sizes]
    if finite and not bool(torch.stack(finite).all()):
        name, size = next(pair for pair, well in zip(sizes, finite, strict=True) if not well)
        raise ValueError(f"`params`: the squares of {name!r} overflow in {size.dtype}.")


def _writers(sym: Symmetries) -> Iterator[tuple[int, Kind, int, Placement]]:
    """Return every group with the placement that writes it, and the ordering key."""
    kinds: tuple[Kind, ...] = ("scalings", "signs")
    for field in kinds:
        for index, group in enumerate(getattr(sym, field)):
            placement = writer(sym, group)
            if placement is not None:
                first = max(p.axis for p in twin_places(sym, group, placement))
                yield first, field, index, placement


@lru_cache(maxsize=8)
def _signs_in_turn(sym: Symmetries) -> bool:
    """Return whether the incoming weights of every unit flip only with it and earlier units."""
    order = [w for w in sorted(_writers(sym), key=lambda w: w[:3]) if w[1] == "signs"]
    before = set[int]()
    for *_, index, placement in order:
        for twin in twin_places(sym, sym.signs[index], placement):
            for axis in sym.axes_of[sym.axes[twin.axis].tensor]:
                for group, position in sym.placements_by_axis("signs").get(axis, ()):
                    same = axis == twin.axis and (group == index or not _meet(twin, position))
                    if position.exponent % 2 and group not in before and not same:
                        return False
        before.add(index)
    return len(before) == len(sym.signs)


def _meet(first: Placement, second: Placement) -> bool:
    return bool(torch.isin(first.positions.flatten(), second.positions.flatten()).any())


def _sign_of_largest(
    params: Mapping[str, Tensor], sym: Symmetries, group: Group, placement: Placement, w: Tensor
) -> Tensor:
    """Return the sign of the largest weight, or of the next in a tie between both signs.

    If the weights are symmetric under reflection up to rounding, the biases decide, then the first
    weight if the order of the inputs is given. Otherwise the sign does not change.
    """
    rows = unit_rows(params, sym, placement, w)
    up, down = rows.amax(-1), -rows.amin(-1)
    largest = torch.maximum(up, down).amax(-1)
    sign = _signs((up - down)[..., None], largest)[..., 0]
    if bool((sign == 0).any()):
        apart = _signs(_extremes(rows, True) + _extremes(rows, False), largest)
        sign = _first_sign(apart)
    if bool((sign == 0).any()):
        sign = torch.where(sign == 0, _sign_of_all(params, sym, group, placement, rows), sign)
    return torch.where(sign < 0, -1.0, 1.0).to(rows)


def _extremes(rows: Tensor, largest: bool) -> Tensor:
    """Return the first numbers of sorted rows, which mostly spare a sort of all."""

    def some(part: Tensor) -> Tensor:
        return part.topk(min(_EXTREMES, part.shape[-1]), largest=largest).values

    return some(torch.cat([some(part) for part in rows.split(_AT_ONCE, -1)], -1))


def _first_sign(signs: Tensor) -> Tensor:
    first = (signs != 0).to(torch.uint8).argmax(-1, keepdim=True)
    return torch.take_along_dim(signs, first, -1)[..., 0]


def _sign_of_all(
    params: Mapping[str, Tensor], sym: Symmetries, group: Group, placement: Placement, rows: Tensor
) -> Tensor:
    ascending = rows.sort(-1).values
    parts = [ascending.flip(-1) + ascending]
    up, down = (by_kernel(r, sym, placement).sort(-2).values.flatten(-2) for r in (rows, -rows))
    parts.append(up - down)
    for later in group.placements:
        if sym.axes[later.axis].role == "bias" and sym.axes[later.axis].tensor in params:
            parts.append(unit_rows(params, sym, later))
    if _inputs_have_an_order(sym, placement):
        parts.append(rows)
    signs = torch.cat([_signs(weights, weights.abs().amax((-1, -2))) for weights in parts], -1)
    return _first_sign(signs)


def _signs(values: Tensor, largest: Tensor) -> Tensor:
    """Return signs of numbers, zero for rounding errors."""
    size = largest[..., None, None] * _ROUNDING * torch.finfo(values.dtype).eps
    return torch.where(values.abs() > size, values.sign(), 0)


def _inputs_have_an_order(sym: Symmetries, placement: Placement) -> bool:
    moved = sym.placements_by_axis("permutations")
    return not any(is_other_side(sym, a, placement) for a in moved)

"""Remove symmetries: one representative for every orbit of a network.

A canonical form goes softmax shift, scale and sign, sort. Layers are treated in graph order, each
after those before it: the scale of a unit does not see its own sign, and its sign not its own
scale, so that both are read off the weights that enter it once the layer before is done. Every step
commutes with permutations: the result is the same for every network of an orbit.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from lightning_bnn.params import Params, is_stacked
from lightning_bnn.symmetry.actions import multiply, permute, shift_logits
from lightning_bnn.symmetry.axis_actions import Kind, axis_factors, broadcastable
from lightning_bnn.symmetry.balanced_form import balancing_matrices, orienting_matrices
from lightning_bnn.symmetry.groups import Group, Placement, Symmetries
from lightning_bnn.symmetry.min_mass import min_mass
from lightning_bnn.symmetry.mixing import mix_some
from lightning_bnn.symmetry.second_scales import check_norms_fix_scales
from lightning_bnn.symmetry.shifting import remove_shifts
from lightning_bnn.symmetry.sorting import SortKey, sort_permutations
from lightning_bnn.symmetry.spaces import covered
from lightning_bnn.symmetry.units import (
    side_by_side,
    sorted_rows,
    statistic,
    twin_places,
    unit_rows,
    writer,
)
from lightning_bnn.symmetry.validation import check_finite, check_params

__all__ = [
    "canonical_scales_and_signs",
    "canonicalise",
    "remove_softmax_shift",
]

Scaling = Literal["unit-norm", "unit-std", "min-mass"]
_ROUNDING = 64  # units in the last place
_log = logging.getLogger(__name__)


def canonicalise(
    params: Params,
    sym: Symmetries,
    scaling: Scaling | None = "unit-norm",
    permutation: SortKey | None = "max",
    softmax_shift: bool = False,
    *,
    mixing: Literal["balanced"] | None = None,
    shifts: bool = False,
    target: float = 1.0,
    descending: bool = True,
) -> Params:
    """Replace a network, or every member of a stack, by the representative of its orbit.

    Args:
        params: one network or a stack.
        sym: what `discover` returned.
        scaling: norm or standard deviation of the weights that enter a unit (those of a residual
            stream's first writer; the absolute gain after a normalisation) set to ``target``, or
            the scales of least mass.
        permutation: what units are sorted by, see `sort_permutations`.
        softmax_shift: also set the mean over classes of the last layer's weights and biases to
            zero. This changes logits, not probabilities.
        mixing: ``"balanced"`` also brings the channels that matrices may mix (``sym.linear``) to
            their balanced form, see `balancing_matrices`; they keep the order that it gives them.
        shifts: also set biases that other biases can take up, and those that nothing sees, to zero.
        target: the norm or standard deviation that every unit gets.
        descending: largest first.

    Returns:
        New parameters; tensors that nothing changes are the same objects, so clone what you keep
        of a network that goes on training.
    """
    check_params(params, sym)
    if softmax_shift:
        params = remove_softmax_shift(params, sym)
    if shifts:
        params = remove_shifts(params, sym)
    if mixing not in (None, "balanced"):
        raise ValueError(f"`mixing` must be 'balanced' or None, got {mixing!r}.")
    held: set[int] = set()
    if mixing is not None and sym.linear:
        params = _balanced(params, sym, scaling, target)
        inside = covered(sym, sym.permutations, _ORDERED)
        held = {
            k
            for k, (group, units) in enumerate(zip(sym.permutations, inside, strict=True))
            if group.kind != "block" and bool(units.all())
        }
    else:
        scales, signs = canonical_scales_and_signs(params, sym, scaling, target)
        params = multiply(params, sym, {"scalings": scales, "signs": signs})
    if permutation is not None and sym.permutations:
        order = sort_permutations(params, sym, permutation, descending, held=held)
        params = permute(params, sym, order)
    return params


_ORDERED = ("general", "orthogonal", "centred")  # their balanced form sorts the channels
_TURNED = ("orthogonal", "centred", "complex", "unit complex")


def _balanced(params: Params, sym: Symmetries, scaling: Scaling | None, target: float) -> Params:
    """Scales, then matrices, then signs and phases until none changes those behind it.

    A standard deviation changes with a rotation of what is read: it is set last, from unit norms.
    """
    held = covered(sym, sym.scalings, ("general", "complex"))
    if scaling == "unit-std" and _reads_mixed_channels(sym, ("general", *_TURNED)):
        params = _balanced(params, sym, "unit-norm", target)
        scales, _ = canonical_scales_and_signs(params, sym, scaling, target, held=held)
        return multiply(params, sym, {"scalings": scales})
    if scaling == "min-mass" or (scaling is not None and _reads_mixed_channels(sym, ("general",))):
        least = min_mass(params, sym, mixing=True, tolerance=1e-13)
        params = multiply(params, sym, {"scalings": least.scales})
        params = mix_some(params, sym, least.matrices)
    if scaling != "min-mass":
        scales, _ = canonical_scales_and_signs(params, sym, scaling, target, held=held)
        params = multiply(params, sym, {"scalings": scales})
    params = mix_some(params, sym, balancing_matrices(params, sym))
    for _ in range(len(sym.linear) + 1 if sym.signs else 0):
        signs = _signs_beside_matrices(params, sym)
        if all(bool((s == 1).all()) for s in signs):
            break
        params = multiply(params, sym, {"signs": signs})
        params = mix_some(params, sym, orienting_matrices(params, sym))
    return params


def _signs_beside_matrices(params: Params, sym: Symmetries) -> list[Tensor]:
    """Signs of the units that no matrix flips; of a centred stream the mean decides."""
    _, signs = canonical_scales_and_signs(params, sym, None)
    mixed, centred = (
        covered(sym, sym.signs, kinds) for kinds in (("general", *_TURNED), ("centred",))
    )
    result = []
    for group, sign, inside, whole in zip(sym.signs, signs, mixed, centred, strict=True):
        sign = torch.where(inside.to(sign.device), 1, sign)
        if bool(whole.any()):
            sign = torch.where(whole.to(sign.device), _sign_of_mean(params, sym, group), sign)
        result.append(sign)
    return result


def _sign_of_mean(params: Params, sym: Symmetries, group: Group) -> Tensor:
    """Make the largest mean over the channels of a unit positive: no centred matrix changes it."""
    place = writer(sym, group) or group.placements[0]
    rows = unit_rows(params, sym, place)
    means = rows.unflatten(-1, (place.positions.shape[1], -1)).mean(-2)
    largest = torch.take_along_dim(means, means.abs().argmax(-1, keepdim=True), -1)[..., 0]
    return torch.where(largest < 0, -1.0, 1.0).to(rows)


def _reads_mixed_channels(sym: Symmetries, kinds: Sequence[str]) -> bool:
    """Whether matrices act on the other side of weights whose size sets a scale."""
    writers = [writer(sym, g) for g in sym.scalings]
    return any(
        sym.axes[p.axis].tensor == sym.axes[w.axis].tensor and p.axis != w.axis
        for w in writers
        if w is not None
        for g in sym.linear
        if g.kind in kinds
        for p in g.placements
    )


# ------------------------------------------------------------ scales and signs
def canonical_scales_and_signs(
    params: Params,
    sym: Symmetries,
    scaling: Scaling | None,
    target: float = 1.0,
    *,
    held: Sequence[Tensor] | None = None,
) -> tuple[list[Tensor], list[Tensor]]:
    """The scales that bring every unit to the target, and the signs of the canonical form.

    A unit's sign makes the largest of the weights that enter it, in absolute value, positive. Units
    without incoming weight keep their scale, with a warning.

    Args:
        params: one network or a stack.
        sym: what `discover` returned.
        scaling: as in `canonicalise`; ``None`` leaves all scales at one.
        target: the norm or standard deviation that every unit gets.
        held: for every group of scalings, a mask of the units whose scale stays one.
    """
    if scaling is not None and scaling not in get_args(Scaling):
        raise ValueError(
            f"`scaling` must be one of {', '.join(get_args(Scaling))} or None, got {scaling!r}."
        )
    check_params(params, sym)
    check_finite(params, sym)
    if not 0 < target < float("inf"):
        raise ValueError(f"`target` must be positive and finite, got {target}.")
    factors: dict[Kind, list[Tensor]] = {
        "scalings": [torch.ones(g.units) for g in sym.scalings],
        "signs": [torch.ones(g.units) for g in sym.signs],
    }
    if scaling == "min-mass" and sym.scalings:
        factors["scalings"] = list(min_mass(params, sym, tolerance=1e-16).scales)
    dead = 0
    for _, kind, index, place in _in_order(sym, scaling, held):
        group = sym.scalings[index] if kind == "scalings" else sym.signs[index]
        twins = [_with_factors(params, sym, factors, p) for p in twin_places(sym, group, place)]
        w = side_by_side(twins, sym, sym.axes[place.axis])
        if kind == "signs":
            factors[kind][index] = _sign_of_largest(params, sym, sym.signs[index], place, w)
        elif scaling in ("unit-norm", "unit-std"):
            size = statistic(params, sym, place, "norm" if scaling == "unit-norm" else "std", w)
            _check_sizes(size, sym.axes[place.axis].tensor)
            usable = size > 0
            fixed = torch.zeros_like(usable) if held is None else held[index].to(usable.device)
            scale = torch.where(usable, target / torch.where(usable, size, 1), 1)
            there = (scale - 1).abs() <= _ROUNDING * torch.finfo(size.dtype).eps
            factors[kind][index] = torch.where(there | fixed, 1, scale)  # again changes nothing
            dead += int((~usable & ~fixed).sum())
    if dead:
        _log.warning("%d units have no incoming weight: their scale is left alone.", dead)
    return factors["scalings"], factors["signs"]


def _check_sizes(size: Tensor, name: str) -> None:
    if not bool(torch.isfinite(size).all()):
        kind = str(size.dtype).removeprefix("torch.")
        raise ValueError(f"`params`: the squares of {name!r} overflow in {kind}.")


def _in_order(
    sym: Symmetries, scaling: Scaling | None, held: Sequence[Tensor] | None
) -> list[tuple[int, Kind, int, Placement]]:
    """Every group with the place that writes it, as they are treated."""
    found = sorted(_writers(sym), key=lambda w: w[:3])
    if scaling in ("unit-norm", "unit-std"):
        places = [(index, place) for _, kind, index, place in found if kind == "scalings"]
        check_norms_fix_scales(sym, places, held)
    return found


def _writers(sym: Symmetries) -> Iterator[tuple[int, Kind, int, Placement]]:
    """Every group with the place that writes it."""
    kinds: tuple[tuple[Kind, Sequence[Group]], ...] = (
        ("scalings", sym.scalings),
        ("signs", sym.signs),
    )
    for kind, groups in kinds:
        for index, group in enumerate(groups):
            place = writer(sym, group)
            if place is not None:
                yield max(p.axis for p in twin_places(sym, group, place)), kind, index, place


def _sign_of_largest(
    params: Params, sym: Symmetries, group: Group, place: Placement, w: Tensor
) -> Tensor:
    """The sign of the largest weight; of the next where two of both signs are as large, and so on.

    Where the weights are their own mirror image up to rounding, the biases decide, then the first
    weight if the order of the inputs is given. What is its own mirror image in all keeps its sign.
    """
    rows = unit_rows(params, sym, place, w)
    up, down = rows.amax(-1), -rows.amin(-1)
    sign = _signs((up - down)[..., None], torch.maximum(up, down).amax(-1))[..., 0]
    if bool((sign == 0).any()):
        sign = torch.where(sign == 0, _sign_of_all(params, sym, group, place, rows), sign)
    return torch.where(sign < 0, -1.0, 1.0).to(rows)


def _sign_of_all(
    params: Params, sym: Symmetries, group: Group, place: Placement, rows: Tensor
) -> Tensor:
    ascending = rows.sort(-1).values
    parts = [ascending.flip(-1) + ascending]
    parts.append(sorted_rows(rows, sym, place) - sorted_rows(-rows, sym, place))
    for other in group.placements:
        if sym.axes[other.axis].role == "bias" and sym.axes[other.axis].tensor in params:
            parts.append(unit_rows(params, sym, other))
    if _inputs_have_an_order(sym, place):
        parts.append(rows)
    signs = torch.cat([_signs(part, part.abs().amax((-1, -2))) for part in parts], -1)
    first = (signs != 0).to(torch.uint8).argmax(-1, keepdim=True)
    return torch.take_along_dim(signs, first, -1)[..., 0]


def _signs(values: Tensor, largest: Tensor) -> Tensor:
    """Signs of numbers; those that rounding explains are zero."""
    size = largest[..., None, None] * _ROUNDING * torch.finfo(values.dtype).eps
    return torch.where(values.abs() > size, values.sign(), 0)


def _inputs_have_an_order(sym: Symmetries, place: Placement) -> bool:
    tensor = sym.axes[place.axis].tensor
    moved = sym.placements_by_axis("permutations")
    return not any(sym.axes[a].tensor == tensor and a != place.axis for a in moved)


def _with_factors(
    params: Params, sym: Symmetries, factors: Mapping[Kind, Sequence[Tensor]], place: Placement
) -> Tensor:
    """The writing tensor after the factors found so far have acted on it."""
    tensor = sym.axes[place.axis].tensor
    w = params[tensor]
    offset = 1 if is_stacked({tensor: w}, sym.shapes) else 0
    for kind, values in factors.items():
        for axis, places in sym.placements_by_axis(kind).items():
            if sym.axes[axis].tensor == tensor and any(
                bool((values[g] != 1).any()) for g, _ in places
            ):
                factor = axis_factors(sym, axis, kind, values, w.dtype, w.device)
                w = w * broadcastable(factor, sym.axes[axis], w, offset)
    return w


# ------------------------------------------------------------ softmax
def remove_softmax_shift(params: Params, sym: Symmetries) -> Params:
    """Set the mean over classes of the last weights and biases to zero."""
    last = sym.softmax_shift
    if last is None:
        raise ValueError(
            "`softmax_shift`: the network does not end in a layer whose outputs are its logits."
        )
    offset = 1 if is_stacked(params, sym.shapes) else 0
    weight = -params[last.weight].mean(offset)
    bias = -params[last.bias].mean(-1) if last.bias is not None else None
    return shift_logits(params, sym, weight, bias)

"""How a weight of any number of dimensions maps an activation, dimensions named by letters.

A letter of the weight is read (the activation has it, the result has not), written (the result has
it, the activation has not), or it counts experts (all three have it): every expert reads and writes
channels of its own. A weight that has experts along its first dimension is one block per expert.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from lightning_bnn.symmetry.rules.constraints import Constraints, Record
from lightning_bnn.symmetry.rules.labels import (
    Unsupported,
    Weight,
    compress,
    moving_dims,
)
from lightning_bnn.symmetry.rules.weight_views import owners_of

__all__ = ["apply_weight", "join_rows", "spread"]


def apply_weight(
    system: Constraints,
    x: Tensor,
    weight: Weight,
    letters: Sequence[str],
    result: str,
    is_summed: Callable[[str], bool] = lambda letter: False,
    same_input: bool = False,
) -> list[Tensor]:
    """Parts of ``einsum(f"{x},{weight}->{result}")``; raises where more than new channels come out.

    Args:
        system: gets the ties.
        x: labels of the activation.
        weight: the weight, or a view of it.
        letters: those of the activation and of the weight.
        result: those of the result.
        is_summed: whether experts, by their letter, are summed next: then they write the same
            channels.
        same_input: whether all experts read the same numbers; else what they read is not exchanged
            where its channels do not say so.
    """
    of_x, x = _without_broadcast(x, letters[0], weight, letters[1])
    weight, of_w = _walked(weight, letters[1], of_x, result)
    sizes = dict(zip(of_x, x.shape, strict=True)) | dict(zip(of_w, weight.shape, strict=True))
    read = [c for c in of_w if c in of_x and c not in result]
    experts = [c for c in of_w if c in of_x and c in result]
    written = [c for c in of_w if c not in of_x]
    lost = [c for c in of_x if c not in result and c not in of_w]
    if lost or len(experts) > 1 or not set(written) <= set(result):
        raise Unsupported("a weight that is summed by itself")
    moving = [of_x[d] for d in moving_dims(x)]
    kept = [c for c in of_x if c in read or (c in experts and c in moving)]
    channels = system.collapse(x, [of_x.index(c) for c in kept])
    common = bool(experts and written) and _stands_alone(weight, of_w.index(experts[0]))
    common = common and is_summed(experts[0])
    of_out = written if common else [*experts, *written]
    out = system.fresh(*(sizes[c] for c in of_out))
    records = [
        _record(out, of_out, of_w, "out", in_blocks=bool(experts)),
        _record(channels, kept, of_w, "in", -1, in_blocks=bool(experts)),
    ]
    if experts:
        inside = channels if experts[0] in kept else None
        place, extra = _tie_experts(
            system, weight, of_w, experts[0], None if common else out, inside, kept, same_input
        )
        records = [*extra, *records]
    if not of_out:
        system.freeze(out)
    system.consume(weight, *(r for r in records if r.dim != ()))
    labels = [spread(out, of_out, result, sizes)]
    if common:
        labels.append(spread(place, experts, result, sizes))
    return labels


def _stands_alone(weight: Weight, dim: int) -> bool:
    return owners_of(weight, [dim])[1] == [dim]


def _without_broadcast(x: Tensor, of_x: str, weight: Weight, of_w: str) -> tuple[str, Tensor]:
    """The activation without the dimensions that it has for the sake of the weight alone."""
    sizes = dict(zip(of_w, weight.shape, strict=True))
    alone = [d for d, c in enumerate(of_x) if x.shape[d] == 1 and sizes.get(c, 1) > 1]
    for d in reversed(alone):
        x = x.select(d, 0)
    return "".join(c for d, c in enumerate(of_x) if d not in alone), x


def _record(
    labels: Tensor,
    letters: Sequence[str],
    of_w: str,
    role: str,
    scale: int = 1,
    in_blocks: bool = False,
) -> Record:
    """Labels along some letters of a weight, in the order that these have there."""
    order = sorted(range(len(letters)), key=lambda k: of_w.index(letters[k]))
    dims = tuple(of_w.index(letters[k]) for k in order)
    labels = labels.permute(order)
    return Record(dims if len(dims) != 1 else dims[0], labels, role, scale, in_blocks=in_blocks)


def _walked(weight: Weight, letters: str, of_x: str, result: str) -> tuple[Weight, str]:
    """The weight without the dimensions along which it is repeated."""
    walked = moving_dims(*weight.coords)
    repeated = [
        d
        for d, c in enumerate(letters)
        if d not in walked and (weight.shape[d] > 1 or (c in of_x and c in result))
    ]
    coords = weight.coords
    for d in reversed(repeated):
        coords = tuple(c.select(d, 0) for c in coords)
    left = "".join(c for d, c in enumerate(letters) if d not in repeated)
    return replace(weight, coords=coords), left


def _tie_experts(
    system: Constraints,
    weight: Weight,
    of_w: str,
    expert: str,
    out: Tensor | None,
    channels: Tensor | None,
    kept: Sequence[str],
    same_input: bool,
) -> tuple[Tensor, list[Record]]:
    """Experts are blocks of all that they read and write; with a record of where they stand."""
    at = of_w.index(expert)
    owners, walked = owners_of(weight, [at])
    others = [d for d in range(len(of_w)) if d not in walked and weight.shape[d] > 1]
    if others and owners != [0]:
        raise Unsupported("experts that are not the first dimension of their weight")
    count = weight.shape[at]
    place = system.fresh(count)
    moves = channels is not None or same_input
    system.freeze(place, ("scale", "sign") if moves else ("permutation", "scale", "sign"))
    rows = [place[:, None], *([] if out is None else [out.reshape(count, -1)])]
    if channels is not None:
        rows.append(channels.movedim(kept.index(expert), 0).reshape(count, -1))
    join_rows(system, rows)
    has_rows = walked != [at] or (out is not None and out.ndim == 1)
    return place, [] if has_rows else [Record(at, place, "expert")]


def join_rows(system: Constraints, parts: Sequence[Tensor]) -> None:
    """Rows that several tensors of labels have in common move as wholes; single labels are tied."""
    single = [p for p in parts if p.shape[1] == 1]
    for part in single[1:]:
        system.tie(single[0], part, ("permutation",))
    several = [p for p in parts if p.shape[1] > 1]
    if several:
        system.block(torch.cat([*single[:1], *several], 1))


def spread(labels: Tensor, letters: Sequence[str], result: str, sizes: Mapping[str, int]) -> Tensor:
    """Labels along some letters in the shape of the result."""
    order = sorted(range(len(letters)), key=lambda k: result.index(letters[k]))
    view = [sizes[c] if c in letters else 1 for c in result]
    assert prod(view) == labels.numel()
    return compress(labels.permute(order).reshape(view).expand([sizes[c] for c in result]))

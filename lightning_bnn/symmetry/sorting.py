"""The permutations that put the units of every group in order.

Units are compared by one number. Where those of two units agree up to rounding, all numbers of the
units are compared, tensor by tensor in graph order: the weights that enter them, biases, gains, the
weights that leave them; sorted by size, then in the order of the layer on the other side where that
is known. Units that agree in all of that keep their order: the result is the same for every
permuted copy of a network in which such units are exchangeable, as copies of each other are.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from lightning_bnn.params import Params, is_stacked
from lightning_bnn.symmetry.corners import corner
from lightning_bnn.symmetry.exchanges import first_axis
from lightning_bnn.symmetry.groups import PermutationGroup, Placement, Symmetries
from lightning_bnn.symmetry.tie_breaking import break_ties, ranks
from lightning_bnn.symmetry.units import (
    common_weight,
    reader,
    statistic,
    twin_places,
    writer,
)
from lightning_bnn.symmetry.validation import check_finite, check_params

__all__ = ["SortKey", "sort_permutations"]

SortKey = Literal["max", "first", "mean", "median", "norm", "outgoing"]
_POOLED: dict[SortKey, SortKey] = {"first": "max", "outgoing": "max"}


def sort_permutations(
    params: Params,
    sym: Symmetries,
    by: SortKey = "max",
    descending: bool = True,
    *,
    held: Collection[int] = (),
) -> list[Tensor]:
    r"""The permutations that sort the units of every group.

    .. math:: k_{p(1)} \geq k_{p(2)} \geq \dots \geq k_{p(n)}

    Args:
        params: one network or a stack.
        sym: what `discover` returned.
        by: statistic of the weights that enter a unit: their ``"max"``, ``"mean"``, ``"median"``,
            ``"norm"`` or the ``"first"`` of them (once the layer before is sorted); or
            ``"outgoing"``, the first weight that leaves the unit, once the layer behind is sorted.
            Blocks are sorted by the same statistic over the whole block; of channels and heads of
            which each contains a part of each other (grouped queries), one has no first weight
            before the other is sorted: it is sorted by the largest.
        descending: largest first.
        held: indices of groups whose units stay where they are.

    >>> from lightning_bnn import params as P
    >>> from lightning_bnn.models import mlp
    >>> from lightning_bnn.symmetry import discover, permute, sort_permutations
    >>> net = mlp(1, [3], 1)
    >>> w = P.of(net) | {"1.weight": torch.tensor([[1.0], [3.0], [2.0]])}
    >>> sym = discover(net, torch.randn(8, 1))
    >>> permute(w, sym, sort_permutations(w, sym, "max"))["1.weight"].tolist()
    [[3.0], [2.0], [1.0]]
    """
    if by not in get_args(SortKey):
        raise ValueError(f"`by` must be one of {', '.join(get_args(SortKey))}, got {by!r}.")
    check_params(params, sym)
    check_finite(params, sym)
    lead = (next(iter(params.values())).shape[0],) if is_stacked(params, sym.shapes) else ()
    device = next(iter(params.values())).device
    result = [torch.arange(g.units, device=device).expand(*lead, g.units) for g in sym.permutations]
    done: set[int] = set()
    around = _around(sym)
    crossing = _crossing(sym, around)
    for index in _order(sym, backwards=by == "outgoing"):
        group = sym.permutations[index]
        used = by if crossing[index] <= done else _POOLED.get(by, by)
        key = _key(params, sym, group, used, result, around[index])
        if key is not None and index not in held:
            places = ranks(-key if descending else key)
            places = break_ties(params, sym, index, places, result, done, descending)
            result[index] = places.argsort(dim=-1, stable=True)
        done.add(index)
    return result


def _order(sym: Symmetries, backwards: bool) -> list[int]:
    """Groups in graph order, or from the last layer.

    Blocks are placed once the channels are sorted by which they are compared, and before the other
    channels inside them, whose first weight may lie in any block.
    """

    def place(g: int) -> Placement | None:
        group = sym.permutations[g]
        return (reader(sym, group) if backwards else None) or writer(sym, group)

    def depth(g: int) -> int:
        read = reader(sym, sym.permutations[g]) if backwards else None
        first = first_axis(sym, sym.permutations[g])
        if read is None:  # from the last layer: channels that no layer reads are behind all others
            is_last = backwards and sym.permutations[g].kind == "channel"
            return first - is_last * 2 * max(len(sym.axes), *(a.last_read for a in sym.axes))
        return -sym.axes[read.axis].last_read

    def compared(g: int, member: int) -> bool:
        at = place(g)
        return at is not None and any(
            p.axis == at.axis for p in sym.permutations[member].placements
        )

    def visit(g: int) -> list[int]:
        inside = sorted((m for row in sym.permutations[g].inner for m in row), key=depth)
        first = [m for m in inside if compared(g, m)]
        rest = [m for m in inside if m not in first]
        return [*(k for m in first for k in visit(m)), g, *(k for m in rest for k in visit(m))]

    inner = {g for group in sym.permutations for row in group.inner for g in row}
    outermost = (g for g in range(len(sym.permutations)) if g not in inner)
    return [k for g in sorted(outermost, key=depth) for k in visit(g)]


def _around(sym: Symmetries) -> list[set[int]]:
    """For every group, those of the blocks that it lies in."""
    around: list[set[int]] = [set() for _ in sym.permutations]
    for g in reversed(range(len(sym.permutations))):
        for row in sym.permutations[g].inner:
            for member in row:
                around[member] |= {g, *around[g]}
    return around


def _crossing(sym: Symmetries, around: Sequence[set[int]]) -> list[set[int]]:
    """Groups whose units have parts of the units of each other: which is first depends on both."""
    crossing: list[set[int]] = [set() for _ in sym.permutations]
    for axis in sym.placements_by_axis("permutations"):
        stages = sym.stages(axis)
        if len(stages) < 2:
            continue
        owner = torch.full((len(stages), sym.axes[axis].blocks * sym.axes[axis].size), -1)
        for k, stage in enumerate(stages):
            for g, place in stage:
                owner[k, place.positions.reshape(-1).cpu()] = g
        for a, b in itertools.combinations(range(len(stages)), 2):
            for g, h in torch.unique(owner[[a, b]], dim=1).T.tolist():
                if min(g, h) >= 0 and g not in around[h] and h not in around[g]:
                    crossing[g].add(h)
                    crossing[h].add(g)
    return crossing


def _key(
    params: Params,
    sym: Symmetries,
    group: PermutationGroup,
    by: SortKey,
    permutations: Sequence[Tensor],
    around: set[int],
) -> Tensor | None:
    place = (reader(sym, group) if by == "outgoing" else None) or writer(sym, group)
    if place is None:
        return _of_tensors(params, sym, group, by) if group.tensors else None
    twins = twin_places(sym, group, place)
    if len(twins) > 1:
        weight = common_weight(params, sym, group, place)
        return statistic(params, sym, place, _POOLED.get(by, by), weight)  # type: ignore[arg-type]
    if by == "first" or (by == "outgoing" and reader(sym, group) is not None):
        return corner(params, sym, place, permutations, around)
    return statistic(params, sym, place, "max" if by == "outgoing" else by)


def _of_tensors(params: Params, sym: Symmetries, group: PermutationGroup, by: SortKey) -> Tensor:
    """One number for every block with tensors of its own: a statistic of the largest of them."""
    row = max(group.tensors, key=lambda names: sym.shapes[names[0]].numel())
    weights = [params[name] for name in row]
    flat = [w.flatten(w.ndim - len(sym.shapes[row[0]])) for w in weights]
    rows = torch.stack(flat, -2)
    reduce: dict[str, Callable[[Tensor], Tensor]] = {
        "mean": lambda w: w.mean(-1),
        "median": lambda w: w.median(-1).values,
        "norm": lambda w: torch.linalg.vector_norm(w, dim=-1),
    }
    return reduce.get(by, lambda w: w.amax(-1))(rows)

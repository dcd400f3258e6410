"""Permutations and matrices learned by the loss half way between two networks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from lightning_bnn.params import Params
from lightning_bnn.symmetry.actions import tied
from lightning_bnn.symmetry.composition import compose
from lightning_bnn.symmetry.elements import identity
from lightning_bnn.symmetry.forward import in_precision_of, structural_copy
from lightning_bnn.symmetry.groups import LinearGroup, Placement, Symmetries
from lightning_bnn.symmetry.matching.assignment import assign
from lightning_bnn.symmetry.matching.channel_views import distance
from lightning_bnn.symmetry.matching.interpolation import Loss, interpolate
from lightning_bnn.symmetry.matching.match_all import FullMatch
from lightning_bnn.symmetry.matching.moving_spaces import SpaceMap
from lightning_bnn.symmetry.mixing import identity_mixings, mixed_axis
from lightning_bnn.symmetry.spaces import multiplied
from lightning_bnn.symmetry.validation import check_one_network

__all__ = ["learn_match"]

Element = tuple[list[Tensor], list[Tensor]]
"""Permutations and matrices."""


def learn_match(
    start: FullMatch,
    params: Params,
    reference: Params,
    sym: Symmetries,
    model: nn.Module,
    batches: Sequence[tuple[Any, Any]],
    *,
    held_back: Sequence[tuple[Any, Any]] | None = None,
    loss: Loss = nn.functional.cross_entropy,
    steps: int = 300,
    learning_rate: float = 0.01,
    every: int = 25,
) -> FullMatch:
    r"""Lower the loss half way between two networks over the group elements that join them.

    .. math:: \min_{g} \; L(\tfrac12 (a + g b))

    Matrices stay in their groups: rotations are exponentials of skew matrices. Hidden units follow
    a table whose best assignment is used and whose gradient is that of the assignment
    (straight-through). Heads stay where the start has put them. The element with the least loss on
    batches that were held back is kept, be it the start.

    References:
        Git Re-Basin: Merging Models modulo Permutation Symmetries (Ainsworth, Hayase, Srinivasa,
        2023)

    Args:
        start: what `match_all` has found, usually by activations.
        params: the network that moves.
        reference: the network that stays.
        sym: what `discover` returned.
        model: gives the computation; it runs in evaluation mode and is left untouched. Statistics
            of BatchNorm are interpolated.
        batches: pairs of input and target, one for each step, in turn.
        held_back: further ones, by which the best is chosen; by default every fourth of the
            batches, which then is not learned from.
        loss: mean loss of a batch.
        steps: of Adam.
        learning_rate: of matrices and tables.
        every: after so many steps the loss on what was held back is looked at.

    >>> from lightning_bnn import params as P
    >>> from lightning_bnn.symmetry import discover, interpolate, learn_match, match_all
    >>> mse, x = torch.nn.functional.mse_loss, torch.randn(64, 8)
    >>> net = torch.nn.Sequential(torch.nn.Linear(8, 3), torch.nn.Linear(3, 8))
    >>> sym, (a, b) = discover(net, x), P.unstack(P.populate(net, 2))
    >>> start = match_all(a, b, sym)
    >>> found = learn_match(start, a, b, sym, net, [(x, x)], held_back=[(x, x)], loss=mse, steps=25)
    >>> half_way = [interpolate(b, match.apply(a, sym), 0.5) for match in (start, found)]
    >>> bool(mse(P.apply(net, half_way[1], x), x) <= mse(P.apply(net, half_way[0], x), x))
    True
    """
    if not isinstance(start, FullMatch):
        raise ValueError(f"`start` must be what `match_all` returns, got {type(start).__name__}.")
    check_one_network(reference, sym, "reference")
    check_one_network(params, sym, "params")
    if steps < 1 or every < 1 or not 0 < learning_rate < float("inf"):
        raise ValueError(
            "`steps`, `every` and `learning_rate` must be positive, got "
            f"{steps}, {every} and {learning_rate}."
        )
    batches = list(batches)
    if held_back is None:
        held_back, batches = batches[::4], [b for k, b in enumerate(batches) if k % 4]
    if not batches or not held_back:
        raise ValueError("`batches` must hold at least two pairs of input and target.")
    line = _Line(structural_copy(model).eval(), reference, loss)
    free = _Free(sym, start.apply(params, sym))
    if not free.tensors:
        return start
    best = _best(free, line, batches, held_back, steps, learning_rate, every)
    return _joined(start, best, params, reference, sym)


def _best(
    free: _Free,
    line: _Line,
    batches: Sequence[tuple[Any, Any]],
    held_back: Sequence[tuple[Any, Any]],
    steps: int,
    learning_rate: float,
    every: int,
) -> Element:
    """What has the least loss on batches that were held back, at the start or on the way."""
    best, least = free.element(), line.mean(free.moved(), held_back)
    optimizer = torch.optim.Adam(free.tensors, lr=learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        with torch.enable_grad():
            line(free.moved(), batches[step % len(batches)]).backward()
        optimizer.step()
        schedule.step()
        if not all(bool(t.isfinite().all()) for t in free.tensors):
            break
        if step % every == 0 or step == steps:
            value = line.mean(free.moved(), held_back)
            if value < least:
                best, least = free.element(), value
    return best


def _joined(
    start: FullMatch,
    step: Element,
    params: Params,
    reference: Params,
    sym: Symmetries,
) -> FullMatch:
    """One element for the start and what was learned after it."""
    permutations = compose(start.permutations, step[0], sym)
    matrices = [b @ a for a, b in zip(start.matrices, step[1], strict=True)]
    after = FullMatch(tuple(permutations), tuple(matrices), start.before, start.after)
    moved = after.apply(params, sym)
    return replace(after, after=distance(moved, reference, sym))


@dataclass(frozen=True, eq=False)
class _Line:
    """The loss half way to a reference."""

    network: nn.Module
    reference: Params
    loss: Loss

    def __call__(self, moved: Params, batch: tuple[Any, Any]) -> Tensor:
        middle = interpolate(self.reference, moved, 0.5)
        middle |= {n: middle[n].detach() for n, _ in self.network.named_buffers() if n in middle}
        return self.loss(
            functional_call(self.network, middle, (in_precision_of(middle, batch[0]),)), batch[1]
        )

    @torch.no_grad()
    def mean(self, moved: Params, batches: Sequence[tuple[Any, Any]]) -> float:
        """The mean over some batches."""
        return sum(float(self(moved, b)) for b in batches) / len(batches)


class _Free:
    """What is learned: one table for every group of hidden units, one matrix for every space."""

    def __init__(self, sym: Symmetries, params: Params) -> None:
        self.sym, self.params = sym, params
        inner = {g for group in sym.permutations for row in group.inner for g in row}
        space_map = SpaceMap(sym)
        self.groups = [
            k
            for k in space_map.others
            if k not in inner and not sym.permutations[k].inner and not space_map.tangled
        ]
        units = [sym.permutations[k].units for k in self.groups]
        device = next(iter(params.values())).device
        self.tables = [torch.eye(n, device=device, requires_grad=True) for n in units]
        self.logs = [
            torch.zeros_like(m, dtype=torch.float32, device=device, requires_grad=True)
            for m in identity_mixings(sym)
        ]

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors that have a gradient."""
        return [*self.tables, *self.logs]

    def moved(self) -> Params:
        """The network after permutations and matrices as they are now, differentiable."""
        result = dict(self.params)
        for k, table in zip(self.groups, self.tables, strict=True):
            chosen = torch.eye(len(table)).to(table)[assign(table)]
            matrix = chosen + table - table.detach()
            for p in self.sym.permutations[k].placements:
                place = Placement(p.axis, p.positions[None])
                name = self.sym.axes[p.axis].tensor
                result[name] = mixed_axis(result[name], self.sym, place, matrix[None])
        for group, log in zip(self.sym.linear, self.logs, strict=True):
            generator = _generator(group, log)
            forward, inverse = torch.matrix_exp(generator), torch.matrix_exp(-generator.mT)
            result = dict(multiplied(result, self.sym, group, forward, inverse))
        return tied(result, self.sym)

    @torch.no_grad()
    def element(self) -> Element:
        """Permutations and matrices as they are now."""
        permutations = identity(self.sym)
        for k, table in zip(self.groups, self.tables, strict=True):
            permutations[k] = assign(table)
        logs = [_generator(g, x.double()) for g, x in zip(self.sym.linear, self.logs, strict=True)]
        return permutations, [torch.matrix_exp(x) for x in logs]


def _generator(group: LinearGroup, free: Tensor) -> Tensor:
    """The part of a matrix whose exponential is in the group."""
    if group.kind == "general":
        return free
    if group.kind == "complex":
        eye = torch.eye(2).to(free)
        return (free - free.mT) / 2 + eye * free.diagonal(dim1=-2, dim2=-1).mean(-1)[
            ..., None, None
        ]
    skew = (free - free.mT) / 2
    if group.kind != "centred":
        return skew
    rest = torch.eye(group.size).to(free) - 1 / group.size
    return rest @ skew @ rest

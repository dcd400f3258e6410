"""Joint matching: Frank-Wolfe over the doubly stochastic matrices of all groups at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from weightsym.groups.axis_maps import along_axis, from_axis, permute_axis
from weightsym.groups.element import axis_index
from weightsym.groups.symmetries import Axis, Placement
from weightsym.groups.units import unit_rows
from weightsym.matching.plan import Plan
from weightsym.networks.devices import at_least_single
from weightsym.params import Params, stack_size

Point = Sequence[Tensor] | None
"""One matrix or one order for every table, or nothing for the mean of all permutations."""
Pieces = Sequence[tuple[int, Placement]]
"""The tables that act along one axis, and where."""

_ROUNDING = 1e-7  # of the largest inner product that norms allow
_CLOSE = 3e-3  # of what has been gained; ascent goes on from there
_FIRST = 3  # steps before a member may be given up
_REACH = 3  # slopes that a member may still gain: behind the first steps 1.5 to 3
_BLIND = 0.01  # of what is missing: slopes that tell nothing at the start
_TEMPERATURE = 0.1  # in units of the mean distance; 0.1 did better than 0.03 and than 0


class FrankWolfeResult(NamedTuple):
    """The end of Frank-Wolfe for every member.

    Attributes:
        orders: of every table.
        matrices: that were rounded to them.
        value: of the similarity there.
        lost: given up, out of reach of what was known first.
        blind: where it began, nothing told permutations apart.
    """

    orders: list[Tensor]
    matrices: list[Tensor]
    value: Tensor
    lost: Tensor
    blind: Tensor


@torch.no_grad()
def frank_wolfe(
    plan: Plan,
    params: Params,
    reference: Params,
    start: Point = None,
    floor: Tensor | None = None,
    max_steps: int = 60,
) -> FrankWolfeResult:
    r"""Orders of every table for every member of a stack, rounded at the end.

    .. math:: P \leftarrow P + \gamma (S - P), \quad S = \arg\max_S \langle \nabla f(P), S \rangle

    where one :math:`\gamma` for all groups maximises the quadratic :math:`f` on the segment, whose
    slopes at P come from those at permutations alone; where the rows of tensors fall into blocks,
    f has a higher degree, and they are computed at P. The slope :math:`g = \langle \nabla f(P), S -
    P \rangle` says what can be had nearby: steps end where it is small. After three steps a member
    is given up if :math:`f(P) + 3 g` is below what is known, as between large networks that have
    nothing in common.

    References:
        Fast Approximate Quadratic Programming for Graph Matching (Vogelstein et al., 2015)
        C2M3: Cycle-Consistent Multi-Model Merging (Crisostomi et al., 2024)

    Args:
        plan: of the groups.
        params: a stack.
        reference: one network.
        start: doubly stochastic matrices, by default those that prefer nothing.
        floor: what is known to be reached otherwise.
        max_steps: steps at most.
    """
    objective, members = Objective(plan, params, reference), stack_size(params)
    value, slopes = objective.value(start), objective.slopes(start)
    matrices = [
        s.new_full((members, t.units, t.units), 1 / t.units) if start is None else start[k].to(s)
        for k, (s, t) in enumerate(zip(slopes, plan.tables, strict=True))
    ]
    first, floor = value.clone(), torch.full_like(value, -torch.inf) if floor is None else floor
    rounding, active = _ROUNDING * objective.most(), torch.arange(members)
    lost, blind = torch.zeros(2, members, dtype=torch.bool)
    for number in range(max_steps):
        gradients, point = [s[active] for s in slopes], [m[active] for m in matrices]
        orders = plan.best(gradients)
        slope, missing = (
            inner(orders, gradients) - inner(point, gradients),
            floor[active] - value[active],
        )
        if number == 0:
            blind = slope <= torch.maximum(_BLIND * missing, rounding)
        if number >= _FIRST:
            lost[active] = missing > _REACH * slope
        enough = torch.maximum(_CLOSE * (value - first)[active], rounding[active])
        going = (slope > enough) & ~lost[active]
        if not bool(going.any()):
            break
        active, slope = active[going], slope[going]
        gradients, point, orders = (
            [t[going] for t in tensors] for tensors in (gradients, point, orders)
        )
        ends = objective.of(active).slopes(orders)
        last = inner(orders, ends) - inner(point, ends)  # slope at the end
        share = torch.where(last < 0, slope / (slope - last), 1.0)
        value[active] += share * slope + share**2 * (last - slope) / 2
        for k, order in enumerate(orders):
            step = share.to(point[k])[:, None, None]
            corner = one_hot(order, order.shape[1]).to(point[k])
            matrices[k][active] = point[k].lerp(corner, step)
            slopes[k][active] = gradients[k].lerp(ends[k], step)
        if plan.blocks:  # of more than the second degree
            value, slopes = objective.value(matrices), objective.slopes(matrices)
    return FrankWolfeResult(plan.best(matrices), matrices, value, lost, blind)


def inner(points: Sequence[Tensor], slopes: Sequence[Tensor]) -> Tensor:
    """Inner product of slopes with matrices, or with those of orders, of every member."""
    total = torch.zeros((), dtype=torch.float64)
    for entries, slope in zip(points, slopes, strict=True):
        chosen = (
            entries * slope if entries.is_floating_point() else slope.gather(2, entries[:, :, None])
        )
        total = total + chosen.sum((1, 2), dtype=torch.float64)
    return total


class Objective:
    """The similarity of a stack with a reference, at one matrix or one order for every table.

    Args:
        plan: of the groups.
        params: a stack.
        reference: one network.
    """

    def __init__(self, plan: Plan, params: Params, reference: Params) -> None:
        self.plan, self.sym = plan, plan.sym
        self.params = {n: at_least_single(params[n]) for n in plan.places}
        self.goal = {n: at_least_single(reference[n]) for n in plan.places}

    def of(self, members: Tensor) -> Objective:
        """The same for some members."""
        if len(members) == stack_size(self.params):
            return self
        return Objective(self.plan, {n: w[members] for n, w in self.params.items()}, self.goal)

    def value(self, point: Point) -> Tensor:
        """The similarity of every member with the reference."""
        total = torch.zeros((), dtype=torch.float64)
        for name, axes in self.plan.places.items():
            w = self.params[name]
            if name in self.plan.blocks:
                total = total + self._in_blocks(name, self._matrices(point)).cpu()
                continue
            for axis in axes:
                w = self._moved(w, axis, axes[axis], point)
            total = total + (w * self.goal[name].to(w)).flatten(1).sum(1, dtype=torch.float64).cpu()
        return total

    def slopes(self, point: Point) -> list[Tensor]:
        """By the entries of the matrices of all tables, of every member."""
        members, like = stack_size(self.params), next(iter(self.params.values()))
        dtype = torch.promote_types(like.dtype, torch.float32)
        result = [torch.zeros(members, t.units, t.units, dtype=dtype) for t in self.plan.tables]
        for name, axes in self.plan.places.items():
            if name in self.plan.blocks:
                continue
            for axis, pieces in axes.items():
                w = self.params[name]
                for partner in axes:
                    w = w if partner == axis else self._moved(w, partner, axes[partner], point)
                for k, placement in pieces:
                    moving = unit_rows({}, self.sym, placement, w)
                    goal = unit_rows({}, self.sym, placement, self.goal[name]).to(moving)
                    result[k] += (goal @ moving.mT).to(result[k])
        if self.plan.blocks:
            with torch.enable_grad():
                matrices = [m.requires_grad_() for m in self._matrices(point)]
                value = torch.stack([self._in_blocks(n, matrices).sum() for n in self.plan.blocks])
                slopes = torch.autograd.grad(
                    value.sum(), matrices, allow_unused=True, materialize_grads=True
                )
            result = [a + b.to(a) for a, b in zip(result, slopes, strict=True)]
        return result

    def most(self) -> Tensor:
        """Upper limit of the similarity, by norms of tensors."""
        pairs = ((w.flatten(1).norm(dim=1), self.goal[n].norm()) for n, w in self.params.items())
        norms = (moving.double() * goal.double() for moving, goal in pairs)
        return torch.stack([n.cpu() for n in norms]).sum(0)

    def _matrices(self, point: Point) -> list[Tensor]:
        """The point as matrices of every member."""
        members, like = stack_size(self.params), next(iter(self.params.values()))
        if point is None:
            return [
                like.new_full((members, t.units, t.units), 1 / t.units) for t in self.plan.tables
            ]
        return [(p if p.is_floating_point() else one_hot(p, p.shape[1])).to(like) for p in point]

    def _moved(self, w: Tensor, axis: int, pieces: Pieces, point: Point) -> Tensor:
        """A tensor of all members whose units along one axis are mixed or reordered."""
        target = self.sym.axes[axis]
        if point is not None and not point[0].is_floating_point():
            index = axis_index(target, [(placement, point[k]) for k, placement in pieces])
            return w if index is None else permute_axis(w, target, index.to(w.device), 1)
        rows = along_axis(w, target, 1)
        for k, placement in pieces:
            if point is None:
                rows = _averaged(rows, placement.positions)
            else:
                rows = _mixed(rows, placement.positions, point[k].to(w))
        return from_axis(rows, w, target, 1)

    def _in_blocks(self, name: str, matrices: Sequence[Tensor]) -> Tensor:
        r"""The similarity of one tensor whose rows fall into blocks.

        With the parts :math:`P_{ab}` of the matrix of an axis that bring block b to block a,

        .. math:: \sum_{ab} \langle P_{ab} W_b Q_{ab}^\top, W^*_a \rangle

        which at permutations is what actions do: these parts are zero but for one b. What moves no
        blocks acts before.
        """
        moving, goal, number = self.params[name], self.goal[name], self.plan.blocks[name]
        axes, parted = self.plan.places[name], dict[Axis, Tensor]()
        for a in sorted(axes, key=lambda a: self.sym.axes[a].blocks):
            axis = self.sym.axes[a]
            if number > 1 and (axis.dim == 0 or axis.blocks > 1):
                parted[axis] = self._parts(axis, axes[a], matrices, moving)
            else:
                moving = self._moved(moving, a, axes[a], matrices)
        if not parted:
            return (moving * goal.to(moving)).flatten(1).sum(1, dtype=torch.float64)
        moving, goal = moving[..., None].unflatten(1, (number, -1)), goal[..., None].to(moving)
        moving = moving[:, None].expand(-1, number, *moving.shape[1:])  # members, a, b, rows
        for axis, parts in parted.items():
            dim = 3 + (axis.dim or 0)
            parts = parts.reshape(*parts.shape[:3], *[1] * (goal.ndim - 2), *parts.shape[3:])
            moving = (moving.movedim(dim, -1) @ parts).movedim(-1, dim)
        goal = goal.unflatten(0, (number, 1, -1))
        return (moving * goal).flatten(1).sum(1, dtype=torch.float64)

    def _parts(
        self, axis: Axis, pieces: Pieces, matrices: Sequence[Tensor], like: Tensor
    ) -> Tensor:
        """The transposed matrix of an axis, by the blocks to which it brings others."""
        matrix = torch.eye(axis.length).to(like).expand(len(like), -1, -1)
        for k, placement in pieces:
            matrix = _mixed(matrix, placement.positions, matrices[k])
        number = axis.blocks if axis.blocks > 1 else self.plan.blocks[axis.tensor]
        parts = matrix.unflatten(2, (number, -1)).unflatten(1, (number, -1))
        return parts.permute(0, 3, 1, 2, 4)


def _averaged(rows: Tensor, positions: Tensor) -> Tensor:
    """Give all units their mean along the last dimension."""
    positions, rows = positions.to(rows.device), rows.clone()
    mean = rows[..., positions].mean(-2, keepdim=True)
    rows[..., positions] = mean.expand(*mean.shape[:-2], *positions.shape)
    return rows


def _mixed(rows: Tensor, positions: Tensor, matrices: Tensor) -> Tensor:
    """Mix the units along the last dimension by the matrices of every member."""
    positions, rows = positions.to(rows.device), rows.clone()
    wide = matrices.reshape(len(matrices), *[1] * (rows.ndim - 2), *matrices.shape[1:])
    rows[..., positions] = wide @ rows[..., positions]
    return rows


def start_from_signatures(plan: Plan, params: Params, reference: Params) -> list[Tensor]:
    """Doubly stochastic matrices that prefer units with the same weights in any order.

    Whatever stands on the other side of a tensor may be permuted: that only changes the order of
    the weights of a unit. Where rows and columns sum to zero, the mean of all permutations tells
    nothing, but sorted weights still do.

    Args:
        plan: of the groups.
        params: a stack.
        reference: one network.
    """
    objective, counts = Objective(plan, params, reference), [0] * len(plan.tables)
    result = [torch.zeros(stack_size(params), t.units, t.units) for t in plan.tables]
    for name, axes in plan.places.items():
        for k, placement in (piece for pieces in axes.values() for piece in pieces):
            if reference[name].ndim > 1:
                both = (w[name] for w in (objective.params, objective.goal))
                moving, goal = (unit_rows({}, plan.sym, placement, w).sort(-1).values for w in both)
                apart = torch.cdist(goal.to(moving).expand_as(moving), moving).square().cpu()
                mean = apart.mean((1, 2), keepdim=True)
                result[k] = result[k] + torch.where(mean > 0, apart / mean, 0)
                counts[k] += 1
    pairs = zip(result, counts, strict=True)
    return [doubly_stochastic(-apart / max(n, 1) / _TEMPERATURE) for apart, n in pairs]


def doubly_stochastic(logits: Tensor, iterations: int = 50) -> Tensor:
    """Normalise rows and columns of ``exp(logits)`` in turns (Sinkhorn), by their logarithms.

    >>> doubly_stochastic(torch.tensor([[3.0, 0.0], [0.0, 3.0]])).sum(0)
    tensor([1., 1.])
    """
    for _ in range(iterations):
        logits = logits - logits.logsumexp(-1, keepdim=True)
        logits = logits - logits.logsumexp(-2, keepdim=True)
    return logits.exp()

r"""A bound of the least mass over scales and matrices from its gradient and its curvature.

Along a direction of length one the mass is :math:`\sum_k w_k^2 e^{2 l_k t}`, where no :math:`2 l_k`
is larger than a number :math:`\Lambda` that the shape of the network gives. So its second
derivative falls at most as :math:`e^{-\Lambda t}`. With :math:`\gamma` the length of the gradient
and :math:`\mu` the least curvature at the point, the derivative is at least
:math:`-\gamma + \mu (1 - e^{-\Lambda t}) / \Lambda`, which is positive from
:math:`t = -\log(1 - \gamma \Lambda / \mu) / \Lambda` on. The mass is not lower than
:math:`m - \gamma t` anywhere.

The curvature is four times the squared size of what the direction does to the weights. Directions
that do nothing are left out if they are multiples of the identity in every space: they commute with
all others.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_bnn.params import Params
from lightning_bnn.symmetry.actions import multiply
from lightning_bnn.symmetry.groups import LinearGroup
from lightning_bnn.symmetry.joint_bounds import JointPoint
from lightning_bnn.symmetry.laplacian import Laplacian
from lightning_bnn.symmetry.mixing import mixed_axis
from lightning_bnn.symmetry.spaces import weight_places

__all__ = ["gap_by_curvature"]

_MOST_DIRECTIONS = 2_000
_LARGEST = 30_000_000
_ROUNDING = 1e-13


def gap_by_curvature(point: JointPoint) -> Tensor:
    """Bound on how far the mass lies above its least value; infinite far from a minimum.

    Args:
        point: where the mass is nearly least.
    """
    bases = [_symmetric_basis(group).to(point.u) for group in point.groups]
    scales = point.alive.any(0).nonzero()[:, 0]
    count = len(scales) + sum(len(b) for b in bases)
    largest = max((t[0].numel() for t in point.scaled.values()), default=0)
    if count == 0 or count > _MOST_DIRECTIONS or count * largest > _LARGEST:
        return torch.full_like(point.u[:, :0].sum(-1), 0 if count == 0 else torch.inf)
    hessian, gradient = _derivatives(point, bases, scales)
    size = len(scales)
    mixed = point.alive.new_ones(len(gradient), count - size)
    there = torch.cat([point.alive[:, scales], mixed], -1)
    hessian = hessian * there[:, :, None] * there[:, None, :]
    central = _central(point, size).to(hessian)
    return _bound(hessian, gradient * there, central, 2 * _steepest(point))


def _bound(hessian: Tensor, gradient: Tensor, central: Tensor, steepness: int) -> Tensor:
    """The bound of every member.

    Args:
        hessian: curvatures, ``(members, directions, directions)``.
        gradient: ``(members, directions)``.
        central: an orthonormal basis of directions that commute with all, ``(basis, directions)``.
        steepness: the largest rate of a term along a direction of length one.
    """
    values, vectors = torch.linalg.eigh(hessian)
    flat = values <= _ROUNDING * len(hessian[0]) * values[:, -1:]
    noncentral = vectors - central.mT @ (central @ vectors)
    commutes = ~(flat & (noncentral.norm(dim=1) > 1e-6)).any(-1)
    least = torch.where(flat, torch.inf, values).amin(-1)
    along = (vectors.mT @ gradient[..., None])[..., 0]
    length = torch.where(flat, 0, along).norm(dim=-1)
    share = steepness * length / least
    known = commutes & (share < 1)
    gap = -length * torch.log1p(-torch.where(known, share, 0)) / steepness
    return torch.where(known, gap, torch.inf)


def _derivatives(point: JointPoint, bases: list[Tensor], scales: Tensor) -> tuple[Tensor, Tensor]:
    """Second and first derivatives by log scales, then by symmetric matrices."""
    flow, size = point.problem.flow(point.u), len(scales)
    laplacian = Laplacian(flow)
    units = torch.eye(point.u.shape[1]).to(point.u)[scales]
    columns = [laplacian(unit.expand_as(point.u))[:, scales] for unit in units]
    by_scales = torch.stack(columns, 1) if size else point.u.new_zeros(len(point.u), 0, 0)
    hessians, gradients = [], []
    count = size + sum(len(basis) for basis in bases)
    for k in range(len(point.u)):
        one = {n: t[k : k + 1] for n, t in point.scaled.items()}
        pairs = [_moved(point, name, w, bases, units) for name, w in one.items()]
        gram, along = point.u.new_zeros(count, count), point.u.new_zeros(count)
        for moved, w in pairs:
            gram += moved @ moved.mT
            along += moved @ w
        gram[:size, :size] = by_scales[k]
        along[:size] = (flow.inflow - flow.outflow)[k, scales]
        hessians.append(4 * gram)
        gradients.append(2 * along)
    return torch.stack(hessians), torch.stack(gradients)


def _moved(
    point: JointPoint, name: str, w: Tensor, bases: list[Tensor], units: Tensor
) -> tuple[Tensor, Tensor]:
    """What all directions do to one tensor, to first order, and the tensor, both flat."""
    parts = [_by_scales(point, {name: w}, units).flatten(1)]
    parts += [
        _by_matrices(point, group, name, w, basis).flatten(1)
        for group, basis in zip(point.groups, bases, strict=True)
    ]
    return torch.cat(parts), w.flatten()


def _by_scales(point: JointPoint, one: Params, units: Tensor) -> Tensor:
    ((name, w),) = one.items()
    ones = {name: torch.ones_like(w).expand(len(units), *w.shape[1:])}
    sizes = [g.units for g in point.sym.scalings]
    factors = multiply(ones, point.sym, {"scalings": list(units.exp().split(sizes, -1))})
    return w * factors[name].log()


def _by_matrices(
    point: JointPoint, group: LinearGroup, name: str, w: Tensor, basis: Tensor
) -> Tensor:
    stack = w.expand(len(basis), *w.shape[1:])
    eye, total = torch.eye(group.size).to(w), torch.zeros_like(stack)
    for place in weight_places(point.sym, group):
        if point.sym.axes[place.axis].tensor == name:
            moved = mixed_axis(stack, point.sym, place, eye + place.exponent * basis)
            total = total + (moved - stack)
    return total


# ------------------------------------------------------------ directions
def _symmetric_basis(group: LinearGroup) -> Tensor:
    """An orthonormal basis of the symmetric matrices of all spaces, ``(basis, spaces, n, n)``."""
    n = group.size
    rows, columns = torch.triu_indices(n, n)
    k = torch.arange(len(rows))
    one = torch.zeros(len(rows), n, n, dtype=torch.float64)
    size = torch.where(rows == columns, 1.0, 0.5**0.5).double()
    one[k, rows, columns] = size
    one[k, columns, rows] = size
    basis = torch.zeros(group.spaces, len(rows), group.spaces, n, n, dtype=torch.float64)
    for space in range(group.spaces):
        basis[space, :, space] = one
    return basis.flatten(0, 1)


def _central(point: JointPoint, scales: int) -> Tensor:
    """All log scales, and of every space the multiples of the identity."""
    parts = [torch.eye(scales, dtype=torch.float64)]
    for group in point.groups:
        traces = _symmetric_basis(group).diagonal(dim1=-2, dim2=-1).sum(-1)
        parts.append(traces.mT / group.size**0.5)
    return torch.block_diag(*parts)


def _steepest(point: JointPoint) -> int:
    """By how much at most the logs of the weights change along a direction of length one."""
    degree = point.problem.composites.degree
    matrices = {name: 0 for name in point.scaled}
    for group in point.groups:
        for place in weight_places(point.sym, group):
            matrices[point.sym.axes[place.axis].tensor] += 1
    scaled = [point.sym.axes[a].tensor for a in point.sym.placements_by_axis("scalings")]
    both = [count + degree * scaled.count(name) for name, count in matrices.items()]
    return max([point.problem.degree, *both])

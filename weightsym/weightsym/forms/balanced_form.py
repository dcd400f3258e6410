r"""One representative for every orbit of matrices: the balanced form of heads, adapters, streams.

For a space with A on the one side and B on the other, G A and :math:`G^{-T} B`, three steps:

1. Balance, :math:`A A^T = B B^T`. With :math:`A^T = Q_A R_A`, :math:`B^T = Q_B R_B` and
   :math:`R_A R_B^T = U S Y^T` that is :math:`G = S^{-1/2} Y^T R_B`, without an inverse.
2. Turn to the eigenvectors of :math:`A A^T + B B^T`, the largest first.
3. Choose signs, or phases: the largest entries that they flip are positive (`joint_signs`).

Rotations only take steps 2 and 3, with biases beside A and B: weights alone need not reach into all
directions. Complex numbers take steps 1 and 3, phases 3. What is left of the group after a step
leaves the steps before it alone, whatever the other groups do.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from weightsym.forms.signs import joint_signs
from weightsym.groups.actions import act, multiply_sides
from weightsym.groups.elements import identity_mixings
from weightsym.groups.placements import Placement, complex_matrices
from weightsym.groups.symmetries import LinearGroup, SignGroup, Symmetries
from weightsym.groups.units import unit_rows
from weightsym.groups.validation import check_finite, check_params, check_squares
from weightsym.params import Params, is_stacked

_NEAR = 1e-6  # singular values nearer than this leave the form undetermined in most of its digits
_RANK = 1e-13
_COMPLEX = ("complex", "unit complex")
_log = logging.getLogger(__name__)


def balancing_matrices(params: Params, sym: Symmetries) -> list[Tensor]:
    r"""Return matrices for `mix` that bring every space to its balanced form.

    .. math:: G A A^T G^T = G^{-T} B B^T G^{-1}

    A space stays as it is if one of its sides, or their product, has not full rank: then no matrix
    balances it. If two singular values are nearly equal, the form is not unique. Both cases are
    logged.

    Args:
        params: one network or a stack.
        sym: result of `discover`.

    >>> from weightsym import params as P
    >>> from weightsym import discover, mix
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Linear(2, 3))
    >>> sym, w = discover(net, torch.randn(8, 4)), P.of(net)
    >>> balanced = mix(w, sym, balancing_matrices(w, sym))
    >>> a, b = balanced["0.weight"], balanced["1.weight"].T
    >>> torch.allclose(a @ a.T, b @ b.T, atol=1e-5)
    True
    """
    stack, stacked = weights_of_spaces(params, sym)
    matrices, dead = _balanced(stack, sym)
    stack = act(stack, sym, {"linear": matrices})
    turned = [_rotation(stack, sym, g) for g in sym.linear]
    _warn(dead, [gap for _, gap in turned])
    rotations = [
        torch.where(d[..., None, None], _identity(r), r)
        for d, (r, _) in zip(dead, turned, strict=True)
    ]
    matrices = [r @ m for r, m in zip(rotations, matrices, strict=True)]
    stack = act(stack, sym, {"linear": rotations})
    _, signs = _orientations(stack, replace(sym, signs=()))
    matrices = [s @ m for s, m in zip(signs, matrices, strict=True)]
    return [m if stacked else m[0] for m in matrices]


def check_full_rank(params: Params, sym: Symmetries) -> None:
    """Require spaces of full rank, without which there is no balanced form.

    Args:
        params: one network or a stack.
        sym: result of `discover`.
    """
    stack, _ = weights_of_spaces(params, sym)
    for group, lost in zip(sym.linear, _balanced(stack, sym)[1], strict=True):
        if bool(lost.any()):
            raise ValueError(
                f"`mixing`: {int(lost.sum())} spaces at {group.name!r} are rank-deficient, so "
                "that no matrix balances them."
            )


def orientation(params: Params, sym: Symmetries) -> tuple[list[Tensor], list[Tensor]]:
    """Return the signs of units and, for `mix`, the signs and phases of a balanced network.

    Args:
        params: one network or a stack.
        sym: result of `discover`.
    """
    stacked = is_stacked(params, sym.shapes)
    stack = {n: params[n].detach().double() for n in sym.shapes if n in params}
    stack = stack if stacked else {n: t[None] for n, t in stack.items()}
    signs, matrices = _orientations(stack, sym)
    return (signs, matrices) if stacked else ([t[0] for t in signs], [t[0] for t in matrices])


def weights_of_spaces(params: Params, sym: Symmetries) -> tuple[Params, bool]:
    """Return the weights of spaces as a float64 stack, and whether they were stacked."""
    stacked = check_params(params, sym)
    check_finite(params, sym)
    names = {sym.axes[p.axis].tensor for g in sym.linear for p in g.placements}
    names = {n for n in sym.shapes if n in names} or set(list(sym.shapes)[:1])
    stack = {n: params[n].detach().double() for n in sym.shapes if n in names}
    check_squares(stack)
    return stack if stacked else {n: t[None] for n, t in stack.items()}, stacked


def _warn(dead: list[Tensor], gaps: list[Tensor]) -> None:
    lost = sum(int(d.sum()) for d in dead)
    if lost:
        _log.warning("%d spaces are rank-deficient and remain unbalanced.", lost)
    close = sum(int((gap[~d] < _NEAR).sum()) for d, gap in zip(dead, gaps, strict=True))
    if close:
        _log.warning(
            "%d spaces have singular values that are nearly equal (relative gap below %g): their "
            "balanced form is not unique.",
            close,
            _NEAR,
        )


# ------------------------------------------------------------ step 1: balance
class Balance(NamedTuple):
    """The closed form for one pair: the factors of A and B, and the singular values of A^T B.

    Rows of the two matrices that belong to vanishing singular values are zero: the limit of a
    balance that no matrix reaches.
    """

    forward: Tensor
    inverse_transpose: Tensor
    singular: Tensor

    @property
    def full(self) -> Tensor:
        """Mask of the spaces that a matrix balances."""
        return (self.singular > 0).all(-1)

    @property
    def reached(self) -> Tensor:
        """The balancing matrix, or the identity if there is none."""
        return torch.where(self.full[..., None, None], self.forward, _identity(self.forward))


def balance_spaces(a: Tensor, b: Tensor) -> Balance:
    """Balance matrices ``(..., size, weights)`` in closed form."""
    ra, rb = _triangle(a), _triangle(b)
    left, singular, right = torch.linalg.svd(ra @ rb.mT)
    noise = _RANK * torch.linalg.matrix_norm(ra) * torch.linalg.matrix_norm(rb)
    singular = torch.where(singular > noise[..., None], singular, 0)
    root = torch.where(singular > 0, singular, torch.inf).rsqrt()[..., None]
    return Balance(root * (right @ rb), root * (left.mT @ ra), singular)


def balance_group(stack: Params, sym: Symmetries, group: LinearGroup) -> Balance:
    """Balance the spaces of a group, half of the way if one tensor contains both sides.

    Args:
        stack: networks in double precision, or some of their tensors.
        sym: result of `discover`.
        group: one of ``sym.linear`` that rescales.
    """
    a, b = sides(stack, sym, group)
    if group.kind == "complex":
        ratio = b.square().sum((-1, -2)) / a.square().sum((-1, -2))
        usable = (ratio > 0) & ratio.isfinite()
        size = torch.where(usable, ratio, 1)[..., None, None] ** 0.25
        eye = torch.eye(2).to(a)
        return Balance(size * eye, eye / size, usable[..., None].to(a))
    solution = balance_spaces(a, b)
    axes = {(p.axis, sym.axes[p.axis].tensor) for p in weight_places(sym, group)}
    if len(axes) == len({tensor for _, tensor in axes}):
        return solution
    values, vectors = torch.linalg.eigh(solution.reached.mT @ solution.reached)
    half = vectors * values.clamp_min(1e-300)[..., None, :] ** 0.25 @ vectors.mT
    return Balance(half, torch.linalg.inv(half).mT, solution.singular)


def _triangle(a: Tensor) -> Tensor:
    """Return the square R of a QR factorisation of the transpose."""
    missing = a.shape[-2] - a.shape[-1]
    if missing > 0:
        a = torch.cat([a, a.new_zeros(*a.shape[:-1], missing)], -1)
    return torch.linalg.qr(a.mT, mode="r").R


def _balanced(stack: Params, sym: Symmetries, most: int = 500) -> tuple[list[Tensor], list[Tensor]]:
    """Return matrices that balance all spaces, and a mask of the spaces without one."""
    total = identity_mixings(sym, stack)
    dead = [torch.zeros(t.shape[:2], dtype=torch.bool, device=t.device) for t in total]
    for _ in range(most):
        moved = 0.0
        for k, group in enumerate(sym.linear):
            if group.rescales:
                solution = balance_group(stack, sym, group)
                step, dead[k] = solution.reached, ~solution.full
                stack = multiply_sides(stack, sym, k, step, torch.linalg.inv(step).mT)
                total[k] = step @ total[k]
                moved = max(moved, float((step.mT @ step - _identity(step)).abs().max()))
        if moved < 1e-14:
            break
    return total, dead


def _identity(like: Tensor) -> Tensor:
    return torch.eye(like.shape[-1], dtype=like.dtype, device=like.device).expand_as(like)


# ------------------------------------------------------------ step 2: turn
def _rotation(stack: Params, sym: Symmetries, group: LinearGroup) -> tuple[Tensor, Tensor]:
    """Return rotations to the eigenvectors of all reads and writes, and their smallest gap."""
    a, b = sides(stack, sym, group)
    gram = a @ a.mT + b @ b.mT
    if group.kind in _COMPLEX:
        return _identity(gram), gram.new_full(gram.shape[:2], torch.inf)
    basis = group.basis.to(gram)
    values, vectors = torch.linalg.eigh(basis.mT @ gram @ basis)
    values = values.flip(-1)
    gap = (values[..., :-1] - values[..., 1:]) / values[..., :-1].clamp_min(1e-300)
    is_empty = values[..., :-1] <= _RANK * values[..., :1]  # directions that nothing reaches into
    gap = torch.where(is_empty, torch.inf, gap)
    smallest = gap.amin(-1) if gap.shape[-1] else gap.new_full(gap.shape[:-1], torch.inf)
    return group.lifted(vectors.flip(-1).mT), smallest


# ------------------------------------------------------------ step 3: signs and phases
def _orientations(stack: Params, sym: Symmetries) -> tuple[list[Tensor], list[Tensor]]:
    """Return signs of units, and signs and phases of spaces, which act on the same weights."""
    matrices = identity_mixings(sym, stack)
    for k in sorted(range(len(sym.linear)), key=lambda k: sym.linear[k].placements[0].axis):
        if (group := sym.linear[k]).kind in _COMPLEX:
            matrices[k] = _phases(stack, sym, group)
            stack = multiply_sides(stack, sym, k, matrices[k], matrices[k])
    flips = [_flips(group) for group in sym.linear]
    for k, group in enumerate(sym.linear):
        if group.kind == "centred":
            turn = group.directions.mT.to(stack[sym.axes[group.placements[0].axis].tensor])
            turn = turn.expand(1, group.spaces, -1, -1)
            stack = multiply_sides(stack, sym, k, turn, turn)
    every = joint_signs(stack, replace(sym, signs=(*sym.signs, *flips)))
    count = len(sym.signs)
    for k, group in enumerate(sym.linear):
        signs = every[count + k].unflatten(-1, (group.spaces, -1))
        if group.kind in _COMPLEX:
            matrices[k] = matrices[k] * signs[..., None].to(matrices[k])
        else:
            matrices[k] = group.lifted(torch.diag_embed(signs)).to(matrices[k])
    return every[:count], matrices


def _flips(group: LinearGroup) -> SignGroup:
    """Return the remaining freedom: a sign for every free direction or complex number."""
    places = []
    for p in group.placements:
        positions = p.positions.flatten(1)[:, None] if group.kind in _COMPLEX else p.positions
        free = positions[:, 1:] if group.kind == "centred" else positions
        places.append(Placement(p.axis, free.flatten(0, 1)))
    return SignGroup(len(places[0].positions), group.name, tuple(places))


def _phases(stack: Params, sym: Symmetries, group: LinearGroup) -> Tensor:
    """Make the largest entry of every row real, in the first placement with a nonzero one.

    Entries that are tiny compared with other rows count as rounding, unless there are no others.
    """
    entries, shares = [], []
    for placement in group.placements:
        rows = unit_rows(stack, sym, placement)
        rows = torch.complex(rows[..., :1, :], rows[..., 1:, :])
        entry = rows.take_along_dim(rows.abs().argmax(-1, keepdim=True), -1)[..., 0]
        entries.append(entry)
        shares.append(entry.abs() / entry.abs().amax(-1, keepdim=True).clamp_min(1e-300))
    first = (torch.stack(shares) > _NEAR).to(torch.uint8).argmax(0, keepdim=True)
    largest = torch.stack(entries).take_along_dim(first, 0)[0]
    phase = torch.where(largest == 0, 1, largest.sgn()).conj()
    return complex_matrices(phase.real[..., 0], phase.imag[..., 0])


# ------------------------------------------------------------ sides of spaces
def weight_places(sym: Symmetries, group: LinearGroup) -> list[Placement]:
    """Return the placements of a group whose tensors count for the mass, in graph order."""
    return [p for p in group.placements if sym.axes[p.axis].tensor in sym.weights]


def sides(stack: Params, sym: Symmetries, group: LinearGroup) -> tuple[Tensor, Tensor]:
    """Return the two matrices of every space that G and its inverse transpose multiply.

    Biases are left out where the group rescales: they do not count for the mass.

    Args:
        stack: networks in double precision, or some of their tensors.
        sym: result of `discover`.
        group: one of ``sym.linear``.
    """
    parts: dict[int, list[Tensor]] = {1: [], -1: []}
    for placement in weight_places(sym, group) if group.rescales else group.placements:
        parts[placement.exponent].append(unit_rows(stack, sym, placement))
    first = next(iter(stack.values()))
    none = first.new_zeros(first.shape[0], group.spaces, group.size, 0)
    return torch.cat([none, *parts[1]], -1), torch.cat([none, *parts[-1]], -1)

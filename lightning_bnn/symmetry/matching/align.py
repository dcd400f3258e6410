"""Many networks in one frame: permutations, flips and scales, or matrices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from lightning_bnn.params import Params, shares, stack_size
from lightning_bnn.symmetry.actions import rescale
from lightning_bnn.symmetry.composition import compose, invert
from lightning_bnn.symmetry.groups import Symmetries
from lightning_bnn.symmetry.matching.alignment import Alignment, AlignMethod, distance_to_mean
from lightning_bnn.symmetry.matching.leave_one_out import LeaveOneOut
from lightning_bnn.symmetry.matching.matrix_frames import align_with_matrices
from lightning_bnn.symmetry.matching.plan import Plan
from lightning_bnn.symmetry.min_mass import min_mass
from lightning_bnn.symmetry.validation import check_finite, check_params, check_squares

__all__ = ["align"]

Scales = Literal["min-mass"]


@torch.no_grad()
def align(
    stack: Params,
    sym: Symmetries,
    *,
    method: AlignMethod = "joint",
    scales: Scales | None = None,
    signs: bool = False,
    mixing: bool = False,
    sweeps: int = 50,
    seed: int = 0,
    weights: Sequence[int | float] | Tensor | None = None,
) -> Alignment:
    r"""Bring all networks of a stack into one frame.

    .. math:: \min_{g_1 \dots g_N} \sum_k w_k \| g_k \theta_k - \textstyle\sum_l w_l g_l \theta_l
        \|^2, \qquad \textstyle\sum_k w_k = 1

    Every network is matched to the sum of the others, one after the other, until none moves; the
    squared distance to the mean falls with every step. It begins once with the networks as they are
    and once with all matched to the first, and keeps the better end. Any two networks are then
    matched by way of the common frame, which is that of the first one: around every cycle the
    permutations cancel. With matrices the second start is what permutations alone have found.

    References:
        C2M3: Cycle-Consistent Multi-Model Merging (Crisostomi et al., 2024)

    Args:
        stack: networks of one architecture.
        sym: what `discover` returned.
        method: ``"joint"``, or ``"reference"``: all are matched to the first only.
        scales: ``"min-mass"`` gives every network the least mass over all rescalings first.
        signs: flip whole units as well, as `match` does.
        mixing: match heads, streams and adapters by matrices as well, see `match_all`.
        sweeps: rounds over all networks at most.
        seed: of the order of the networks within a round.
        weights: how much each network counts in the mean; by default all count the same.

    >>> from lightning_bnn import params as P
    >>> from lightning_bnn.models import mlp
    >>> from lightning_bnn.symmetry import align, discover, permute, random_permutations
    >>> net = mlp(2, [5], 1)
    >>> sym, w = discover(net, torch.randn(8, 2)), P.of(net)
    >>> copies = permute(P.stack([w] * 4), sym, random_permutations(sym, members=4))
    >>> together = align(copies, sym).apply(copies, sym)
    >>> all(torch.equal(t[0], t[k]) for t in together.values() for k in range(4))
    True
    """
    _check(stack, sym, method, scales, signs, mixing, sweeps)
    counts = torch.ones(stack_size(stack), dtype=torch.float64)
    if weights is not None:
        counts *= torch.tensor(shares(weights, len(counts))).double() * len(counts)
    factors = min_mass(stack, sym).scales if scales and sym.scalings else None
    scaled = stack if factors is None else rescale(stack, sym, factors)
    plan = Plan(sym)
    check_squares(scaled, "stack", plan.compared)
    if plan.compared:
        joint = LeaveOneOut(plan, scaled, signs, seed, counts)
        alone = _by_permutations(joint, stack, factors, method, sweeps)
    else:
        every = (torch.arange(g.units).expand(len(counts), -1) for g in sym.permutations)
        alone = Alignment(tuple(every), (0.0, 0.0), method, None, factors)
    if mixing and sym.linear:
        return align_with_matrices(stack, sym, alone, sweeps, seed, counts)
    return alone


def _check(
    stack: Params,
    sym: Symmetries,
    method: str,
    scales: str | None,
    signs: bool,
    mixing: bool,
    sweeps: int,
) -> None:
    if method not in get_args(AlignMethod):
        raise ValueError(f"`method` must be 'joint' or 'reference', got {method!r}.")
    if scales not in (None, *get_args(Scales)):
        raise ValueError(f"`scales` must be 'min-mass' or None, got {scales!r}.")
    if sweeps < 1:
        raise ValueError(f"`sweeps` must be at least 1, got {sweeps}.")
    if not check_params(stack, sym, "stack"):
        raise ValueError("`stack` must be a stack of networks, not one network.")
    check_finite(stack, sym, "stack")
    if mixing and (signs or scales):
        raise ValueError("`mixing` goes with neither `signs` nor `scales`: matrices hold both.")


def _by_permutations(
    joint: LeaveOneOut,
    stack: Params,
    factors: tuple[Tensor, ...] | None,
    method: AlignMethod,
    sweeps: int,
) -> Alignment:
    """From both starts, in the frame of the first network."""
    plan, sym = joint.plan, joint.sym
    best = joint.run(*joint.at_the_first(), sweeps if method == "joint" else 0)
    if method == "joint":
        other = joint.run(*joint.as_given(), sweeps)
        best = other if other[2][-1] < best[2][-1] else best
    permutations, flips, spread = best
    counts = torch.tensor(joint.counts).double()
    spread = [distance_to_mean(stack, plan.compared, counts), *spread]
    permutations = _as_the_first(permutations, sym)
    flips = None if flips is None else _flipped_as_the_first(permutations, flips, plan)
    signs_found = None if flips is None else tuple(flips)
    return Alignment(tuple(permutations), tuple(spread), method, signs_found, factors)


def _as_the_first(permutations: Sequence[Tensor], sym: Symmetries) -> list[Tensor]:
    """The same alignment in the frame of the first network."""
    return compose(permutations, invert([p[0] for p in permutations], sym), sym)


def _flipped_as_the_first(
    permutations: Sequence[Tensor], flips: Sequence[Tensor], plan: Plan
) -> list[Tensor]:
    """Common flips after which those of the first network are none."""
    result = [f.clone() for f in flips]
    for g, mirror in enumerate(plan.mirrors):
        if mirror is not None:
            common = flips[mirror][:1].expand_as(permutations[g])
            result[mirror].scatter_(
                1, permutations[g], flips[mirror].gather(1, permutations[g]) * common
            )
    return result

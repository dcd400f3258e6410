"""From ties between channels to groups: what moves, scales and flips together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_bnn.symmetry.discovery.axes import axis_entries
from lightning_bnn.symmetry.discovery.blocks import Family, block_families, permutation_groups
from lightning_bnn.symmetry.discovery.classes import ChannelClasses, Ints, connected
from lightning_bnn.symmetry.discovery.factors import NO_ACTIONS, actions, factor_groups
from lightning_bnn.symmetry.discovery.independence import independent
from lightning_bnn.symmetry.discovery.mixing import (
    Factors,
    limits_that_matter,
    linear_groups,
)
from lightning_bnn.symmetry.discovery.second_scales import FreeProducts, SecondScales
from lightning_bnn.symmetry.discovery.twin_channels import TwinChannels
from lightning_bnn.symmetry.groups import Axis, Frozen, ScalingGroup, SignGroup, Symmetries
from lightning_bnn.symmetry.rules.constraints import Constraints, Product
from lightning_bnn.symmetry.rules.labels import FROZEN

__all__ = ["solve"]


def solve(
    system: Constraints,
    shapes: Mapping[str, torch.Size],
    twins: Sequence[TwinChannels] = (),
    limits: Sequence[Frozen] = (),
) -> Symmetries:
    """Solve the three systems and describe their free motions as groups.

    Args:
        system: what the rules have stated.
        shapes: those of all tensors, by name.
        twins: branches that pair up, those inside others first.
        limits: the operations of the system's limits, reported where these cost a group.
    """
    roots = connected(system.ties["permutation"], system.nodes)
    scale_id, scale_sign, more = _solve_scales(system)
    sign_id = _solve_signs(system)
    signed = np.where(scale_id < 0, -1, 2 * scale_id + (scale_sign > 0))  # s and 1/s differ
    systems = (roots, signed, sign_id, *((more.kinds(),) if more else ()))
    entries = axis_entries(system, shapes, systems)
    axes = tuple(
        Axis(
            e.name,
            e.dim if shapes[e.name] else None,
            e.labels.shape[-1],
            e.role,
            e.labels.shape[0],
            e.last_read,
        )
        for e in entries
    )
    labels = [np.where(e.labels < 0, FROZEN, e.labels).ravel() for e in entries]
    pairs = list(zip(entries, labels, strict=True))
    scale_powers = [e.scale * scale_sign[at] for e, at in pairs]
    further = more.actions(labels, [e.scale for e in entries]) if more else NO_ACTIONS
    acts = independent(axes, shapes, actions(labels, scale_id, scale_powers), further)
    scalings = tuple(g for part in acts for g in factor_groups(ScalingGroup, axes, part))
    sign_powers = [np.full(at.shape, e.sign) for e, at in pairs]
    channels = ChannelClasses(system, roots, axes, labels, twins)
    families = block_families(channels)
    return Symmetries(
        axes=axes,
        permutations=permutation_groups(channels, families),
        scalings=scalings,
        signs=factor_groups(SignGroup, axes, actions(labels, sign_id, sign_powers)),
        linear=linear_groups(
            channels, Factors(scale_id, sign_id, scale_powers), _rows_of_copies(channels, families)
        ),
        frozen=tuple(limits[k] for k in limits_that_matter(channels)) if limits else (),
    )


def _rows_of_copies(channels: ChannelClasses, families: Sequence[Family]) -> list[list[Ints]]:
    """Channels that move only together with copies or partners in products, and rows of these."""
    classes = channels.classes()
    found = [f.units for f in families if f.mixes]
    rows = [[[classes[i] for i in row] for row in zip(*units, strict=True)] for units in found]
    return [[np.concatenate(row) for row in copies] for copies in rows if len(copies[0][0]) == 1]


# ------------------------------------------------------------ log scales and signs
def _solve_scales(system: Constraints) -> tuple[Ints, Ints, SecondScales | None]:
    """Per channel the variable of its log scale (-1: fixed), and its sign in it; what that leaves.

    Every channel has two copies, plus and minus; a channel whose copies are connected has log scale
    zero.
    """
    n = system.nodes
    equal = [_straight(t, n) for t in system.ties["scale"]]
    opposite = [_crossed(t, n) for t in system.ties["inverse scale"]]
    ties = [np.array([[FROZEN], [n]]), *equal, *opposite]

    def resolve(product: Product, fixed: NDArray[np.bool_]) -> list[Ints]:
        ties = []
        out, a, b = product.out, product.a, product.b
        for known, pair, crossed in (
            (a, (out, b), product.inverse),
            (b, (out, a), False),
            (out, (a, b), not product.inverse),
        ):
            tie = np.stack(pair)[:, fixed[known]]
            ties.append(_crossed(tie, n) if crossed else _straight(tie, n))
        return ties

    def cancelled(product: Product, roots: Ints) -> list[Ints]:
        out, a, b = product.out, product.a, product.b
        below = n if not product.inverse else 0  # of b what a product with a leaves at one
        return [
            out[roots[a] == roots[b + below]],
            b[roots[out] == roots[a]],
            a[roots[out] == roots[b + (n - below)]],
        ]

    def freedom(roots: Ints, product: Product, held: Ints) -> int:
        return FreeProducts(*_halves(roots, n), (product,)).freedom_beside(held)

    def is_fixed(roots: Ints) -> NDArray[np.bool_]:
        return roots[:n] == roots[n:]

    solved = _fixpoint(ties, system.products, (n, 2), is_fixed, resolve, cancelled, freedom)
    variable, sign = _halves(solved.roots, n)
    if not solved.free:
        return variable, sign, None
    return (
        variable,
        sign,
        SecondScales.of(FreeProducts(*_halves(solved.before, n), solved.free), variable),
    )


def _halves(both: Ints, n: int) -> tuple[Ints, Ints]:
    """The variable of every channel and its sign in it, from the components of both copies."""
    plus, minus = both[:n], both[n:]
    variable = _numbered(np.minimum(plus, minus), plus == minus)
    return variable, np.where(plus <= minus, 1, -1)


def _numbered(roots: Ints, fixed: NDArray[np.bool_]) -> Ints:
    """Variables from 0 on, one for each root; -1 where there is nothing to vary."""
    names, index = np.unique(np.where(fixed, -1, roots), return_inverse=True)
    return index.reshape(-1) - (1 if names[0] == -1 else 0)


def _straight(tie: Ints, n: int) -> Ints:
    return np.concatenate([tie, tie + n], 1)


def _crossed(tie: Ints, n: int) -> Ints:
    return np.concatenate([np.stack([tie[0], tie[1] + n]), np.stack([tie[0] + n, tie[1]])], 1)


def _solve_signs(system: Constraints) -> Ints:
    """Per channel the variable of its sign, -1 where it is fixed."""

    def resolve(product: Product, fixed: NDArray[np.bool_]) -> list[Ints]:
        trio = (product.out, product.a, product.b)
        return [np.stack([x[fixed[k]] for x in trio if x is not k]) for k in trio]

    def cancelled(product: Product, roots: Ints) -> list[Ints]:
        trio = (product.out, product.a, product.b)
        others = ((product.a, product.b), (product.out, product.b), (product.out, product.a))
        return [x[roots[y] == roots[z]] for x, (y, z) in zip(trio, others, strict=True)]

    def freedom(roots: Ints, product: Product, held: Ints) -> int:
        return -np.unique(roots[held]).size

    def is_fixed(roots: Ints) -> NDArray[np.bool_]:
        return roots == roots[FROZEN]

    ties: list[Ints] = list(system.ties["sign"])
    size = (system.nodes, 1)
    products = [p for p in system.products if p.has_signs]
    roots = _fixpoint(ties, products, size, is_fixed, resolve, cancelled, freedom).roots
    return _numbered(roots, roots == roots[FROZEN])


class _Solved(NamedTuple):
    """Components of channels; those before anything was held, and the products free until then."""

    roots: Ints
    before: Ints
    free: tuple[Product, ...]


def _fixpoint(
    ties: list[Ints],
    products: Sequence[Product],
    size: tuple[int, int],
    is_fixed: Any,
    resolve: Any,
    cancelled: Any,
    freedom: Any,
) -> _Solved:
    """Add what products imply until nothing changes.

    What two equal variables of a product cancel to is one. Where both factors of a product are
    free, the second is held, or the product itself if that leaves more: sums of products, such as
    scores without a softmax, have one scale for many factors.
    """
    nodes, copies = size
    pending = list(products)
    before: Ints | None = None
    free: tuple[Product, ...] = ()
    while True:
        roots = connected(ties, copies * nodes)
        fixed = is_fixed(roots)
        if not pending:
            return _Solved(roots, roots if before is None else before, free)
        still, progressed = [], False
        for product in pending:
            implied = resolve(product, fixed)
            ones = np.concatenate(cancelled(product, roots))
            ones = ones[~fixed[ones]]
            implied += [
                np.stack([ones, np.full_like(ones, FROZEN)]) + k * nodes for k in range(copies)
            ]
            ties += [t for t in implied if t.size]
            done = fixed[product.a] | fixed[product.b] | fixed[product.out]
            progressed |= bool(done.any() or ones.size)
            if not done.all():
                out, a, b = (x[~done] for x in (product.out, product.a, product.b))
                still.append(product._replace(out=out, a=a, b=b))
        if not progressed:
            if before is None:
                before, free = roots, tuple(still)
            first = still[0]
            held = max((first.b, first.out), key=lambda nodes: freedom(roots, first, nodes))
            zero = np.full_like(held, FROZEN)
            ties += [np.stack([held + k * nodes, zero]) for k in range(copies)]
        pending = still

"""From ties between channels to groups: what moves, scales and flips together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_bnn.symmetry.discovery.axes import axis_entries
from lightning_bnn.symmetry.discovery.blocks import Family, block_families, permutation_groups
from lightning_bnn.symmetry.discovery.classes import ChannelClasses, Ints, connected
from lightning_bnn.symmetry.discovery.factors import factor_groups
from lightning_bnn.symmetry.discovery.mixing import Factors, linear_groups
from lightning_bnn.symmetry.discovery.trades import shift_groups
from lightning_bnn.symmetry.discovery.twin_channels import TwinChannels
from lightning_bnn.symmetry.groups import Axis, ScalingGroup, SignGroup, Symmetries
from lightning_bnn.symmetry.rules.constraints import Constraints, Product
from lightning_bnn.symmetry.rules.labels import FROZEN

__all__ = ["solve"]


def solve(
    system: Constraints, shapes: Mapping[str, torch.Size], twins: Sequence[TwinChannels] = ()
) -> Symmetries:
    """Solve the three systems and describe their free motions as groups.

    Args:
        system: what the rules have stated.
        shapes: those of all tensors, by name.
        twins: branches that pair up, those inside others first.
    """
    roots = connected(system.ties["permutation"], system.nodes)
    scale_id, scale_sign = _solve_scales(system)
    sign_id = _solve_signs(system)
    systems = (roots, scale_id, sign_id)
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
    sign_powers = [np.full(at.shape, e.sign) for e, at in pairs]
    channels = ChannelClasses(system, roots, axes, labels, twins)
    families = block_families(channels)
    return Symmetries(
        axes=axes,
        permutations=permutation_groups(channels, families),
        scalings=factor_groups(ScalingGroup, axes, labels, scale_id, scale_powers),
        signs=factor_groups(SignGroup, axes, labels, sign_id, sign_powers),
        linear=linear_groups(
            channels, Factors(scale_id, sign_id, scale_powers), _rows_of_copies(channels, families)
        ),
        shifts=shift_groups(channels),
    )


def _rows_of_copies(channels: ChannelClasses, families: Sequence[Family]) -> list[list[Ints]]:
    """Channels that are exchangeable only together with their copies, and rows of the copies."""
    classes = channels.classes()
    found = [f.units for f in families if f.copies]
    rows = [[[classes[i] for i in row] for row in zip(*units, strict=True)] for units in found]
    return [[np.concatenate(row) for row in copies] for copies in rows if len(copies[0][0]) == 1]


# ------------------------------------------------------------ log scales and signs
def _solve_scales(system: Constraints) -> tuple[Ints, Ints]:
    """Per channel the variable of its log scale (-1: fixed), and its sign in it.

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

    both = _fixpoint(ties, system.products, (n, 2), lambda c: c[:n] == c[n:], resolve)
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

    roots = _fixpoint(
        list(system.ties["sign"]),
        system.products,
        (system.nodes, 1),
        lambda c: c == c[FROZEN],
        resolve,
    )
    return _numbered(roots, roots == roots[FROZEN])


def _fixpoint(
    ties: list[Ints],
    products: Sequence[Product],
    size: tuple[int, int],
    is_fixed: Any,
    resolve: Any,
) -> Ints:
    """Add what products imply until nothing changes.

    Where both factors of a product are free, the second is fixed, or the product itself if that
    fixes less: sums of products, such as scores without a softmax, have one scale for many factors.
    """
    nodes, copies = size
    pending = list(products)
    while True:
        roots = connected(ties, copies * nodes)
        fixed = is_fixed(roots)
        if not pending:
            return roots
        still, progressed = [], False
        for product in pending:
            implied = resolve(product, fixed)
            ties += [t for t in implied if t.size]
            done = fixed[product.a] | fixed[product.b] | fixed[product.out]
            progressed |= bool(done.any())
            if not done.all():
                still.append(
                    Product(product.out[~done], product.a[~done], product.b[~done], product.inverse)
                )
        if not progressed:
            held = _fewest(roots, still[0])
            zero = np.full_like(held, FROZEN)
            ties += [np.stack([held + k * nodes, zero]) for k in range(copies)]
        pending = still


def _fewest(roots: Ints, product: Product) -> Ints:
    """The product or its second factor, whichever has fewer variables."""
    return min((product.b, product.out), key=lambda nodes: np.unique(roots[nodes]).size)

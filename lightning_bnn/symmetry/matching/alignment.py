"""What `align` returns, and how far maps between pairs of networks contradict each other."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lightning_bnn.params import Params
from lightning_bnn.symmetry.actions import flip, permute, rescale
from lightning_bnn.symmetry.composition import compose, invert
from lightning_bnn.symmetry.groups import Symmetries
from lightning_bnn.symmetry.mixing import mix

__all__ = ["AlignMethod", "Alignment", "cycle_error", "distance_to_mean"]

AlignMethod = Literal["joint", "reference"]


@dataclass(frozen=True, eq=False)
class Alignment(Sequence[Tensor]):
    """What brings every network of a stack into a common frame; a sequence of its permutations.

    Attributes:
        permutations: one per group, ``(members, units)``.
        spread: after every sweep, the sum of squared distances of the networks to their mean, over
            the tensors that permutations (with matrices: any symmetries) reach; first as they were
            given.
        method: ``"joint"`` or ``"reference"``.
        signs: flips that come before the permutations, where they were asked for.
        scales: positive factors that come before the flips, where they were asked for.
        matrices: for `mix`, after the permutations, where they were asked for.

    >>> from lightning_bnn import params as P
    >>> from lightning_bnn.models import mlp
    >>> from lightning_bnn.symmetry import align, compose, discover
    >>> net = mlp(2, [5], 1)
    >>> sym, stack = discover(net, torch.randn(8, 2)), P.populate(net, 3)
    >>> found = align(stack, sym)
    >>> found.spread[-1] < found.spread[0], found[0].shape
    (True, torch.Size([3, 5]))
    >>> compose(found.between(1, 2, sym), found.between(2, 1, sym), sym)
    [tensor([0, 1, 2, 3, 4])]
    """

    permutations: tuple[Tensor, ...]
    spread: tuple[float, ...]
    method: AlignMethod
    signs: tuple[Tensor, ...] | None = None
    scales: tuple[Tensor, ...] | None = None
    matrices: tuple[Tensor, ...] | None = None

    def apply(self, stack: Params, sym: Symmetries) -> Params:
        """The stack in the common frame."""
        stack = stack if self.scales is None else rescale(stack, sym, self.scales)
        stack = stack if self.signs is None else flip(stack, sym, self.signs)
        moved = permute(stack, sym, self)
        return moved if self.matrices is None else mix(moved, sym, self.matrices)

    def between(self, a: int, b: int, sym: Symmetries) -> list[Tensor]:
        """Permutations that bring network ``a`` into the frame of network ``b``.

        Flips, scales and matrices are left out.
        """
        to_common = [p[a] for p in self.permutations]
        return compose(to_common, invert([p[b] for p in self.permutations], sym), sym)

    def __getitem__(self, index: int) -> Tensor:  # type: ignore[override]
        """The permutations of one group, one row per network."""
        return self.permutations[index]

    def __len__(self) -> int:
        """The number of groups that are permuted."""
        return len(self.permutations)

    def __str__(self) -> str:
        """The method and what it does to the spread."""
        return (
            f"{self.method}: squared distance to the mean {self.spread[0]:.4g} -> "
            f"{self.spread[-1]:.4g} in {len(self.spread) - 1} sweeps"
        )


def distance_to_mean(stack: Params, names: Iterable[str], counts: Tensor | None = None) -> float:
    """Sum of squared distances of the networks of a stack to their mean, over some tensors.

    Args:
        stack: networks of one kind.
        names: of the tensors.
        counts: how often each network counts; by default once.
    """
    rows = (stack[name].double() for name in names)
    if counts is None:
        return sum(float((t - t.mean(0)).square().sum()) for t in rows)
    return sum(_weighted_distance(t.flatten(1), counts.to(t)) for t in rows)


def _weighted_distance(rows: Tensor, counts: Tensor) -> float:
    mean = counts @ rows / counts.sum()
    return float(counts @ (rows - mean).square().sum(1))


def cycle_error(between: Mapping[tuple[int, int], Sequence[Tensor]], sym: Symmetries) -> float:
    r"""Share of units that do not come back to their place on the way round three networks.

    .. math:: \frac{1}{|U|} \sum_{a, b, c} |\{u : (\pi_{c a} \pi_{b c} \pi_{a b})(u) \neq u\}|

    Args:
        between: for every ordered pair ``(a, b)``, permutations that bring ``a`` to ``b``, from
            `match` or from `Alignment.between`.
        sym: what `discover` returned.

    >>> import itertools
    >>> from lightning_bnn import params as P
    >>> from lightning_bnn.models import mlp
    >>> from lightning_bnn.symmetry import align, cycle_error, discover, match
    >>> net = mlp(2, [20], 1)
    >>> stack = P.populate(net, 3, torch.Generator().manual_seed(0))
    >>> sym = discover(net, torch.randn(8, 2))
    >>> pairs, found = list(itertools.permutations(range(3), 2)), align(stack, sym)
    >>> cycle_error({(a, b): found.between(a, b, sym) for a, b in pairs}, sym)
    0.0
    >>> w = P.unstack(stack)
    >>> cycle_error({(a, b): match(w[a], w[b], sym) for a, b in pairs}, sym) > 0
    True
    """
    networks = sorted({k for pair in between for k in pair})
    missing = [p for p in itertools.permutations(networks, 2) if p not in between]
    if len(networks) < 3 or missing:
        raise ValueError(
            "`between` must hold every ordered pair of at least three networks"
            + (f", {missing[0]} is missing." if missing else ".")
        )
    astray = units = 0
    for a, b, c in itertools.permutations(networks, 3):
        there = compose(between[a, b], between[b, c], sym)
        for order in compose(there, between[c, a], sym):
            astray += int((order != torch.arange(len(order))).sum())
            units += len(order)
    return astray / max(units, 1)

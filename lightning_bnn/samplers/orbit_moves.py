"""Moves of chains to other networks of the same function, drawn from the prior on their orbits."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor

from weightsym import (
    Element,
    ScalingGroup,
    Symmetries,
    along_axis,
    random_permutations,
    random_signs,
)
from weightsym.params import Params, check_positive

__all__ = ["OrbitMoves"]

_SLICES = 3
"""Successive draws of every scale: after one, a scale still depends on its old value."""


class OrbitMoves:
    r"""Draws networks from a Gaussian prior restricted to their orbits.

    The likelihood does not change along an orbit, so these draws leave the posterior invariant.
    Permutations and signs are uniform. The logarithm of a scale, given all others, has the density

    .. math:: p(\lambda) \propto \exp\Big(n \lambda
        - \frac{1}{2 \sigma^2} \textstyle\sum_k w_k^2 e^{2 e_k \lambda}\Big), \quad
        n = \textstyle\sum_k e_k

    for weights with exponents :math:`e_k`, of which the sum comes from volumes. It is drawn by
    slices.

    Args:
        sym: result of `discover`.
        prior_std: standard deviation of the prior over all weights.
        movable: names of the tensors that may move; by default all that symmetries move.

    Attributes:
        held: names of groups that are not moved: those with a fixed tensor, and scalings with two
            units in one weight.

    References:
        | Slice Sampling (Neal, 2003)

    >>> from lightning_bnn.models import mlp
    >>> from weightsym import discover, params as P
    >>> net, x = mlp(2, [4], 1), torch.randn(5, 2)
    >>> stack = P.populate(net, 3)
    >>> moved = OrbitMoves(discover(net, x))(stack, torch.Generator().manual_seed(0))
    >>> torch.allclose(P.apply(net, moved, x), P.apply(net, stack, x), atol=1e-5)
    True
    """

    def __init__(
        self, sym: Symmetries, prior_std: float = 1.0, movable: Collection[str] | None = None
    ) -> None:
        check_positive("prior_std", prior_std)
        self.sym, self.prior_std = sym, prior_std
        names = sym.touched if movable is None else movable
        groups = *sym.permutations, *sym.signs, *sym.scalings
        fixed = {g for g in groups if not sym.moved_by(g).issubset(names)}
        fixed |= {g for g in sym.scalings if not _is_separable(g, sym)}
        self.scalings = [group for group in sym.scalings if group not in fixed]
        self.held = [group.name for group in groups if group in fixed]
        self._held = [
            [k for k, group in enumerate(family) if group in fixed]
            for family in (sym.permutations, sym.signs)
        ]

    @torch.no_grad()
    def __call__(self, stack: Params, generator: torch.Generator | None = None) -> Params:
        """Return other networks with the same functions as those of a stack."""
        to_copies = self.draw_copies(len(next(iter(stack.values()))), generator)
        return self.rescaled(to_copies(stack), generator)

    def draw_copies(self, members: int, generator: torch.Generator | None = None) -> Element:
        """Draw permutations and signs for a stack of networks; they also act on its momenta."""
        orders = random_permutations(self.sym, generator, members)
        signs = random_signs(self.sym, generator, members)
        held_orders, held_signs = self._held
        for g in held_orders:
            orders[g] = torch.arange(orders[g].shape[-1]).expand_as(orders[g])
        for g in held_signs:
            signs[g] = torch.ones_like(signs[g])
        return Element.of_groups(self.sym, permutations=orders, signs=signs)

    @torch.no_grad()
    def rescaled(self, stack: Params, generator: torch.Generator | None = None) -> Params:
        """Draw the scales of every network of a stack."""
        moved = stack
        for group in self.scalings:
            scales = [torch.ones(g.units) for g in self.sym.scalings]
            scales[self.sym.scalings.index(group)] = self._logs(group, moved, generator).exp()
            moved = Element.of_groups(self.sym, scales=scales)(moved)
        return moved

    def _logs(
        self, group: ScalingGroup, stack: Params, generator: torch.Generator | None
    ) -> Tensor:
        """Draw logarithms of new scales of the units of a group, ``(members, units)``."""
        squares, counts = self._sums(group, stack)
        of_volume = sum(power * count for power, count in counts.items())

        def log_density(logs: Tensor) -> Tensor:
            sizes = sum(s * (2 * power * logs).exp() for power, s in squares.items())
            return of_volume * logs - sizes / (2 * self.prior_std**2)

        first = next(iter(squares.values()))

        def total(side: int) -> Tensor:
            parts = [s for power, s in squares.items() if power * side > 0]
            return torch.stack(parts).sum(0) if parts else torch.zeros_like(first)

        up, down = total(1), total(-1)
        has_law = ((up > 0) | (of_volume < 0)) & ((down > 0) | (of_volume > 0))
        has_law &= (up + down).isfinite()  # where one side is zero, a scale may have none
        numbers = torch.stack([power**2 * count for power, count in counts.items()]).sum(0)
        width = 2 / numbers.sqrt()  # of the order of the deviation
        logs = torch.zeros_like(first)
        for _ in range(_SLICES):
            logs = _slice(log_density, logs, width, has_law, generator)
        return logs

    def _sums(
        self, group: ScalingGroup, stack: Params
    ) -> tuple[Mapping[int, Tensor], Mapping[int, Tensor]]:
        """Return by power the squared weights of every unit, and their number."""
        squares: dict[int, Tensor] = {}
        counts: dict[int, Tensor] = {}
        for placement in group.placements:
            axis = self.sym.axes[placement.axis]
            rows = along_axis(stack[axis.tensor].double(), axis, 1)
            positions = placement.positions.to(rows.device)
            size = rows[0, ..., positions[0]].numel()
            of_units = rows.square().flatten(1, -2).sum(1) if rows.ndim > 2 else rows.square()
            total = of_units[:, positions].sum(-1)
            power = placement.exponent
            squares[power] = squares.get(power, torch.zeros_like(total)) + total
            count = torch.full((group.units,), float(size), dtype=total.dtype)
            counts[power] = counts.get(power, torch.zeros_like(count)) + count
        return squares, {power: count.to(total.device) for power, count in counts.items()}


def _is_separable(group: ScalingGroup, sym: Symmetries) -> bool:
    """Return whether no weight has factors of two units, or of one unit twice."""
    tensors = [sym.axes[placement.axis].tensor for placement in group.placements]
    return len(set(tensors)) == len(tensors) and not any(p.meets_itself for p in group.placements)


def _slice(
    log_density: Callable[[Tensor], Tensor],
    x: Tensor,
    width: Tensor,
    moves: Tensor,
    generator: torch.Generator | None,
) -> Tensor:
    """Draw once by stepping out and shrinking, for unimodal densities."""

    def uniform() -> Tensor:
        return torch.rand(x.shape, generator=generator, dtype=x.dtype).to(x.device)

    level = log_density(x) + uniform().log()
    low = x - width * uniform()
    high = low + width
    for end, step in ((low, -width), (high, width)):
        while bool((inside := (log_density(end) > level) & moves).any()):
            end += torch.where(inside, step, 0)
    new, left = x, moves.clone()
    while bool(left.any()):
        proposal = low + (high - low) * uniform()
        new = torch.where(left, proposal, new)
        left &= ~(log_density(new) > level)
        low = torch.where(left & (proposal < x), proposal, low)
        high = torch.where(left & (proposal >= x), proposal, high)
    return new

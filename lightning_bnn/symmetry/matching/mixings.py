"""Matrices that bring a network closest to another: of heads, adapters and normalised streams."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bnn.params import Params
from lightning_bnn.symmetry.actions import tied
from lightning_bnn.symmetry.elements import identity
from lightning_bnn.symmetry.groups import Symmetries
from lightning_bnn.symmetry.matching.channel_moments import Moments
from lightning_bnn.symmetry.matching.channel_views import By, View, distance, view_of
from lightning_bnn.symmetry.matching.full_elements import closest, nothing, together
from lightning_bnn.symmetry.matching.nearest import least_squares, nearest
from lightning_bnn.symmetry.mixing import identity_mixings
from lightning_bnn.symmetry.spaces import multiplied

__all__ = ["Pair", "match_mixings"]

_ROUNDS = 20


@torch.no_grad()
def match_mixings(
    params: Params,
    reference: Params,
    sym: Symmetries,
    *,
    model: nn.Module | None = None,
    batches: Iterable[Any] | None = None,
    by: By = "weights",
    sweeps: int = 50,
) -> list[Tensor]:
    r"""Matrices for `mix` after which the channels of a network are closest to a reference.

    For rotations that is Procrustes, over all places of a group at once:

    .. math:: \max_R \; \mathrm{tr}\, R^T \sum_l B_l A_l^T

    with the channels :math:`A_l` of the network and :math:`B_l` of the reference. Where matrices
    are free, both networks are balanced first, see `canonicalise`, and a rotation leads from one
    balanced form to the other. Heads stay in their places; `match_all` also exchanges those.

    Args:
        params: one network, or a stack whose members are matched one by one.
        reference: the network to come close to.
        sym: what `discover` returned.
        model: gives the computation where activations are compared.
        batches: inputs, or tuples whose first element is the input.
        by: compare ``"weights"``, group after group until nothing moves, or ``"activations"``,
            which for networks that were trained apart lowers barriers far more. Where no linear map
            shows the channels, weights are compared, with a warning.
        sweeps: at most so many rounds over the groups.

    Returns:
        One tensor ``(spaces, size, size)`` per group of ``sym.linear``, in double precision; with a
        leading dimension for a stack.

    >>> from lightning_bnn import params as P
    >>> from lightning_bnn.symmetry import discover, match_mixings, mix, random_mixings
    >>> norm = torch.nn.RMSNorm(4, elementwise_affine=False)
    >>> net = torch.nn.Sequential(torch.nn.Linear(8, 4), norm, torch.nn.Linear(4, 8))
    >>> sym, w = discover(net, torch.randn(8, 8)), P.of(net)
    >>> (turn,) = random_mixings(sym)
    >>> (back,) = match_mixings(mix(w, sym, [turn]), w, sym)
    >>> torch.allclose(back @ turn, torch.eye(4, dtype=torch.float64), atol=1e-4)
    True
    """
    view, members, stacked = view_of(params, reference, sym, model, batches, by, sweeps)
    found = []
    for member in members:
        pair = Pair(view, member, reference)
        pair.sweep(sweeps)
        ends = [(identity(sym), pair.matrices)]
        if by == "weights":
            ends = [nothing(sym), *ends]
        found.append(closest(ends, member, reference, sym))
    return (together(found) if stacked else found[0])[1]


class Pair:
    """A network on its way to a reference, and the matrices that it has met.

    Both stand where shifts leave nothing free (`View.standing`): no element of the group changes
    that.
    """

    def __init__(self, view: View, params: Params, reference: Params) -> None:
        self.view, self.sym = view, view.sym
        self.params, self.goal = view.standing(params), view.standing(reference)
        self.reference = reference
        self.seen, self.everywhere = view.activations(params, reference)
        self.device = next(iter(params.values())).device
        rounding = [torch.finfo(params[n].dtype).eps for n in self.sym.touched]
        self.still = max(rounding, default=1e-16) ** 0.6
        self.matrices = [m.to(self.device) for m in identity_mixings(self.sym)]

    @property
    def apart(self) -> float:
        """The distance that is left."""
        return float(distance(self.params, self.goal, self.sym))

    def sweep(self, sweeps: int) -> None:
        """All groups, streams first, until nothing moves."""
        for number in range(sweeps):
            moved = self.turn(self.view.streams, first=number == 0)
            moved = max(moved, self.turn(self.view.rest))
            if moved < self.still:
                break
        self.refine()

    def turn(self, groups: Sequence[int], first: bool = False) -> float:
        """Mix the channels of some groups; returns how far the matrices are from one."""
        moved = 0.0
        for k in groups:
            group = self.sym.linear[k]
            found = self.moments(k, first)
            step = nearest(group, found.own, found.goal, found.paired).matrices
            moved = max(moved, self._mix(k, step))
        return moved

    def moments(self, k: int, first: bool = False) -> Moments:
        """Moments of one group as the network stands now."""
        return self.view.moments(k, self.params, self.goal, self.seen, first)

    def refine(self, groups: Collection[int] | None = None) -> None:
        """Replace balanced forms by least squares, where matrices are free, from what was found.

        Weights alternate with rotations of streams as long as that lowers the distance.

        Args:
            groups: some of all groups.
        """
        for _ in range(_ROUNDS if self.seen is None else 1):
            before, apart = (list(self.matrices), self.params), self.apart
            for k, group in enumerate(self.sym.linear):
                if groups is not None and k not in groups:
                    continue
                if group.kind == "general":
                    found = self.moments(k) if self.seen is None else self.moments(k).shares
                    eye = torch.eye(group.size).to(found.own).expand(group.spaces, -1, -1)
                    self._mix(k, least_squares(eye, found.own, found.paired))
                elif self.seen is None:
                    self.turn([k])
            if self.seen is None and self.apart > apart:  # numbers of planes are balanced
                self.matrices, self.params = before
            if self.apart > apart * (1 - 1e-4):
                break

    def _mix(self, k: int, step: Tensor) -> float:
        """Mix the channels of one group; returns how far the matrices are from one."""
        group, inverse = self.sym.linear[k], torch.linalg.inv(step).mT
        self.params = tied(multiplied(self.params, self.sym, group, step, inverse), self.sym)
        self.matrices[k] = step @ self.matrices[k]
        if self.seen is not None:
            self.seen[k] = self.seen[k].mixed(step)
        if self.everywhere is not None:
            self.everywhere[k] = self.everywhere[k].mixed(step)
        return float((step - torch.eye(group.size).to(step)).abs().max())

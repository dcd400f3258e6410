"""Matrices that bring a network closest to another: of heads, adapters and normalised streams."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from lightning_bnn.params import Params, unstack
from lightning_bnn.symmetry.actions import tied
from lightning_bnn.symmetry.forward import structural_copy
from lightning_bnn.symmetry.groups import Placement, Symmetries
from lightning_bnn.symmetry.matching.channel_moments import (
    Moments,
    activation_moments,
    unseen_groups,
    weight_moments,
)
from lightning_bnn.symmetry.matching.nearest import least_squares, nearest
from lightning_bnn.symmetry.matching.watching import first_inputs
from lightning_bnn.symmetry.mixing import identity_mixings
from lightning_bnn.symmetry.spaces import multiplied
from lightning_bnn.symmetry.validation import check_finite, check_one_network, check_params

__all__ = ["By", "Pair", "View", "distance", "match_mixings", "view_of"]

By = Literal["weights", "activations"]
Seen = list[Moments] | None
_log = logging.getLogger(__name__)
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
        found.append(pair.matrices)
    rows = [torch.stack(m) for m in zip(*found, strict=True)]
    return rows if stacked else [m[0] for m in rows]


def view_of(
    params: Params,
    reference: Params,
    sym: Symmetries,
    model: nn.Module | None,
    batches: Iterable[Any] | None,
    by: By,
    sweeps: int,
) -> tuple[View, list[Params], bool]:
    """Check arguments; how channels are compared, the members of a stack, whether it was one."""
    if by not in get_args(By):
        raise ValueError(f"`by` must be one of {', '.join(get_args(By))}, got {by!r}.")
    if sweeps < 1:
        raise ValueError(f"`sweeps` must be at least 1, got {sweeps}.")
    check_one_network(reference, sym, "reference")
    stacked = check_params(params, sym)
    check_finite(reference, sym, "reference")
    check_finite(params, sym)
    network, inputs = None, list[Any]()
    if by == "activations":
        if model is None or batches is None:
            raise ValueError('`by="activations"` needs `model` and `batches`.')
        network, inputs = structural_copy(model).eval(), first_inputs(batches)
    return View(sym, network, inputs), unstack(params) if stacked else [params], stacked


def distance(a: Params, b: Params, sym: Symmetries) -> Tensor:
    """Euclidean distance of two networks in what symmetries move; one number, or one per member."""
    total = torch.zeros((), dtype=torch.float64)
    for name in sym.touched:
        difference = a[name].double() - b[name].double()
        dims = list(range(-b[name].ndim, 0)) if b[name].ndim <= a[name].ndim else []
        total = total + (difference.square().sum(dims) if dims else difference.square()).cpu()
    return total.sqrt()


# ------------------------------------------------------------ what is compared
@dataclass(frozen=True, eq=False)
class View:
    """How the channels of two networks are compared: by weights, or by activations on inputs."""

    sym: Symmetries
    network: nn.Module | None = None
    inputs: list[Any] = field(default_factory=list)
    warned: set[str] = field(default_factory=set)

    @cached_property
    def streams(self) -> list[int]:
        """Groups of rotations, which are turned before all others are matched."""
        return [k for k, g in enumerate(self.sym.linear) if not g.rescales]

    @cached_property
    def rest(self) -> list[int]:
        """All groups but those of streams."""
        return [k for k in range(len(self.sym.linear)) if k not in self.streams]

    @cached_property
    def places(self) -> list[list[Placement]]:
        """By group, the places that count: not those of biases that may take any value."""
        free = {p.axis for shift in self.sym.shifts for p in shift.placements}
        return [[p for p in g.placements if p.axis not in free] for g in self.sym.linear]

    @cached_property
    def anchored(self) -> list[list[Placement]]:
        """By group, the places whose weights have nothing on their other side that may move."""
        sym, result = self.sym, []
        reached = {(sym.axes[a].tensor, a) for a in sym.placements_by_axis("permutations")}
        reached |= {(sym.axes[p.axis].tensor, p.axis) for g in sym.linear for p in g.placements}
        for places in self.places:
            alone = [
                p
                for p in places
                if not any(t == sym.axes[p.axis].tensor and a != p.axis for t, a in reached)
            ]
            result.append(alone or places)
        return result

    def activations(self, params: Params, reference: Params) -> tuple[Seen, Seen]:
        """Moments of all groups, if activations are what counts: for matrices, and for heads."""
        if self.network is None:
            return None, None
        own = {n: t.to(reference[n].dtype) if n in reference else t for n, t in params.items()}
        found = activation_moments(self.network, own, reference, self.sym, self.inputs)
        for name in set(unseen_groups(self.sym, found[0])) - self.warned:
            self.warned.add(name)
            _log.warning("No linear map shows the channels of %s: weights are compared.", name)
        return found

    def moments(
        self,
        k: int,
        params: Params,
        reference: Params,
        seen: Sequence[Moments] | None,
        first: bool = False,
    ) -> Moments:
        """Moments of one group: what was seen of it, and weights where nothing was."""
        group, sym = self.sym.linear[k], self.sym
        places = (self.anchored if first else self.places)[k]
        if seen is None or not bool((seen[k].goal != 0).any()):
            return weight_moments(params, reference, sym, group, places)
        if not group.rescales:
            return seen[k]
        missing = [s for s in (0, 1) if not bool((seen[k].goal[s] != 0).any())]
        places = [p for p in self.places[k] if int(p.exponent == -1) in missing]
        return seen[k] + weight_moments(params, reference, sym, group, places)


# ------------------------------------------------------------ one network and its reference
class Pair:
    """A network on its way to a reference, and the matrices that it has met."""

    def __init__(self, view: View, params: Params, reference: Params) -> None:
        self.view, self.sym = view, view.sym
        self.params, self.reference = dict(params), reference
        for name in self.sym.touched:
            self.params[name] = params[name].double()
        self.seen, self.everywhere = view.activations(params, reference)
        device = next(iter(params.values())).device
        rounding = [torch.finfo(params[n].dtype).eps for n in self.sym.touched]
        self.still = max(rounding, default=1e-16) ** 0.6
        self.matrices = [m.to(device) for m in identity_mixings(self.sym)]

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
        return self.view.moments(k, self.params, self.reference, self.seen, first)

    def refine(self, groups: Collection[int] | None = None) -> None:
        """Replace balanced forms by least squares, where matrices are free, from what was found.

        Weights alternate with rotations of streams: every step lowers the distance.

        Args:
            groups: some of all groups.
        """
        last = torch.inf
        for _ in range(_ROUNDS if self.seen is None else 1):
            for k, group in enumerate(self.sym.linear):
                if groups is not None and k not in groups:
                    continue
                if group.kind == "general":
                    found = self.moments(k) if self.seen is None else self.moments(k).shares
                    eye = torch.eye(group.size).to(found.own).expand(group.spaces, -1, -1)
                    self._mix(k, least_squares(eye, found.own, found.paired))
                elif self.seen is None:
                    self.turn([k])
            apart = float(distance(self.params, self.reference, self.sym))
            if apart > last * (1 - 1e-4):
                break
            last = apart

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

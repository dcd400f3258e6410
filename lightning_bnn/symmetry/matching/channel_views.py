"""How the channels of two networks are compared: by weights, or by activations on inputs."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from lightning_bnn.params import Params, unstack
from lightning_bnn.symmetry.forward import structural_copy
from lightning_bnn.symmetry.groups import Placement, Symmetries
from lightning_bnn.symmetry.matching.channel_moments import (
    Moments,
    activation_moments,
    unseen_groups,
    weight_moments,
)
from lightning_bnn.symmetry.matching.watching import first_inputs
from lightning_bnn.symmetry.shifting import remove_shifts
from lightning_bnn.symmetry.validation import (
    check_finite,
    check_one_network,
    check_params,
    check_squares,
)

__all__ = ["By", "View", "distance", "view_of"]

By = Literal["weights", "activations"]
Seen = list[Moments] | None
_log = logging.getLogger(__name__)


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
    for name, networks in (("reference", reference), ("params", params)):
        check_squares(networks, name, sym.touched)
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
    def anchored(self) -> list[list[Placement]]:
        """By group, the places whose weights have nothing on their other side that may move."""
        sym, result = self.sym, []
        reached = {(sym.axes[a].tensor, a) for a in sym.placements_by_axis("permutations")}
        reached |= {(sym.axes[p.axis].tensor, p.axis) for g in sym.linear for p in g.placements}
        for places in (g.placements for g in sym.linear):
            alone = [
                p
                for p in places
                if not any(t == sym.axes[p.axis].tensor and a != p.axis for t, a in reached)
            ]
            result.append(alone or list(places))
        return result

    def standing(self, params: Params) -> Params:
        """A network in double precision, the one of all that shifts make equal.

        What shifts move for nothing would count as distance: two tables that are summed differ in
        the offset that they share, biases of keys in everything.
        """
        double = {n: params[n].double() for n in self.sym.touched}
        return remove_shifts({**params, **double}, self.sym)

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
        places = self.anchored[k] if first else group.placements
        if seen is None or not bool((seen[k].goal != 0).any()):
            return weight_moments(params, reference, sym, group, places)
        if not group.rescales:
            return seen[k]
        missing = [s for s in (0, 1) if not bool((seen[k].goal[s] != 0).any())]
        places = [p for p in group.placements if int(p.exponent == -1) in missing]
        return seen[k] + weight_moments(params, reference, sym, group, places)

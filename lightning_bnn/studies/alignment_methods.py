"""The ways of bringing networks into one frame that the study of averages compares."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lightning_bnn import params as P
from lightning_bnn.params import Params
from lightning_bnn.symmetry import (
    Symmetries,
    align,
    discover,
    fold_norms,
    match,
    match_all,
)
from lightning_bnn.symmetry.matching.plan import Plan

__all__ = ["LEARNED", "MATRICES", "PERMUTATIONS", "Kind", "aligned", "without_gains"]

PERMUTATIONS = (
    "as they are",
    "first, ascent",
    "first, best",
    "first, activations",
    "first, correlation",
    "first, regression",
    "first, learned",
    "first, sinkhorn",
    "joint",
)
LEARNED = ("first, learned", "first, sinkhorn")
"""Those of the permutations that take hundreds of gradients of the loss half way: for pairs."""
MATRICES = ("first, matrices", "first, matrices by activations", "joint, matrices")


@dataclass(frozen=True, eq=False)
class Kind:
    """A network, its symmetries, and the tensors whose distances count."""

    model: nn.Module
    symmetries: Symmetries
    compared: Sequence[str]

    @classmethod
    def of(cls, model: nn.Module, inputs: Tensor) -> Kind:
        """A network as it is."""
        symmetries = discover(model, inputs[:2])
        return cls(model, symmetries, Plan(symmetries).compared)

    @classmethod
    def folded(cls, model: nn.Module, inputs: Tensor) -> Kind:
        """The network without the gains of its norms, so that its stream can be turned."""
        without = fold_norms(model, inputs[:2])
        symmetries = discover(without, inputs[:2])
        return cls(without, symmetries, sorted(symmetries.touched))


def without_gains(model: nn.Module, networks: Params, inputs: Tensor) -> Params:
    """The same functions without the gains of norms."""
    model, found = copy.deepcopy(model), []
    for network in P.unstack(networks):
        model.load_state_dict(network)
        found.append(P.of(fold_norms(model, inputs[:2])))
    return P.stack(found)


def aligned(
    kind: Kind, networks: Params, method: str, batches: Sequence[tuple[Tensor, Tensor]], seed: int
) -> Params:
    """A stack as a method brings it into one frame.

    Args:
        kind: of the networks.
        networks: a stack.
        method: one of `PERMUTATIONS` or `MATRICES`.
        batches: pairs of input and label, for methods that look at data.
        seed: of the search.
    """
    model, sym = kind.model, kind.symmetries
    first = {n: t[0] for n, t in networks.items()}
    frame, _, way = method.partition(", ")
    if frame == "as they are":
        return networks
    if frame == "joint":
        return align(networks, sym, mixing=way == "matrices", seed=seed).apply(networks, sym)
    if way == "matrices":
        return match_all(networks, first, sym).apply(networks, sym)
    if way == "matrices by activations":
        found = match_all(networks, first, sym, by="activations", model=model, batches=batches)
        return found.apply(networks, sym)
    how: dict[str, Any] = {"method": way, "seed": seed}
    if way not in ("ascent", "best"):
        how |= {"model": model, "batches": batches, "loss": nn.functional.cross_entropy}
    return match(networks, first, sym, **how).apply(networks, sym)

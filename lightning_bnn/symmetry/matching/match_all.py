"""Everything that brings a network to another: permutations of units and heads, and matrices."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bnn.params import Params
from lightning_bnn.symmetry.actions import permute
from lightning_bnn.symmetry.groups import Symmetries
from lightning_bnn.symmetry.matching.channel_views import By, distance, view_of
from lightning_bnn.symmetry.matching.full_elements import closest, moved, nothing, together
from lightning_bnn.symmetry.matching.half_way import HalfWay
from lightning_bnn.symmetry.matching.match import match
from lightning_bnn.symmetry.matching.moving_spaces import SpaceMap
from lightning_bnn.symmetry.matching.watching import first_inputs
from lightning_bnn.symmetry.matching.whole_pair import WholePair
from lightning_bnn.symmetry.mixing import identity_mixings, mix

__all__ = ["FullMatch", "match_all"]

_JUDGES = 1  # batches


@dataclass(frozen=True, eq=False)
class FullMatch:
    """Permutations and matrices that bring a network, or every member of a stack, to a reference.

    Attributes:
        permutations: one per group of ``sym.permutations``, for `permute`; they act first.
        matrices: one tensor per group of ``sym.linear``, for `mix`.
        before: distance of the weights to those of the reference, before.
        after: the same afterwards.

    >>> from lightning_bnn import params as P
    >>> from lightning_bnn.symmetry import discover, match_all
    >>> adapter = torch.nn.Sequential(torch.nn.Linear(8, 3), torch.nn.Linear(3, 8))
    >>> sym, stack = discover(adapter, torch.randn(8, 8)), P.populate(adapter, 2)
    >>> found = match_all(*P.unstack(stack), sym)
    >>> bool(found.after < found.before), found.matrices[0].shape
    (True, torch.Size([1, 3, 3]))
    """

    permutations: tuple[Tensor, ...]
    matrices: tuple[Tensor, ...]
    before: Tensor
    after: Tensor

    def apply(self, params: Params, sym: Symmetries) -> Params:
        """The network or stack in the frame of the reference; its function stays."""
        return mix(permute(params, sym, self.permutations), sym, self.matrices)

    def __str__(self) -> str:
        """What has moved, and how much closer the weights are."""
        before, after = float(self.before.mean()), float(self.after.mean())
        groups = f"{len(self.permutations)} permutations, {len(self.matrices)} groups of matrices"
        return f"{groups}: distance of weights {before:.4g} before, {after:.4g} after"


@torch.no_grad()
def match_all(
    params: Params,
    reference: Params,
    sym: Symmetries,
    *,
    model: nn.Module | None = None,
    batches: Iterable[Any] | None = None,
    by: By = "weights",
    sweeps: int = 50,
    swaps: int = 0,
) -> FullMatch:
    r"""Bring a network to another by permutations and matrices together: for transformers.

    .. math:: \min_{\pi, G} \| G\, \pi\, \theta - \theta^* \|

    A round turns streams, permutes hidden units, exchanges heads by the best that can be had inside
    each pair of them, and mixes the channels inside. Rounds follow until nothing moves. By weights
    the network comes no farther from the reference than it was, and than `match` brings it. Norms
    with gains hold the stream fixed but for signs and permutations: fold them first, see
    `fold_norms`.

    References:
        Generalized Linear Mode Connectivity for Transformers (Theus et al., 2025)

    Args:
        params: one network, or a stack whose members are matched one by one.
        reference: the network to come close to.
        sym: what `discover` returned.
        model: gives the computation where activations are compared.
        batches: inputs, or tuples whose first element is the input.
        by: compare ``"weights"`` or ``"activations"``, see `match_mixings`.
        sweeps: at most so many rounds; of weights, the closest is kept.
        swaps: at most so many rounds in which any two heads of a layer are exchanged, and stay so
            if the outputs of the network half way then come closer to the mean of those of both;
            with a model and batches. A try costs a run of the first batch.

    >>> from lightning_bnn import params as P
    >>> from lightning_bnn.symmetry import discover, match_all, mix, random_mixings
    >>> norm = torch.nn.RMSNorm(4, elementwise_affine=False)
    >>> net = torch.nn.Sequential(torch.nn.Linear(8, 4), norm, torch.nn.Linear(4, 8))
    >>> sym, w = discover(net, torch.randn(8, 8)), P.of(net)
    >>> turned = mix(w, sym, random_mixings(sym))
    >>> found = match_all(turned, w, sym)
    >>> back = found.apply(turned, sym)
    >>> all(torch.allclose(back[name], w[name], atol=1e-5) for name in w)
    True
    """
    if swaps and batches is not None and not isinstance(batches, Tensor):
        batches = list(batches)  # they are looked at twice
    halfway = _halfway(model, reference, batches, swaps)
    view, members, stacked = view_of(params, reference, sym, model, batches, by, sweeps)
    space_map, found = SpaceMap(sym), []
    for member in members:
        whole = WholePair(view, member, reference, space_map)
        whole.run(sweeps)
        if by == "weights":
            alone = list(match(member, reference, sym)), identity_mixings(sym)
            whole.stand(closest([nothing(sym), alone, whole.element], member, reference, sym))
        if halfway is not None:
            whole.swap(halfway.to(member), swaps)
        found.append(whole.element)
    element = together(found) if stacked else found[0]
    before, after = (distance(p, reference, sym) for p in (params, moved(params, sym, element)))
    return FullMatch(tuple(element[0]), tuple(element[1]), before, after)


def _halfway(
    model: nn.Module | None, reference: Params, batches: Iterable[Any] | None, swaps: int
) -> HalfWay | None:
    """What judges exchanges of heads, if there are to be any."""
    if not swaps:
        return None
    if swaps < 0 or model is None or batches is None:
        raise ValueError(
            f"`swaps` must be at least 0, and need `model` and `batches`, got {swaps}."
        )
    return HalfWay(model, reference, first_inputs(batches)[:_JUDGES])

"""Rebasin: match the units of two networks by their hidden activations."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from lightning_bnn.params import Params, of, unstack
from lightning_bnn.symmetry.elements import identity
from lightning_bnn.symmetry.forward import structural_copy
from lightning_bnn.symmetry.groups import Symmetries
from lightning_bnn.symmetry.matching.assignment import assign, assign_blocks, families
from lightning_bnn.symmetry.units import writer
from lightning_bnn.symmetry.validation import check_params

__all__ = ["match_activations"]

_log = logging.getLogger(__name__)


# ------------------------------------------------------------ activations
@torch.no_grad()
def match_activations(
    model: nn.Module,
    params: Params,
    reference: Params,
    sym: Symmetries,
    batches: Iterable[Any],
    *,
    average: bool = False,
) -> list[Tensor]:
    """Permutations after which hidden activations agree best with those of a reference.

    Inner products of activations are summed over the batches and maximised by one linear assignment
    per group.

    References:
        A Compact Representation for BNNs by Removing Permutation Symmetry (Xiao, Liu, Bamler, 2023)

    Args:
        model: gives the computation; it runs in evaluation mode.
        params: one network or a stack.
        reference: the network to agree with; the activations of a stack are averaged.
        sym: what `discover` returned.
        batches: inputs, or tuples whose first element is the input.
        average: match a stack (the samples of one posterior) as a whole, by activations averaged
            over its members.

    Returns:
        One permutation per group, for `permute`; with a leading dimension for a stack that is not
        averaged.
    """
    network = structural_copy(model).eval()
    stacked = check_params(params, sym)
    members = unstack(params) if stacked else [params]
    targets = unstack(reference) if check_params(reference, sym, "reference") else [reference]
    sums: list[list[Tensor]] = []
    probes = _Probes(network, sym)
    if isinstance(batches, Tensor):
        raise ValueError("`batches` must be an iterable of inputs; put one tensor into a list.")
    for batch in batches:
        x = batch[0] if isinstance(batch, tuple | list) else batch
        if not sums:
            probes.drop_blind_ones(targets[0], x)
        goal = _mean([probes.run(p, x) for p in targets])
        seen = [probes.run(p, x) for p in members]
        seen = [_mean(seen)] if average else seen
        new = [[a @ b.T for a, b in zip(goal, s, strict=True)] for s in seen]
        old = sums or [[torch.zeros_like(product) for product in row] for row in new]
        sums = [[a + b for a, b in zip(o, n, strict=True)] for o, n in zip(old, new, strict=True)]
    if not sums:
        raise ValueError("`batches` is empty.")
    matched = [_assign_all(sym, probes, products) for products in sums]
    single = average or not stacked
    return matched[0] if single else [torch.stack(rows) for rows in zip(*matched, strict=True)]


def _mean(runs: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    return [torch.stack(rows).mean(0) for rows in zip(*runs, strict=True)]


class _Probes:
    """Where units can be watched: at the input of a layer that reads them, or where written."""

    def __init__(self, network: nn.Module, sym: Symmetries) -> None:
        self.network, self.sym = network, sym
        owners = {n: n.rpartition(".")[0] for n in of(network)}
        self.watched: list[tuple[str, bool, int, Tensor]] = []
        self.index: dict[tuple[int, ...], int] = {}
        for family in families(sym):
            for groups in family.inner or ((family.group,),):
                spot = self._spot(groups, owners)
                if spot is not None:
                    self.index[tuple(groups)] = len(self.watched)
                    self.watched.append(spot)
                else:
                    self._warn(groups)

    def _spot(
        self, groups: Sequence[int], owners: dict[str, str]
    ) -> tuple[str, bool, int, Tensor] | None:
        """Module path, whether to look at its input, channel dimension, positions of the units."""
        first = self.sym.permutations[groups[0]]
        readers = [p for p in first.placements if self.sym.axes[p.axis].role == "in"]
        writes = writer(self.sym, first)
        for place in [*readers, *([writes] if writes else [])]:
            path = owners[self.sym.axes[place.axis].tensor]
            module = self.network.get_submodule(path)
            if isinstance(module, nn.Linear | nn.modules.conv._ConvNd):
                k = first.placements.index(place)
                positions = torch.cat(
                    [self.sym.permutations[g].placements[k].positions for g in groups]
                )
                return path, place in readers, -1 if isinstance(module, nn.Linear) else 1, positions
        return None

    def run(self, params: Params, x: Any) -> list[Tensor]:
        """Activations of all watched units, ``(units, samples)`` each."""
        seen: list[Tensor] = [torch.empty(0, 0)] * len(self.watched)
        with ExitStack() as stack:
            for k, (path, before, dim, positions) in enumerate(self.watched):
                module = self.network.get_submodule(path)
                hook = _keep(seen, k, before, dim, positions)
                stack.callback(module.register_forward_hook(hook).remove)
            stack.callback(
                torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled()
            )
            torch.backends.mha.set_fastpath_enabled(False)  # fused layers call no module
            functional_call(self.network, params, (x,))
        return seen

    def drop_blind_ones(self, params: Params, x: Any) -> None:
        """Some modules are never called as such (the projections inside a fused attention)."""
        blind = {k for k, rows in enumerate(self.run(params, x)) if not rows.numel()}
        for groups, k in list(self.index.items()):
            if k in blind:
                del self.index[groups]
                self._warn(groups)

    def _warn(self, groups: Sequence[int]) -> None:
        _log.warning(
            "match_activations: no layer shows the units of %s; they stay as they are.",
            self.sym.permutations[groups[0]].name,
        )


def _keep(
    seen: list[Tensor], k: int, before: bool, dim: int, positions: Tensor
) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
    """A hook that keeps the activations of some units, at the input or the output of a module."""

    def keep(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        rows = (args[0] if before else output).movedim(dim, 0).flatten(1)
        seen[k] = rows[positions.to(rows.device)].flatten(1).float().clone()

    return keep


def _assign_all(sym: Symmetries, probes: _Probes, products: Sequence[Tensor]) -> list[Tensor]:
    result = identity(sym)
    for family in families(sym):
        if not family.inner:
            spot = probes.index.get((family.group,))
            if spot is not None:
                result[family.group] = assign(products[spot])
            continue
        blocks = sym.permutations[family.group].units
        rows = [row for row in family.inner if tuple(row) in probes.index]
        tables = []
        for row in rows:
            units = sym.permutations[row[0]].units
            tables.append(products[probes.index[tuple(row)]].reshape(blocks, units, blocks, units))
        order, orders = assign_blocks(torch.zeros(blocks, blocks), tables)
        result[family.group] = order
        for row, new in zip(rows, orders, strict=True):
            for block in range(blocks):
                result[row[int(order[block])]] = new[block]
    return result

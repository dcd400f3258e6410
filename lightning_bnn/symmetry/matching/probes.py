"""Where in a network its units can be watched: at layers that read them, or that write them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from lightning_bnn.params import Params, of
from lightning_bnn.symmetry.forward import in_precision_of
from lightning_bnn.symmetry.groups import Placement
from lightning_bnn.symmetry.matching.relaxation import Relaxation

__all__ = ["Probes", "call_modules"]

_log = logging.getLogger(__name__)
_WRITES = ("out", "gain", "raw", "slope")


@dataclass(frozen=True, eq=False)
class _Spot:
    """Which table is seen, at the input or output of which module, and where along its channels."""

    table: int
    path: str
    before: bool
    dim: int
    positions: Tensor


class Probes:
    """The activations of all units that some linear layer or convolution shows.

    Args:
        network: gives the computation.
        relaxation: of the symmetries of the network; its tables are watched.
    """

    def __init__(self, network: nn.Module, relaxation: Relaxation) -> None:
        self.network, self.relaxation = network, relaxation
        owners = {n: n.rpartition(".")[0] for n in of(network)}
        self.spots: list[_Spot] = []
        for k, table in enumerate(relaxation.tables):
            spot = self._spot(k, table.places, owners)
            if spot is not None:
                self.spots.append(spot)
            elif table.places:
                self._warn(k)

    def _spot(
        self, table: int, places: Sequence[Placement], owners: dict[str, str]
    ) -> _Spot | None:
        axes = self.relaxation.plan.sym.axes
        readers = [p for p in places if axes[p.axis].role == "in"]
        writers = [p for p in places if axes[p.axis].role in _WRITES][:1]
        for k, place in enumerate([*readers, *writers]):
            path = owners[axes[place.axis].tensor]
            module = self.network.get_submodule(path)
            if isinstance(module, nn.Linear | nn.modules.conv._ConvNd):
                dim = -1 if isinstance(module, nn.Linear) else 1
                return _Spot(table, path, k < len(readers), dim, place.positions)
        return None

    def run(self, params: Params, x: Any) -> list[Tensor]:
        """Activations of the units of every spot, ``(units, samples)`` each."""
        seen: list[Tensor] = [torch.empty(0, 0)] * len(self.spots)
        with ExitStack() as stack:
            for k, spot in enumerate(self.spots):
                module = self.network.get_submodule(spot.path)
                stack.callback(module.register_forward_hook(_keep(seen, k, spot)).remove)
            call_modules(self.network, params, x)
        return seen

    def drop_blind_ones(self, params: Params, x: Any) -> None:
        """Some modules are never called as such (the projections inside a fused attention)."""
        rows = self.run(params, x)
        for spot, seen in zip(self.spots, rows, strict=True):
            if not seen.numel():
                self._warn(spot.table)
        self.spots = [s for s, seen in zip(self.spots, rows, strict=True) if seen.numel()]

    def _warn(self, table: int) -> None:
        _log.warning(
            "match: no layer shows the units of %s; they stay as they are.",
            self.relaxation.plan.sym.axes[self.relaxation.tables[table].places[0].axis].tensor,
        )


def call_modules(network: nn.Module, params: Params, x: Any) -> Any:
    """Run a network so that the hooks of its layers fire: fused layers call no module."""
    if isinstance(x, Tensor) and not x.numel():
        raise ValueError(f"`batches` holds an empty batch, of shape {tuple(x.shape)}.")
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        return functional_call(network, params, (in_precision_of(params, x),))
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def _keep(
    seen: list[Tensor], k: int, spot: _Spot
) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
    """A hook that keeps the activations of some units, at the input or the output of a module."""

    def keep(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        rows = (args[0] if spot.before else output).movedim(spot.dim, 0).flatten(1)
        seen[k] = rows[spot.positions.to(rows.device)].flatten(1).clone()

    return keep

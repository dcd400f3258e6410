"""Changes in the order of the units during training."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lightning_bnn._compat import figure_step, should_log
from lightning_bnn.callbacks.watching import Network, SymmetryCallback
from weightsym import SortKey, UnitOrders, order_change, transpositions_between
from weightsym.params import Params

__all__ = ["PermutationTau"]

_TOGETHER = 64
"""Largest number of steps between two sorts of the units."""


class PermutationTau(SymmetryCallback):
    r"""Kendall's tau between the orders of the units after successive steps, layer by layer.

    .. math:: \tau = 1 - \frac{4 D}{n (n - 1)}, \quad D \text{ pairs that have changed places}

    Sorting the units of a layer removes its permutations. If two units change places between two
    steps, the sorted network jumps. Tau counts these pairs: 1 means that no pair has changed
    places, 0 that half of all pairs have. Logged at the trainer's ``log_every_n_steps``, averaged
    over the steps since the last time:

    - ``tau`` and ``tau/<layer>``, the mean over layers and each, the heads of a layer as one mean,
      and ``tau/<layer>/<kind>``, the order of whole blocks such as heads or experts,
    - ``tau_moved``, the fraction of units that have another place,
    - ``tau_transpositions``, swaps of units since the start of training, of all layers together.

    Works with any LightningModule. The network and its input are found in the first batch.

    Args:
        by: sorting key of the units, see `weightsym.sort_permutations`.
        module: name of the network inside the LightningModule, such as ``"net"``; by default it is
            found.
        every_n_steps: number of optimizer steps between two compared orders.

    References:
        | A Symmetry-Aware Exploration of BNN Posteriors (Laurent, Aldea, Franchi, 2024), 5.2
        | A Compact Representation for BNNs by Removing Permutation Symmetry (Xiao et al., 2023)

    >>> from lightning import Trainer
    >>> from lightning_bnn.datamodules import TwoGaussians
    >>> from lightning_bnn.models import mlp
    >>> from lightning_bnn.modules import DeepEnsemble
    >>> quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    >>> quiet |= {"enable_model_summary": False, "log_every_n_steps": 1}
    >>> trainer = Trainer(max_steps=2, callbacks=[PermutationTau()], **quiet)
    >>> trainer.fit(DeepEnsemble(mlp(2, [8], 2), members=1), TwoGaussians())
    >>> sorted(name for name in trainer.logged_metrics if "tau" in name)
    ['tau', 'tau/1.weight', 'tau_moved', 'tau_transpositions']
    """

    persistent = {"history": list, "_state": dict, "_waiting": list}
    history: list[tuple[int, list[float]]]
    """Step and tau of every layer, as logged."""
    _state: dict[str, Any]
    _waiting: list[list[Tensor]]

    def __init__(
        self, by: SortKey = "max", module: str | None = None, every_n_steps: int = 1
    ) -> None:
        super().__init__(module, every_n_steps)
        UnitOrders.check(by)
        self.by = by
        self.layers: tuple[str, ...] = ()

    @property
    def state_key(self) -> str:
        return f"{super().state_key}, by={self.by!r}, n={self.every_n_steps}"

    def state_dict(self) -> dict[str, Any]:
        self._count()
        return super().state_dict()

    def begin(self, weights: Params) -> None:
        assert self.network is not None
        device = next(iter(weights.values())).device
        self._orders = UnitOrders(self.network.symmetries, self.by).to(device)
        groups = self._orders.groups
        names = [g.name if g.kind == "channel" else f"{g.name}/{g.kind}" for g in groups]
        self.layers, self._waiting = tuple(dict.fromkeys(names)), []
        self._layer_of = [self.layers.index(name) for name in names]
        orders = self._orders(weights)
        restored = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in self._state.items()}
        fits = restored.get("last", orders[..., :0]).shape == orders.shape
        self._state = restored if fits else self._fresh(orders)

    def look(self, trainer: Any, pl_module: Any, weights: Params) -> None:
        self._waiting.append(self._orders.keys(weights))
        logs = should_log(trainer)
        if logs or len(self._waiting) == _TOGETHER:
            self._count()
        if logs:
            self._log(trainer, pl_module)

    def _count(self) -> None:
        """Sort the units after all steps since the last time, and compare the orders."""
        if not self._waiting:
            return
        state, keys = self._state, [torch.stack(k) for k in zip(*self._waiting, strict=True)]
        orders = torch.cat([state["last"][None], self._orders.sorted(keys)])
        finite = torch.stack([k.isfinite().all(-1) for k in keys], -1)
        change = order_change(orders[:-1], orders[1:], self._orders.sizes)
        for name, values in change._asdict().items():  # one after the other, however many at once
            values = values.where(finite, torch.nan)
            state[name] = torch.cat([state[name][None], values]).cumsum(0)[-1]
        state["last"], state["count"] = orders[-1], state["count"] + len(orders) - 1
        self._waiting = []

    def _check(self, network: Network) -> None:
        if not UnitOrders(network.symmetries, self.by).groups:
            raise ValueError("the network has no units that can be exchanged.")

    def _fresh(self, orders: Tensor) -> dict[str, Any]:
        zero = torch.zeros(orders.shape[:-1], dtype=torch.float64, device=orders.device)
        return {"start": orders, "last": orders, "tau": zero, "moved": zero, "count": 0}

    def _log(self, trainer: Any, pl_module: Any) -> None:
        """Log tau, at the only time when the host waits for the device."""
        state = self._state
        sums = torch.stack([state["tau"], state["moved"]]) / state["count"]
        swaps = transpositions_between(state["start"], state["last"]).double()
        table = torch.cat([sums, swaps[None]])
        if table.ndim > 2:  # several networks side by side
            table = table.mean(1)
        each, moved, swaps = table.tolist()
        if math.isnan(sum(moved)):
            self._state = {}  # another fit begins anew
            raise ValueError("the weights are not finite.")
        numbers: list[list[float]] = [[] for _ in self.layers]
        for layer, value in zip(self._layer_of, each, strict=True):
            numbers[layer].append(value)
        tau = [sum(values) / len(values) for values in numbers]
        values = {f"tau/{name}": value for name, value in zip(self.layers, tau, strict=True)}
        values |= {
            "tau": sum(tau) / len(tau),
            "tau_moved": sum(moved) / len(moved),
            "tau_transpositions": sum(swaps),
        }
        self._log_all(trainer, pl_module, values)
        self.history.append((figure_step(trainer), tau))
        zero = torch.zeros_like(state["tau"])
        self._state = {**state, "tau": zero, "moved": zero, "count": 0}

"""What the callbacks that look at symmetries share: find the network, then look at every step."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Literal

import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_warn
from torch.distributed.tensor import DTensor

from lightning_bnn import params as P
from lightning_bnn.callbacks.network import Capture, Network, candidates, plain
from lightning_bnn.params import Params
from lightning_bnn.symmetry import discover

__all__ = ["SymmetryCallback"]


class SymmetryCallback(Callback):
    """Finds the network and its symmetries in the first batch, then looks at it after steps.

    A network that cannot be traced is reported once and left alone; training goes on. Under several
    processes only the first one looks.
    """

    def __init__(
        self,
        module: str | None,
        every_n_steps: int,
        batch_norm: Literal["carrier", "eval"] = "carrier",
    ) -> None:
        if every_n_steps < 1:
            raise ValueError(f"`every_n_steps` must be at least 1, got {every_n_steps}.")
        if batch_norm not in ("carrier", "eval"):
            raise ValueError(f"`batch_norm` must be 'carrier' or 'eval', got {batch_norm!r}.")
        self.module, self.every_n_steps, self.batch_norm = module, every_n_steps, batch_norm
        self.network: Network | None = None
        self._capture: Capture | None = None
        self._before: Params = {}
        self._step = 0
        self._active = False

    @abstractmethod
    def begin(self, weights: Params) -> None:
        """See the weights before the first step."""

    @abstractmethod
    def look(self, trainer: Any, pl_module: Any, weights: Params) -> None:
        """See the weights after every n-th step."""

    # -------------------------------------------------------- hooks
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._step = trainer.global_step
        self._active = trainer.is_global_zero and not _sharded(pl_module)
        self.network = None
        if not trainer.is_global_zero:
            return
        if not self._active:
            self._switch_off("its weights are sharded over processes")
        elif hasattr(pl_module, "weights"):
            self._watch_stack(pl_module)
        else:
            names = candidates(pl_module, self.module)
            self._before = {
                f"{name}|{key}": tensor.clone()
                for name, module in names[:1]
                for key, tensor in P.of(plain(module)).items()
            }

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if self._active and self.network is None:
            self._capture = Capture(pl_module, self.module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if self._active and self.network is None and self._capture is not None:
            self._find()
        step, before = trainer.global_step, self._step
        self._step = step
        if self._active and step // self.every_n_steps > before // self.every_n_steps:
            assert self.network is not None
            with torch.no_grad():
                self.look(trainer, pl_module, self.network.weights())

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._close()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._close()

    # -------------------------------------------------------- network
    def _find(self) -> None:
        assert self._capture is not None
        try:
            self.network = self._capture.network(self.batch_norm)
            self._check(self.network)
        except ValueError as error:
            self._switch_off(str(error))
        else:
            prefix = f"{self.network.name}|"
            before = {
                key.removeprefix(prefix): tensor
                for key, tensor in self._before.items()
                if key.startswith(prefix)
            }
            self.begin(before or self.network.weights())
        self._capture, self._before = None, {}

    def _watch_stack(self, pl_module: Any) -> None:
        """Our own modules know their networks."""
        template, weights, example = pl_module.weights()
        try:
            found = discover(template, *example, batch_norm=self.batch_norm)
            self.network = Network("", template, lambda: pl_module.weights()[1], found)
            self._check(self.network)
        except ValueError as error:
            self._switch_off(str(error))
        else:
            self.begin(weights)

    def _check(self, network: Network) -> None:
        """Refuse a network in which there is nothing to see, by a `ValueError`."""

    def _switch_off(self, reason: str) -> None:
        self._active = False
        rank_zero_warn(f"{type(self).__name__} is switched off: {reason}")

    def _close(self) -> None:
        if self._capture is not None:
            self._capture.close()
        self._capture, self._before = None, {}


def _sharded(module: torch.nn.Module) -> bool:
    return any(isinstance(p, DTensor) for p in module.parameters())

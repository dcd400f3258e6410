"""The base of callbacks that look at symmetries: find the network, then look after steps."""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_warn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from lightning_bnn import params as P
from lightning_bnn.arguments import check_count
from lightning_bnn.callbacks.network import Capture, Network, Stack, candidates, stack_of
from lightning_bnn.params import Params
from lightning_bnn.symmetry import discover
from lightning_bnn.symmetry.forward import Inputs

__all__ = ["SymmetryCallback", "shards_weights"]


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
        check_count("every_n_steps", every_n_steps)
        if batch_norm not in ("carrier", "eval"):
            raise ValueError(f"`batch_norm` must be 'carrier' or 'eval', got {batch_norm!r}.")
        self.module, self.every_n_steps, self.batch_norm = module, every_n_steps, batch_norm
        self.network: Network | None = None
        self._capture: Capture | None = None
        self._before: Params = {}
        self._step = 0
        self._active = False
        self._restored = False
        self._seen: Any = None

    @abstractmethod
    def forget(self) -> None:
        """Drop what was seen, since another run begins."""

    @abstractmethod
    def begin(self, weights: Params) -> None:
        """See the weights before the first step."""

    @abstractmethod
    def look(self, trainer: Any, pl_module: Any, weights: Params) -> None:
        """See the weights after every n-th step."""

    def due(self, trainer: Any, before: int, step: int) -> bool:
        """Decide whether to look after the count of optimizer steps has changed."""
        return step // self.every_n_steps > before // self.every_n_steps

    def __getstate__(self) -> dict[str, Any]:
        """The state for a spawned process, which finds the network itself."""
        return {**self.__dict__, "network": None, "_capture": None, "_seen": None}

    # -------------------------------------------------------- hooks
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if not self._restored and self._seen is not None and self._seen() is not pl_module:
            self.forget()
        self._restored, self._seen = False, weakref.ref(pl_module)
        self._step = trainer.global_step
        shards = shards_weights(trainer, pl_module)
        self._active = trainer.is_global_zero and not shards
        self.network = None
        stack = stack_of(pl_module)
        if not trainer.is_global_zero:
            return
        if not self._active:
            self._switch_off("its weights are sharded over processes")
        elif stack is not None and stack.example:
            self._watch_stack(pl_module, stack)
        elif stack is not None:  # a stream of batches: an example comes with the first of them
            self._before = {name: t.clone() for name, t in stack.weights.items()}
        elif not any(is_lazy(p) for p in pl_module.parameters()):
            candidates(pl_module, self.module)  # a wrong name is an error now
            self._before = {_plain_name(n): t.clone() for n, t in P.of(pl_module).items()}

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if self._active and self.network is None and stack_of(pl_module) is None:
            self._capture = Capture(pl_module, self.module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if self._active and self.network is None:
            if self._capture is not None:
                self._watch_called(self._capture)
            elif (stack := stack_of(pl_module)) is not None:
                self._watch_stack(pl_module, stack._replace(weights=self._before))
        before, self._step = self._step, trainer.global_step
        if self._active and self.due(trainer, before, self._step):
            assert self.network is not None
            try:
                with torch.no_grad():
                    self.look(trainer, pl_module, self.network.weights())
            except ValueError as error:  # such as weights that have become NaN
                self._switch_off(str(error))

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._close()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._close()

    # -------------------------------------------------------- network
    def _watch(self, find: Callable[[], Network], before: Callable[[Network], Params]) -> None:
        """Find the network, and begin with its weights before the first step."""
        try:
            self.network = find()
            self._check(self.network)
        except ValueError as error:
            self._switch_off(str(error))
        else:
            self.begin(before(self.network))
        self._capture, self._before = None, {}

    def _watch_called(self, capture: Capture) -> None:
        """The network is one that the first batch has called."""
        self._watch(partial(capture.network, self.batch_norm), self._weights_before)

    def _watch_stack(self, pl_module: Any, stack: Stack) -> None:
        """Our own modules know their networks."""

        def find() -> Network:
            symmetries = discover(stack.template, *stack.example, batch_norm=self.batch_norm)
            weights, inputs = partial(_live_weights, pl_module), Inputs(stack.example, {})
            return Network("", stack.template, weights, symmetries, inputs)

        self._watch(find, lambda _: stack.weights)

    def _weights_before(self, network: Network) -> Params:
        """Return the weights before the first step, or as they are if they were lazy."""
        prefix = f"{network.name}." if network.name else ""
        return {
            name: self._before.get(_plain_name(prefix + name), tensor)
            for name, tensor in network.weights().items()
        }

    def _log_all(self, trainer: Any, pl_module: Any, values: dict[str, float]) -> None:
        """Log from the first process, behind names of networks if two callbacks are alike."""
        same = [c for c in trainer.callbacks if type(c) is type(self)]
        name = self.network.name if self.network else ""
        prefix = f"{name}/" if len(same) > 1 and name else ""
        for key, value in values.items():
            pl_module.log(prefix + key, value, on_step=True, on_epoch=False, rank_zero_only=True)

    def _check(self, network: Network) -> None:
        """Raise a `ValueError` for a network in which there is nothing to see."""

    def _switch_off(self, reason: str) -> None:
        self._active = False
        rank_zero_warn(f"{type(self).__name__} is switched off: {reason}")

    def _close(self) -> None:
        if self._capture is not None:
            self._capture.close()
        self._capture, self._before = None, {}


def _plain_name(name: str) -> str:
    return name.replace("_orig_mod.", "")


def _live_weights(pl_module: Any) -> Params:
    stack = stack_of(pl_module)
    assert stack is not None
    return stack.weights


def shards_weights(trainer: Any, module: torch.nn.Module) -> bool:
    """Tell whether every process has only a part of the weights."""
    strategies = {base.__name__ for base in type(trainer.strategy).__mro__}
    return bool(strategies & {"FSDPStrategy", "DeepSpeedStrategy"}) or any(
        isinstance(p, DTensor) for p in module.parameters()
    )

"""Tensors that go with a module, however many they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bnn.params import Params

__all__ = ["Carried"]


class Carried(nn.Module):
    """Named tensors that move, save and load with a module.

    Unlike buffers they may be another number in a checkpoint, have dots in their names, and are not
    sent between processes at every step.

    Args:
        tensors: what to carry; these names must then be in a checkpoint, others may be.

    >>> Carried({"0.weight": torch.zeros(2)}).double().tensors()["0.weight"].dtype
    torch.float64
    """

    def __init__(self, tensors: Params | None = None) -> None:
        super().__init__()
        self.register_buffer("_here", torch.empty(0), persistent=False)
        self._expected = tuple(tensors or ())
        self.hold(dict(tensors or {}))

    def tensors(self) -> Params:
        """The tensors by name."""
        return self._held

    def hold(self, tensors: Params) -> None:
        """Carry these instead."""
        self._held = tensors

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        self.hold({name: fn(t) for name, t in self.tensors().items()})
        return super()._apply(fn, recurse)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        for name, tensor in self.tensors().items():
            destination[prefix + name] = tensor

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, _meta: Any, _strict: bool, missing: Any, *_: Any
    ) -> None:
        absent = [prefix + name for name in self._expected if prefix + name not in state_dict]
        if absent:
            missing.extend(absent)
            return
        found = {k[len(prefix) :]: t for k, t in state_dict.items() if k.startswith(prefix)}
        self.hold({name: t.detach().to(self._here.device).clone() for name, t in found.items()})

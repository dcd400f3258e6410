"""Tensors under the names of a network, which go with a module wherever it goes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lightning_bnn.params import Params

__all__ = ["NamedTensors"]

_DEVICE = "(device)"


class NamedTensors(nn.Module):
    """Tensors that are not trained; they move, save and load with the module that has them.

    They are buffers whose names may have dots, and a checkpoint may hold other ones, or more.

    Args:
        tensors: copies of them are held; a checkpoint must then have these names at least.

    >>> NamedTensors({"0.weight": torch.zeros(2)}).double().tensors()["0.weight"].dtype
    torch.float64
    """

    def __init__(self, tensors: Params | None = None) -> None:
        super().__init__()
        self._buffers[_DEVICE] = torch.empty(0)
        self._non_persistent_buffers_set.add(_DEVICE)
        self._required = tuple(tensors or ())
        self.hold({name: t.detach().clone() for name, t in (tensors or {}).items()})

    def tensors(self) -> Params:
        """The tensors by name."""
        return {n: t for n, t in self._buffers.items() if n != _DEVICE and t is not None}

    def hold(self, tensors: Params) -> None:
        """Have these instead; they are not copied."""
        for name in self.tensors():
            del self._buffers[name]
        self._buffers.update(tensors)

    @property
    def device(self) -> torch.device:
        """Where the tensors are, also if there are none."""
        empty = self._buffers[_DEVICE]
        assert empty is not None
        return empty.device

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, _metadata: Any, _strict: bool, missing: Any, *_: Any
    ) -> None:
        found = {key[len(prefix) :]: t for key, t in state_dict.items() if key.startswith(prefix)}
        found = _named(found, self._required)
        absent = [prefix + name for name in self._required if name not in found]
        if absent:
            missing.extend(absent)
            return
        self.hold({name: t.detach().to(self.device).clone() for name, t in found.items()})


def _named(found: Params, names: tuple[str, ...]) -> Params:
    """Older files number the tensors."""
    numbered = {f"tensor_{k}": name for k, name in enumerate(names)}
    return {numbered.get(name, name): t for name, t in found.items()}

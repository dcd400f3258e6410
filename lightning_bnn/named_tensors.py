"""Tensors under the names of a network, as parts of a module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from weightsym.params import Params


class NamedTensors(nn.Module):
    """Untrained tensors that move, save and load with their module.

    The initial tensors are buffers: data-parallel training sends them to all processes at every
    step, and a checkpoint must have the same ones. Their replacements by `hold` are never sent, and
    a checkpoint may have different ones.

    Args:
        tensors: copied; a checkpoint must have their names, even after `hold`.

    >>> NamedTensors({"0.weight": torch.zeros(2)}).double().tensors()["0.weight"].dtype
    torch.float64
    """

    _device: Tensor

    def __init__(self, tensors: Params | None = None) -> None:
        super().__init__()
        self.register_buffer("_device", torch.empty(0), persistent=False)
        self._attributes = {name: f"tensor_{k}" for k, name in enumerate(tensors or {})}
        for name, tensor in (tensors or {}).items():  # attributes have no dots in their names
            self.register_buffer(self._attributes[name], tensor.detach().clone())
        self._replaced: Params | None = None if tensors else {}

    @property
    def device(self) -> torch.device:
        """The device of the tensors, also without any."""
        return self._device.device

    def tensors(self) -> Params:
        """Return the current tensors, by name."""
        if self._replaced is not None:
            return dict(self._replaced)
        return {name: getattr(self, attribute) for name, attribute in self._attributes.items()}

    def hold(self, tensors: Params) -> None:
        """Replace the tensors without copying."""
        for attribute in self._attributes.values():
            self._buffers.pop(attribute, None)
        self._replaced = dict(tensors)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        if self._replaced is not None:
            self._replaced = {name: fn(t) for name, t in self._replaced.items()}
        return super()._apply(fn, recurse)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        for name, tensor in self.tensors().items():
            destination[prefix + name] = tensor if keep_vars else tensor.detach()

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, metadata: Any, strict: bool,
        missing: list[str], unexpected: list[str], errors: list[str],
    ) -> None:  # fmt: skip
        tensors = {key[len(prefix) :]: t for key, t in state_dict.items() if key.startswith(prefix)}
        absent = [prefix + name for name in self._attributes if name not in tensors]
        missing.extend(absent)
        if self._replaced is None:
            buffers = {
                prefix + self._attributes[n]: t for n, t in tensors.items() if n in self._attributes
            }
            super()._load_from_state_dict(buffers, prefix, metadata, False, [], [], errors)
            unexpected.extend(prefix + name for name in tensors if name not in self._attributes)
        elif not absent:
            self.hold({name: t.detach().to(self.device).clone() for name, t in tensors.items()})

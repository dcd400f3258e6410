"""Networks without weights: on the meta device, and in reserved memory that is never used."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._pytree import tree_map

_OWN: dict[str, Any] = {}
if hasattr(mmap, "MAP_PRIVATE"):  # pages that are shared between processes take memory when read
    _OWN["flags"] = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


@contextmanager
def matrices_on_meta() -> Iterator[None]:
    """Construct networks with their weight matrices on the meta device.

    Buffers, which are computed, and vectors such as gains of norms keep their numbers.

    >>> with matrices_on_meta():
    ...     net = nn.Linear(2, 3)
    >>> net.weight.device, net.bias.device
    (device(type='meta'), device(type='cpu'))
    """
    plain = nn.Module.register_parameter

    def register(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and param.ndim > 1 and not param.is_meta:
            param = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
        plain(module, name, param)

    nn.Module.register_parameter = register  # type: ignore[assignment, method-assign]  # for a while
    try:
        yield
    finally:
        nn.Module.register_parameter = plain  # type: ignore[method-assign]


def reserved(tensor: Tensor) -> Tensor:
    """Return zeros like a tensor, on the CPU, that occupy no memory until they are written."""
    size = tensor.numel() * tensor.element_size()
    if not size:
        return torch.zeros(tensor.shape, dtype=tensor.dtype)
    pages = mmap.mmap(-1, size, **_OWN)
    zeros = torch.frombuffer(pages, dtype=torch.uint8).view(tensor.dtype)
    return zeros.as_strided(tensor.shape, tensor.stride())


class Substituted(TorchFunctionMode):
    """A mode that replaces some tensors in the arguments of every function of a forward.

    Only what one function takes is held at a time.

    Args:
        values: by the identity of a tensor, what reads the one that takes its place.
    """

    def __init__(self, values: Mapping[int, Callable[[], Tensor]]) -> None:
        super().__init__()
        self._values = values

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if getattr(function, "__name__", "") != "__get__" or _gives_numbers(function):
            args, kwargs = tree_map(self._value, (args, kwargs or {}))
        return function(*args, **(kwargs or {}))

    def _value(self, x: Any) -> Any:
        return self._values[id(x)]() if id(x) in self._values else x


_NUMBERS = frozenset(f"torch.Tensor.{name}.__get__" for name in ("data", "T", "mT", "H", "mH"))


def _gives_numbers(function: Any) -> bool:
    """Return whether an attribute of tensors returns a tensor of the same values."""
    return resolve_name(function) in _NUMBERS

"""Names of a module that refer to the same memory."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

import torch
from torch import Tensor, nn


def place_of(tensor: Tensor) -> Hashable:
    """Return a key of a tensor's memory: storage, offset, shape and stride."""
    if not _has_memory(tensor):
        return id(tensor)
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device


def named_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """List parameters and buffers under all of their names."""
    return [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]


def owners(model: nn.Module) -> dict[str, str]:
    """Map each name of a module's tensors to the first name of the same tensor."""
    first: dict[Hashable, str] = {}
    return {name: first.setdefault(place_of(t), name) for name, t in named_tensors(model)}


def overlapping(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """Find names whose memory overlaps with that of another name in part or in another layout."""
    spans = []
    for name, t in tensors:
        if _has_memory(t):
            last = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
            start = t.data_ptr()
            spans.append((start, start + (last + 1) * t.element_size(), name, place_of(t)))
    others: dict[str, str] = {}
    reach: tuple[int, str, Hashable] | None = None
    for start, stop, name, storage in sorted(spans, key=lambda s: s[:3]):
        if reach is not None and start < reach[0] and storage != reach[2]:
            others[name], others[reach[1]] = reach[1], name
        if reach is None or stop > reach[0]:
            reach = (stop, name, storage)
    return others


def _has_memory(tensor: Tensor) -> bool:
    plain = type(tensor) in (Tensor, nn.Parameter, nn.Buffer) and tensor.layout is torch.strided
    return plain and tensor.numel() > 0 and tensor.device.type != "meta"

"""Which tensors of a module are averaged, where its network is among them, what it is fed with."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map, tree_structure

from lightning_bnn.batch_norms import batch_norms
from lightning_bnn.params import Params

__all__ = ["KeptCalls", "all_finite", "averaged_tensors", "places_of", "wide"]


def averaged_tensors(root: nn.Module) -> Params:
    """Parameters and statistics of batch norms by their names in the state dict, live.

    Other buffers (masks, tables, counts) are no weights: an average keeps those of the last
    network.

    >>> list(averaged_tensors(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3, affine=False))))
    ['0.weight', '0.bias', '1.running_mean', '1.running_var']
    """
    statistics = {
        id(t) for m in batch_norms(root) for t in (m.running_mean, m.running_var) if t is not None
    }
    every = [
        *root.named_parameters(remove_duplicate=False),
        *((n, b) for n, b in root.named_buffers(remove_duplicate=False) if id(b) in statistics),
    ]
    return {name: t.detach() for name, t in every if t.is_floating_point()}


def places_of(network: Params, tensors: Params) -> dict[str, str]:
    """Under which name every tensor of a network is among those of the whole module.

    Args:
        network: live tensors by their names in the network.
        tensors: live tensors by their names in the module.
    """
    names = {(t.data_ptr(), t.shape): name for name, t in reversed(tensors.items()) if t.numel()}
    found = ((name, names.get((t.data_ptr(), t.shape))) for name, t in network.items())
    return {name: place for name, place in found if place is not None}


def wide(tensor: Tensor) -> Tensor:
    """A tensor in which small steps are not rounded away: half precision becomes float32."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def all_finite(tensors: Params) -> bool:
    """Whether no tensor holds NaN or infinite values."""
    sums = [t.sum(dtype=torch.float64) for t in tensors.values()]
    return not sums or bool(torch.stack([s.cpu() for s in sums]).isfinite().all())


class KeptCalls:
    """The last inputs that a network was trained on, so many examples and no more.

    Args:
        examples: how many.
    """

    def __init__(self, examples: int) -> None:
        self.examples = examples
        self.calls: deque[tuple[tuple[Any, ...], dict[str, Any]]] = deque()
        self._handle: Any = None

    def listen(self, module: nn.Module, example: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
        """Keep what a module is called with from now on, in training and alike to an example."""
        structure = tree_structure(example)

        def keep(called: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            call = (args, kwargs)  # of the module itself: copies of it have its hooks, too
            if called is module and module.training and tree_structure(call) == structure:
                self.add(call)

        self._handle = module.register_forward_pre_hook(keep, with_kwargs=True)

    def add(self, call: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
        """Keep a call, and drop the oldest that are not needed."""
        self.calls.append(tree_map(lambda t: t.detach() if isinstance(t, Tensor) else t, call))
        total = sum(map(_rows, self.calls))
        while len(self.calls) > 1 and total - _rows(self.calls[0]) >= self.examples:
            total -= _rows(self.calls.popleft())

    def close(self) -> None:
        """Keep no more calls from now on."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def to(self, device: torch.device) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        """All calls that are kept, on a device."""
        return [
            tree_map(lambda t: t.to(device) if isinstance(t, Tensor) else t, call)
            for call in self.calls
        ]

    def state(self) -> list[Any]:
        """All calls, for a checkpoint: only those that hold nothing but tensors and numbers."""
        plain = (Tensor, int, float, bool, str, type(None))
        return [c for c in self.calls if all(isinstance(x, plain) for x in tree_leaves(c))]

    def restore(self, state: list[Any]) -> None:
        """Go on with the calls of a checkpoint."""
        self.calls = deque((tuple(args), dict(kwargs)) for args, kwargs in state)


def _rows(call: tuple[tuple[Any, ...], Mapping[str, Any]]) -> int:
    return max((len(t) for t in tree_leaves(call) if isinstance(t, Tensor) and t.ndim), default=1)

"""Which weights read the units that dropout drops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

__all__ = ["ACTIVE", "DropoutSite", "dropout_sites"]

_BY_UNIT = (F.dropout, F.alpha_dropout)
_BY_CHANNEL = (F.dropout1d, F.dropout2d, F.dropout3d, F.feature_alpha_dropout)
ACTIVE: frozenset[Any] = frozenset((*_BY_UNIT, *_BY_CHANNEL, F.multi_head_attention_forward))
"""Functions with an argument ``training`` that decides whether they drop something."""

_KEEP_ZEROS = {"relu", "relu_", "leaky_relu", "clone", "contiguous", "detach", "to", "float"}
_FLATTEN = {"flatten", "reshape", "view"}
_POOL = {
    f"{prefix}{kind}_pool{d}d"
    for prefix in ("", "adaptive_", "_")
    for kind in ("max", "avg")
    for d in (1, 2, 3)
}
_CONVOLUTIONS = {"conv1d", "conv2d", "conv3d"}


@dataclass(frozen=True)
class DropoutSite:
    """One call of dropout.

    Args:
        rate: how many units are dropped.
        units: how many there are.
        weight: name of the weight that reads them, None if it is not one.
        repeat: columns of the weight for each unit.
        reason: why there is no such weight.
    """

    rate: float
    units: int = 0
    weight: str | None = None
    repeat: int = 1
    reason: str = "nothing reads its output"


@torch.no_grad()
def dropout_sites(model: nn.Module, example: Sequence[Any]) -> list[DropoutSite]:
    """All calls of dropout of a network in evaluation mode, in the order of the forward pass.

    Args:
        model: the network.
        example: inputs.
    """
    training = model.training
    model.eval()
    names = {id(p): name for name, p in model.named_parameters()}
    watch = _Watch(names)
    try:
        with watch:
            model(*example)
    finally:
        model.train(training)
    used = [weight for weight in watch.readers if watch.readers.count(weight) > 1]
    return [
        replace(s, weight=None, reason=f"{s.weight} is used more than once")
        if s.weight in used
        else s
        for s in watch.sites
    ]


@dataclass(frozen=True)
class _Tag:
    site: int
    by_channel: bool


class _Watch(TorchFunctionMode):
    """Follows the outputs of dropout to what reads them."""

    def __init__(self, names: dict[int, str]) -> None:
        super().__init__()
        self.names = names
        self.sites: list[DropoutSite] = []
        self.readers: list[str | None] = []
        self._tags: dict[int, _Tag] = {}
        self._alive: list[Tensor] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Mark what dropout returns, follow it, and note what reads it."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "").removesuffix("_")
        if name == "linear" or name in _CONVOLUTIONS:
            self.readers.append(self.names.get(id(_argument(args, kwargs, 1, "weight"))))
        out = func(*args, **kwargs)
        if func in ACTIVE:
            return self._begin(func, args, kwargs, out)
        self._follow(name, args, kwargs, out)
        return out

    def _begin(self, func: Any, args: Any, kwargs: Any, out: Any) -> Any:
        if func is F.multi_head_attention_forward:
            self._break_all(args, kwargs, "attention reads it")
            self.sites.append(
                DropoutSite(_argument(args, kwargs, 10, "dropout_p"), reason="it is in attention")
            )
            return out
        if kwargs.get("p", 0.5) == 0:  # it passes on what it gets
            self.sites.append(DropoutSite(0.0))
            if id(args[0]) in self._tags:
                out = out.clone()
                self._mark(out, self._tags[id(args[0])])
            return out
        self._break_all(args, kwargs, "another dropout reads it")
        out = out.clone()
        by_channel = func in _BY_CHANNEL
        units = out.shape[1] if by_channel else out[0].numel()
        self.sites.append(DropoutSite(kwargs.get("p", 0.5), units))
        self._mark(out, _Tag(len(self.sites) - 1, by_channel))
        if func in (F.alpha_dropout, F.feature_alpha_dropout):
            self._fail(len(self.sites) - 1, "alpha dropout moves its units")
        return out

    def _follow(self, name: str, args: Any, kwargs: Any, out: Any) -> None:
        tag = self._tags.get(id(args[0])) if args else None
        if not isinstance(out, Tensor):
            return
        if tag is None:
            self._break_all(args, kwargs, f"{name} reads it")
        elif _passes(name, tag, args[0], out):
            self._mark(out, tag)
        elif _reads(name, tag, args, kwargs):
            self._end(tag, _argument(args, kwargs, 1, "weight"))
        else:
            self._fail(tag.site, f"{name} reads it")

    def _mark(self, tensor: Tensor, tag: _Tag) -> None:
        self._alive.append(tensor)
        self._tags[id(tensor)] = tag

    def _end(self, tag: _Tag, weight: Tensor) -> None:
        site, name = self.sites[tag.site], self.names.get(id(weight))
        if site.units == 0:  # it has failed
            return
        if site.weight is not None or name is None:
            self._fail(tag.site, "several layers read it" if name else "no parameter reads it")
        elif weight.shape[1] % site.units == 0:
            repeat = weight.shape[1] // site.units
            self.sites[tag.site] = replace(site, weight=name, repeat=repeat)
        else:
            self._fail(tag.site, f"{name} does not read its units one by one")

    def _break_all(self, args: Any, kwargs: Any, reason: str) -> None:
        for value in tree_leaves((args, kwargs)):
            if id(value) in self._tags:
                self._fail(self._tags[id(value)].site, reason)

    def _fail(self, site: int, reason: str) -> None:
        self.sites[site] = replace(self.sites[site], weight=None, units=0, reason=reason)


def _passes(name: str, tag: _Tag, before: Tensor, after: Tensor) -> bool:
    """Whether an operation keeps dropped units apart from others, and at zero."""
    if name in _FLATTEN:
        return after.ndim == 2 and len(after) == len(before)
    return name in _KEEP_ZEROS or (name in _POOL and tag.by_channel)


def _reads(name: str, tag: _Tag, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operation multiplies every unit with columns of its own."""
    if name == "linear":
        return args[0].ndim == 2
    if name not in _CONVOLUTIONS or not tag.by_channel:
        return False
    return _argument(args, kwargs, 6, "groups") in (None, 1)


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], place: int, name: str) -> Any:
    return args[place] if len(args) > place else kwargs.get(name)

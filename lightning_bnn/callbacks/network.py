"""Finds the network that a run trains, and its inputs, without being told by the user."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves, tree_map

from lightning_bnn import params as P
from lightning_bnn.params import Params
from lightning_bnn.symmetry import Symmetries, UnsupportedModel, discover
from lightning_bnn.symmetry.forward import Inputs, first_line

__all__ = ["Capture", "Network", "Stack", "candidates", "plain", "stack_of", "whole_network"]

_EXAMPLE_ROWS = 2
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Network:
    """A network inside a LightningModule, its live weights, its symmetries, and how it was called.

    The inputs of the call are those that its symmetries were found with.
    """

    name: str
    module: nn.Module
    weights: Callable[[], Params]
    symmetries: Symmetries
    inputs: Inputs


class Stack(NamedTuple):
    """Several networks that a module trains side by side."""

    template: nn.Module
    weights: Params
    example: tuple[Any, ...]


def stack_of(root: Any) -> Stack | None:
    """Return the networks of a module that trains several, as ``weights()`` returns them, or None.

    Other modules may have an attribute of that name, too.
    """
    method = getattr(root, "weights", None)
    if not inspect.ismethod(method) or len(inspect.signature(method).parameters) > 0:
        return None
    result = method()
    if not isinstance(result, tuple) or len(result) != 3 or not isinstance(result[0], nn.Module):
        return None
    return Stack(*result)


def plain(module: nn.Module) -> nn.Module:
    """The module that `torch.compile` has wrapped, or the module itself."""
    return getattr(module, "_orig_mod", module)


def candidates(root: nn.Module, name: str | None) -> list[tuple[str, nn.Module]]:
    """Modules that may be the network, the likeliest first, with their names.

    That is the named one; else the only child with weights; else the LightningModule itself, then
    its children by size.
    """
    if name is not None:
        return [(name, _named(root, name))]
    children = [(n, m) for n, m in root.named_children() if _size(m)]
    children.sort(key=lambda child: -_size(child[1]))
    if len(children) == 1 and not list(root.parameters(recurse=False)):
        return children
    return [("", root), *children]


def _named(root: nn.Module, name: str) -> nn.Module:
    try:
        return root.get_submodule(name)
    except AttributeError:
        names = ", ".join(n for n, _ in root.named_children()) or "none"
        raise ValueError(
            f"`module`: {type(root).__name__} has no submodule {name!r}; it has {names}."
        ) from None


def _size(module: nn.Module) -> int:
    return sum(1 if is_lazy(p) else p.numel() for p in module.parameters() if p.is_floating_point())


def whole_network(root: nn.Module, name: str | None) -> tuple[str, nn.Module]:
    """The likeliest network, whether or not it is ever called, with its name."""
    chosen, module = candidates(root, name)[0]
    return chosen, plain(module)


# ------------------------------------------------------------ input
@dataclass
class Capture:
    """Records the calls of all candidates during one batch, then finds the network among them.

    Args:
        root: the LightningModule.
        name: of the network, if the user has named it.
    """

    root: nn.Module
    name: str | None
    calls: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._modules = candidates(self.root, self.name)
        self._handles = [
            module.register_forward_pre_hook(self._listener(name), with_kwargs=True)
            for name, module in self._modules
        ]

    def _listener(self, name: str) -> Callable[..., None]:
        def listen(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.calls[name] = (args, kwargs)

        return listen

    def close(self) -> None:
        """Stop recording what the network is called with."""
        for handle in self._handles:
            handle.remove()

    def network(self, batch_norm: Literal["carrier", "eval"]) -> Network:
        """The first candidate that was called and whose symmetries can be found."""
        self.close()
        reasons = []
        for name, module in self._modules:
            if name not in self.calls:
                reasons.append(f"{name or type(self.root).__name__} was not called")
                continue
            inner = plain(module)
            for args, kwargs in _examples(*self.calls[name]):
                try:
                    inputs = _inputs(inner, args, kwargs)
                    symmetries = discover(
                        inner, *inputs.args, batch_norm=batch_norm, **inputs.named
                    )
                except Exception as error:  # whatever the user's forward raises on two rows
                    reasons.append(f"{name or type(self.root).__name__}: {first_line(error)}")
                    continue
                if symmetries.permutations or symmetries.scalings or len(self._modules) == 1:
                    weights = partial(P.of, inner)
                    return _announced(Network(name, inner, weights, symmetries, inputs))
        raise UnsupportedModel("; ".join(dict.fromkeys(reasons)))


def _inputs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
    """Return the inputs of a call, by position where `discover` has an option of a name."""
    if kwargs.keys() & inspect.signature(discover).parameters.keys():
        return Inputs(inspect.signature(module.forward).bind(*args, **kwargs).args, {})
    return Inputs(args, kwargs)


def _examples(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """The inputs to try: two rows of the batch, then all of it."""
    call = (args, kwargs)
    sizes = {t.shape[:1] for t in tree_leaves(call) if isinstance(t, Tensor) and t.ndim > 1}
    if len(sizes) == 1 and next(iter(sizes))[0] > _EXAMPLE_ROWS:
        rows = next(iter(sizes))
        yield tree_map(lambda t: _rows(t, rows), call)
    yield tree_map(lambda t: t.detach() if isinstance(t, Tensor) else t, call)


def _rows(value: Any, rows: torch.Size) -> Any:
    if isinstance(value, Tensor) and value.shape[:1] == rows:
        return value.detach()[:_EXAMPLE_ROWS]
    return value


def _announced(network: Network) -> Network:
    sym = network.symmetries
    _log.info(
        "Watching %s: %d groups of permutations (10^%.1f), %d free scales%s.",
        network.name or "the LightningModule itself",
        len(sym.permutations),
        sym.log10_permutations,
        sym.scaling_dof,
        f"; {len(sym.frozen)} operations are held fixed" if sym.frozen else "",
    )
    return network

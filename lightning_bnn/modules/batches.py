"""Inputs and targets of a batch of any loader."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence, Sized
from inspect import Parameter
from typing import Any

from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.data import IterableDataset

_INPUTS = ("x", "input", "inputs", "image", "images", "features", "data")
_TARGETS = ("y", "target", "targets", "label", "labels")
_ELSEWHERE = "For another layout override `inputs_and_targets` of the module."
Parameters = Mapping[str, Parameter]


def inputs_and_targets(
    batch: Any, network: nn.Module | None = None
) -> tuple[tuple[Any, ...], Tensor]:
    """Return the inputs of the network, by position, and the targets.

    In a tuple the last entry is the target. In a dict the target has one of the usual names, and
    the other entries go to the parameters of the network's ``forward`` with their names. An entry
    with a usual name (``"x"``, ``"image"``, ...) goes to the first parameter if no other does.

    Args:
        batch: of a loader.
        network: its parameters count.

    >>> import torch
    >>> inputs_and_targets({"image": torch.zeros(2), "label": torch.tensor(3)})
    ((tensor([0., 0.]),), tensor(3))
    """
    if isinstance(batch, Mapping):
        name = _target_name(batch, parameters_of(network))
        return _inputs(batch, network, name), batch[name]
    if isinstance(batch, Sequence) and len(batch) > 1:
        return tuple(batch[:-1]), batch[-1]
    raise ValueError(
        f"A batch must be a tuple (inputs, targets) or a dict, got {type(batch).__name__}. "
        f"{_ELSEWHERE}"
    )


def inputs_only(batch: Any, network: nn.Module | None = None) -> tuple[Any, ...]:
    """Return the inputs of the network from a batch that may have no targets.

    Args:
        batch: of a loader.
        network: its parameters count.
    """
    if isinstance(batch, Tensor):
        return (batch,)
    if isinstance(batch, Mapping):
        return _inputs(batch, network, _target_beside_inputs(batch, parameters_of(network)))
    if isinstance(batch, Sequence) and len(batch) == 1:
        return tuple(batch)
    return inputs_and_targets(batch)[0]


def left_over(batch: Any, network: nn.Module | None) -> list[str]:
    """Return the names in a dict batch that are neither targets nor inputs of the network."""
    if not isinstance(batch, Mapping):
        return []
    parameters = parameters_of(network)
    named = _by_name(batch, parameters, _target_beside_inputs(batch, parameters))
    main = [n for n in _INPUTS if n in batch] if _lacks_the_first(batch, named, parameters) else []
    return [n for n in batch if n not in {*named, *main, *_TARGETS}]


def positional(
    network: nn.Module, inputs: Sequence[Any], named: Mapping[str, Any]
) -> tuple[Any, ...]:
    """Return the inputs of a network by position, where some are given by name.

    Args:
        network: with the names in its ``forward``.
        inputs: the first inputs.
        named: the other inputs.
    """
    if not named:
        return tuple(inputs)
    parameters = parameters_of(network)
    first = dict(zip(parameters, inputs, strict=False))
    wrong = [n for n in named if n not in parameters or n in first]
    if wrong or len(first) < len(inputs):
        allowed = ", ".join(parameters) or "none"
        raise ValueError(
            f"{type(network).__name__} takes {allowed}; it does not take {len(inputs)} "
            f"inputs by position and {', '.join(named)} by name."
        )
    return _in_order({**first, **named}, parameters, network)


def only_loader(loader: Any) -> tuple[Any, Callable[[Any], Any]]:
    """Return the loader of a collection of one, and a function that rebuilds its batches.

    Args:
        loader: a loader, or a list, a dict or a `CombinedLoader` of them. Several loaders stay as
            they are.
    """
    whole = loader.iterables if isinstance(loader, CombinedLoader) else loader
    loaders, spec = tree_flatten(whole)
    if len(loaders) != 1:
        return whole, lambda batch: batch
    return loaders[0], lambda batch: tree_unflatten([batch], spec)


def first_rows(loader: Any, rows: int) -> Any:
    """Return a small batch as a loader would make it, without starting it, or None."""
    loader, wrap = only_loader(loader)
    if hasattr(loader, "example"):
        return wrap(loader.example(rows))
    dataset = getattr(loader, "dataset", None)
    if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized):
        return None
    if getattr(loader, "batch_sampler", None) is None:  # its data set holds whole batches
        return wrap(loader.dataset[0])
    return wrap(loader.collate_fn([loader.dataset[k] for k in range(min(rows, len(dataset)))]))


# ------------------------------------------------------------ names
def parameters_of(network: nn.Module | None) -> Parameters:
    """Return the inputs that a network takes by position, or none if they have no names."""
    if network is None:
        return {}
    try:
        parameters = inspect.signature(getattr(network, "_orig_mod", network).forward).parameters
    except (TypeError, ValueError):  # scripted networks have no signature
        return {}
    return {
        n: p
        for n, p in parameters.items()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    }


def _target_name(batch: Mapping[str, Any], parameters: Parameters) -> str:
    """Return the name of the targets, preferring an entry that the network does not take."""
    candidates = [n for n in _TARGETS if n in batch]
    free = [n for n in candidates if n not in parameters] or candidates
    return _only(batch, free, _TARGETS, "targets")


def _target_beside_inputs(batch: Mapping[str, Any], parameters: Parameters) -> str | None:
    """Return the name of the targets, if any, unless the network needs that entry."""
    candidates = [n for n in _TARGETS if n in batch]
    free = [n for n in candidates if n not in parameters]
    if free or len(candidates) != 1:
        return free[0] if free else None
    without = _by_name(batch, parameters, candidates[0])
    filled = {*without, *(list(parameters)[:1] if any(n in batch for n in _INPUTS) else ())}
    return candidates[0] if not _unfilled(filled, parameters) else None


def _only(
    batch: Mapping[str, Any], candidates: Sequence[str], names: Sequence[str], role: str
) -> str:
    if len(candidates) != 1:
        present = ", ".join(map(repr, batch)) or "nothing"
        raise ValueError(
            f"The {role} of a dict batch must have one of the names {', '.join(names)}; it has "
            f"{present}. {_ELSEWHERE}"
        )
    return candidates[0]


# ------------------------------------------------------------ inputs
def _inputs(
    batch: Mapping[str, Any], network: nn.Module | None, target: str | None
) -> tuple[Any, ...]:
    parameters = parameters_of(network)
    named = _by_name(batch, parameters, target)
    if _lacks_the_first(batch, named, parameters):
        main = batch[_only(batch, _usual(batch, named), _INPUTS, "inputs")]
        if not parameters:
            return (main,)
        named = {next(iter(parameters)): main, **named}
    unfilled = _unfilled(named, parameters)
    if unfilled:
        assert network is not None
        present = ", ".join(map(repr, batch))
        raise ValueError(
            f"The inputs of a dict batch must have the names that {type(network).__name__} gives "
            f"them: it needs {', '.join(map(repr, unfilled))} and the batch has {present}"
            + (f", of which {target!r} is the target. " if target else ". ")
            + _ELSEWHERE
        )
    return _in_order(named, parameters, network)


def _by_name(
    batch: Mapping[str, Any], parameters: Parameters, target: str | None
) -> dict[str, Any]:
    return {n: batch[n] for n in parameters if n in batch and n != target}


def _lacks_the_first(
    batch: Mapping[str, Any], named: Collection[str], parameters: Parameters
) -> bool:
    """Return whether the batch has the main input under another name than the network."""
    first = next(iter(parameters.values()), None)
    if first is None or not named:
        return True
    wanted = first.default is first.empty or _usual(batch, named)
    return first.name not in named and bool(wanted)


def _usual(batch: Mapping[str, Any], named: Collection[str]) -> list[str]:
    return [n for n in _INPUTS if n in batch and n not in named]


def _unfilled(named: Collection[str], parameters: Parameters) -> list[str]:
    return [n for n, p in parameters.items() if p.default is p.empty and n not in named]


def _in_order(
    named: Mapping[str, Any], parameters: Parameters, network: nn.Module | None
) -> tuple[Any, ...]:
    """Return the inputs up to the last one given; the missing ones have their defaults."""
    last = max(k for k, name in enumerate(parameters) if name in named)
    chosen = list(parameters.values())[: last + 1]
    return tuple(named.get(p.name, p.default) for p in chosen)

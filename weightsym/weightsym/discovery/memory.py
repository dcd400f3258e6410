"""Refuse a forward that returns no tensor, or remembers earlier calls outside of its buffers."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from weightsym.comparison import agree, tolerance_of
from weightsym.discovery.graph import Measured
from weightsym.discovery.random_weights import RandomWeights
from weightsym.forward import (
    Inputs,
    UnsupportedModel,
    as_real,
    called,
    structural_copy,
    tensors_of,
)
from weightsym.fresh_memory import reused_memory
from weightsym.params import Params

__all__ = ["check_calls"]

_OF_EVERY_MODULE = vars(nn.Module()).keys()
_COMPARED = (Tensor, bool, int, float, str, type(None))


@torch.no_grad()
def check_calls(model: nn.Module, inputs: Inputs) -> Measured | None:
    """Call a copy of a network, and again if the first call has changed its attributes.

    Such attributes may hold what was computed once and for all; they are a state if they change
    what later calls return.

    Returns:
        What the first call returned, at random weights. None if it failed.

    Raises:
        UnsupportedModel: the forward returns no tensor, or depends on earlier calls.
    """
    network = structural_copy(model)
    before = _attributes(network)  # their tensors live on, so that no identity is used twice
    stamps = {key: list(map(_stamp, leaves)) for key, leaves in before.items()}
    try:
        with reused_memory():
            weights = RandomWeights.of_unknown(model)
            returned = called(network, weights.all(), inputs)
    except Exception:  # the trace says what is wrong with it
        return None
    name = type(model).__name__
    if not tensors_of(returned):
        output = "None" if returned is None else f"a {type(returned).__name__} without a tensor"
        raise UnsupportedModel(
            f"The forward of {name} returns {output}, so that there is no output to keep: return "
            "its outputs as tensors, or pass the submodule that does."
        )
    changed = [
        key
        for key, leaves in _attributes(network).items()
        if list(map(_stamp, leaves)) != stamps.get(key, [])
    ]
    if changed and not _repeats(model, inputs):
        raise UnsupportedModel(
            f"{name} keeps {', '.join(map(repr, changed))} from one call to the next, so that its "
            "outputs depend on earlier calls: hold this state in buffers (`register_buffer`), or "
            "have the forward take and return it."
        )
    return Measured(weights.random, [as_real(t) for t in tensors_of(returned)])


def _attributes(network: nn.Module) -> dict[str, list[Any]]:
    """Tensors and plain values in attributes of modules other than parameters and buffers."""
    return {
        f"{name}.{key}".lstrip("."): [x for x in tree_leaves(value) if isinstance(x, _COMPARED)]
        for name, module in network.named_modules()
        for key, value in vars(module).items()
        if key not in _OF_EVERY_MODULE
    }


def _stamp(x: Any) -> Any:
    """Another one for another tensor, and for one that was written to."""
    if isinstance(x, Tensor):
        return id(x), 0 if x.is_inference() else x._version
    return x


def _repeats(model: nn.Module, inputs: Inputs) -> bool:
    """Tell whether three calls of one copy, at random weights, return the same."""
    network, params = structural_copy(model), RandomWeights.of_unknown(model).all()
    try:
        first, *others = [_call(network, params, inputs) for _ in range(3)]
    except Exception:  # what an earlier call has left does not fit
        return False
    tolerance = min(1e-4, tolerance_of(params))
    return all(agree(first, later, tolerance) for later in others)


def _call(network: nn.Module, params: Params, inputs: Inputs) -> list[Tensor]:
    state = random.getstate()
    try:
        returned = called(network, {name: t.clone() for name, t in params.items()}, inputs)
    finally:
        random.setstate(state)
    return [as_real(t).clone() for t in tensors_of(returned)]

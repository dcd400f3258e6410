"""Run the forward of a network, at other weights or in another precision, and leave no mark."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_map

from lightning_bnn.params import Params
from lightning_bnn.symmetry.inputs import Inputs, described, tensors_of
from lightning_bnn.symmetry.shared_tensors import named_tensors, place_of

__all__ = [
    "UnsupportedModel",
    "check_forward",
    "first_line",
    "in_runnable_precision",
    "outputs",
    "structural_copy",
]

_T = TypeVar("_T")


class UnsupportedModel(ValueError):
    """The network cannot be traced at all, or a symmetry found in it does not hold."""


def structural_copy(model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """A copy of the module structure that shares the parameters: tracing leaves no mark.

    With ``dtype`` the copy has parameters and buffers of its own, in that precision.
    """
    shared: dict[int, Any] = {id(p): p for p in model.parameters()}
    if dtype is not None:
        shared = _tensors_in_precision(model, dtype)
    for module in model.modules():  # a LightningModule in a run holds its Trainer, data included
        shared |= {id(x): x for x in (vars(module).get("_trainer"), vars(module).get("_fabric"))}
    try:
        return copy.deepcopy(model, shared)
    except Exception as error:
        raise UnsupportedModel(
            f"{type(model).__name__} cannot be copied: {first_line(error)}. "
            "Remove the attribute that holds it, or pass the submodule that has none."
        ) from error


def _tensors_in_precision(model: nn.Module, dtype: torch.dtype) -> dict[int, Any]:
    """Parameters and buffers in a precision, by the identity of the old; shared stay shared."""
    cast: dict[Hashable, Tensor] = {}
    by_identity: dict[int, Any] = {}
    for _, old in named_tensors(model):
        place = place_of(old)
        if place not in cast:
            new = old.detach().to(dtype) if old.is_floating_point() else old.detach()
            trained = isinstance(old, nn.Parameter)
            cast[place] = nn.Parameter(new, requires_grad=False) if trained else new.clone()
        by_identity[id(old)] = cast[place]
    return by_identity


def check_forward(model: nn.Module, inputs: Inputs) -> None:
    """Tell a network that cannot be traced from an example input that does not fit."""
    network = structural_copy(model)
    try:
        with torch.no_grad():
            network(*inputs.args, **inputs.named)
    except Exception as error:
        if isinstance(error, NotImplementedError) and "forward" in str(error):
            raise ValueError(
                f"`model`: {type(model).__name__} has no forward; pass the submodule that has one, "
                "such as `module.net`."
            ) from error
        what = first_line(error) if isinstance(error, RuntimeError | ValueError) else repr(error)
        raise ValueError(
            f"`example`: the network does not accept {described(inputs)}: {what}"
        ) from error


def first_line(error: BaseException) -> str:
    """What an error says first; its type where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def in_runnable_precision(
    model: nn.Module, inputs: Inputs, use: Callable[[nn.Module, Inputs], _T]
) -> _T:
    """Use a network in float64, or as it is where an operation or a plain tensor forbids that."""

    def cast(x: Any) -> Any:
        return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x

    try:
        return use(structural_copy(model, torch.float64), tree_map(cast, inputs))
    except (RuntimeError, TypeError, NotImplementedError):
        check_forward(model, inputs)
        return use(structural_copy(model), inputs)


def outputs(network: nn.Module, params: Params, inputs: Inputs) -> list[Tensor]:
    """All tensors that a network returns, as real numbers; every call draws the same noise.

    A copy runs, so that nothing a forward keeps (a cache of computed biases) meets other weights.
    """
    trained = {name for name, _ in network.named_parameters()}
    separate = {n: t if n in trained and t.ndim > 1 else t.clone() for n, t in params.items()}
    on_gpu = {t.device.index or 0 for t in params.values() if t.device.type == "cuda"}
    with torch.random.fork_rng(devices=sorted(on_gpu)):
        torch.manual_seed(0)
        returned = functional_call(structural_copy(network), separate, inputs.args, inputs.named)
    return [_real(t) for t in tensors_of(returned)]


def _real(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj())
    return tensor if tensor.is_floating_point() else tensor.double()

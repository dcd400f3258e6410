"""Run the forward of a network with other weights, or in another precision."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves, tree_map

from weightsym.networks.devices import elsewhere, random_numbers
from weightsym.networks.dicts import Params, of
from weightsym.networks.meta import Substituted, reserved
from weightsym.networks.shared_tensors import named_tensors, place_of

_T = TypeVar("_T")
_LONGEST = 300
_LARGE = 2**25
"""The number of weights from which on they are not held together."""


class UnsupportedModel(ValueError):
    """Raised for a network that cannot be traced, or whose symmetries do not hold.

    >>> from weightsym import discover
    >>> discover(torch.nn.BatchNorm1d(2, device="meta"), torch.randn(8, 2))
    Traceback (most recent call last):
    weightsym.networks.forward.UnsupportedModel: BatchNorm1d has no values in 'running_mean' ...
    """


# ------------------------------------------------------------ a network that is not touched
def structural_copy(model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """Copy the module structure but share the parameters: tracing has no side effects on it.

    With ``dtype`` the copy has parameters and buffers of its own, in that precision. Parameters on
    the meta device become zeros that take no memory.
    """
    shared: dict[int, Any] = {
        id(p): nn.Parameter(reserved(p), p.requires_grad) if p.is_meta else p
        for p in model.parameters()
    }
    if dtype is not None:
        shared = _tensors_in_precision(model, dtype)
    for module in model.modules():  # a LightningModule in a run holds its Trainer, data included
        shared |= {id(x): x for x in runners_of(module)}
        shared |= _computed_tensors(module, dtype)
    try:
        return copy.deepcopy(model, shared)
    except Exception as error:
        raise UnsupportedModel(
            f"{type(model).__name__} cannot be copied: {first_line(error)}. "
            "Remove the attribute that holds it, or pass the submodule that has none."
        ) from error


def runners_of(module: nn.Module) -> tuple[Any, Any]:
    """Return the Trainer and the Fabric that a LightningModule refers to but does not own."""
    return vars(module).get("_trainer"), vars(module).get("_fabric")


def _tensors_in_precision(model: nn.Module, dtype: torch.dtype) -> dict[int, Any]:
    """Return parameters and buffers in a precision, by the identity of the original ones."""
    cast: dict[Hashable, Tensor] = {}
    by_identity: dict[int, Any] = {}
    for _, old in named_tensors(model):
        position = place_of(old)
        if position not in cast:
            new = old.detach().to(dtype) if old.is_floating_point() else old.detach()
            trained = isinstance(old, nn.Parameter)
            cast[position] = nn.Parameter(new, requires_grad=False) if trained else new.clone()
        by_identity[id(old)] = cast[position]
    return by_identity


def _computed_tensors(module: nn.Module, dtype: torch.dtype | None) -> dict[int, Any]:
    """Return attributes with autograd history, such as of weight norm, which cannot be copied."""
    computed = [x for x in vars(module).values() if isinstance(x, Tensor) and not x.is_leaf]
    return {id(x): x.detach().to(dtype if x.is_floating_point() else None) for x in computed}


def check_forward(model: nn.Module, inputs: Inputs) -> None:
    """Distinguish a network that cannot be traced from an example input that does not fit."""
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
        message = first_line(error) if isinstance(error, RuntimeError | ValueError) else repr(error)
        raise ValueError(
            f"`example`: the network does not accept {_described(inputs)}: {message}"
        ) from error


def first_line(error: BaseException) -> str:
    r"""Return the first line of an error in printable form, or its type if it has no message.

    >>> first_line(ValueError("no \x1b[31m\nat all"))
    'no \\x1b[31m'
    """
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    printable = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line[: 4 * _LONGEST])
    return printable if len(printable) <= _LONGEST else f"{printable[:_LONGEST]} ..."


def in_precision_of(params: Params, inputs: _T) -> _T:
    """Convert floating-point inputs to the precision of a network's weights."""
    dtype = next((t.dtype for t in params.values() if t.is_floating_point()), None)

    def cast(x: Any) -> Any:
        return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x

    return tree_map(cast, inputs)


def in_runnable_precision(
    model: nn.Module, inputs: Inputs, use: Callable[[nn.Module, Inputs], _T]
) -> _T:
    """Use a network in float64, or in its own dtype if it cannot be converted."""

    def cast(x: Any) -> Any:
        return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x

    try:
        return use(structural_copy(model, torch.float64), tree_map(cast, inputs))
    except (RuntimeError, TypeError, NotImplementedError):
        check_forward(model, inputs)
        return use(structural_copy(model), inputs)


def outputs(network: nn.Module, params: Params, inputs: Inputs) -> list[Tensor]:
    """Return all output tensors as real numbers, with the same noise in every call.

    A copy runs, so that nothing a forward keeps (a cache of computed biases) sees other weights.
    """
    returned = called(structural_copy(network), params, inputs)
    return [as_real(t) for t in tensors_of(returned)]


def called_by(network: nn.Module, read: Callable[[str], Tensor], inputs: Inputs) -> Any:
    """Run the network with weights that are read by name, of a large one a few at a time.

    Args:
        network: it changes nothing in its parameters.
        read: gives a parameter or a persistent buffer by its name, in memory of its own.
        inputs: of the forward.
    """
    state = of(network)
    if sum(t.numel() for t in state.values()) > _LARGE:
        return called_in_turn(network, read, inputs)
    return called(network, {name: read(name) for name in state}, inputs)


def called_in_turn(network: nn.Module, read: Callable[[str], Tensor], inputs: Inputs) -> Any:
    """Run the network like `called`, but read each parameter only while a function uses it.

    Args:
        network: it changes nothing in its parameters.
        read: gives a parameter or a persistent buffer by its name, in memory of its own.
        inputs: of the forward.
    """
    names = {id(p): name for name, p in network.named_parameters()}
    values = {key: partial(read, name) for key, name in names.items()}
    state = network.state_dict(keep_vars=True)
    buffers = {name: read(name) for name, t in state.items() if id(t) not in names}
    with same_noise(network.parameters()), Substituted(values):
        return functional_call(network, buffers, inputs.args, inputs.named)


def called(network: nn.Module, params: Params, inputs: Inputs) -> Any:
    """Run the forward of a network, with the same noise in every call."""
    trained = {name for name, _ in network.named_parameters()}
    separate = {n: t if n in trained and t.ndim > 1 else t.clone() for n, t in params.items()}
    with same_noise(params.values()):
        return functional_call(network, separate, inputs.args, inputs.named)


@contextmanager
def same_noise(tensors: Iterable[Any]) -> Iterator[None]:
    """Reseed torch in a context, on every device that holds one of the tensors."""
    with random_numbers(elsewhere(tensors), seed=0):
        yield


def in_precision(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Convert a floating-point or complex tensor to a precision, if one is given."""
    if dtype is not None and tensor.is_floating_point():
        return tensor if tensor.dtype is dtype else tensor.to(dtype)
    if dtype is torch.float64 and tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor


def as_real(tensor: Tensor) -> Tensor:
    """Return complex numbers as pairs, integers as floats."""
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj())
    return tensor if tensor.is_floating_point() else tensor.double()


# ------------------------------------------------------------ inputs and outputs
class Inputs(NamedTuple):
    """Arguments of a forward, as a pytree of tensors."""

    args: tuple[Any, ...] = ()
    named: dict[str, Any] = {}


def on_network(model: nn.Module, inputs: Inputs) -> Inputs:
    """Move inputs to the device, unless it is the meta device, and the dtype of the network."""
    parameters = list(model.parameters())
    types = {p.dtype for p in parameters if p.is_floating_point()}
    device = next((p.device for p in parameters if not p.is_meta), None)
    if not parameters:
        return inputs

    def move(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        dtype = next(iter(types)) if len(types) == 1 and x.is_floating_point() else x.dtype
        return x.to(device or x.device, dtype)

    moved: Inputs = tree_map(move, inputs)
    return moved


def check_filled(inputs: Inputs) -> None:
    """Refuse inputs without rows, which reveal nothing about a network."""
    empty = [t for t in tree_leaves(inputs) if isinstance(t, Tensor) and not t.numel()]
    if empty:
        raise ValueError(
            f"`example` is empty: it holds a tensor of shape {tuple(empty[0].shape)}; "
            "pass at least one row."
        )


def doubled(inputs: Inputs) -> Inputs | None:
    """Repeat a batch of one row to two rows; None for any other size.

    Batch norm does not train on one row.
    """
    sizes = {t.shape[:1] for t in tree_leaves(inputs) if isinstance(t, Tensor) and t.ndim}
    if sizes != {torch.Size([1])}:
        return None

    def twice(t: Any) -> Any:
        return torch.cat([t, t]) if isinstance(t, Tensor) and t.ndim else t

    pair: Inputs = tree_map(twice, inputs)
    return pair


def tensors_of(outputs: Any) -> list[Tensor]:
    """List the tensors in the output of a forward, except those of caches and other objects."""
    tensors = []
    for leaf in tree_leaves(outputs):
        if isinstance(leaf, Tensor):
            tensors.append(leaf)
        elif is_dataclass(leaf):
            tensors += tensors_of([getattr(leaf, f.name) for f in fields(leaf)])
    return tensors


def _described(inputs: Inputs) -> str:
    """Describe the inputs for an error message."""
    parts = [_describe(x) for x in inputs.args]
    parts += [f"`{name}` = {_describe(x)}" for name, x in inputs.named.items()]
    return ", ".join(parts) or "a call without inputs"


def _describe(x: Any) -> str:
    if isinstance(x, Tensor):
        dtype = "" if x.dtype == torch.float32 else f" ({str(x.dtype).removeprefix('torch.')})"
        return f"an input of shape {tuple(x.shape)}{dtype}"
    hint = " (unpack it with *)" if isinstance(x, tuple | list) else ""
    return f"a {type(x).__name__}{hint}"

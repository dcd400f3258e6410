"""Fold the gains of normalisations into the linear maps behind them: the stream may then turn.

With gains, only signs and permutations of a normalised stream keep a network's function. The same
function without gains allows all rotations (of an RMSNorm; those that keep the vector of ones, of a
LayerNorm).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Node

from lightning_bnn.symmetry.discovery.discover import in_evaluation
from lightning_bnn.symmetry.discovery.export import trace
from lightning_bnn.symmetry.discovery.graph import Graph, ancestors
from lightning_bnn.symmetry.forward import Inputs, on_network

__all__ = ["ReadNorm", "fold_norms", "folded_with_readers"]

_SAME_CHANNELS = ("dropout", "contiguous", "clone", "alias", "detach", "feature_dropout")


def fold_norms(model: nn.Module, *example: Any, partial: bool = False, **named: Any) -> nn.Module:
    r"""Copy a network without the gains and biases of its norms: the next linear maps take them.

    .. math:: W' = W \mathrm{diag}(\gamma), \quad b' = b + W \beta

    ``nn.LayerNorm``, ``nn.RMSNorm`` and modules that compute the same with a ``weight``, and maybe
    a ``bias``, of their own are folded. The function stays; `discover` finds the rotations of the
    stream then. Training goes on differently, for the weights are others.

    Args:
        model: any module; it is left untouched.
        *example: example inputs, as the module takes them.
        partial: leave the norms that cannot be folded, instead of an error.
        **named: example inputs by name.

    Raises:
        ValueError: a norm is read by something that is not a linear map of its own, and ``partial``
            is not set.

    >>> from lightning_bnn.symmetry import discover, fold_norms
    >>> layers = torch.nn.Linear(4, 3), torch.nn.LayerNorm(3), torch.nn.Linear(3, 2)
    >>> net, x = torch.nn.Sequential(*layers), torch.randn(8, 4)
    >>> folded = fold_norms(net, x)
    >>> torch.allclose(folded(x), net(x), atol=1e-5)
    True
    >>> discover(net, x).linear, discover(folded, x).linear[0].kind
    ((), 'centred')
    """
    folded, _ = folded_with_readers(model, Inputs(example, named), partial)
    return folded


class ReadNorm(NamedTuple):
    """A norm that was folded: the name of its gain, and of the weights that have taken it.

    ``offset`` is what is added to the gain before it multiplies, one where gains are around zero.
    """

    gain: str
    offset: int
    readers: tuple[str, ...]


def folded_with_readers(
    model: nn.Module, inputs: Inputs, partial: bool = False
) -> tuple[nn.Module, list[ReadNorm]]:
    """A copy as `fold_norms` makes it, and the norms that were folded.

    Args:
        model: any module.
        inputs: example inputs.
        partial: whether norms that cannot be folded are left.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"`model` must be a torch.nn.Module, got {type(model).__name__}.")
    affine = {name: module for name, module in model.named_modules() if _is_affine(module)}
    norms = {name: norm for name, module in affine.items() if (norm := _norm_of(module))}
    folded, found = copy.deepcopy(model), []
    if not norms:
        return folded, []
    with in_evaluation(model):
        graph = trace(model, on_network(model, inputs))
    live = ancestors(graph.results)
    for name, norm in norms.items():
        try:
            readers = _readers(graph, live, name)
            _check_readers(folded, readers, norm)
        except _Unfoldable as reason:
            if not partial:
                raise ValueError(f"The norm {name!r} cannot be folded: {reason}.") from None
        else:
            by_weight = {r.weight: r for r in readers}
            for reader in by_weight.values():
                _fold(folded, reader, norm)
            _replace(folded, name, norm.plain)
            gain = f"{name}.weight" if name else "weight"
            found.append(ReadNorm(gain, norm.offset, tuple(by_weight)))
    _leave_fused_kernels(folded)
    return folded, found


class _Unfoldable(Exception):
    """Why a norm keeps its gain."""


# ------------------------------------------------------------ norms
class _Norm(NamedTuple):
    """The gain and bias of a norm, and the norm without them."""

    gain: Tensor
    bias: Tensor | None
    plain: nn.Module
    offset: int


def _is_affine(module: nn.Module) -> bool:
    """Whether a module has one vector of weights, maybe one of biases, and nothing else."""
    own = dict(module.named_parameters())
    weight = own.get("weight")
    same = all(p.shape == weight.shape for p in own.values()) if weight is not None else False
    return same and weight is not None and weight.ndim == 1 and own.keys() <= {"weight", "bias"}


@torch.no_grad()
def _norm_of(module: nn.Module) -> _Norm | None:
    """What a module computes, if it is a norm over the last axis, found by running it."""
    weight, bias = module.weight, getattr(module, "bias", None)
    assert isinstance(weight, Tensor)
    shape = weight.shape
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, *shape, generator=generator, dtype=torch.float64)
    x = torch.cat([x, 1e-3 * x, 10 * x + 1])
    try:
        y = copy.deepcopy(module).double().cpu().eval()(x)
    except Exception:  # whatever a module of this shape may raise, it is no norm of vectors
        return None
    for plain, offset in ((p, o) for p in _plain_norms(module, shape) for o in (0, 1)):
        gain = offset + weight
        expected = plain(x) * gain.double().cpu()
        expected = expected if bias is None else expected + bias.double().cpu()
        if y.shape == x.shape and torch.allclose(y.double(), expected, rtol=1e-6, atol=1e-7):
            return _Norm(gain.detach().clone(), bias, plain, offset)
    return None


def _plain_norms(module: nn.Module, shape: torch.Size) -> Iterator[nn.Module]:
    """Norms without gain, with the epsilon of the module under any of its usual names."""
    found = [getattr(module, n, None) for n in ("eps", "variance_epsilon", "epsilon", "norm_eps")]
    eps = next((e for e in found if isinstance(e, float)), None)
    yield nn.RMSNorm(shape, eps=eps, elementwise_affine=False)
    if eps is not None:
        yield nn.LayerNorm(shape, eps=eps, elementwise_affine=False)


def _replace(model: nn.Module, name: str, plain: nn.Module) -> None:
    """Put the norm without gain where the norm was; those of torch keep their class."""
    old = model.get_submodule(name)
    if type(old) in (nn.LayerNorm, nn.RMSNorm):
        setattr(old, "elementwise_affine", False)  # noqa: B010
        for key in list(dict(old.named_parameters())):
            old.register_parameter(key, None)
        return
    parent, _, own = name.rpartition(".")
    setattr(model.get_submodule(parent), own, plain.train(old.training))


def _leave_fused_kernels(model: nn.Module) -> None:
    """Fused layers read the gains of their norms: without these they take the ordinary path."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer) and any(
            norm.weight is None for norm in (module.norm1, module.norm2)
        ):
            module.activation_relu_or_gelu = 0


# ------------------------------------------------------------ readers
class _Reader(NamedTuple):
    """A linear map behind a norm, and the names of its weight and bias."""

    node: Node
    weight: str
    bias: str | None


def _readers(graph: Graph, live: set[Node], norm: str) -> list[_Reader]:
    """The linear maps that read a norm; whatever else reads it is an error."""
    nodes = [n for n in graph.module.graph.nodes if n in live]
    inside = {n for n in nodes if _path(n) == norm and n.op == "call_function"}
    if not inside:
        raise _Unfoldable("the example does not reach it")
    pending, readers = [(n, u) for n in inside for u in n.users if u not in inside], []
    while pending:
        read, node = pending.pop()
        operation = str(node.target).removeprefix("aten.").split(".")[0]
        if node not in live and node.op != "output":
            continue
        if operation == "linear" and node.args[0] is read:
            readers.append(_reader(graph, node))
        elif node.op == "call_function" and _keeps_channels(operation, node, read):
            pending += [(node, u) for u in node.users]
        else:
            what = "the output of the network" if node.op == "output" else f"`{operation}`"
            raise _Unfoldable(f"it is read by {what}, which is not linear in its channels alone")
    own = {r.node for r in readers}
    for r in readers:
        others = [u for n in _placeholders(graph, r.weight) for u in n.users if u not in own]
        if any(u in live for u in others):
            raise _Unfoldable(
                f"{r.weight!r} is read elsewhere, too (a tied embedding must be untied first)"
            )
    return readers


def _path(node: Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    return str(list(stack.values())[-1][0]) if stack else ""


def _reader(graph: Graph, node: Node) -> _Reader:
    names = []
    for argument in node.args[1:3]:
        source = graph.sources.get(argument) if isinstance(argument, Node) else None
        if source is None or source.kind != "parameter":
            raise _Unfoldable(
                "it is read by a linear map whose weight is no parameter as it stands"
            )
        names.append(source.name)
    return _Reader(node, names[0], names[1] if len(names) > 1 else None)


def _placeholders(graph: Graph, name: str) -> list[Node]:
    return [n for n, s in graph.sources.items() if s.kind == "parameter" and s.name == name]


def _keeps_channels(operation: str, node: Node, read: Node) -> bool:
    """Whether an operation moves or averages vectors and leaves their channels on the last axis."""
    if operation in _SAME_CHANNELS:
        return True
    before, after = read.meta["val"].shape, node.meta["val"].shape
    last, arguments = len(before) - 1, [a for a in node.args[1:] if isinstance(a, int)]
    if operation in (
        "view",
        "reshape",
        "unflatten",
        "flatten",
        "_unsafe_view",
        "expand",
        "squeeze",
    ):
        return len(after) > 0 and after[-1] == before[-1] and _moves_rows(operation, before, after)
    if operation == "transpose":
        return all(a % len(before) != last for a in arguments)
    if operation == "permute":
        order = node.args[1]
        return isinstance(order, list | tuple) and int(order[-1]) % len(before) == last  # type: ignore[arg-type]
    if operation == "mean":
        axes = node.args[1] if len(node.args) > 1 else None
        return isinstance(axes, list | tuple) and all(int(a) % len(before) != last for a in axes)
    if operation in ("select", "slice"):
        return (arguments[0] if arguments else 0) % len(before) != last
    if operation == "unsqueeze":
        return arguments[0] % len(after) != len(after) - 1
    return False


def _moves_rows(operation: str, before: Any, after: Any) -> bool:
    if operation in ("expand", "squeeze"):
        return len(after) == len(before) or operation == "squeeze"
    return True


def _check_readers(model: nn.Module, readers: list[_Reader], norm: _Norm) -> None:
    if not readers:
        raise _Unfoldable("no linear map reads it")
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for reader in readers:
        if parameters[reader.weight].shape[1:] != norm.gain.shape:
            raise _Unfoldable(f"{reader.weight!r} does not read its channels one by one")
        owner = model.get_submodule(reader.weight.rpartition(".")[0])
        if norm.bias is not None and reader.bias is None and type(owner) is not nn.Linear:
            raise _Unfoldable(f"it has a bias, and the reader {reader.weight!r} has none")
    biases = [r.bias for r in readers if r.bias is not None]
    if norm.bias is not None and len(set(biases)) != len({r.weight for r in readers if r.bias}):
        raise _Unfoldable("two of its readers share a bias")


@torch.no_grad()
def _fold(model: nn.Module, reader: _Reader, norm: _Norm) -> None:
    """Multiply the columns of a weight by the gain, and add what the bias contributes."""
    weight = model.get_parameter(reader.weight)
    if norm.bias is not None:
        shift = F.linear(norm.bias, weight)
        if reader.bias is not None:
            model.get_parameter(reader.bias).add_(shift)
        else:
            owner = model.get_submodule(reader.weight.rpartition(".")[0])
            owner.bias = nn.Parameter(shift)
    weight.mul_(norm.gain)

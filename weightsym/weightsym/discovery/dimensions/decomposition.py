"""Compound operations decomposed into simpler ones, cached by kind of call for all networks."""

from __future__ import annotations

import functools
import operator
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._decomp import get_decompositions
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import OpOverload
from torch._subclasses import FakeTensorMode
from torch.export import ExportedProgram, default_decompositions
from torch.func import functionalize
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from weightsym.discovery.dimensions.complex_pairs import in_pairs
from weightsym.discovery.dimensions.nodes import first_written, writes
from weightsym.discovery.dimensions.simplification import simplify

aten: Any = torch.ops.aten
_WRITTEN_OUT = [
    *(aten.native_layer_norm, aten._softmax, aten._log_softmax, aten.addmm, aten.lstm, aten.gru),
    *(aten.softplus, aten.glu, aten._weight_norm_interface, aten.baddbmm, aten.addcmul),
    *(aten.linalg_vector_norm, aten.lerp, aten.rsub, aten.silu_, aten.repeat),
]
_AS_THEY_ARE = [
    *(aten.gelu.default, aten.silu.default, aten.mish.default, aten.hardswish.default),
    *(aten.hardsigmoid.default, aten.elu.default, aten.leaky_relu.default, aten.cumsum.default),
    *(aten.upsample_bilinear2d.vec, aten.upsample_nearest2d.vec),
    aten.matmul.default,
    *(aten.std_mean.correction, aten.std_mean.dim, aten.std_mean.default),
    *(aten.quantile.scalar, aten.quantile.default),
    *(aten.nanquantile.scalar, aten.nanquantile.default),
    aten.diag_embed.default,
]
_ORIGIN = ("nn_module_stack", "stack_trace")
_LARGEST_STORE = 1024


class Decomposed(NamedTuple):
    """A program with few kinds of operations.

    Attributes:
        graph: the operations; placeholders have the names that they have in the program.
        results: by node of the program what stands for it: nodes, also in lists.
        written: by placeholder the node whose numbers it has at the end.
        constants: by the target of a node of the graph the tensor that it reads.
    """

    graph: Graph
    results: Mapping[Node, Any]
    written: Mapping[Node, Node]
    constants: Mapping[str, Any]


def written_out(exported: ExportedProgram, rules: Mapping[Any, Callable[..., Any]]) -> Decomposed:
    """Decompose the compound operations of a program into sums, products and functions.

    Args:
        exported: what `torch.export` says; nothing is read under the name that it had before it
            was written.
        rules: functions that compute the same as operations of others.
    """
    graph, results = Graph(), dict[Node, Any]()
    written, constants = dict[Node, Node](), dict[str, Any]()
    for node in exported.graph.nodes:
        fragment = _fragment_of(node, rules)
        if fragment is not None:
            values, copies = _inlined(graph, node, fragment, results, constants)
            results[node] = values
            for argument, value in copies:
                written[first_written(argument)] = results[argument] = value
        elif node.target is operator.getitem and not isinstance(results[node.args[0]], Node):
            results[node] = results[node.args[0]][node.args[1]]
        elif node.op != "output":
            results[node] = graph.node_copy(node, results.__getitem__)
    attributes = (n for n in exported.graph.nodes if n.op == "get_attr")
    constants |= {
        n.target: operator.attrgetter(n.target)(exported.graph_module) for n in attributes
    }
    written = {source: value for source, value in written.items() if source.op == "placeholder"}
    simplify(graph)
    in_pairs(graph, exported.graph_signature.inputs_to_parameters)
    return Decomposed(graph, results, written, constants)


def _inlined(
    graph: Graph, node: Node, fragment: _Fragment, results: Mapping[Node, Any],
    constants: dict[str, Any],
) -> tuple[Any, list[tuple[Node, Node]]]:  # fmt: skip
    """Inline a fragment for a node. Return its result, and the nodes that it overwrites."""
    arguments = [a for a in tree_leaves((node.args, node.kwargs)) if isinstance(a, Node)]
    inner = list(fragment.module.graph.nodes)
    places = [n for n in inner if n.op == "placeholder"]
    copies: dict[Node, Any] = {
        n: results[argument] for n, argument in zip(places, arguments, strict=True)
    }
    written = []
    for call in inner:
        if (
            call.op == "call_function"
            and call.target is aten.copy_.default
            and call.args[0] in places
        ):
            index = places.index(call.args[0])
            written.append((arguments[index], copies[call.args[1]]))
            copies[call] = copies[call.args[1]]
        elif call.op in ("call_function", "get_attr"):
            copy = copies[call] = graph.node_copy(call, copies.__getitem__)
            copy.meta |= {k: v for k, v in node.meta.items() if k in _ORIGIN}
            if call.op == "get_attr":
                copy.target = f"{call.target}_{len(constants)}_of_{node.name}"
                constants[copy.target] = getattr(fragment.module, str(call.target))
    leaves = [copies[x] if isinstance(x, Node) else x for x in fragment.results]
    return tree_unflatten(leaves, fragment.structure), written


# ------------------------------------------------------------ one operation
class _Fragment(NamedTuple):
    """The decomposition of one operation: its graph, and the pytree of its result."""

    module: GraphModule
    results: Sequence[Any]
    structure: Any


class _Shape(NamedTuple):
    """The properties of a tensor on which a fragment depends."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


_fragments: dict[object, _Fragment] = {}


def _fragment_of(node: Node, rules: Mapping[Any, Callable[..., Any]]) -> _Fragment | None:
    """Return the decomposition of a call, or None if it has none."""
    functions, table = _decompositions()
    target: Any = node.target
    if node.op != "call_function" or not isinstance(target, OpOverload):
        return None
    is_compound = target in table or writes(node) or _is_composite(target)
    if target not in rules and (target in _AS_THEY_ARE or not is_compound):
        return None
    leaves, structure = tree_flatten((node.args, node.kwargs))
    inputs = [_input(x) for x in leaves]
    if any(isinstance(x, Node) for x in inputs):
        return None
    function = rules.get(target, functions.get(target, target))
    key = (function, str(structure), *((type(x), x) for x in inputs))
    if key not in _fragments:
        while len(_fragments) >= _LARGEST_STORE:
            del _fragments[next(iter(_fragments))]
        _fragments[key] = _traced(function, inputs, structure, table)
    return _fragments[key]


def _input(x: Any) -> Any:
    """Describe an argument of a fragment: numbers by value, tensors by shape."""
    val = x.meta.get("val") if isinstance(x, Node) else None
    if not isinstance(val, Tensor) or not all(isinstance(n, int) for n in val.shape):
        return x  # also a tensor whose sizes depend on numbers
    return _Shape(tuple(val.shape), tuple(val.stride()), val.dtype, val.device)


def _traced(
    function: Callable[..., Any], inputs: Sequence[Any], structure: Any, table: Mapping[Any, Any]
) -> _Fragment:
    indices = [k for k, x in enumerate(inputs) if isinstance(x, _Shape)]
    returned: list[Any] = []

    def call(*tensors: Tensor) -> list[Any]:
        arguments = list(inputs)
        for k, t in zip(indices, tensors, strict=True):
            arguments[k] = t
        args, kwargs = tree_unflatten(arguments, structure)
        leaves, spec = tree_flatten(function(*args, **kwargs))
        returned[:] = [spec]
        return leaves

    with (
        FakeTensorMode(allow_non_fake_inputs=True),  # a rule may hold tensors
        enable_python_dispatcher(),
        torch.no_grad(),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        shapes = [inputs[k] for k in indices]
        tensors = [
            torch.empty_strided(s.size, s.stride, dtype=s.dtype, device=s.device) for s in shapes
        ]
        with (
            torch.backends.mkldnn.flags(enabled=False),  # it has recurrent layers of its own
            _replaced({aten.matmul.default: _product, aten.linear.default: _linear}),
        ):
            module = make_fx(call, dict(table))(*tensors)
        if any(map(writes, module.graph.nodes)):
            module = make_fx(functionalize(module, remove="mutations"))(*tensors)
    for node in module.graph.nodes:
        if node.target is torch.ops.weightsym.product.default:
            node.target = aten.matmul.default
    output = next(n for n in module.graph.nodes if n.op == "output")
    return _Fragment(module, output.args[0], returned[0])


# ------------------------------------------------------------ products stay what they are
@torch.library.custom_op(
    "weightsym::product", mutates_args=(), schema="(Tensor x, Tensor y) -> Tensor"
)
def _product(x: Tensor, y: Tensor) -> Tensor:
    """Replace `matmul` while its calls are recorded."""
    return torch.matmul(x, y)


@_product.register_fake
def _size_of_product(x: Tensor, y: Tensor) -> Tensor:
    batch = torch.broadcast_shapes(x.shape[:-2], y.shape[:-2])
    rows, columns = (x.shape[-2:-1], y.shape[-1:] if y.ndim > 1 else ())
    return x.new_empty((*batch, *rows, *columns))


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    y = x @ weight.t()
    return y if bias is None else y + bias


@contextmanager
def _replaced(kernels: Mapping[Any, Callable[..., Any]]) -> Iterator[None]:
    """Replace the kernels of composite operations, including calls inside other operations."""
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    before = {operation: operation.py_kernels.get(key) for operation in kernels}
    try:
        for operation, kernel in kernels.items():
            operation.py_kernels[key] = kernel
            operation._dispatch_cache.clear()
        yield
    finally:
        for operation, old in before.items():
            operation.py_kernels.pop(key)
            operation.py_kernels.update({key: old} if old else {})
            operation._dispatch_cache.clear()


# ------------------------------------------------------------ tables
@functools.cache
def _decompositions() -> tuple[Mapping[Any, Callable[..., Any]], Mapping[Any, Callable[..., Any]]]:
    """Return the decompositions of a program's operations, and of the operations inside those."""
    ours = {**get_decompositions(_WRITTEN_OUT), **IN_OTHERS}
    table = {op: f for op, f in default_decompositions().items() if not _is_composite(op)} | ours
    return ours, {op: f for op, f in table.items() if op not in _AS_THEY_ARE}


def _is_composite(operation: Any) -> bool:
    """Return whether PyTorch itself computes an operation by other operations."""
    has_kernel: bool = torch._C._dispatch_has_kernel_for_dispatch_key(
        operation.name(), "CompositeImplicitAutograd"
    )
    return has_kernel


# ------------------------------------------------------------ operations made of others


def _addbmm(
    bias: Tensor, x: Tensor, y: Tensor, *, beta: float | int = 1, alpha: float | int = 1
) -> Tensor:
    return beta * bias + alpha * torch.bmm(x, y).sum(0)


def _addmm(
    bias: Tensor, x: Tensor, y: Tensor, *, beta: float | int = 1, alpha: float | int = 1
) -> Tensor:
    product = x @ y if alpha == 1 else alpha * (x @ y)
    return product + (bias if beta == 1 else beta * bias)


def _softmax_of_some(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Softmax of rows with at least one finite entry."""
    return torch.softmax(x, dim, dtype=dtype)


def _log_of_sum(x: Tensor, dim: list[int], keepdim: bool = False) -> Tensor:
    """Log-sum-exp of values that are not all minus infinity."""
    largest = x.amax(dim, keepdim=True)
    result = (x - largest).exp().sum(dim, keepdim=True).log() + largest
    return result if keepdim else result.squeeze(dim)


def _trilinear(
    x: Tensor, y: Tensor, z: Tensor, expand_x: Sequence[int], expand_y: Sequence[int],
    expand_z: Sequence[int], summed: Sequence[int], unroll_dim: int = 1,
) -> Tensor:  # fmt: skip
    """Multiply three tensors, each with new dimensions, and sum over some of them.

    What the third one lacks is summed before, so that nothing has a number for every pair of units.
    """
    operands = zip((x, y, z), (expand_x, expand_y, expand_z), strict=True)
    wide = []
    for tensor, dims in operands:
        for d in sorted(dims):
            tensor = tensor.unsqueeze(d)
        wide.append(tensor)
    first = [d for d in summed if d in expand_z]
    product = wide[0] * wide[1]
    product = product.sum(first, keepdim=True) if first else product
    return (product * wide[2]).sum(list(summed))


def _distances(x: Tensor, y: Tensor, p: float | int, mode: int | None) -> Tensor:
    return torch.linalg.vector_norm(x.unsqueeze(-2) - y.unsqueeze(-3), p, -1)


def _batch_norm(
    x: Tensor, gain: Tensor | None, bias: Tensor | None, mean: Tensor | None,
    variance: Tensor | None, training: bool, momentum: float, eps: float, cudnn: bool,
) -> Any:  # fmt: skip
    """A batch norm that declares the buffers that it writes."""
    if not training:
        statistics = (mean, variance, momentum, eps)
        return aten._native_batch_norm_legit_no_training(x, gain, bias, *statistics)[0]
    if mean is None or variance is None:
        return aten._native_batch_norm_legit.no_stats(x, gain, bias, True, momentum, eps)[0]
    new = aten._native_batch_norm_legit_functional(
        x, gain, bias, mean, variance, True, momentum, eps
    )
    mean.copy_(new[3])
    variance.copy_(new[4])
    return new[0]


def _largest(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """The largest values and their indices, at most one of which may be read."""
    return x.amax(dim, keepdim), x.argmax(dim, keepdim)


def _smallest(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    return x.amin(dim, keepdim), x.argmin(dim, keepdim)


IN_OTHERS: dict[Any, Callable[..., Any]] = {
    aten.max.dim: _largest,
    aten.min.dim: _smallest,
    aten.addbmm.default: _addbmm,
    aten.batch_norm.default: _batch_norm,
    aten.addmm.default: _addmm,
    aten._safe_softmax.default: _softmax_of_some,
    aten.logsumexp.default: _log_of_sum,
    aten._trilinear.default: _trilinear,
    aten._cdist_forward.default: _distances,
}
"""The function that computes the same, by operation."""

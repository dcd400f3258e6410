"""Recognition of networks that are chains of stages, from a recording of one run."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.utils._python_dispatch import TorchDispatchMode

from weightsym_fast.chains import (
    FUNCTIONS,
    Chain,
    Elementwise,
    Layer,
    Pads,
    Pair,
    Pooling,
    StageSizes,
    Unsuitable,
    with_room,
)


def read_chain(run: Callable[[], Any], x: Tensor, weights: Mapping[str, Tensor]) -> Chain:
    """Run a network once, and return its chain.

    Args:
        run: runs it on ``x`` with ``weights``.
        x: inputs of one network.
        weights: its parameters and buffers by name.

    Raises:
        Unsuitable: if it is no chain.
    """
    reader = _Reader(x, weights)
    with reader:
        outputs = run()
    if reader.refusal:
        raise Unsuitable(reader.refusal)
    if outputs is not reader.draft.current and not _same(outputs, reader.draft.current):
        raise Unsuitable("it returns something other than the output of its last layer")
    if not any(isinstance(layer, Layer) and layer.weight for layer in reader.draft.layers):
        raise Unsuitable("it has no layer with weights")
    chain = Chain(tuple(with_room(reader.draft.layers)), tuple(outputs.shape[1:]))
    used = [x, *(weights[name] for name in chain.uses)]
    if _differentiated(outputs) != Counter(id(t) for t in used if t.requires_grad):
        raise Unsuitable("it hides gradients of some weights or inputs, or defines its own")
    return chain


def _differentiated(outputs: Tensor) -> Counter[int]:
    """Count the gradients that reach each tensor, except those that a Python function computes.

    Operations are recorded below autograd, where ``torch.no_grad`` and functions with derivatives
    of their own leave no trace.
    """
    counts: Counter[int] = Counter()
    waiting: list[Any] = [outputs.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or isinstance(node, BackwardCFunction):
            continue
        if hasattr(node, "variable"):
            counts[id(node.variable)] += 1
        waiting += [before for before, _ in node.next_functions]
    return counts


def _same(a: Any, b: Tensor) -> bool:
    return isinstance(a, Tensor) and a.data_ptr() == b.data_ptr() and a.shape == b.shape


class _Reader(TorchDispatchMode):
    """A mode that follows one tensor through a network, and refuses any other operation."""

    def __init__(self, x: Tensor, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.draft, self.refusal, self.is_input = Draft(x), "", True
        self.draft.names = {id(t): name for name, t in weights.items()}
        self._aside: set[int] = set()
        self._alive: list[Any] = [x, *weights.values()]

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self._alive.append(result)  # so that no other tensor has its identity
        if not self.refusal:
            try:
                self._read(func._schema, result, args, kwargs or {})
            except Unsuitable as reason:
                self.refusal = str(reason)
        return result

    def _read(self, schema: Any, result: Any, args: Any, kwargs: Any) -> None:
        called = schema.name.removeprefix("aten::")
        arguments = {a.name: a.default_value for a in schema.arguments}
        arguments.update(zip(arguments, args, strict=False))
        arguments.update(kwargs)
        if self._is_about_weights(called, args, result):
            return
        x, name = (
            arguments.get("mat1", next(iter(arguments.values()), None)),
            called.removesuffix("_"),
        )
        if name == "detach" or (name in VIEWS and id(x) in self._aside):
            self._aside.add(id(result))  # saved by autograd, or places of maxima
            return
        if x is not self.draft.current:
            raise Unsuitable(f"{called} takes more than the output of the layer before")
        if name not in READERS or (self.is_input and name != called):
            raise Unsuitable(f"{called} is not one of the known layers")
        out, *others = result if isinstance(result, tuple) else (result,)
        self._aside |= {id(extra) for extra in others}
        if any(self.draft.pads) and name != "convolution":
            raise Unsuitable("padding is not followed by a convolution")
        READERS[name](self.draft, arguments, out)
        if len(out) != len(x):
            raise Unsuitable(f"{called} changes the number of examples")
        self.is_input = self.is_input and out.data_ptr() == x.data_ptr()
        self.draft.current = out

    def _is_about_weights(self, called: str, args: Any, result: Any) -> bool:
        name = self.draft.names.get(id(args[0])) if args else None
        if name and called in ("t", "detach"):
            (self.draft.turned if called == "t" else self.draft.names)[id(result)] = name
            return True
        return False


LARGEST_WINDOW = 2**15
"""Places in it, for which a number of 16 bits is enough."""
WIDEST_KERNEL = 32
"""Rows of kernels are written out as instructions."""


class Draft:
    """The part of a chain that has been read.

    Attributes:
        current: the output of the last layer.
        layers: in their order.
        names: of weights, by the identity of their tensors.
        turned: of transposed weights.
        pads: zeros around what goes into the next convolution.
        is_open: whether pooling may join the last layer.
    """

    def __init__(self, x: Tensor) -> None:
        self.current = x
        self.layers: list[Layer | Elementwise] = []
        self.names: dict[int, str] = {}
        self.turned: dict[int, str] = {}
        self.pads: Pads = (0, 0, 0, 0)
        self.is_open = False

    def shape(self) -> tuple[int, Pair]:
        """Return channels, rows and columns of the next layer's input."""
        shape = tuple(self.current.shape[1:])
        if len(shape) not in (2, 3):
            raise Unsuitable(f"a layer takes examples of shape {shape}")
        return shape[0], (shape[1] if len(shape) == 3 else 1, shape[-1])

    def name_of(self, tensor: Tensor | None, turned: bool = False) -> str:
        """Return the name of a weight."""
        if tensor is None:
            return ""
        name = (self.turned if turned else self.names).get(id(tensor))
        if name is None:
            raise Unsuitable("a layer takes weights that are computed, or no parameters")
        return name

    def add(self, layer: Layer | Elementwise) -> None:
        """Append a layer, which pooling may join."""
        self.layers.append(layer)
        self.is_open = True

    def last_stage(self) -> StageSizes | None:
        """Return the stage of the last layer, if it is one."""
        last = self.layers[-1] if self.layers else None
        return last.stage if isinstance(last, Layer) else None

    def change(self, stage: StageSizes) -> None:
        """Replace the last stage."""
        last = self.layers[-1]
        assert isinstance(last, Layer)
        self.layers[-1] = replace(last, stage=stage)


Given = dict[str, Any]


def _convolution(draft: Draft, arguments: Given, out: Tensor) -> None:
    weight, bias = arguments["weight"], arguments["bias"]
    if arguments["transposed"] or weight.ndim > 4 or weight.shape[-1] > WIDEST_KERNEL:
        raise Unsuitable("it has transposed, three-dimensional or very wide convolutions")
    channels, size = draft.shape()
    rows, columns = _pair(arguments["padding"], weight.ndim - 2, 0)
    top, bottom, left, right = draft.pads
    draft.pads = (0, 0, 0, 0)
    stage = StageSizes(
        channels,
        (size[0] - top - bottom, size[1] - left - right),
        weight.shape[0],
        arguments["groups"],
        _pair(weight.shape[2:], weight.ndim - 2, 1),
        _pair(arguments["stride"], weight.ndim - 2, 1),
        _pair(arguments["dilation"], weight.ndim - 2, 1),
        (top + rows, bottom + rows, left + columns, right + columns),
        bias=bias is not None,
    )
    draft.add(Layer(stage, draft.name_of(weight), draft.name_of(bias)))


def _pair(values: Any, dimensions: int, default: int) -> Pair:
    """Return a pair for rows and columns; one dimension has one row."""
    values = list(values)
    values *= dimensions if len(values) == 1 else 1
    return (default, values[0]) if dimensions == 1 else (values[0], values[1])


def _linear(draft: Draft, arguments: Given, out: Tensor) -> None:
    bias, weight = (
        (arguments["self"], arguments["mat2"]) if "mat1" in arguments else (None, arguments["mat2"])
    )
    scaled = arguments.get("alpha", 1) != 1 or arguments.get("beta", 1) != 1
    if scaled or (bias is not None and bias.ndim != 1):
        raise Unsuitable("a linear layer scales or adds a matrix")
    stage = StageSizes(draft.current.shape[1], (1, 1), out.shape[1], bias=bias is not None)
    draft.add(Layer(stage, draft.name_of(weight, turned=True), draft.name_of(bias)))


def _rectifier(draft: Draft, arguments: Given, out: Tensor) -> None:
    slope = float(arguments.get("negative_slope", 0))
    stage = draft.last_stage()
    if stage is not None and stage.outside == 1 and 0 <= slope < 1:
        draft.change(replace(stage, outside=slope))
    elif "negative_slope" in arguments:
        draft.add(Elementwise("leaky_relu", (slope,)))
    else:
        draft.add(Elementwise("relu"))


def _elementwise(name: str) -> Callable[..., None]:
    def read(draft: Draft, arguments: Given, out: Tensor) -> None:
        remainder = list(arguments.values())[1:]
        if name == "gelu":
            draft.add(Elementwise("gelu_tanh" if remainder == ["tanh"] else "gelu"))
        else:
            draft.add(Elementwise(name, tuple(float(n) for n in remainder)))

    return read


def _view(draft: Draft, arguments: Given, out: Tensor) -> None:
    if out.numel() != draft.current.numel() or out.ndim < 2:
        raise Unsuitable("it slices an activation, or flattens a batch to one vector")
    if out.shape != draft.current.shape:
        draft.is_open = False


def _zeros_around(draft: Draft, arguments: Given, out: Tensor) -> None:
    pads, images = list(arguments["pad"]), draft.current.ndim - 2
    if arguments["value"] != 0 or min(pads) < 0 or images < 1 or len(pads) > 2 * images:
        raise Unsuitable("it pads with something other than zeros around images")
    left, right, top, bottom = (*pads, 0, 0)[:4]
    draft.pads = (top, bottom, left, right)


def _windows(pooling: Pooling) -> Callable[..., None]:
    def read(draft: Draft, arguments: Given, out: Tensor) -> None:
        window = _pair(arguments["kernel_size"], 2, 1)
        step = _pair(arguments["stride"], 2, 1) if arguments["stride"] else window
        gaps = any(d != 1 for d in arguments.get("dilation") or ())
        if any(arguments["padding"]) or gaps or arguments.get("divisor_override") is not None:
            raise Unsuitable("its windows reach over the edge, have gaps or are scaled")
        _pool(draft, pooling, window, step, out)

    return read


def _all_places(draft: Draft, arguments: Given, out: Tensor) -> None:
    count = draft.current.ndim
    dimensions = {d % count for d in arguments.get("dim") or ()}
    if count < 3 or dimensions != set(range(2, count)) or arguments.get("dtype") is not None:
        raise Unsuitable("it averages over something other than all places of a channel")
    _, size = draft.shape()
    _pool(draft, "mean", size, size, None)


def _adaptive(pooling: Pooling) -> Callable[..., None]:
    def read(draft: Draft, arguments: Given, out: Tensor) -> None:
        _, size = draft.shape()
        wanted = _pair(arguments["output_size"], 2, 1)
        if any(n % k for n, k in zip(size, wanted, strict=True)):
            raise Unsuitable("adaptive pooling has windows of different sizes")
        window = size[0] // wanted[0], size[1] // wanted[1]
        _pool(draft, pooling, window, window, out)

    return read


def _pool(draft: Draft, pooling: Pooling, window: Pair, step: Pair, out: Tensor | None) -> None:
    channels, size = draft.shape()
    stage = draft.last_stage()
    apart = step[0] >= window[0] and step[1] >= window[1]
    if stage is not None and stage.pooling == "none" and draft.is_open and apart:
        pooled = replace(stage, pooling=pooling, window=window, step=step)
        if pooling == "mean":
            pooled = replace(pooled, inside=stage.outside, outside=1.0)
        draft.change(pooled)
    else:
        alone = StageSizes(channels, size, channels, channels, weighted=False)
        pooled = replace(alone, pooling=pooling, window=window, step=step)
        draft.add(Layer(pooled))
    if math.prod(window) > LARGEST_WINDOW or (out is not None and pooled.out_size != out.shape[2:]):
        raise Unsuitable("its windows are very large or reach over the edge")


VIEWS = ("view", "_unsafe_view", "squeeze", "unsqueeze", "alias", "clone")
READERS: dict[str, Callable[..., None]] = {
    "convolution": _convolution,
    "addmm": _linear,
    "mm": _linear,
    "relu": _rectifier,
    "leaky_relu": _rectifier,
    "constant_pad_nd": _zeros_around,
    "max_pool2d_with_indices": _windows("max"),
    "avg_pool2d": _windows("mean"),
    "mean": _all_places,
    "_adaptive_avg_pool2d": _adaptive("mean"),
    "adaptive_max_pool2d": _adaptive("max"),
    **{name: _elementwise(name) for name in FUNCTIONS if name not in ("relu", "leaky_relu")},
    **dict.fromkeys(VIEWS, _view),
}

"""Which networks are chains of stages: what they compute is recorded while they run once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_bnn.stacks.fused.chains import Chain, Layer, Unsuitable, with_room
from lightning_bnn.stacks.fused.operations import READERS, VIEWS, Draft

__all__ = ["read_chain"]


def read_chain(run: Callable[[], Any], x: Tensor, weights: Mapping[str, Tensor]) -> Chain:
    """The chain of a network, from one run of it.

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
        raise Unsuitable("it returns something else than the output of its last layer")
    if not any(isinstance(layer, Layer) and layer.weight for layer in reader.draft.layers):
        raise Unsuitable("it has no layer with weights")
    chain = Chain(tuple(with_room(reader.draft.layers)), tuple(outputs.shape[1:]))
    used = [x, *(weights[name] for name in chain.uses)]
    if _differentiated(outputs) != Counter(id(t) for t in used if t.requires_grad):
        raise Unsuitable("it keeps gradients from some weights or inputs, or defines its own")
    return chain


def _differentiated(outputs: Tensor) -> Counter[int]:
    """How often gradients reach each tensor, but not those that a Python function computes.

    Operations are recorded below autograd, where ``torch.no_grad`` and functions with derivatives
    of their own leave no trace.
    """
    found: Counter[int] = Counter()
    waiting: list[Any] = [outputs.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or isinstance(node, BackwardCFunction):
            continue
        if hasattr(node, "variable"):
            found[id(node.variable)] += 1
        waiting += [before for before, _ in node.next_functions]
    return found


def _same(a: Any, b: Tensor) -> bool:
    return isinstance(a, Tensor) and a.data_ptr() == b.data_ptr() and a.shape == b.shape


class _Reader(TorchDispatchMode):
    """Follows one tensor through a network; whatever else happens is a refusal."""

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
        given = {a.name: a.default_value for a in schema.arguments}
        given.update(zip(given, args, strict=False))
        given.update(kwargs)
        if self._is_about_weights(called, args, result):
            return
        x, name = given.get("mat1", next(iter(given.values()), None)), called.removesuffix("_")
        if name == "detach" or (name in VIEWS and id(x) in self._aside):
            self._aside.add(id(result))  # saved by autograd, or places of maxima
            return
        if x is not self.draft.current:
            raise Unsuitable(f"{called} takes more than the output of the layer before")
        if name not in READERS or (self.is_input and name != called):
            raise Unsuitable(f"{called} is none of the known layers")
        out, *others = result if isinstance(result, tuple) else (result,)
        self._aside |= {id(other) for other in others}
        if any(self.draft.pads) and name != "convolution":
            raise Unsuitable("padding is followed by something else than a convolution")
        READERS[name](self.draft, given, out)
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

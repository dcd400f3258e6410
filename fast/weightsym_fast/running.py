"""Forward and backward passes of chains of stages, for all members of a stack."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from weightsym.networks.threads import end_waiting_threads, pool
from weightsym_fast.chains import Chain, Elementwise, Layer, examples_first, examples_last
from weightsym_fast.machine_code import Call, Step, compiled, lanes_of

AT_ONCE = 4 * 2**20
"""Bytes of activations at once where no gradients are wanted: they should stay in the cache."""
SMALL = 10**6
"""Numbers that go into a stage of a plan, of all members, for which one thread is enough."""


def run_chain(
    chain: Chain,
    x: Tensor,
    weights: Sequence[Tensor],
    own_inputs: bool,
    by_torch: Callable[..., Tensor],
) -> Tensor:
    """Return the outputs ``(members, examples, ...)`` of all members.

    Args:
        chain: what they compute.
        x: inputs, with a leading member dimension if members have their own_inputs.
        weights: those of ``chain.weights``, stacked.
        own_inputs: whether members have inputs of their own_inputs.
        by_torch: the same by operations of torch, which second derivatives are taken of.
    """
    out: Tensor = _Chain.apply(chain, by_torch, own_inputs, x, *weights)
    return out


class _Chain(torch.autograd.Function):
    """Analytic gradients in one pass. Second derivatives are left to torch."""

    @staticmethod
    def forward(
        ctx: Any, chain: Chain, by_torch: Any, own_inputs: bool, x: Tensor, *weights: Tensor
    ) -> Tensor:
        keeps = any(ctx.needs_input_grad)
        stacked = [w.detach().contiguous() for w in weights]
        named = dict(zip(chain.weights, stacked, strict=True))
        run = _Run(chain, x if own_inputs else x[None], named)
        size = run.members if keeps else run.members_at_once()
        if size >= run.members:
            out = run.outputs()
        else:
            starts = range(0, run.members, size)
            out = torch.cat([run.of(slice(k, k + size)).outputs() for k in starts])
        if keeps:
            ctx.save_for_backward(x, *weights)
            ctx.run, ctx.own_inputs, ctx.by_torch = run, own_inputs, by_torch
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad[3:]
        tensors = ctx.saved_tensors  # raises if they have been changed meanwhile
        if torch.is_grad_enabled() or _is_batched(g):
            return None, None, None, *_by_autograd(ctx.by_torch, tensors, wanted, g)
        run: _Run = ctx.run
        names = [n for n, needed in zip(run.weights, wanted[1:], strict=True) if needed]
        gx, gradients = run.backward(run.laid_out(g), wanted[0], names)
        if gx is not None and not ctx.own_inputs:
            gx = gx.sum(0)
        return None, None, None, gx, *(gradients.get(n) for n in run.weights)


def _by_autograd(
    run: Callable[..., Tensor], tensors: Sequence[Tensor], wanted: Sequence[bool], g: Tensor
) -> list[Tensor | None]:
    """Return gradients that can be differentiated again, or several gradients at once."""
    leaves = [t for t, needed in zip(tensors, wanted, strict=True) if needed]
    with torch.enable_grad():
        outputs = run(*tensors)
    gradients = iter(torch.autograd.grad(outputs, leaves, g, create_graph=torch.is_grad_enabled()))
    return [next(gradients) if needed else None for needed in wanted]


def _is_batched(g: Tensor) -> bool:
    """Return whether a tensor stands for many, as ``is_grads_batched`` creates it."""
    return not torch._C._has_storage(g)


class GradientPlan:
    """Outputs and gradients of a stack, recomputed in the same memory.

    Args:
        chain: what the members compute. It uses every weight once.
        x: inputs, the same for all members.
        weights: those of ``chain.weights``, stacked; they may change in place.
        gradients: where those of weights go, by name.

    Attributes:
        outputs: ``(members, blocks, channels, rows, columns, lanes)``; lanes without examples are
            zero.
        slopes: gradients of the outputs, to be filled in between.
        forward: steps that compute the outputs.
        backward: steps that compute the gradients of weights, and change the slopes.
    """

    def __init__(
        self, chain: Chain, x: Tensor, weights: dict[str, Tensor], gradients: Mapping[str, Tensor]
    ) -> None:
        run = _Run(chain, x[None], weights)
        self.forward: list[Step] = []
        self.backward: list[Step] = []
        run.into, run.steps = gradients, self.forward
        self.outputs, self.examples = run.forward(), run.examples
        self.slopes, run.steps = torch.zeros_like(self.outputs), self.backward
        run.backward(self.slopes, False, [*gradients])
        self._run = run

    def difference(self, targets: Tensor, scale: Tensor, into: Tensor) -> Call:
        """Return the step that sets the gradients to the outputs minus targets, times a scale.

        Args:
            targets: laid out.
            scale: a single number.
            into: where the differences go.
        """
        count, lanes = len(self.outputs), self._run.lanes
        tensors = [self.outputs, targets, scale, into, self.slopes]
        return Call.of_numbers("difference", tensors, count, targets.numel() // lanes)

    def laid_out(self, values: Tensor) -> Tensor:
        """Arrange values ``(members or one, examples, ...)`` as outputs, with zeros elsewhere."""
        return self._run.laid_out(values)

    def examples_first(self) -> Tensor:
        """Return a copy of the outputs, ``(members, examples, ...)``."""
        chain = self._run.chain
        return examples_first(
            self.outputs, self.examples, chain.out_shape, chain.out_size, (0, 0, 0, 0)
        )


def adding(x: Tensor, scale: Tensor, into: Tensor) -> Call:
    """Return the step that adds a multiple of some values to others.

    Args:
        x: whole vectors of numbers.
        scale: a single number.
        into: as many, in a row.
    """
    return Call.of_numbers("add", [x, None, scale, into, None], x.numel() // lanes_of(x.itemsize))


class _Run:
    """The activations of a chain, and the notes of its stages for the backward pass.

    What it does is kept in ``steps``, if that is a list: they do the same again.
    """

    def __init__(self, chain: Chain, x: Tensor, weights: dict[str, Tensor]) -> None:
        self.chain, self.weights = chain, weights
        self.members = len(next(iter(weights.values())))
        self.examples, self.shape = x.shape[1], x.shape
        self.size, self.lanes = x.element_size(), lanes_of(x.element_size())
        first = chain.first
        inputs = examples_last(x, first.channels, first.size, first.pads, self.lanes)
        self.activations, self.notes = [inputs], [inputs[:0]]
        self.into: Mapping[str, Tensor] = {}
        self.steps: list[Step] | None = None

    def of(self, some: slice) -> _Run:
        """Return the run of some of the members."""
        piece = object.__new__(_Run)
        piece.__dict__.update(self.__dict__)
        inputs = self.activations[0]
        piece.weights = {n: w[some] for n, w in self.weights.items()}
        piece.members = len(range(self.members)[some])
        piece.activations = [inputs[some] if len(inputs) > 1 else inputs]
        piece.notes = [inputs[:0]]
        return piece

    def members_at_once(self) -> int:
        """Return the number of members whose activations fit into the cache together."""
        chunk = AT_ONCE // self.chain.bytes_of(self.activations[0].shape[1] * self.lanes, self.size)
        return max(chunk, 1) * torch.get_num_threads()

    # ------------------------------------------------------------ forwards
    def outputs(self) -> Tensor:
        """Return the outputs, examples first."""
        size, out = self.chain.out_size, self.forward()
        return examples_first(out, self.examples, self.chain.out_shape, size, (0, 0, 0, 0))

    def forward(self) -> Tensor:
        """Run forward and return the outputs, examples last. Activations and notes are kept."""
        for layer in self.chain.layers:
            x = self.activations[-1]
            if isinstance(layer, Layer):
                self._stage(layer, x)
            else:
                self.activations.append(self._computed(layer, "forward", x))
                self.notes.append(x[:0])
        return self.activations[-1]

    def _stage(self, layer: Layer, x: Tensor) -> None:
        stage, blocks = layer.stage, x.shape[1]
        shape = (self.members, blocks, stage.outputs, *stage.out_padded, self.lanes)
        out = x.new_zeros(shape) if any(stage.out_pads) else x.new_empty(shape)
        room = self.members * blocks * stage.notes * stage.note_bits * self.lanes // 8
        notes = torch.empty(room, dtype=torch.uint8)
        used = [self.weights.get(n) for n in (layer.weight, layer.bias)]
        self._call(layer, "forward", x, [x, *used, out, notes])
        self.activations.append(out)
        self.notes.append(notes)

    def _call(self, layer: Layer, name: str, x: Tensor, tensors: list[Tensor | None]) -> None:
        """Run a function of a stage, with members distributed over the threads of torch."""
        function = compiled(layer.stage, name, self.size)
        places = [0 if t is None else t.data_ptr() for t in tensors]
        apart = [0 if t is None else t.stride(0) for t in tensors[1:3]]
        shared, blocks = int(len(x) > 1), x.shape[1]

        def some(first: int, last: int, tensors_alive: Any = tensors) -> None:
            function(*places, shared, first, last, blocks, self.examples, *apart)

        call = partial(_over_members, some, self.members)
        call()
        if self.steps is not None:
            every = (shared, 0, self.members, blocks, self.examples, *apart)
            is_small = x.numel() * self.members < SMALL
            self.steps.append(Call(function, tensors, every) if is_small else call)

    def _computed(self, layer: Elementwise, name: str, *tensors: Tensor) -> Tensor:
        """Return the result of torch, which is later written to the same memory."""
        compute = partial(getattr(layer, name), *tensors)
        result: Tensor = compute()
        if self.steps is not None:
            in_code = layer.name == "tanh" and self.size == 4 and not result.numel() % self.lanes
            code, last = ("tanh", None) if name == "forward" else ("tanh_backward", tensors[-1])
            places, count = [tensors[0], last, None, result, None], result.numel() // self.lanes
            again = Call.of_numbers(code, places, count) if in_code else None
            self.steps.append(again or (lambda: result.copy_(compute())))
        return result

    # ------------------------------------------------------------ backwards
    def laid_out(self, g: Tensor) -> Tensor:
        """Return gradients of the outputs, examples last."""
        channels = self.activations[-1].shape[2]
        return examples_last(g, channels, self.chain.out_size, (0, 0, 0, 0), self.lanes)

    def backward(
        self, g: Tensor, wants_inputs: bool, wanted: Sequence[str]
    ) -> tuple[Tensor | None, dict[str, Tensor]]:
        """Return gradients of the inputs, if wanted, and of weights by name."""
        gradients: dict[str, Tensor] = {}
        layers = self.chain.layers
        earliest = 0 if wants_inputs else self.chain.earliest(wanted)
        for k in reversed(range(earliest, len(layers))):
            layer, x, y = layers[k], self.activations[k], self.activations[k + 1]
            if not isinstance(layer, Layer):
                g = self._computed(layer, "backward", g, x, y)
                continue
            g = g.contiguous()
            if layer.stage.outside != 1 or layer.stage.pooling == "mean":
                self._call(layer, "before_backward", y, [y, None, None, g, None])
            if {layer.weight, layer.bias} & {*wanted}:
                self._weight_gradient(layer, x, g, self.notes[k + 1], gradients)
            if wants_inputs or k > earliest:
                weight, gx = self.weights.get(layer.weight), g.new_empty(self.members, *x.shape[1:])
                self._call(layer, "input_gradient", gx, [gx, weight, None, g, self.notes[k + 1]])
                g = gx
        return self._of_inputs(g) if wants_inputs else None, gradients

    def _weight_gradient(
        self, layer: Layer, x: Tensor, g: Tensor, notes: Tensor, gradients: dict[str, Tensor]
    ) -> None:
        """Add the gradients of a layer's weights to those of earlier uses."""
        names = [name for name in (layer.weight, layer.bias) if name]
        grads = [self.into.get(name, torch.empty_like(self.weights[name])) for name in names]
        self._call(layer, "weight_gradient", x, [x, *[*grads, None][:2], g, notes])
        for name, grad in zip(names, grads, strict=True):
            gradients[name] = gradients[name] + grad if name in gradients else grad

    def _of_inputs(self, g: Tensor) -> Tensor:
        first = self.chain.first
        shape = tuple(self.shape[2:])
        return examples_first(g, self.examples, shape, first.size, first.pads)


def _over_members(run: Callable[[int, int], None], members: int) -> None:
    """Run a function for all members, distributed over the threads of torch."""
    threads = min(torch.get_num_threads(), members)
    if threads == 1:
        run(0, members)
        return
    bounds = [members * k // threads for k in range(threads + 1)]
    parts = list(zip(bounds, bounds[1:], strict=False))
    end_waiting_threads()
    running = [pool(threads - 1).submit(run, *piece) for piece in parts[1:]]
    run(*parts[0])
    for piece in running:
        piece.result()

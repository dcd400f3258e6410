"""Losses and gradients of small networks as CUDA graphs: one launch instead of a hundred.

A graph repeats the operations of one run on other numbers, without Python. It is used only for what
cannot compute anything else next time: layers of torch without randomness, buffers and hooks.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from weightsym.networks.engines import Energies, Losses
from weightsym.params import chunk_of, first_line

_AFTER, _MOST = 3, 8
_LARGEST = 2**26
"""Bytes of the weights of a stack; those of more keep a GPU busy as it is."""
_TOLERANCE = 1e-3
_NOT_THERE = "it has tensors that are not on a GPU"
_log = logging.getLogger("weightsym.params")


class LossGraphs:
    """Losses and their gradients, by graphs recorded when shapes occur for the third time."""

    name = "CUDA graphs"
    kinds = (Losses,)

    def takes(self, job: Losses) -> str | None:
        tensors = _tensors(job)
        reason = _unrepeatable(tensors) or _changeable(job)
        if reason:
            return reason
        memory, key = job.loss.memory, _key(job, tensors)
        entry = memory.get(key, 0)
        if isinstance(entry, int):
            entry += 1
            if entry >= _AFTER and sum(isinstance(g, _LossGraph) for g in memory.values()) < _MOST:
                entry = _checked_graph(job)
            memory[key] = entry
        if not isinstance(entry, _LossGraph):
            return "there is no graph for tensors of these shapes"
        job.notes["graph"] = entry
        return None

    def run(self, job: Losses) -> Tensor:
        losses: Tensor = _Replayed.apply(job.notes["graph"], len(job.stack), *_tensors(job))
        return losses


def _are_on_gpu(tensors: Iterable[Any]) -> bool:
    return all(isinstance(t, Tensor) and t.is_cuda for t in tensors)


def _tensors(job: Losses) -> list[Any]:
    return [*job.stack.values(), *job.inputs, job.targets]


def _key(job: Losses, tensors: Sequence[Tensor]) -> Any:
    """Return the key of a graph: addresses of parameters, modes, precision and shapes."""
    places = tuple(p.data_ptr() for p in job.loss.parameters)
    modes = tuple(module.training for module in job.network.modules())
    precise = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    shapes = tuple((t.shape, t.dtype, t.device, t.requires_grad) for t in tensors)
    return job.own_inputs, places, modes, precise, shapes


def _unrepeatable(tensors: Sequence[Any]) -> str | None:
    """Require GPU tensors in an ordinary run with gradients, or return the reason."""
    if not _are_on_gpu(tensors):
        return _NOT_THERE
    is_plain = (
        torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cuda")
        and not torch.cuda.is_current_stream_capturing()
        and torch._C._functorch.peek_interpreter_stack() is None
        and _get_current_dispatch_mode() is None
    )
    return None if is_plain else "it runs without gradients, in mixed precision or in a transform"


def _changeable(job: Losses) -> str | None:
    """Require layers and losses that compute the same in every run, or return the reason."""
    if job.loss.formula == "unknown":  # it may wait for the device
        return "its loss may compute something different next time"
    if any(p.requires_grad for p in job.loss.parameters):
        return "its loss has parameters that are trained"
    if job.stack.keys() != {name for name, _ in job.network.named_parameters()}:
        return "it has buffers"
    if sum(t.nbytes for t in job.stack.values()) > _LARGEST:
        return "the stack is large"
    if not all(_repeats_itself(m) for m in job.network.modules()):
        return "it has dropout, hooks, or layers that are not of torch"
    return None


def _repeats_itself(layer: nn.Module) -> bool:
    return (
        type(layer).__module__.startswith("torch.nn.modules")
        and not isinstance(layer, nn.modules.dropout._DropoutNd)
        and not (layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks)
    )


class _LossGraph:
    """The inputs of a recorded run, and its losses and gradients, which a replay updates."""

    def __init__(self, job: Losses) -> None:
        self.read = [t.detach().clone() for t in _tensors(job)]
        for mine, t in zip(self.read, job.stack.values(), strict=False):
            mine.requires_grad_(t.requires_grad)
        weights, count = dict(zip(job.stack, self.read, strict=False)), len(job.stack)
        wanted = [t for t in weights.values() if t.requires_grad]
        inputs, targets = tuple(self.read[count:-1]), self.read[-1]
        mine = replace(job, stack=weights, inputs=inputs, targets=targets)

        @torch.enable_grad()
        def run() -> list[Tensor]:
            losses = mine.by_torch(mine)
            grads = torch.autograd.grad(
                losses.sum(), wanted, materialize_grads=True, allow_unused=True
            )
            return [losses.detach(), *grads]

        self.recorded = Recorded(run, self.read)

    def is_right(self) -> bool:
        """Return whether the recording reproduces the results of a direct run."""
        before = [t.clone() for t in self.recorded()]
        for result in self.recorded():  # so that a replay that does nothing is seen
            result.fill_(12345)
        pairs = zip(self.recorded(), before, strict=True)
        return self.recorded.is_replayed and all(_agree(a, b) for a, b in pairs)

    @torch.no_grad()
    def run(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the losses and gradients for other tensors of the same shapes."""
        torch._foreach_copy_(self.read, list(tensors))
        return [t.clone() for t in self.recorded()]


def _checked_graph(job: Losses) -> _LossGraph | None:
    """Return a verified graph, if all members run at once."""
    inputs = tuple(x[0] for x in job.inputs) if job.own_inputs else job.inputs
    members = len(next(iter(job.stack.values())))
    if chunk_of(job.network, job.stack, inputs, job.chunk_size) < members:
        return None
    graph = _LossGraph(job)
    return graph if graph.is_right() else None


def _agree(a: Tensor, b: Tensor) -> bool:
    finite = b[b.isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else 0.0
    return torch.allclose(a, b, _TOLERANCE, _TOLERANCE * scale, equal_nan=True)


class _Replayed(torch.autograd.Function):
    """Losses of a graph, with precomputed gradients."""

    @staticmethod
    def forward(ctx: Any, graph: _LossGraph, count: int, *tensors: Tensor) -> Tensor:
        losses, *ctx.grads = graph.run(tensors)
        ctx.others = len(tensors) - count
        return losses

    @staticmethod
    def backward(ctx: Any, weight: Tensor) -> tuple[Tensor | None, ...]:
        rows = [weight.to(g).view(-1, *(1,) * (g.ndim - 1)) for g in ctx.grads]
        gradients = iter(torch._foreach_mul(ctx.grads, rows))
        wanted = ctx.needs_input_grad[2 : len(ctx.needs_input_grad) - ctx.others]
        return (None, None, *(next(gradients) if w else None for w in wanted), *[None] * ctx.others)


# ------------------------------------------------------------ energies
class EnergyGraphs:
    """Energies of all data and their gradients, replayed at new weights."""

    name = "CUDA graphs"
    kinds = (Energies,)

    def takes(self, job: Energies) -> str | None:
        return None if _are_on_gpu(job.moving.values()) else _NOT_THERE

    def run(self, job: Energies) -> RecordedField:
        return RecordedField(job)


class RecordedField:
    """A `Field` of torch's computation, recorded at the second call.

    Args:
        job: asks for it.
    """

    def __init__(self, job: Energies) -> None:
        self.job, self.places = job, list(job.moving.values())
        self.recorded = Recorded(lambda: job.by_torch(job), self.places)

    def look(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        self.job.count(1)
        pieces = rows.split([p[:1].numel() for p in self.places], 1)
        views = [piece.view_as(p) for piece, p in zip(pieces, self.places, strict=True)]
        with torch.no_grad():
            torch._foreach_copy_(self.places, views)
        with torch.enable_grad():
            energies, *gradients = self.recorded()
        return energies.clone(), torch.cat([g.flatten(1) for g in gradients], 1)

    def slope(self, rows: Tensor) -> Tensor:
        return self.look(rows)[1]

    def leapfrog(self, x: Tensor, momenta: Tensor, steps: int, size: float, kick: float) -> None:
        for _ in range(steps):
            momenta.add_(self.slope(x), alpha=kick)
            x.add_(momenta, alpha=size)


# ------------------------------------------------------------ records
class Recorded:
    """A recording of a computation on the same tensors, replayed without Python.

    It is recorded at its second call, and again when a tensor that it reads has moved. Computations
    that CUDA cannot record, or on other devices, run as they are.

    Args:
        compute: returns tensors. It draws no random numbers, and depends only on the values in
            ``reads`` and on constant tensors.
        reads: tensors that change between calls.

    >>> x = torch.tensor([1.0, 2.0])
    >>> squares = Recorded(lambda: [x.square()], [x])
    >>> squares(), x.add_(1), squares()
    ([tensor([1., 4.])], tensor([2., 3.]), [tensor([4., 9.])])
    """

    def __init__(self, compute: Callable[[], list[Tensor]], reads: Sequence[Tensor]) -> None:
        self._compute, self._reads = compute, reads
        self._possible = all(t.is_cuda for t in reads)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._results: list[Tensor] = []
        self._places: list[int] = []

    @property
    def is_replayed(self) -> bool:
        """True if there is a recording, from the second call on."""
        return self._graph is not None

    def __call__(self) -> list[Tensor]:
        """Return the results, which overwrite those of the previous call."""
        places = [t.data_ptr() for t in self._reads] if self._possible else []
        if self._possible and places == self._places:
            if self._graph is None:
                self._record()
            if self._graph is not None:
                self._graph.replay()
                return self._results
        elif places != self._places:
            self._places, self._graph = places, None
        return self._compute()

    def _record(self) -> None:
        device = self._reads[0].device
        side, current = torch.cuda.Stream(device), torch.cuda.current_stream(device)
        side.wait_stream(current)
        try:
            with torch.cuda.stream(side), _without_waiting():  # which no graph can do
                self._compute()
            self._graph, self._results = _recorded(self._compute, side)
        except RuntimeError as error:
            self._possible = False
            _log.info("Gradients are computed kernel by kernel: %s", first_line(error))
        current.wait_stream(side)


def _recorded(
    compute: Callable[[], list[Tensor]], stream: torch.cuda.Stream
) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
    """Record a computation as a graph, and return it with its output tensors."""
    graph, generator = torch.cuda.CUDAGraph(), torch.cuda.default_generators[stream.device.index]
    state = generator.get_state()
    try:  # threads that load data may go on
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            results = compute()
    except RuntimeError:  # it would be in the middle of this graph forever
        fresh = torch.Generator(stream.device)
        fresh.set_state(state)
        generator.graphsafe_set_state(fresh.graphsafe_get_state())
        raise
    return graph, results


@contextmanager
def _without_waiting() -> Iterator[None]:
    """Raise an error where Python waits for the device."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it does not see all there is
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)

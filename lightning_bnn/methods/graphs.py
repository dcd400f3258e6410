"""Losses of small networks and their gradients as CUDA graphs: one launch in place of a hundred.

A graph repeats the operations of one run on other numbers, without Python. It is used only for what
cannot compute anything else next time: layers of torch without randomness, buffers and hooks.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from lightning_bnn.likelihoods import Categorical, Gaussian
from weightsym.params import Params, first_line

__all__ = ["Graphs", "Recorded"]

_AFTER, _MOST = 3, 8
_LARGEST = 2**26
"""Bytes of the weights of a stack; those of more keep a GPU busy as it is."""
_TOLERANCE = 1e-3
_log = logging.getLogger("lightning_bnn")

Compute = Callable[[Params, tuple[Tensor, ...], Tensor], Tensor]
"""From a stack, inputs and targets to a loss for every member."""


class Graphs:
    """The graphs of one network, made when it is run a third time on tensors of the same shapes.

    Copies have none: a graph belongs to its tensors.
    """

    def __init__(self) -> None:
        self._known: dict[Any, _Graph | int | None] = {}

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(self), ()

    def losses(
        self,
        compute: Compute,
        may_repeat: Callable[[], bool],
        model: nn.Module,
        likelihood: nn.Module,
        params: Params,
        inputs: Any,
        targets: Tensor,
    ) -> Tensor | None:
        """The losses by a graph, or None where there is none.

        Args:
            compute: what to repeat.
            may_repeat: is asked once for every graph.
            model: gives the computation.
            likelihood: gives the losses of its outputs.
            params: a stack.
            inputs: of the networks.
            targets: of the networks.
        """
        tensors = [*params.values(), *inputs, targets]
        if not (_may_be_repeated(tensors) and _repeats_itself(model, likelihood, params)):
            return None
        places = tuple(p.data_ptr() for p in likelihood.parameters())
        modes = tuple(module.training for module in model.modules())
        precise = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
        shapes = tuple((t.shape, t.dtype, t.device, t.requires_grad) for t in tensors)
        key = places, modes, precise, shapes
        entry = self._known.get(key, 0)
        if isinstance(entry, int):
            entry += 1
            if entry >= _AFTER and sum(isinstance(g, _Graph) for g in self._known.values()) < _MOST:
                entry = _graph(compute, params, inputs, targets) if may_repeat() else None
            self._known[key] = entry
        if not isinstance(entry, _Graph):
            return None
        return _Replayed.apply(entry, len(params), *tensors)


def _may_be_repeated(tensors: Sequence[Any]) -> bool:
    """Check whether these are tensors of a card in a plain run with gradients."""
    if not all(isinstance(t, Tensor) and t.device.type == "cuda" for t in tensors):
        return False
    return (
        torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cuda")
        and not torch.cuda.is_current_stream_capturing()
        and torch._C._functorch.peek_interpreter_stack() is None
        and _get_current_dispatch_mode() is None
    )


def _repeats_itself(model: nn.Module, likelihood: nn.Module, params: Params) -> bool:
    """Check that everything is made of layers which compute the same every time."""
    if type(likelihood) not in (Categorical, Gaussian):  # others may wait for the device
        return False
    if any(p.requires_grad for p in likelihood.parameters()):
        return False
    if params.keys() != {name for name, _ in model.named_parameters()}:  # it has buffers
        return False
    if sum(t.nbytes for t in params.values()) > _LARGEST:
        return False
    return all(
        type(m).__module__.startswith("torch.nn.modules")
        and not isinstance(m, nn.modules.dropout._DropoutNd)
        and not (m._forward_hooks or m._forward_pre_hooks or m._backward_hooks)
        for m in model.modules()
    )


class _Graph:
    """Tensors that a recorded run reads, and its losses and gradients, which a replay renews."""

    def __init__(self, compute: Compute, params: Params, inputs: Any, targets: Tensor) -> None:
        self.read = [t.detach().clone() for t in (*params.values(), *inputs, targets)]
        for mine, t in zip(self.read, params.values(), strict=False):
            mine.requires_grad_(t.requires_grad)
        weights, count = dict(zip(params, self.read, strict=False)), len(params)
        wanted = [t for t in weights.values() if t.requires_grad]

        @torch.enable_grad()
        def run() -> list[Tensor]:
            losses = compute(weights, tuple(self.read[count:-1]), self.read[-1])
            grads = torch.autograd.grad(
                losses.sum(), wanted, materialize_grads=True, allow_unused=True
            )
            return [losses.detach(), *grads]

        self.recorded = Recorded(run, self.read)

    def is_right(self) -> bool:
        """Check that there is a record, which gives the numbers of a run without it."""
        before = [t.clone() for t in self.recorded()]
        for result in self.recorded():  # so that a replay that does nothing is seen
            result.fill_(12345)
        pairs = zip(self.recorded(), before, strict=True)
        return self.recorded.is_replayed and all(_agree(a, b) for a, b in pairs)

    @torch.no_grad()
    def run(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The losses and gradients of other tensors of the same shapes."""
        torch._foreach_copy_(self.read, list(tensors))
        return [t.clone() for t in self.recorded()]


def _graph(compute: Compute, params: Params, inputs: Any, targets: Tensor) -> _Graph | None:
    graph = _Graph(compute, params, inputs, targets)
    if graph.is_right():
        return graph
    _log.info("Losses are computed without a CUDA graph.")
    return None


def _agree(a: Tensor, b: Tensor) -> bool:
    finite = b[b.isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else 0.0
    return torch.allclose(a, b, _TOLERANCE, _TOLERANCE * scale, equal_nan=True)


class _Replayed(torch.autograd.Function):
    """Losses of a graph, which come with their gradients."""

    @staticmethod
    def forward(ctx: Any, graph: _Graph, count: int, *tensors: Tensor) -> Tensor:
        losses, *ctx.grads = graph.run(tensors)
        ctx.others = len(tensors) - count
        return losses

    @staticmethod
    def backward(ctx: Any, weight: Tensor) -> tuple[Tensor | None, ...]:
        rows = [weight.to(g).view(-1, *(1,) * (g.ndim - 1)) for g in ctx.grads]
        gradients = iter(torch._foreach_mul(ctx.grads, rows))
        wanted = ctx.needs_input_grad[2 : len(ctx.needs_input_grad) - ctx.others]
        return (None, None, *(next(gradients) if w else None for w in wanted), *[None] * ctx.others)


# ------------------------------------------------------------ records
class Recorded:
    """What is computed from the same tensors again and again, without Python in between.

    It is recorded at its second call, and anew when a tensor that it reads is elsewhere. What CUDA
    cannot record, and what is on other devices, is computed as it stands.

    Args:
        compute: returns tensors. It draws no random numbers, and sees only numbers in ``reads``
            and tensors that stay.
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
        """Check whether there is a record, from the second call on."""
        return self._graph is not None

    def __call__(self) -> list[Tensor]:
        """The results; those of the call before are overwritten."""
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
        side, here = torch.cuda.Stream(device), torch.cuda.current_stream(device)
        side.wait_stream(here)
        try:
            with torch.cuda.stream(side), _without_waiting():  # which no graph can do
                self._compute()
            self._graph, self._results = _recorded(self._compute, side)
        except RuntimeError as error:
            self._possible = False
            _log.info("Gradients are computed kernel by kernel: %s", first_line(error))
        here.wait_stream(side)


def _recorded(
    compute: Callable[[], list[Tensor]], stream: torch.cuda.Stream
) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
    """A graph of what is computed, and where it writes its results."""
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

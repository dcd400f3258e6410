"""Computations on CUDA devices that are recorded once, as a graph of kernels, and replayed."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

__all__ = ["Recorded"]

_log = logging.getLogger("lightning_bnn")


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
            _log.info("Gradients are computed kernel by kernel: %s", str(error).splitlines()[0])
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

"""Computations on CUDA devices that are recorded once, as a graph of kernels, and replayed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

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
        with torch.cuda.stream(side):  # libraries set themselves up for this stream
            self._compute()
        here.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        try:  # threads that load data may go on
            with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
                self._results = self._compute()
        except RuntimeError as error:
            self._possible = False
            generator = torch.cuda.default_generators[device.index or 0]
            generator.graphsafe_set_state(generator.clone_state())  # it still waits for the graph
            _log.info("Gradients are computed kernel by kernel: %s", str(error).splitlines()[0])
        else:
            self._graph = graph

"""Appends to a bank from a thread, while training continues."""

from __future__ import annotations

import queue
import threading
from typing import Any

import torch
from torch import Tensor

from lightning_bnn.bank.checkpoint_bank import CheckpointBank
from lightning_bnn.bank.disk import is_full, require_room
from weightsym.params import Params, current_stream, elsewhere


class BankWriter:
    """Appends stacks from a thread, in order, and blocks the caller if too many are waiting.

    Stacks for which the disk has no space are left out and counted, whether this is detected before
    or during the write. After any other error nothing more is written.

    Args:
        bank: open for appending.
        waiting: largest number of stacks in the queue.

    Attributes:
        lost: number of networks that were left out.
    """

    def __init__(self, bank: CheckpointBank, waiting: int = 2) -> None:
        self.bank, self.lost = bank, 0
        self._queue: queue.Queue[tuple[Any, ...] | None] = queue.Queue(waiting)
        self._error: BaseException | None = None
        self._is_raised = False
        self._thread = threading.Thread(target=self._work, name="bank writer", daemon=True)
        self._thread.start()

    def put(self, networks: Params, records: list[dict[str, Any]]) -> None:
        """Copy a stack from any device, and queue the copy."""
        self._raise()
        self._queue.put((*_host_copy(networks), records))

    def flush(self) -> None:
        """Wait until all queued stacks are on disk."""
        self._queue.join()
        self._raise()

    def close(self) -> None:
        """Write the queued stacks, then stop."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()
        if not self._is_raised:
            self._raise()

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            try:
                if self._error is None:
                    self._write(*item)
            except BaseException as error:  # handed to the thread that trains
                self._error = error
            finally:
                self._queue.task_done()
        self._queue.task_done()

    def _write(self, networks: Params, ready: list[Any], records: list[dict[str, Any]]) -> None:
        for event in ready:
            event.synchronize()
        try:
            require_room(self.bank.path, sum(t.nbytes for t in networks.values()))
            self.bank.extend(networks, records)
        except OSError as error:
            if not is_full(error):
                raise
            self.lost += len(records)

    def _raise(self) -> None:
        if self._error is not None:  # again and again: what came after is not written either
            self._is_raised = True
            message = f"Writing to {self.bank.path} failed: {self._error}"
            raise RuntimeError(message) from self._error


def _host_copy(tensors: Params) -> tuple[Params, list[Any]]:
    """Copy to the CPU, and return events after which copies from other devices are complete."""
    copies = {name: _copied(t.detach()) for name, t in tensors.items()}
    streams = [current_stream(device) for device in elsewhere(tensors.values())]
    return copies, [stream.record_event() for stream in streams if stream is not None]


def _copied(tensor: Tensor) -> Tensor:
    if current_stream(tensor.device) is None:
        return tensor.to("cpu", copy=True)
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)

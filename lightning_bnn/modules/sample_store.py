"""Where chains keep the networks that they have visited: in memory, or in a bank on disk."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bnn.bank import CheckpointBank
from lightning_bnn.modules.side_by_side import finite_members
from lightning_bnn.named_tensors import NamedTensors
from lightning_bnn.params import Params

__all__ = ["BankStore", "MemoryStore", "SampleStore"]


class SampleStore(nn.Module, ABC):
    """Stacks of members, one for every time at which they were kept.

    Networks are numbered: the members of the first time, then those of the second, ...
    """

    @abstractmethod
    def __len__(self) -> int:
        """Number of times."""

    @abstractmethod
    def append(self, members: Params, **record: Any) -> None:
        """Keep a copy of all members."""

    @abstractmethod
    def networks(self, rows: Sequence[int]) -> Params:
        """The networks of these numbers, as a stack."""

    @abstractmethod
    def finite(self) -> Tensor:
        """Which of them hold finite weights only, ``(times, members)``."""

    def open(self, writer: bool) -> None:
        """Get ready for a run; only one process writes."""

    def close(self) -> None:
        """The run is over."""

    @abstractmethod
    def forget(self) -> None:
        """Start anew."""


class MemoryStore(NamedTensors, SampleStore):
    """In memory, and in the checkpoints.

    Args:
        limit: forget all but the last ones.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit, self._times = limit, 0
        super().__init__()

    def __len__(self) -> int:
        """Number of times."""
        return self._times

    def tensors(self) -> Params:
        """Everything: ``(times, members, ...)``."""
        return {n: t[: self._times] for n, t in super().tensors().items()} if self._times else {}

    def append(self, members: Params, **record: Any) -> None:
        """Keep a copy of all members; room for further ones is made by doubling."""
        times = self._times
        if self.limit is not None and times == self.limit:
            self.hold({name: t.roll(-1, 0) for name, t in self.tensors().items()})
            times -= 1
        room = super().tensors()
        if times == len(next(iter(room.values()), ())):
            count = max(1, times if self.limit is None else min(times, self.limit - times))
            more = {n: t.detach().new_empty(count, *t.shape) for n, t in members.items()}
            room = {n: torch.cat([room[n], t]) if times else t for n, t in more.items()}
            super().hold(room)
        for name, tensor in members.items():
            room[name][times] = tensor.detach()
        self._times = times + 1

    def finite(self) -> Tensor:
        """Which of them hold finite weights only, ``(times, members)``."""
        if not self._times:
            return torch.ones(0, 0).bool()
        flat = {name: t.flatten(0, 1) for name, t in self.tensors().items()}
        return _finite(flat).view(self._times, -1)

    def hold(self, tensors: Params) -> None:
        """Keep these instead."""
        last = slice(0 if self.limit is None else -self.limit, None)
        kept = {name: t[last] for name, t in tensors.items()}
        super().hold(kept)
        self._times = len(next(iter(kept.values()), ()))

    def forget(self) -> None:
        """Start anew."""
        self.hold({})

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        for name, tensor in self.tensors().items():
            destination[prefix + name] = tensor

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *more: Any) -> None:
        if f"{prefix}rows" in state_dict:
            raise ValueError(
                "This checkpoint keeps its networks in a bank: pass the folder as `bank`."
            )
        super()._load_from_state_dict(state_dict, prefix, *more)

    def networks(self, rows: Sequence[int]) -> Params:
        """The networks of these numbers, as a stack."""
        chosen = torch.tensor(list(rows), device=self.device)
        return {n: t.flatten(0, 1)[chosen] for n, t in self.tensors().items()}


class BankStore(SampleStore):
    """In a `lightning_bnn.bank.CheckpointBank`; checkpoints only say how many there were.

    Args:
        path: folder of the bank.
        members: networks of every time.
    """

    rows: Tensor

    def __init__(self, path: str, members: int) -> None:
        super().__init__()
        self.path, self.members = path, members
        self.register_buffer("rows", torch.zeros((), dtype=torch.long))
        self._bank: CheckpointBank | None = None

    def __len__(self) -> int:
        """Number of times."""
        return int(self.rows) // self.members

    def open(self, writer: bool) -> None:
        """Go on where the checkpoint was made; what came after it will come again."""
        self.close()
        if not writer:
            return
        self._bank = CheckpointBank(self.path)
        held, known = len(self._bank), int(self.rows)
        if held < known:
            self.close()
            raise ValueError(
                f"The bank {self.path} has {held} networks, the checkpoint knew of {known}."
            )
        self._bank.truncate(known)

    def append(self, members: Params, **record: Any) -> None:
        """Write all members."""
        if self._bank is not None:
            finite = _finite(members).tolist()
            told = [{} if well else {"finite": False} for well in finite]
            records = [{**record, "member": m, **told[m]} for m in range(self.members)]
            self._bank.extend(members, records)
        self.rows += self.members

    def finite(self) -> Tensor:
        """Which of them hold finite weights only, ``(times, members)``: the bank remembers."""
        if not len(self):
            return torch.ones(0, self.members).bool()
        records = CheckpointBank(self.path, "r").records[: int(self.rows)]
        found = torch.tensor([record.get("finite", True) for record in records])
        return found.view(len(self), self.members)

    def networks(self, rows: Sequence[int]) -> Params:
        """The networks of these numbers, as a stack."""
        bank = CheckpointBank(self.path, "r")
        return {name: t.to(self.rows.device) for name, t in bank[list(rows)].items()}

    def forget(self) -> None:
        """Start anew, in an empty bank."""
        there = (Path(self.path) / "manifest.jsonl").is_file()
        count = len(CheckpointBank(self.path, "r")) if there else 0
        if count:
            raise ValueError(
                f"The bank {self.path} has {count} networks of another run: choose another `bank`, "
                "or resume from its checkpoint."
            )
        self.rows.zero_()

    def close(self) -> None:
        """Let others write."""
        if self._bank is not None:
            self._bank.close()
            self._bank = None

    def __getstate__(self) -> dict[str, Any]:
        """Without the open files."""
        return {**self.__dict__, "_bank": None}


def _finite(members: Params) -> Tensor:
    return finite_members(t for t in members.values() if t.is_floating_point()).cpu()

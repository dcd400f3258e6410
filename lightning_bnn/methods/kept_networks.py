"""Networks that were kept along a run, and how they go with the state of a method."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bnn.bank import CheckpointBank
from lightning_bnn.methods.health import finite_members
from lightning_bnn.named_tensors import NamedTensors
from lightning_bnn.params import Params

__all__ = ["InBank", "InMemory", "KeptNetworks", "finite_networks"]


class KeptNetworks(nn.Module, ABC):
    """Stacks of members, one for every time at which they were kept.

    Networks are numbered: the members of the first time, then those of the second, ...
    """

    @abstractmethod
    def __len__(self) -> int:
        """At how many times members were kept."""

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
        """A run is over: let others write."""

    @abstractmethod
    def forget(self) -> None:
        """Let go of all networks, as another run begins."""


class InMemory(NamedTensors, KeptNetworks):
    """In memory, and in the checkpoints.

    Args:
        limit: forget all but the last ones.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit, self._first, self._times = limit, 0, 0
        super().__init__()

    def __len__(self) -> int:
        return self._times

    def tensors(self) -> Params:
        """All kept networks, as ``(times, members, ...)``; nothing if there are none."""
        if not self._times:
            return {}
        kept = slice(self._first, self._first + self._times)
        return {n: t[kept] for n, t in super().tensors().items()}

    def append(self, members: Params, **record: Any) -> None:
        """Keep a copy of all members.

        Room for further ones is made by doubling. With a limit the networks are a window that
        moves through a room of one and a half times its size, and is put back to the front at the
        end: that copies two networks for each that is kept, and not all of them.
        """
        if self._times == self.limit:
            self._first, self._times = self._first + 1, self._times - 1
        room, end = super().tensors(), self._first + self._times
        if end == len(next(iter(room.values()), ())):
            room = self._with_room(room, end, members)
        for name, tensor in members.items():
            room[name][self._first + self._times] = tensor.detach()
        self._times += 1

    def _with_room(self, room: Params, end: int, members: Params) -> Params:
        """Tensors with a free row after the kept ones."""
        most = math.inf if self.limit is None else self.limit + max(1, self.limit // 2)
        if end < most:
            count = int(min(max(1, end), most - end))
            more = {n: t.detach().new_empty(count, *t.shape) for n, t in members.items()}
            room = {n: torch.cat([room[n], t]) if end else t for n, t in more.items()}
            super().hold(room)
            return room
        for tensor in room.values():
            tensor[: self._times] = tensor[self._first : end].clone()
        self._first = 0
        return room

    def finite(self) -> Tensor:
        """Which of them hold finite weights only, ``(times, members)``."""
        if not self._times:
            return torch.ones(0, 0).bool()
        flat = {name: t.flatten(0, 1) for name, t in self.tensors().items()}
        return finite_networks(flat).view(self._times, -1)

    def hold(self, tensors: Params) -> None:
        last = slice(0 if self.limit is None else -self.limit, None)
        kept = {name: t[last] for name, t in tensors.items()}
        super().hold(kept)
        self._first, self._times = 0, len(next(iter(kept.values()), ()))

    def forget(self) -> None:
        self.hold({})

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        for name, tensor in self.tensors().items():
            whole = tensor.untyped_storage().nbytes() == tensor.nbytes
            destination[prefix + name] = tensor if whole else tensor.clone()  # a file has no room

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


class InBank(KeptNetworks):
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
        return int(self.rows) // self.members

    def open(self, writer: bool) -> None:
        """Go on where the checkpoint was made; what came after it will come again."""
        self.close()
        if not writer:
            return
        self._bank = CheckpointBank(self.path)
        stored, known = len(self._bank), int(self.rows)
        if stored < known:
            self.close()
            raise ValueError(
                f"The bank {self.path} has {stored} networks, the checkpoint knew of {known}."
            )
        self._bank.truncate(known)

    def append(self, members: Params, **record: Any) -> None:
        if self._bank is not None:
            finite = finite_networks(members).tolist()
            health = [{} if well else {"finite": False} for well in finite]
            records = [{**record, "member": m, **health[m]} for m in range(self.members)]
            self._bank.extend(members, records)
        self.rows += self.members

    def finite(self) -> Tensor:
        """Which of them hold finite weights only, ``(times, members)``: the bank remembers."""
        if not len(self):
            return torch.ones(0, self.members).bool()
        records = CheckpointBank(self.path, "r").records[: int(self.rows)]
        finite = torch.tensor([record.get("finite", True) for record in records])
        return finite.view(len(self), self.members)

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
        if self._bank is not None:
            self._bank.close()
            self._bank = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_bank": None}


def finite_networks(stack: Params) -> Tensor:
    """Which networks of a stack are finite, on the CPU."""
    return finite_members(t for t in stack.values() if t.is_floating_point()).cpu()

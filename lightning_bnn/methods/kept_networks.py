"""Networks collected during a run, and their storage in memory or in a bank."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bnn.bank import CheckpointBank
from lightning_bnn.methods.health import finite_members
from weightsym.params import Params


class KeptNetworks(nn.Module, ABC):
    """Stacks of members, one for each time of collection.

    Indices count the members of the first time, then those of the second, and so on.
    """

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of times at which members were collected."""

    @abstractmethod
    def append(self, members: Params, **record: Any) -> None:
        """Store a copy of all members."""

    @abstractmethod
    def networks(self, rows: Sequence[int]) -> Params:
        """Return the networks with these indices, as a stack."""

    @abstractmethod
    def finite(self) -> Tensor:
        """Mark the networks whose weights are all finite, ``(times, members)``."""

    def open(self, writer: bool) -> None:
        """Prepare a run. Only one process writes."""

    def close(self) -> None:
        """Finish a run, so that others can write."""

    @abstractmethod
    def forget(self) -> None:
        """Remove all networks before another run."""


class NetworksInMemory(KeptNetworks):
    """Networks in memory and in checkpoints.

    Args:
        limit: number of times to store; earlier ones are removed.
    """

    _device: Tensor

    def __init__(self, limit: int | None = None) -> None:
        super().__init__()
        self.register_buffer("_device", torch.empty(0), persistent=False)
        self._stacks: deque[Params] = deque(maxlen=limit)

    def __len__(self) -> int:
        return len(self._stacks)

    def tensors(self) -> Params:
        """Return all networks as ``(times, members, ...)``, or nothing if there are none."""
        names = self._stacks[0] if self._stacks else ()
        return {name: torch.stack([stack[name] for stack in self._stacks]) for name in names}

    def append(self, members: Params, **record: Any) -> None:
        """Store a copy of all members."""
        self._stacks.append({name: t.detach().clone() for name, t in members.items()})

    def finite(self) -> Tensor:
        """Mark the networks whose weights are all finite, ``(times, members)``."""
        if not self._stacks:
            return torch.ones(0, 0).bool()
        every = (torch.stack([s[n] for s in self._stacks]).flatten(0, 1) for n in self._stacks[0])
        return finite_networks(every).view(len(self), -1)

    def networks(self, rows: Sequence[int]) -> Params:
        """Return the networks with these indices, as a stack."""
        members = len(next(iter(self._stacks[0].values())))
        chosen = [(self._stacks[row // members], row % members) for row in rows]
        return {n: torch.stack([s[n][m] for s, m in chosen]) for n in self._stacks[0]}

    def forget(self) -> None:
        self._stacks.clear()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        for stack in self._stacks:
            stack.update({name: fn(t) for name, t in stack.items()})
        return super()._apply(fn, recurse)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination.update({prefix + name: t for name, t in self.tensors().items()})

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *more: Any) -> None:
        if f"{prefix}rows" in state_dict:
            raise ValueError(
                "This checkpoint stores its networks in a bank: pass the folder as `bank`."
            )
        tensors = {n[len(prefix) :]: t for n, t in state_dict.items() if n.startswith(prefix)}
        self.forget()
        for time in range(len(next(iter(tensors.values()), ()))):
            self.append({name: t[time].to(self._device.device) for name, t in tensors.items()})


class InBank(KeptNetworks):
    """Networks in a `lightning_bnn.bank.CheckpointBank`. Checkpoints store their number only.

    Args:
        path: folder of the bank.
        members: number of networks per time.
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
        """Continue from the checkpoint: networks collected after it are collected again."""
        self.close()
        if not writer:
            return
        self._bank = CheckpointBank(self.path)
        stored, expected = len(self._bank), int(self.rows)
        if stored < expected:
            self.close()
            raise ValueError(
                f"The bank {self.path} has {stored} networks, but the checkpoint "
                f"expects {expected}."
            )
        self._bank.truncate(expected)

    def append(self, members: Params, **record: Any) -> None:
        if self._bank is not None:
            finite = finite_networks(members.values()).tolist()
            health = [{} if well else {"finite": False} for well in finite]
            records = [{**record, "member": m, **health[m]} for m in range(self.members)]
            self._bank.extend(members, records)
        self.rows += self.members

    def finite(self) -> Tensor:
        """Mark the networks whose weights are all finite, ``(times, members)``."""
        if not len(self):
            return torch.ones(0, self.members).bool()
        records = CheckpointBank(self.path, "r").records[: int(self.rows)]
        finite = torch.tensor([record.get("finite", True) for record in records])
        return finite.view(len(self), self.members)

    def networks(self, rows: Sequence[int]) -> Params:
        """Return the networks with these indices, as a stack."""
        bank = CheckpointBank(self.path, "r")
        return {name: t.to(self.rows.device) for name, t in bank[list(rows)].items()}

    def forget(self) -> None:
        """Start again with an empty bank."""
        exists = (Path(self.path) / "manifest.jsonl").is_file()
        count = len(CheckpointBank(self.path, "r")) if exists else 0
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


def finite_networks(stacks: Iterable[Tensor]) -> Tensor:
    """Mark the networks of stacks whose weights are all finite, on the CPU."""
    return finite_members(t for t in stacks if t.is_floating_point()).cpu()

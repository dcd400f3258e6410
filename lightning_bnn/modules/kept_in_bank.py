"""Networks of chains that are kept in a bank on disk."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_bnn.bank import CheckpointBank
from lightning_bnn.methods import Keeping
from lightning_bnn.methods.kept_networks import KeptNetworks, finite_networks
from lightning_bnn.params import Params

__all__ = ["KeptInBank", "keeping"]


class KeptInBank(KeptNetworks):
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


def keeping(
    burn_in: int, every_n_steps: int | None, every_n_epochs: int | None, bank: str | None
) -> Keeping:
    """When networks are kept, and where: in the memory, or in a bank.

    Args:
        burn_in: nothing is kept of the first so many steps (or epochs).
        every_n_steps: how often the members are kept, in steps.
        every_n_epochs: the same in epochs.
        bank: its folder; None for the memory.
    """
    store = None if bank is None else partial(KeptInBank, bank)
    return Keeping(burn_in, every_n_steps, every_n_epochs, store)

"""Networks from wherever they are: a bank, a folder of checkpoints, or one file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch import nn

from lightning_bnn import params as P
from lightning_bnn.bank.checkpoint_bank import CheckpointBank
from lightning_bnn.bank.folders import checkpoint_files, read_networks_of
from lightning_bnn.params import Params

__all__ = ["read_networks"]


def read_networks(
    source: str | os.PathLike[str],
    like: nn.Module,
    last: int | None = None,
    prefix: str | None = None,
) -> tuple[Params, list[dict[str, Any]]]:
    """A stack of networks, and what is known of each.

    Args:
        source: folder of a `CheckpointBank`, folder of checkpoints (in natural order of their
            names), or one checkpoint; a checkpoint of a module of this package has several.
        like: a network of their kind.
        last: only the last so many, by default all.
        prefix: what stands before the names of the network in checkpoints.

    >>> import tempfile
    >>> net, bank = nn.Linear(2, 1), CheckpointBank(tempfile.mkdtemp())
    >>> for step in range(3):
    ...     bank.append(P.of(net), step=step)
    >>> stack, records = read_networks(bank.path, net, last=2)
    >>> stack["weight"].shape, records[0]
    (torch.Size([2, 1, 2]), {'step': 1})
    """
    path = Path(source)
    if not path.exists():
        raise ValueError(f"There are no networks at {path}: it does not exist.")
    if last is not None and last < 1:
        raise ValueError(f"`last` must be at least 1, got {last}.")
    if (path / "manifest.jsonl").is_file():
        return _of_bank(CheckpointBank(path, "r"), like, last)
    root, files = (path.parent, [path]) if path.is_file() else (path, checkpoint_files(path))
    every = [found for file in files for found in read_networks_of(file, root, like, prefix)]
    found = _without_copies(every)
    kept = found if last is None else found[-last:]
    return P.stack([network for network, _ in kept]), [record for _, record in kept]


def _without_copies(
    found: list[tuple[Params, dict[str, Any]]],
) -> list[tuple[Params, dict[str, Any]]]:
    """Lightning's ``last.ckpt`` often is another file of its folder again: of the same step."""

    def place(record: dict[str, Any]) -> Any:
        return Path(record["file"]).parent, record.get("step"), record.get("epoch")

    named = {place(record) for _, record in found if Path(record["file"]).name != "last.ckpt"}
    return [
        (network, record)
        for network, record in found
        if Path(record["file"]).name != "last.ckpt"
        or "step" not in record
        or place(record) not in named
    ]


def _of_bank(
    bank: CheckpointBank, like: nn.Module, last: int | None
) -> tuple[Params, list[dict[str, Any]]]:
    if len(bank) == 0:
        raise ValueError(f"The bank {bank.path} is empty.")
    start = 0 if last is None else max(0, len(bank) - last)
    rows = slice(start, len(bank))
    held = bank[rows]
    for name, tensor in P.of(like).items():
        found = held[name].shape[1:] if name in held else None
        if found != tensor.shape:
            told = "is not in it" if found is None else f"has shape {tuple(found)}"
            raise ValueError(f"The bank {bank.path} does not fit: {name!r} {told}.")
    return {name: held[name] for name in P.of(like)}, bank.records[rows]

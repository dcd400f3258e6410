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
    """A stack of networks, and a record of what is known of each.

    Args:
        source: folder of a `CheckpointBank`, folder of checkpoints (in natural order of their
            names), or one checkpoint; a checkpoint of a module of this package has several.
        like: a network of their kind.
        last: how many networks to read, counted from the end; by default all.
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
    networks = [pair for file in files for pair in read_networks_of(file, root, like, prefix)]
    chosen = _without_copies(networks)[0 if last is None else -last :]
    return P.stack([network for network, _ in chosen]), [record for _, record in chosen]


def _without_copies(
    networks: list[tuple[Params, dict[str, Any]]],
) -> list[tuple[Params, dict[str, Any]]]:
    """Leave out each ``last.ckpt`` that is of the same step as another file of its folder."""

    def moment(record: dict[str, Any]) -> Any:
        return Path(record["file"]).parent, record.get("step"), record.get("epoch")

    def is_last(record: dict[str, Any]) -> bool:
        return Path(record["file"]).name == "last.ckpt" and "step" in record

    others = {moment(record) for _, record in networks if not is_last(record)}
    return [(n, r) for n, r in networks if not is_last(r) or moment(r) not in others]


def _of_bank(
    bank: CheckpointBank, like: nn.Module, last: int | None
) -> tuple[Params, list[dict[str, Any]]]:
    if len(bank) == 0:
        raise ValueError(f"The bank {bank.path} is empty.")
    start = 0 if last is None else max(0, len(bank) - last)
    rows = slice(start, len(bank))
    networks = bank[rows]
    for name, tensor in P.of(like).items():
        shape = networks[name].shape[1:] if name in networks else None
        if shape != tensor.shape:
            misfit = "is not in it" if shape is None else f"has shape {tuple(shape)}"
            raise ValueError(f"The bank {bank.path} does not fit: {name!r} {misfit}.")
    return {name: networks[name] for name in P.of(like)}, bank.records[rows]

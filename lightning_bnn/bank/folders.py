"""Checkpoints of earlier runs into a bank, and a bank back into files."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from lightning_bnn import params as P
from lightning_bnn.bank.checkpoint_bank import CheckpointBank
from lightning_bnn.bank.state_files import (
    FORMATS,
    find_prefix,
    natural_order,
    read_state,
    strip_prefix,
)
from lightning_bnn.params import Params

__all__ = ["checkpoint_files", "export_files", "import_files", "read_networks_of"]

Networks = Iterator[tuple[Params, dict[str, Any]]]
"""Networks one by one, and what is known of each."""
_BATCH_BYTES, _BATCH_NETWORKS = 2**26, 1024
_MEMBERS = "networks."
"""The prefix behind which modules of this package keep their members."""


def import_files(
    bank: CheckpointBank,
    folder: str | os.PathLike[str],
    like: nn.Module | None = None,
    prefix: str | None = None,
    pattern: str = "**/*",
) -> int:
    """Add every checkpoint of a folder to a bank, in natural order of the names.

    Args:
        bank: open for appending.
        folder: with Lightning ``.ckpt`` files, state dicts (``.pt``, ``.pth``) or ``.safetensors``.
        like: a network of the kind that is looked for; its names are found behind any prefix, and
            what else a checkpoint holds is left out.
        prefix: what stands before the names of the network in the files, such as ``"net."``.
        pattern: which files.

    Returns:
        How many networks were added; each record holds the file, and step and epoch if known.

    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> for k in (10, 9):
    ...     torch.save({"net.w": torch.full((2,), k)}, f"{folder}/epoch={k}.pt")
    >>> bank = CheckpointBank(tempfile.mkdtemp())
    >>> import_files(bank, folder, prefix="net."), bank[0]["w"]
    (2, tensor([9, 9]))
    """
    root = Path(folder)
    paths = checkpoint_files(root, pattern)
    networks = (network for path in paths for network in read_networks_of(path, root, like, prefix))
    before = len(bank)
    for stack, records in batched(networks):
        bank.extend(stack, records)
    return len(bank) - before


def checkpoint_files(folder: Path, pattern: str = "**/*") -> list[Path]:
    """The files of a folder that may hold networks, in natural order of their names."""
    paths = [p for p in folder.glob(pattern) if p.suffix in FORMATS and p.is_file()]
    if not paths:
        raise ValueError(f"There is no {', '.join(FORMATS)} file in {folder}.")
    return sorted(paths, key=lambda p: natural_order(p.relative_to(folder)))


def batched(networks: Networks) -> Iterator[tuple[Params, list[dict[str, Any]]]]:
    """Networks in stacks of some size, so that the files of a bank are not tiny."""
    for first, record in networks:
        size = max(1, sum(t.nbytes for t in first.values()))
        more = min(_BATCH_NETWORKS, -(-_BATCH_BYTES // size)) - 1
        batch = [(first, record), *itertools.islice(networks, more)]
        yield P.stack([network for network, _ in batch]), [record for _, record in batch]


def read_networks_of(
    path: Path, root: Path, like: nn.Module | None, prefix: str | None
) -> list[tuple[Params, dict[str, Any]]]:
    """The network of a file, or all members of a module of this package, with their records."""
    state, record = read_state(path)
    record["file"] = path.relative_to(root).as_posix()
    if like is not None:
        wanted = P.of(like)
        members = strip_prefix(state, _MEMBERS)
        if prefix is None and _are_members(members, wanted):
            stack = P.unstack({name: members[name] for name in wanted})
            return [(network, {**record, "member": m}) for m, network in enumerate(stack)]
        return [
            (strip_prefix(state, find_prefix(path, state, wanted, prefix), list(wanted)), record)
        ]
    network = strip_prefix(state, prefix or "")
    if not network:
        raise ValueError(f"{path} has no names that start with {prefix!r}.")
    return [(network, record)]


def _are_members(members: Params, wanted: Params) -> bool:
    """Whether these tensors are several networks of the wanted kind, stacked."""
    return wanted.keys() <= members.keys() and all(
        members[name].shape[1:] == t.shape and members[name].ndim == t.ndim + 1
        for name, t in wanted.items()
    )


def export_files(
    bank: CheckpointBank,
    folder: str | os.PathLike[str],
    kind: Literal["safetensors", "pt"] = "safetensors",
    prefix: str = "",
) -> list[Path]:
    """Write every network of a bank to a file of its own.

    Args:
        bank: any bank.
        folder: where to write; it is made.
        kind: ``"safetensors"``, or ``"pt"`` for `torch.load`.
        prefix: put before every name, such as ``"net."``.

    >>> import tempfile
    >>> bank = CheckpointBank(tempfile.mkdtemp())
    >>> bank.extend({"w": torch.arange(2.0)[:, None]})
    >>> paths = export_files(bank, tempfile.mkdtemp(), kind="pt", prefix="net.")
    >>> [path.name for path in paths], torch.load(paths[1])
    (['network-0.pt', 'network-1.pt'], {'net.w': tensor([1.])})
    """
    if kind not in ("safetensors", "pt"):
        raise ValueError(f"`kind` must be safetensors or pt, got {kind!r}.")
    root = Path(folder)
    root.mkdir(parents=True, exist_ok=True)
    width = len(str(max(0, len(bank) - 1)))
    paths = []
    for row, network in enumerate(bank):
        path = root / f"network-{row:0{width}d}.{kind}"
        _save(path, {prefix + name: tensor for name, tensor in network.items()})
        paths.append(path)
    return paths


def _save(path: Path, state: Params) -> None:
    if path.suffix == ".pt":
        torch.save(state, path)
        return
    from safetensors.torch import save_file

    save_file(state, path)

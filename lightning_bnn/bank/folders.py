"""Banks and files: import checkpoints, export safetensors, read networks from any source."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from lightning_bnn.bank.checkpoint_bank import CheckpointBank
from weightsym import params as P
from weightsym.files import (
    FORMATS,
    LabelledNetworks,
    checkpoint_files,
    draft_of,
    networks_in,
    save_tensors,
)
from weightsym.files import read_networks as read_files
from weightsym.params import Params, check_count

_BATCH_BYTES, _BATCH_NETWORKS = 2**26, 1024


def import_files(
    bank: CheckpointBank,
    source: str | os.PathLike[str],
    like: nn.Module | None = None,
    prefix: str | None = None,
    pattern: str = "**/*",
) -> int:
    """Append every network of a folder or a file to a bank, in natural order of the names.

    Archives have the format of the checkpoint data set of Laurent et al. (2024): gzipped tar files
    ``models/<name>/<name>-<first>-<last>.tgz`` of safetensors, one file per network.

    Args:
        bank: open for appending.
        source: folder or file of Lightning ``.ckpt`` files, state dicts (``.pt``, ``.pth``),
            ``.safetensors`` or ``.tgz``.
        like: a network of the same architecture; its names are found behind any prefix, and tensors
            that do not belong to it are omitted.
        prefix: of the names of the network in the files, such as ``"net."``.
        pattern: of the file names.

    Returns:
        How many networks were added; each record holds the file, and step and epoch if known.

    >>> import tempfile
    >>> import torch
    >>> folder = tempfile.mkdtemp()
    >>> for k in (10, 9):
    ...     torch.save({"net.w": torch.full((2,), k)}, f"{folder}/epoch={k}.pt")
    >>> bank = CheckpointBank(tempfile.mkdtemp())
    >>> import_files(bank, folder, prefix="net."), bank[0]["w"]
    (2, tensor([9, 9]))
    """
    path = Path(source)
    root = path.parent if path.is_file() else path
    paths = [path] if path.is_file() else checkpoint_files(root, pattern, (*FORMATS, ".tgz"))
    files = (network for path in paths for network in networks_in(path, root, like, prefix))
    networks = _of_one_kind(files, bank, root)
    before = len(bank)
    for first, record in networks:
        size = max(1, sum(t.nbytes for t in first.values()))
        more = min(_BATCH_NETWORKS, -(-_BATCH_BYTES // size)) - 1
        batch = [(first, record), *itertools.islice(networks, more)]
        bank.extend(P.stack([network for network, _ in batch]), [record for _, record in batch])
    return len(bank) - before


def _of_one_kind(networks: LabelledNetworks, bank: CheckpointBank, root: Path) -> LabelledNetworks:
    """Pass networks on, and name the file of the first one with another architecture."""
    first = {name: t.shape[1:] for name, t in bank[:0].items()}
    for network, record in networks:
        shapes = {name: t.shape for name, t in network.items()}
        first = first or shapes
        if shapes != first:
            odd = next(n for n in (*shapes, *first) if shapes.get(n) != first.get(n))
            raise ValueError(
                f"{root / record['file']} holds a network of a different architecture from those "
                f"before it ({odd!r} differs): add files of one architecture only."
            )
        yield network, record


def export_files(bank: CheckpointBank, folder: str | os.PathLike[str]) -> list[Path]:
    """Write every network of a bank to a safetensors file of its own.

    Args:
        bank: any bank.
        folder: target folder, created if needed.

    >>> import tempfile
    >>> import torch
    >>> from weightsym.files import read_state
    >>> bank = CheckpointBank(tempfile.mkdtemp())
    >>> bank.extend({"w": torch.arange(2.0)[:, None]})
    >>> paths = export_files(bank, tempfile.mkdtemp())
    >>> [path.name for path in paths], read_state(paths[1])[0]
    (['network-0.safetensors', 'network-1.safetensors'], {'w': tensor([1.])})
    """
    root = Path(folder)
    root.mkdir(parents=True, exist_ok=True)
    width = len(str(max(0, len(bank) - 1)))
    paths = [root / f"network-{row:0{width}d}.safetensors" for row in range(len(bank))]
    for path, network in zip(paths, bank, strict=True):
        with draft_of(path) as draft:
            save_tensors(draft, network)
    return paths


def read_networks(
    source: str | os.PathLike[str],
    like: nn.Module,
    last: int | None = None,
    prefix: str | None = None,
) -> tuple[Params, list[dict[str, Any]]]:
    """Return a stack of networks, and a record of each.

    Args:
        source: folder of a `CheckpointBank`, folder of checkpoints (in natural order of their
            names), or one checkpoint; one of a module of this package has several networks.
        like: a network of their architecture.
        last: number of networks to read, counted from the end; by default all.
        prefix: of the names of the network in checkpoints.

    >>> import tempfile
    >>> net, bank = nn.Linear(2, 1), CheckpointBank(tempfile.mkdtemp())
    >>> for step in range(3):
    ...     bank.append(P.of(net), step=step)
    >>> stack, records = read_networks(bank.path, net, last=2)
    >>> stack["weight"].shape, records[0]
    (torch.Size([2, 1, 2]), {'step': 1})
    """
    path = Path(source)
    if not (path / "manifest.jsonl").is_file():
        return read_files(path, like, last, prefix)
    if last is not None:
        check_count("last", last)
    return _of_bank(CheckpointBank(path, "r"), like, last)


def chains_of(records: Sequence[Mapping[str, Any]]) -> list[int] | None:
    """Group networks by member or by run.

    Networks of different folders belong to different runs. Those of one folder, or of a bank,
    belong to one run if all their steps differ.

    >>> chains_of([{"step": 1}, {"step": 2}]), chains_of([{"step": 2}, {"step": 2}])
    ([0, 0], None)
    """
    members = [record.get("member", 0) for record in records]
    if len(set(members)) > 1:
        return members
    folders = [str(Path(record.get("file", "")).parent) for record in records]
    steps: dict[str, list[Any]] = {}
    for folder, record in zip(folders, records, strict=True):
        steps.setdefault(folder, []).append(record.get("step"))
    one_run = all(None not in s and len(set(s)) == len(s) for s in steps.values())
    if len(records) == 1 or not one_run or len(steps) == len(records):
        return None
    return [list(steps).index(folder) for folder in folders]


def _of_bank(
    bank: CheckpointBank, like: nn.Module, last: int | None
) -> tuple[Params, list[dict[str, Any]]]:
    if len(bank) == 0:
        raise ValueError(f"The bank {bank.path} is empty.")
    start = 0 if last is None else max(0, len(bank) - last)
    rows = slice(start, len(bank))
    networks, fixed = bank[rows], P.fixed_weights(like)
    wanted = {n: t for n, t in P.of(like).items() if n in networks or n not in fixed}
    for name, tensor in wanted.items():
        shape = networks[name].shape[1:] if name in networks else None
        if shape != tensor.shape:
            misfit = "is not in it" if shape is None else f"has shape {tuple(shape)}"
            raise ValueError(f"The bank {bank.path} does not match: {name!r} {misfit}.")
    return {name: networks[name] for name in wanted}, bank.records[rows]

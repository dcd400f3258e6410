"""Archives of networks as published: ``models/<name>/<name>-<first>-<last>.tgz``.

The layout of the checkpoint data set of Laurent et al. (2024): gzipped tar files of float16
safetensors, one file per network.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import itertools
import os
import re
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from lightning_bnn.bank.checkpoint_bank import CheckpointBank
from lightning_bnn.bank.folders import batched, natural_order
from lightning_bnn.params import Params

__all__ = ["export_archives", "import_archives"]

_DAMAGE = (tarfile.TarError, gzip.BadGzipFile, EOFError, zlib.error, SafetensorError, ValueError)
"""What may be raised by reading a damaged archive."""


def import_archives(
    bank: CheckpointBank, path: str | os.PathLike[str], limit: int | None = None
) -> int:
    """Add the networks of one archive, or of all archives of a folder, to a bank.

    Args:
        bank: open for appending.
        path: a ``.tgz`` file, or a folder with such files.
        limit: how many networks to add at most; by default all.

    Returns:
        How many networks were added; each record holds archive, file and number.

    >>> import tempfile
    >>> bank, copy = CheckpointBank(tempfile.mkdtemp()), CheckpointBank(tempfile.mkdtemp())
    >>> bank.extend({"w": torch.arange(5.0)[:, None]})
    >>> folder = tempfile.mkdtemp()
    >>> archives = export_archives(bank, folder, "tiny", per_archive=2)
    >>> import_archives(copy, folder), copy[3]["w"].float(), copy.records[3]["number"]
    (5, tensor([3.]), 3)
    """
    if limit is not None and limit < 1:
        raise ValueError(f"`limit` must be at least 1, got {limit}.")
    path = Path(path)
    archives = [path] if path.is_file() else sorted(path.glob("**/*.tgz"), key=natural_order)
    if not archives:
        raise ValueError(f"`path`: there is no .tgz archive at {path}.")
    before = len(bank)
    for stack, records in batched(itertools.islice(_networks(archives), limit)):
        bank.extend(stack, records)
    return len(bank) - before


def _networks(archives: list[Path]) -> Iterator[tuple[Params, dict[str, Any]]]:
    for archive in archives:
        for name, network in _members(archive):
            record: dict[str, Any] = {"archive": archive.name, "file": name}
            numbers = re.findall(r"\d+", Path(name).stem)
            if numbers:
                record["number"] = int(numbers[-1])
            yield network, record


def _members(archive: Path) -> Iterator[tuple[str, Params]]:
    """Networks in the order of the archive, which can only be read from front to back."""
    try:
        _check_crc(archive)
        with tarfile.open(archive, "r:gz") as tar:
            for member in tar:
                if member.isfile() and member.name.endswith(".safetensors"):
                    file = tar.extractfile(member)
                    assert file is not None
                    yield member.name, load(file.read())
    except _DAMAGE as error:
        raise ValueError(f"Archive {archive} is damaged: {error}.") from error


def _check_crc(archive: Path) -> None:
    """Read the whole archive once: its CRC is at its end, which reading networks does not reach."""
    with gzip.open(archive) as file:
        while file.read(2**22):
            continue


# ------------------------------------------------------------ export
def export_archives(
    bank: CheckpointBank,
    folder: str | os.PathLike[str],
    name: str,
    per_archive: int = 1024,
    dtype: torch.dtype = torch.float16,
    about: str = "",
    licence: str = "apache-2.0",
) -> list[Path]:
    """Write a bank as a data set: archives, their hashes and a data card.

    Args:
        bank: any bank.
        folder: where to write; it is made.
        name: of the networks, such as ``"mnist-optunet"``.
        per_archive: networks in one file.
        dtype: of floating tensors in the files.
        about: what the data card says about how the networks were trained.
        licence: what the data card names.

    Returns:
        The archives.

    >>> import tempfile
    >>> bank = CheckpointBank(tempfile.mkdtemp())
    >>> bank.extend({"w": torch.arange(5.0)[:, None]})
    >>> archives = export_archives(bank, tempfile.mkdtemp(), "tiny", per_archive=2)
    >>> len(archives), archives[0].suffix
    (3, '.tgz')
    """
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name):
        raise ValueError(f"`name` must be letters, digits, dots and dashes, got {name!r}.")
    if per_archive < 1:
        raise ValueError(f"`per_archive` must be at least 1, got {per_archive}.")
    if not len(bank):
        raise ValueError("`bank` is empty.")
    root = Path(folder) / "models" / name
    root.mkdir(parents=True, exist_ok=True)
    archives = [
        _write_archive(bank, root, name, first, min(first + per_archive, len(bank)), dtype)
        for first in range(0, len(bank), per_archive)
    ]
    hashes = [f"{_sha256(path)}  {path.relative_to(folder).as_posix()}\n" for path in archives]
    (Path(folder) / "SHA256SUMS").write_text("".join(hashes))
    (Path(folder) / "README.md").write_text(_card(bank, name, archives, dtype, about, licence))
    return archives


def _write_archive(
    bank: CheckpointBank, root: Path, name: str, first: int, stop: int, dtype: torch.dtype
) -> Path:
    path = root / f"{name}-{first}-{stop - 1}.tgz"
    with tarfile.open(path, "w:gz", compresslevel=1) as tar:
        for row in range(first, stop):
            network = {
                key: (t.to(dtype) if t.is_floating_point() else t).contiguous()
                for key, t in bank[row].items()
            }
            content = save(network)
            member = tarfile.TarInfo(f"{name}-{row}.safetensors")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(2**22):
            digest.update(block)
    return digest.hexdigest()


def _card(
    bank: CheckpointBank,
    name: str,
    archives: list[Path],
    dtype: torch.dtype,
    about: str,
    licence: str,
) -> str:
    weights = sum(shape.numel() for shape in bank.shapes.values())
    size = sum(path.stat().st_size for path in archives)
    layers = "\n".join(f"| `{k}` | {tuple(s)} |" for k, s in bank.shapes.items())
    return f"""---
license: {licence}
tags: [bayesian-neural-networks, checkpoints]
---

# {name}

{len(bank)} independently stored networks of {weights} weights each, in {len(archives)} archives
({size / 1e6:.3g} MB). Each archive holds one safetensors file per network, floating tensors as
{str(dtype).removeprefix("torch.")}. `SHA256SUMS` has the hashes.

{about}

| layer | shape |
|---|---|
{layers}

```python
from lightning_bnn.bank import CheckpointBank, import_archives

bank = CheckpointBank("bank")
import_archives(bank, "models/{name}")
```
"""

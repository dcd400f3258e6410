"""Folders for exchange: tensors as safetensors, everything else as JSON, with SHA-256."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from weightsym.files import read_file, read_json, save_tensors, write_whole
from weightsym.params import Params

INDEX, TENSORS = "contents.json", "tensors-[0-9][0-9][0-9][0-9][0-9].safetensors"
"""Names of all files of a bundle; nothing else in its folder is read."""
_FORMAT = 1
DAMAGES = LookupError, TypeError, ValueError, RuntimeError, AttributeError, ArithmeticError
"""Errors that the content of a damaged bundle can raise."""
_UNFINISHED = ".unfinished"
"""Name of a file that marks a bundle being written."""


class Damaged(ValueError):
    """Raised for a bundle that differs from its hashes or format."""


def write_bundle(
    folder: str | os.PathLike[str],
    content: Mapping[str, Any],
    parts: Iterable[Params],
    texts: Mapping[str, str] | None = None,
) -> None:
    """Write tensors and plain data to a folder without a bundle, completely or not at all.

    The index is written last. The remains of a killed process are overwritten.

    Args:
        folder: created if needed.
        content: plain data, with the ``kind`` of the bundle.
        parts: tensors for one file each, one in memory at a time.
        texts: further files, by name.
    """
    root = Path(folder)
    try:
        root.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise ValueError(f"{root} is not a folder and cannot be created: choose another.") from None
    marker, is_full = root / _UNFINISHED, any(root.glob(TENSORS))
    if os.path.lexists(root / INDEX) or (is_full and not os.path.lexists(marker)):
        raise ValueError(f"{root} already holds a posterior or a bank: choose another folder.")
    try:
        _write(root, marker, content, parts, texts or {})
    except BaseException:
        for path in (*root.glob(TENSORS), marker):
            path.unlink(missing_ok=True)
        raise
    marker.unlink()


def _write(
    root: Path,
    marker: Path,
    content: Mapping[str, Any],
    parts: Iterable[Params],
    texts: Mapping[str, str],
) -> None:
    if not os.path.lexists(marker):
        marker.open("x").close()
    for path in root.glob(TENSORS):
        path.unlink()
    files = {}
    for k, tensors in enumerate(parts):
        path = root / f"tensors-{k:05d}.safetensors"
        _check_numbers(path, tensors)
        save_tensors(path, tensors)
        files[path.name] = _sha256(path)
    for name, text in texts.items():
        write_whole(root / name, text)
    index = json.dumps({"format": _FORMAT, "files": files, **content}, indent=1)
    write_whole(root / INDEX, index + "\n")  # NaN is NaN in it, as in the journal of a bank


def read_bundle(folder: str | os.PathLike[str]) -> tuple[dict[str, Any], Iterator[Params]]:
    """Read the plain data of a bundle with its ``folder``, and its tensors file by file.

    Args:
        folder: with regular files that match their hashes.
    """
    path = Path(folder) / INDEX
    if not path.is_file():
        raise ValueError(f"There is no {INDEX} in {folder}: nothing was saved there.")
    try:
        content = read_json(path)
    except ValueError as error:
        raise Damaged(str(error)) from None
    if content.get("format") != _FORMAT:
        version = repr(content.get("format"))[:80]
        raise ValueError(f"{path} has format {version}, but this version reads {_FORMAT}.")
    files = content.get("files")
    if not isinstance(files, dict) or list(files) != [
        f"tensors-{k:05d}.safetensors" for k in range(len(files))
    ]:
        raise ValueError(f"{path} names files outside the bundle: only {TENSORS} are read.")
    for name, digest in files.items():
        file = path.with_name(name)
        if not file.is_file() or _sha256(file) != digest:
            raise Damaged(f"{file} is missing or differs from its hash: download it again.")
    content |= {"kind": str(content.get("kind"))[:80], "folder": str(folder)}
    return content, map(_tensors, map(path.with_name, files))


def _tensors(path: Path) -> Params:
    tensors = {name: stored.read().clone() for name, stored in read_file(path).tensors.items()}
    _check_numbers(path, tensors)
    return tensors


def _check_numbers(path: Path, tensors: Params) -> None:
    bad = next((name for name, tensor in tensors.items() if _has_nan(tensor)), None)
    if bad is not None:
        raise ValueError(f"{path}: {bad!r} holds NaN.")


def _has_nan(tensor: Tensor) -> bool:
    wide = tensor.float() if tensor.dtype.itemsize == 1 else tensor  # torch has no test of float8
    return bool(wide.isnan().any())


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()

"""Atomic writing of a network in the format of another one, tensor by tensor."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch import Tensor

from weightsym.networks.files.drafts import draft_of
from weightsym.networks.files.safetensors_format import TensorFile, write_file
from weightsym.networks.files.stored import INDEX, StoredNetwork, companions


def check_target(target: Path, like: StoredNetwork, overwrite: bool = False) -> None:
    """Refuse an invalid target before the computation begins.

    Args:
        target: what shall be written: a .safetensors file, or a folder if ``like`` is one.
        like: the network whose form is taken.
        overwrite: whether what is there may be replaced.

    >>> import tempfile
    >>> import torch
    >>> from weightsym.files import open_network
    >>> folder = Path(tempfile.mkdtemp())
    >>> torch.save(torch.nn.Linear(2, 3).state_dict(), folder / "net.pt")
    >>> check_target(folder / "new.safetensors", open_network(folder / "net.pt"))  # all is well
    >>> try:
    ...     check_target(folder / "new.pt", open_network(folder / "net.pt"))
    ... except ValueError as error:
    ...     str(error).partition(",")[0]
    '`--out` must be a .safetensors file'
    """
    if like.is_folder == (target.suffix == ".safetensors"):
        form = "a folder, as the network is one" if like.is_folder else "a .safetensors file"
        raise ValueError(f"`--out` must be {form}, got {target}.")
    _check_free(target, like, overwrite)
    if shutil.disk_usage(target.parent).free <= like.nbytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))


def check_path(path: Path, overwrite: bool) -> None:
    """Refuse a path in a missing folder, or one that exists and must not be overwritten.

    Args:
        path: what shall be written.
        overwrite: whether what is there may be replaced.
    """
    if not path.parent.is_dir():
        raise ValueError(f"`--out`: there is no folder {path.parent}.")
    if os.path.lexists(path) and not overwrite:
        raise ValueError(f"`--out`: {path} already exists; `--overwrite true` replaces it.")


def _check_free(target: Path, like: StoredNetwork, overwrite: bool) -> None:
    check_path(target, overwrite)
    if not os.path.lexists(target):
        return
    if target.is_dir() != like.is_folder or (target.is_symlink() and like.is_folder):
        raise ValueError(
            f"`--out`: {target} exists as a file or folder of the wrong type, and is not replaced."
        )
    if like.is_folder:
        ours = {s.name for s in like.shards} | {p.name for p in companions(like.path)}
        check_foreign(target, ours)


def check_foreign(folder: Path, ours: Collection[str]) -> None:
    """Refuse to replace a folder that contains other files.

    Args:
        folder: which would be replaced.
        ours: names of the files that may be there.
    """
    foreign = sorted(p.name for p in folder.iterdir() if p.name not in ours or p.is_dir())
    if foreign:
        raise ValueError(f"`--out`: {folder} also contains {foreign[0]!r}, and is not replaced.")


def write_like(
    like: StoredNetwork, target: Path, value: Callable[[str], Tensor], overwrite: bool = False
) -> None:
    """Write a network with the names, dtypes, metadata and files of another one.

    Args:
        like: the network whose form is taken.
        target: a .safetensors file, or a folder if ``like`` is one.
        value: gives the tensor for a name in the file; only one is held at a time.
        overwrite: whether what is there may be replaced.

    >>> import tempfile
    >>> import torch
    >>> from weightsym.files import open_network
    >>> folder, net = Path(tempfile.mkdtemp()), torch.nn.Linear(2, 3)
    >>> torch.save(net.state_dict(), folder / "net.pt")
    >>> like, target = open_network(folder / "net.pt"), folder / "double.safetensors"
    >>> write_like(like, target, lambda name: 2 * like.read(name))
    >>> torch.equal(open_network(target).read("bias"), 2 * net.bias)
    True
    """
    with draft_of(target) as draft:
        if like.is_folder:
            _write_folder(like, draft, value)
        else:
            _write_shard(like.shards[0], draft, value)
        _check_free(target, like, overwrite)


def _write_folder(like: StoredNetwork, folder: Path, value: Callable[[str], Tensor]) -> None:
    folder.mkdir()
    for path in companions(like.path):
        if path.name != INDEX or not _is_one_file(like):  # which nobody has read
            shutil.copyfile(path, folder / path.name)
    for shard in like.shards:
        _write_shard(shard, folder / shard.name, value)


def _write_shard(shard: TensorFile, path: Path, value: Callable[[str], Tensor]) -> None:
    tensors = {n: replace(t, read=partial(value, n)) for n, t in shard.tensors.items()}
    write_file(path, tensors, shard.metadata)


def _is_one_file(like: StoredNetwork) -> bool:
    return [shard.name for shard in like.shards] == ["model.safetensors"]

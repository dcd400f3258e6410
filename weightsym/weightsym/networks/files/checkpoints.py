"""Networks in files and folders: Lightning checkpoints, state dicts, safetensors."""

from __future__ import annotations

import gzip
import os
import re
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from weightsym.arguments import check_count
from weightsym.networks import dicts as P
from weightsym.networks.dicts import Params
from weightsym.networks.files.loading import load
from weightsym.networks.files.names import NetworkNames, find_names
from weightsym.networks.files.safetensors_format import check_names, read_bytes, read_file
from weightsym.networks.forward import first_line

LabelledNetworks = Iterator[tuple[Params, dict[str, Any]]]
"""Networks one by one, and what is known of each."""
FORMATS = (".ckpt", ".pt", ".pth", ".safetensors")
_NESTED = ("state_dict", "model_state_dict", "model")
_MEMBERS = "state.networks."
"""The prefix behind which modules of `lightning_bnn` keep their members."""
_DAMAGES = tarfile.TarError, EOFError, zlib.error, ValueError, TypeError, OSError


def read_state(path: Path, mmap: bool = False) -> tuple[Params, dict[str, Any]]:
    """Read the tensors of a file by name, and its step and epoch if it has them.

    Args:
        path: a file of one of `FORMATS`.
        mmap: leave tensors that torch has written on the disk until they are used.

    >>> import tempfile
    >>> import torch
    >>> path = Path(tempfile.mkdtemp()) / "run.ckpt"
    >>> torch.save({"state_dict": {"net.w": torch.ones(2)}, "global_step": 30, "epoch": 2}, path)
    >>> read_state(path)
    ({'net.w': tensor([1., 1.])}, {'step': 30, 'epoch': 2})
    """
    if path.suffix == ".safetensors":
        stored = read_file(path).tensors
        return {name: tensor.read().clone() for name, tensor in stored.items()}, {}
    content = load(path, mmap=mmap)
    content = content if isinstance(content, dict) else {}
    nested = (content[key] for key in _NESTED if isinstance(content.get(key), dict))
    state = next(nested, content)
    if not state or not all(isinstance(n, str) and isinstance(t, Tensor) for n, t in state.items()):
        raise ValueError(f"{path} is not a state dict: it must map names to tensors.")
    check_names(path, state)
    numbers = {"global_step": "step", "epoch": "epoch"}
    record = {to: content[key] for key, to in numbers.items() if isinstance(content.get(key), int)}
    return {name.replace("_orig_mod.", ""): t for name, t in state.items()}, record


def strip_prefix(state: Params, prefix: str) -> Params:
    """Select the tensors whose names start with a prefix, and remove it.

    >>> import torch
    >>> state = {"net.w": torch.ones(1), "net.b": torch.zeros(1), "loss.w": torch.ones(3)}
    >>> strip_prefix(state, "net.")
    {'w': tensor([1.]), 'b': tensor([0.])}
    """
    return {n.removeprefix(prefix): t for n, t in state.items() if n.startswith(prefix)}


def checkpoint_files(
    folder: Path, pattern: str = "**/*", formats: Sequence[str] = FORMATS
) -> list[Path]:
    """List the files of a folder that may contain networks, in natural order of their names."""
    paths = [p for p in folder.glob(pattern) if p.suffix in formats and p.is_file()]
    if not paths:
        raise ValueError(f"There is no {', '.join(formats)} file in {folder}.")
    return sorted(paths, key=lambda p: _natural_order(p.relative_to(folder)))


def _natural_order(path: Path) -> list[tuple[int, str]]:
    """Return a sort key that puts epoch=9 before epoch=10."""
    pieces = re.split(r"(\d+)", path.as_posix())
    return [(int(p), "") if p.isdigit() else (-1, p) for p in pieces if p]


def networks_in(
    path: Path, root: Path, like: nn.Module | None, prefix: str | None
) -> LabelledNetworks:
    """Read the networks of a file one by one, and all members of a module of `lightning_bnn`.

    Args:
        path: a file of one of `FORMATS`, or a gzipped tar file (.tgz) of safetensors.
        root: the folder from which records name the file.
        like: a network of the kind that is looked for, if it is known.
        prefix: of the names of the network in the file.
    """
    name = path.relative_to(root).as_posix()
    if path.suffix == ".tgz":
        for member, state in _archived(path):
            yield from _of_state(path, state, {"file": f"{name}/{member}"}, like, prefix)
    else:
        state, record = read_state(path)
        yield from _of_state(path, state, {**record, "file": name}, like, prefix)


def _archived(archive: Path) -> Iterator[tuple[str, Params]]:
    """Read the networks of an archive in order."""
    try:
        with gzip.open(archive) as file:  # to its end, where its CRC is
            while file.read(2**22):
                continue
        with tarfile.open(archive, "r:gz") as tar:
            for member in tar:
                if member.isfile() and member.name.endswith(".safetensors"):
                    if not member.name.isprintable():
                        raise ValueError(f"it names a file {member.name!r}")
                    content = tar.extractfile(member)
                    assert content is not None
                    yield member.name, read_bytes(archive / member.name, content.read())
    except _DAMAGES as error:
        raise ValueError(f"Archive {archive} is damaged: {first_line(error)}") from error


def _of_state(
    path: Path, state: Params, record: dict[str, Any], like: nn.Module | None, prefix: str | None
) -> LabelledNetworks:
    if like is not None:
        members, fixed = strip_prefix(state, _MEMBERS), P.fixed_weights(like)
        wanted = {n: t for n, t in P.of(like).items() if n in members or n not in fixed}
        if prefix is None and _are_members(members, wanted):
            for m, network in enumerate(P.unstack({name: members[name] for name in wanted})):
                yield network, {**record, "member": m}
            return
        places, _ = find_names(path, state, NetworkNames.of(like), prefix)
        yield {name: state[key] for name, key in places.items()}, record
        return
    network = strip_prefix(state, prefix or "")
    if not network:
        raise ValueError(f"{path} has no names that start with {prefix!r}.")
    yield network, record


def _are_members(members: Params, wanted: Params) -> bool:
    """Return whether tensors are a stack of networks of the given architecture."""
    return wanted.keys() <= members.keys() and all(
        members[name].shape[1:] == t.shape and members[name].ndim == t.ndim + 1
        for name, t in wanted.items()
    )


def read_networks(
    source: str | os.PathLike[str],
    like: nn.Module,
    last: int | None = None,
    prefix: str | None = None,
) -> tuple[Params, list[dict[str, Any]]]:
    """Read a stack of networks, and the available metadata of each.

    Args:
        source: folder of checkpoints (in natural order of their names), or one checkpoint; one of a
            module of `lightning_bnn` has several networks.
        like: a network of their kind.
        last: how many networks to read, counted from the end; by default all.
        prefix: what stands before the names of the network in checkpoints.

    >>> import tempfile
    >>> import torch
    >>> net, folder = nn.Linear(2, 1), tempfile.mkdtemp()
    >>> for step in range(3):
    ...     content = {"state_dict": net.state_dict(), "global_step": step}
    ...     torch.save(content, f"{folder}/{step}.ckpt")
    >>> stack, records = read_networks(folder, net, last=2)
    >>> stack["weight"].shape, records[0]
    (torch.Size([2, 1, 2]), {'step': 1, 'file': '1.ckpt'})
    """
    path = Path(source)
    if not path.exists():
        raise ValueError(f"There are no networks at {path}: it does not exist.")
    check_count("last", last, optional=True)
    root, files = (path.parent, [path]) if path.is_file() else (path, checkpoint_files(path))
    networks = [pair for file in files for pair in networks_in(file, root, like, prefix)]
    chosen = _without_copies(networks)[0 if last is None else -last :]
    return P.stack([network for network, _ in chosen]), [record for _, record in chosen]


def _without_copies(
    networks: list[tuple[Params, dict[str, Any]]],
) -> list[tuple[Params, dict[str, Any]]]:
    """Omit each ``last.ckpt`` with the same step as another file of its folder."""

    def moment(record: dict[str, Any]) -> Any:
        return Path(record["file"]).parent, record.get("step"), record.get("epoch")

    def is_last(record: dict[str, Any]) -> bool:
        return Path(record["file"]).name == "last.ckpt" and "step" in record

    others = {moment(record) for _, record in networks if not is_last(record)}
    return [(n, r) for n, r in networks if not is_last(r) or moment(r) not in others]

"""Networks in files and folders: Lightning checkpoints, state dicts, safetensors, banks."""

from __future__ import annotations

import gzip
import itertools
import os
import re
import tarfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lightning_bnn import params as P
from lightning_bnn.bank.checkpoint_bank import CheckpointBank
from lightning_bnn.bank.safetensors_format import save_tensors
from lightning_bnn.loading import load
from lightning_bnn.params import Params

__all__ = [
    "FORMATS",
    "checkpoint_files",
    "export_files",
    "find_prefix",
    "import_files",
    "misfit",
    "read_networks",
    "read_state",
    "strip_prefix",
]


Names = Mapping[str, str]
FORMATS = (".ckpt", ".pt", ".pth", ".safetensors")
_NESTED = ("state_dict", "model_state_dict", "model")


def read_state(path: Path, mmap: bool = False) -> tuple[Params, dict[str, Any]]:
    """The tensors of a file by name, and the step and epoch if the file has them.

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
        return _read_safetensors(path), {}
    content = load(path, mmap=mmap)
    content = content if isinstance(content, dict) else {}
    nested = (content[key] for key in _NESTED if isinstance(content.get(key), dict))
    state = next(nested, content)
    if not state or not all(isinstance(n, str) and isinstance(t, Tensor) for n, t in state.items()):
        raise ValueError(f"{path} is not a state dict: it must map names to tensors.")
    numbers = {"global_step": "step", "epoch": "epoch"}
    record = {to: content[key] for key, to in numbers.items() if isinstance(content.get(key), int)}
    return {name.replace("_orig_mod.", ""): t for name, t in state.items()}, record


def _read_safetensors(path: Path) -> Params:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is no safetensors file: {error}.") from error


def strip_prefix(state: Params, prefix: str, wanted: Sequence[str] | None = None) -> Params:
    """Select the wanted tensors whose names start with a prefix, and remove it.

    >>> import torch
    >>> state = {"net.w": torch.ones(1), "net.b": torch.zeros(1), "loss.w": torch.ones(3)}
    >>> strip_prefix(state, "net."), list(strip_prefix(state, "net.", wanted=["w"]))
    ({'w': tensor([1.]), 'b': tensor([0.])}, ['w'])
    """
    inner = {n.removeprefix(prefix): t for n, t in state.items() if n.startswith(prefix)}
    return inner if wanted is None else {name: inner[name] for name in wanted}


def find_prefix(path: Path, state: Params, wanted: Mapping[str, Tensor], given: str | None) -> str:
    """The one prefix with which all names and shapes of a network are in a file.

    >>> import torch
    >>> net = torch.nn.Linear(2, 1)
    >>> state = {f"model.net.{name}": t for name, t in net.state_dict().items()}
    >>> find_prefix(Path("run.ckpt"), state, net.state_dict(), given=None)
    'model.net.'
    """
    first = next(iter(wanted))
    candidates = sorted({n[: -len(first)] for n in state if n == first or n.endswith(f".{first}")})
    candidates = candidates if given is None else [given]
    misfits = {p: misfit(state, wanted, {n: p + n for n in wanted}) for p in candidates or [""]}
    fitting = [prefix for prefix, why in misfits.items() if why is None]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise ValueError(
            f"Several networks in {path} fit: {', '.join(map(repr, fitting))}. "
            "Choose one by its `prefix`."
        )
    raise ValueError(f"{path} does not fit: {next(iter(misfits.values()))}.")


def misfit(stored: Mapping[str, Any], wanted: Mapping[str, Tensor], places: Names) -> str | None:
    """Describe in half a sentence what a file lacks of a network, if anything.

    Args:
        stored: whatever has a shape, by name in the file.
        wanted: the tensors of the network.
        places: by name in the network, the name in the file.
    """
    missing = [name_in_file for name_in_file in places.values() if name_in_file not in stored]
    if missing:
        more = f" and {len(missing) - 1} more names" if len(missing) > 1 else ""
        return f"it lacks {missing[0]!r}{more}"
    for name, tensor in wanted.items():
        shape = stored[places[name]].shape
        if shape != tensor.shape:
            return (
                f"{places[name]!r} has shape {tuple(shape)}, the network has {tuple(tensor.shape)}"
            )
    return None


Networks = Iterator[tuple[Params, dict[str, Any]]]
"""Networks one by one, and what is known of each."""
_BATCH_BYTES, _BATCH_NETWORKS = 2**26, 1024
_MEMBERS = "networks."
"""The prefix behind which modules of this package keep their members."""


def import_files(
    bank: CheckpointBank,
    source: str | os.PathLike[str],
    like: nn.Module | None = None,
    prefix: str | None = None,
    pattern: str = "**/*",
) -> int:
    """Add every network of a folder or a file to a bank, in natural order of the names.

    Archives are those of the checkpoint data set of Laurent et al. (2024): gzipped tar files
    ``models/<name>/<name>-<first>-<last>.tgz`` of safetensors, one file per network.

    Args:
        bank: open for appending.
        source: with Lightning ``.ckpt`` files, state dicts (``.pt``, ``.pth``), ``.safetensors`` or
            ``.tgz``.
        like: a network of the kind that is looked for; its names are found behind any prefix, and
            tensors that do not belong to it are omitted.
        prefix: of the names of the network in the files, such as ``"net."``.
        pattern: which files.

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
    networks = (network for path in paths for network in _networks(path, root, like, prefix))
    before = len(bank)
    for first, record in networks:
        size = max(1, sum(t.nbytes for t in first.values()))
        more = min(_BATCH_NETWORKS, -(-_BATCH_BYTES // size)) - 1
        batch = [(first, record), *itertools.islice(networks, more)]
        bank.extend(P.stack([network for network, _ in batch]), [record for _, record in batch])
    return len(bank) - before


def checkpoint_files(
    folder: Path, pattern: str = "**/*", formats: Sequence[str] = FORMATS
) -> list[Path]:
    """List the files of a folder that may hold networks, in natural order of their names."""
    paths = [p for p in folder.glob(pattern) if p.suffix in formats and p.is_file()]
    if not paths:
        raise ValueError(f"There is no {', '.join(formats)} file in {folder}.")
    return sorted(paths, key=lambda p: _natural_order(p.relative_to(folder)))


def _natural_order(path: Path) -> list[tuple[int, str]]:
    """Return a sort key that puts epoch=9 before epoch=10."""
    pieces = re.split(r"(\d+)", path.as_posix())
    return [(int(p), "") if p.isdigit() else (-1, p) for p in pieces if p]


def _networks(path: Path, root: Path, like: nn.Module | None, prefix: str | None) -> Networks:
    """Read the networks of a file one by one, and all members of a module of this package."""
    name = path.relative_to(root).as_posix()
    if path.suffix == ".tgz":
        for member, state in _archived(path):
            yield from _of_state(path, state, {"file": f"{name}/{member}"}, like, prefix)
    else:
        state, record = read_state(path)
        yield from _of_state(path, state, {**record, "file": name}, like, prefix)


def _archived(archive: Path) -> Iterator[tuple[str, Params]]:
    """Read an archive, which can only be read from front to back."""
    from safetensors import SafetensorError
    from safetensors.torch import load as load_tensors

    try:
        with gzip.open(archive) as file:  # to its end, where its CRC is
            while file.read(2**22):
                continue
        with tarfile.open(archive, "r:gz") as tar:
            for member in tar:
                if member.isfile() and member.name.endswith(".safetensors"):
                    content = tar.extractfile(member)
                    assert content is not None
                    yield member.name, load_tensors(content.read())
    except (tarfile.TarError, EOFError, zlib.error, SafetensorError, ValueError, OSError) as error:
        raise ValueError(f"Archive {archive} is damaged: {error}.") from error


def _of_state(
    path: Path, state: Params, record: dict[str, Any], like: nn.Module | None, prefix: str | None
) -> Networks:
    if like is not None:
        wanted = P.of(like)
        members = strip_prefix(state, _MEMBERS)
        if prefix is None and _are_members(members, wanted):
            for m, network in enumerate(P.unstack({name: members[name] for name in wanted})):
                yield network, {**record, "member": m}
            return
        prefix = find_prefix(path, state, wanted, prefix)
    network = strip_prefix(state, prefix or "", None if like is None else list(wanted))
    if not network:
        raise ValueError(f"{path} has no names that start with {prefix!r}.")
    yield network, record


def _are_members(members: Params, wanted: Params) -> bool:
    """Tell whether these tensors are several networks of the wanted kind, stacked."""
    return wanted.keys() <= members.keys() and all(
        members[name].shape[1:] == t.shape and members[name].ndim == t.ndim + 1
        for name, t in wanted.items()
    )


def export_files(bank: CheckpointBank, folder: str | os.PathLike[str]) -> list[Path]:
    """Write every network of a bank to a safetensors file of its own.

    Args:
        bank: any bank.
        folder: where to write; it is made.

    >>> import tempfile
    >>> import torch
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
        path.unlink(missing_ok=True)
        save_tensors(path, network)
    return paths


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
    networks = [pair for file in files for pair in _networks(file, root, like, prefix)]
    chosen = _without_copies(networks)[0 if last is None else -last :]
    return P.stack([network for network, _ in chosen]), [record for _, record in chosen]


def _without_copies(
    networks: list[tuple[Params, dict[str, Any]]],
) -> list[tuple[Params, dict[str, Any]]]:
    """Omit each ``last.ckpt`` that is of the same step as another file of its folder."""

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

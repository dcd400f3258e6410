"""A network on disk in any format, whose tensors are read on demand."""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from weightsym.networks.files.checkpoints import FORMATS, read_state
from weightsym.networks.files.loading import read_json
from weightsym.networks.files.safetensors_format import StoredTensor, TensorFile, read_file

INDEX = "model.safetensors.index.json"
_ONE = "model.safetensors"
_WEIGHTS = (
    ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".onnx_data",
    ".gguf", ".tflite", ".ot", ".mlmodel", ".npz", ".pkl",
)  # fmt: skip


def is_hugging_face(folder: Path) -> bool:
    """Return whether a folder looks like a network of Hugging Face."""
    return (folder / "config.json").is_file()


def has_weights(folder: Path) -> bool:
    """Return whether a Hugging Face folder contains weights or their index."""
    return (folder / _ONE).exists() or (folder / INDEX).exists()


def weight_shards(folder: Path) -> dict[Path, set[str] | None]:
    """Return the weight files, and the names that the index expects in each, if there is one."""
    if not is_hugging_face(folder):
        if (folder / "adapter_config.json").is_file():
            raise ValueError(f"{folder} is an adapter: `weightsym adapters` merges it into a base.")
        raise ValueError(f"{folder} is not a Hugging Face folder: it has no config.json.")
    if (folder / _ONE).is_file():
        return {_inside(folder, _ONE): None}
    if not (folder / INDEX).is_file():
        raise ValueError(
            f"{folder} has neither {_ONE} nor {INDEX}; other formats are not supported."
        )
    names: dict[Path, set[str] | None] = {}
    for tensor, shard in _weight_map(folder).items():
        expected = names.setdefault(_inside(folder, shard), set())
        assert expected is not None
        expected.add(tensor)
    return names


def companions(folder: Path) -> list[Path]:
    """List the files beside the weights: configuration, tokenizer, texts.

    Weights in other formats are left out: they would be of another network.
    """
    files = (p for p in sorted(folder.iterdir()) if p.is_file() and not p.name.startswith("."))
    others = [p for p in files if p.suffix not in _WEIGHTS and not _is_other_index(p)]
    return [_inside(folder, path.name) for path in others]


def _is_other_index(path: Path) -> bool:
    return path.name.endswith(".index.json") and path.name != INDEX


def _weight_map(folder: Path) -> dict[str, str]:
    index = folder / INDEX
    table = read_json(index).get("weight_map")
    if not isinstance(table, dict) or not table:
        raise ValueError(f"{index} is damaged: it has no `weight_map`.")
    for shard in table.values():
        is_plain = isinstance(shard, str) and Path(shard).name == shard and "\\" not in shard
        if not is_plain or not shard.endswith(".safetensors") or shard.startswith("."):
            raise ValueError(
                f"{index} names {shard!r}: shards must be .safetensors files in the same folder."
            )
    return table


def _inside(folder: Path, name: str) -> Path:
    """Find a file of the folder, and refuse links that leave it and the cache."""
    path = folder / name
    if not path.is_file():
        raise ValueError(f"{folder} lacks {name}, which its index names.")
    allowed = [folder.resolve()]
    if folder.resolve().parent.name == "snapshots":  # of the cache: links to ../../blobs
        allowed.append(folder.resolve().parents[1] / "blobs")
    if path.resolve().parent not in allowed:
        raise ValueError(
            f"{path} is a link to {path.resolve()}, outside the folder, and is not read."
        )
    return path


# ------------------------------------------------------------ files and folders
@dataclass(frozen=True, eq=False)
class StoredNetwork:
    """A network on disk.

    Attributes:
        path: the file, or a folder of Hugging Face.
        shards: the files with its tensors.

    >>> import tempfile
    >>> from weightsym.files import open_network
    >>> path, net = Path(tempfile.mkdtemp()) / "net.pt", torch.nn.Linear(2, 3)
    >>> torch.save(net.state_dict(), path)
    >>> stored = open_network(path)
    >>> stored.is_folder, torch.equal(stored.read("weight"), net.weight)
    (False, True)
    """

    path: Path
    shards: tuple[TensorFile, ...]

    @cached_property
    def tensors(self) -> dict[str, StoredTensor]:
        """The tensors of all files by name."""
        return {name: tensor for shard in self.shards for name, tensor in shard.tensors.items()}

    @property
    def is_folder(self) -> bool:
        """True for a folder of Hugging Face."""
        return self.path.is_dir()

    @property
    def nbytes(self) -> int:
        """The size of all tensors in bytes."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def read(self, name: str) -> Tensor:
        """Read one tensor in its stored dtype, into its own memory."""
        return self.tensors[name].read().clone()


def open_network(path: Path) -> StoredNetwork:
    """Open a file (.safetensors, .pt, .pth, .ckpt) or a folder of Hugging Face.

    Raises:
        ValueError: it is not there, damaged, or of no format that is known.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "net.pt"
    >>> torch.save(torch.nn.Linear(2, 3).state_dict(), path)
    >>> stored = open_network(path)
    >>> {name: tuple(t.shape) for name, t in stored.tensors.items()}, stored.nbytes
    ({'weight': (3, 2), 'bias': (3,)}, 36)
    """
    if path.is_dir():
        return _folder(path)
    if not path.is_file():
        raise ValueError(f"There is no file or folder {path}.")
    if path.suffix not in FORMATS:
        raise ValueError(f"{path} must be a folder, or end in one of {', '.join(FORMATS)}.")
    shard = read_file(path) if path.suffix == ".safetensors" else _of_torch(path)
    if not shard.tensors:
        raise ValueError(f"{path} contains no tensors.")
    return StoredNetwork(path, (shard,))


def _folder(path: Path) -> StoredNetwork:
    shards, owners = [], dict[str, str]()
    for file, expected in weight_shards(path).items():
        shard = read_file(file)
        odd = sorted(expected ^ shard.tensors.keys()) if expected is not None else []
        if odd:
            where = "the index" if odd[0] in shard.tensors else file.name
            raise ValueError(f"{path} is damaged: {odd[0]!r} of {file.name} is not in {where}.")
        twice = [name for name in shard.tensors if name in owners]
        if twice:
            raise ValueError(f"{path}: {twice[0]!r} is in {owners[twice[0]]} and in {file.name}.")
        owners |= dict.fromkeys(shard.tensors, file.name)
        shards.append(shard)
    return StoredNetwork(path, tuple(shards))


def _of_torch(path: Path) -> TensorFile:
    """Map the tensors of a torch archive from disk."""
    state, _ = read_state(path, mmap=zipfile.is_zipfile(path))
    for name, tensor in state.items():
        if tensor.layout != torch.strided or tensor.is_quantized:
            raise ValueError(f"{path}: {name!r} is sparse or quantised, which is not supported.")
    tensors = {n: StoredTensor(t.dtype, t.shape, t.detach) for n, t in state.items()}
    return TensorFile(path.name, tensors, {"format": "pt"})

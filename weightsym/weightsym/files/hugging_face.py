"""Folders of Hugging Face: which files hold the weights, and which go along with them."""

from __future__ import annotations

from pathlib import Path

from weightsym.loading import read_json

__all__ = ["companions", "is_hugging_face", "weight_shards"]

INDEX = "model.safetensors.index.json"
_ONE = "model.safetensors"
_WEIGHTS = (
    ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".onnx_data",
    ".gguf", ".tflite", ".ot", ".mlmodel", ".npz", ".pkl",
)  # fmt: skip


def is_hugging_face(folder: Path) -> bool:
    """Tell whether a folder looks like a network of Hugging Face."""
    return (folder / "config.json").is_file()


def weight_shards(folder: Path) -> dict[Path, set[str] | None]:
    """The files with the weights, and the names that the index expects in each, if there is one."""
    if not is_hugging_face(folder):
        raise ValueError(f"{folder} is no folder of Hugging Face: it has no config.json.")
    if (folder / _ONE).is_file():
        return {_inside(folder, _ONE): None}
    if not (folder / INDEX).is_file():
        raise ValueError(f"{folder} has neither {_ONE} nor {INDEX}; other formats are not read.")
    names: dict[Path, set[str] | None] = {}
    for tensor, shard in _weight_map(folder).items():
        expected = names.setdefault(_inside(folder, shard), set())
        assert expected is not None
        expected.add(tensor)
    return names


def companions(folder: Path) -> list[Path]:
    """Files that belong to the network beside its weights: configuration, tokenizer, texts.

    Weights in other formats are left out: they would be of another network.
    """
    files = (p for p in sorted(folder.iterdir()) if p.is_file() and not p.name.startswith("."))
    kept = [p for p in files if p.suffix not in _WEIGHTS and not _is_other_index(p)]
    return [_inside(folder, path.name) for path in kept]


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
    """Find a file of the folder, and refuse links that lead out of it and of the cache."""
    path = folder / name
    if not path.is_file():
        raise ValueError(f"{folder} lacks {name}, which its index names.")
    allowed = [folder.resolve()]
    if folder.resolve().parent.name == "snapshots":  # of the cache: links to ../../blobs
        allowed.append(folder.resolve().parents[1] / "blobs")
    if path.resolve().parent not in allowed:
        raise ValueError(f"{path} is a link to {path.resolve()}, out of the folder, and not read.")
    return path

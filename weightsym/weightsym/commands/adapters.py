"""`weightsym adapters`: adapters of peft merged with each other, or into their base."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from weightsym import Outcome
from weightsym.files import open_network
from weightsym.networks.files.adapters import (
    CONFIG,
    WEIGHTS,
    Adapter,
    compressed,
    is_adapter,
    sum_of,
    write_into,
)
from weightsym.networks.files.writing import check_foreign, check_path, check_target
from weightsym.params import check_count


def adapters(
    sources: list[str],
    out: str | None = None,
    base: str | None = None,
    weights: list[float] | None = None,
    rank: int | None = None,
    overwrite: bool = False,
) -> Outcome:
    """Merge adapters of peft without changing what they compute.

    LoRA, rsLoRA and DoRA of linear layers, convolutions and embeddings, with biases and modules
    that are saved whole. The products B A of the adapters are added, not their factors.

    Args:
        sources: folders of adapters (adapter_config.json, adapter_model.safetensors).
        out: output: the folder of one adapter, or with --base a network in the form of the base.
            For example: weightsym adapters style/ task/ --weights 1 -0.5 --out both/
            weightsym adapters task/ --base llama/ --out llama-task/
        base: network that takes up the adapters: a folder of Hugging Face, or a .safetensors file.
        weights: how often each adapter is added, e.g. 1 -0.5; by default once.
        rank: largest rank of the merged adapter, which is the closest one of that rank; by default
            the sum of the ranks, where it is exact.
        overwrite: replace an existing file or folder at --out (true or false).
    """
    target = _target(out, base, rank)
    read = [Adapter.read(_folder(Path(source))) for source in sources]
    shares = [1.0] * len(read) if weights is None else weights
    if len(shares) != len(read):
        raise ValueError(f"`--weights` must be {len(read)} numbers, got {len(shares)}.")
    content = {"out": str(target), "weights": dict(zip(sources, shares, strict=True))}
    if base is None:
        return Outcome({**content, **_merge(read, shares, rank, target, overwrite)})
    network = open_network(Path(base))
    check_target(target, network, overwrite)
    if target.exists() and target.samefile(network.path):
        raise ValueError(f"`--out`: {target} is the base.")
    write_into(network, read, shares, target, overwrite)
    print(f"{target}: {base} + {_listed(read, shares)}")
    return Outcome({**content, "base": base})


def _target(out: str | None, base: str | None, rank: int | None) -> Path:
    if out is None:
        raise ValueError("`--out` is missing: the folder to write, such as `--out merged`.")
    if rank is not None:
        check_count("--rank", rank)
        if base is not None:
            raise ValueError("`--rank` is of a merged adapter, and `--base` makes a network.")
    return Path(out)


def _folder(path: Path) -> Path:
    if not is_adapter(path):
        raise ValueError(f"{path} is no folder of an adapter: it has no {CONFIG}.")
    return path


def _merge(
    read: list[Adapter], shares: list[float], rank: int | None, target: Path, overwrite: bool
) -> dict[str, Any]:
    """Write one adapter, and return its ranks and error."""
    _check_free(target, overwrite)
    merged, error = sum_of(read, shares), 0.0
    print(f"{target}: {_listed(read, shares)}, {_ranks(merged)}")
    if rank is not None:
        merged, error = compressed(merged, rank)
        print(f"at rank {rank}: {_ranks(merged)}, relative error of the products {error:.3g}")
    merged.write(target)
    ranks = {name: layer.rank for name, layer in merged.layers.items()}
    return {"ranks": ranks, "error": float(error)}


def _listed(read: list[Adapter], shares: list[float]) -> str:
    return " + ".join(f"{w:g} x {a.path.name}" for a, w in zip(read, shares, strict=True))


def _ranks(adapter: Adapter) -> str:
    ranks = [layer.rank for layer in adapter.layers.values()]
    low, high = min(ranks, default=0), max(ranks, default=0)
    return f"{len(ranks)} layers of rank {low}" + (f" to {high}" if high > low else "")


def _check_free(target: Path, overwrite: bool) -> None:
    check_path(target, overwrite)
    if target.is_file():
        raise ValueError(f"`--out` must be a folder, and {target} is a file.")
    if target.exists():
        check_foreign(target, (CONFIG, WEIGHTS, "README.md"))

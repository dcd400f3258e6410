"""`lightning-bnn merge`: networks on disk, brought into one frame and averaged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_bnn.commands.average_numbers import average_numbers
from lightning_bnn.commands.disk_networks import DiskNetworks, disk_networks, shown, target_of
from lightning_bnn.commands.judged_examples import Examples, examples_of
from lightning_bnn.params import Params, shares, stack, weighted_mean
from lightning_bnn.symmetry import Alignment, align
from lightning_bnn.symmetry.matching.repair import reestimated
from lightning_bnn.weight_files import FittedNetwork, moved, open_network, write_like

__all__ = ["merge"]

STATISTICS = ("running_mean", "running_var")


def merge(
    *networks: str,
    out: str | None = None,
    weights: list[float] | None = None,
    network: str | None = None,
    input: str = "",
    init: dict[str, Any] | None = None,
    prefix: str | None = None,
    batch_norm: Literal["carrier", "eval"] = "carrier",
    method: Literal["joint", "reference"] = "joint",
    signs: bool = False,
    mixing: bool = False,
    seed: int = 0,
    data: str | None = None,
    others: Literal["refuse", "copy"] = "refuse",
    overwrite: bool = False,
    dry_run: bool = False,
) -> None:
    """Average networks after bringing all of them into the frame of the first one.

    Writes one network, with the names, types and metadata of the first.

    Args:
        *networks: at least two networks: .safetensors, .ckpt, .pt, or folders of Hugging Face
            (config.json beside model.safetensors or its shards).
        out: output, a .safetensors file, or a folder if the first network is one. For example:
            lightning-bnn merge a.safetensors b.safetensors c.safetensors --weights 0.5 0.3 0.2
            --out d.safetensors --network torchvision.models.resnet18 --input 1,3,224,224
        weights: the weight of each network, e.g. 0.5 0.3 0.2; by default all are equal.
        network: import path of a class or function that returns the network, or a configuration for
            fit (.yaml); not needed for folders of Hugging Face, if transformers is installed.
        input: shape of the input, e.g. 1,3,224,224; a type may follow a colon, e.g. 2,16:int64;
            separate several inputs by ;
        init: arguments of the class, e.g. --init.num_classes 10
        prefix: prefix of the network's tensor names in the files, dot included, e.g. net. (found
            automatically if only one fits); files that lack it everywhere are accepted.
        batch_norm: carrier leaves the weights before a batch norm alone; eval treats the norm as a
            fixed affine map.
        method: joint matches every network to the sum of the others, reference matches all to the
            first.
        signs: also flip the signs of units, where the network allows it (true or false).
        mixing: also match heads, streams and adapters by matrices, without signs (true or false).
        seed: random seed of the order of the networks, the initialisation and the example input.
        data: data that re-estimate the statistics of batch norms and judge the average: import path
            of a LightningDataModule, a configuration (.yaml), or a .pt or .safetensors file with
            inputs and targets.
        others: what to do with tensors in the first network that do not belong to it: refuse or
            copy.
        overwrite: replace an existing file or folder at --out (true or false).
        dry_run: print what there is before averaging, and write nothing (true or false).
    """
    if len(networks) < 2:
        raise ValueError(f"`networks` must be at least two, got {len(networks)}.")
    if mixing and signs:
        raise ValueError("`--signs` must be false with `--mixing`: matrices hold both.")
    parts = shares(weights, len(networks), "`--weights`")
    stored = [open_network(Path(path)) for path in networks]
    target = target_of(out, stored, overwrite, dry_run)
    examples = examples_of(data) if data is not None else None
    read = disk_networks(stored, network, input, init, prefix, batch_norm, others, seed)
    every = stack([read.read(k) for k in range(len(networks))])
    examples = examples and examples.fitted(read.network, {n: t[0] for n, t in every.items()})
    told = ", ".join(f"{part:.3g} of {name}" for part, name in zip(parts, networks, strict=True))
    print(f"the average of {told}, in the frame of {networks[0]}\n{read.describe()}", flush=True)
    before = average_numbers(read.network, every, parts, examples)
    print("\n".join(f"{name}: {value:.6g}" for name, value in before.items()), flush=True)
    if read.has_statistics and examples is None:
        print(
            "the statistics of batch norms are averaged, too: give `--data` to estimate them anew"
        )
    if dry_run:
        return
    alignment = Alignment((), (0.0,), method)  # where nothing can be exchanged
    if read.sym.permutations or (mixing and read.sym.linear):
        how: dict[str, Any] = {"method": method, "signs": signs, "mixing": mixing, "seed": seed}
        alignment = align(every, read.sym, weights=parts, **how)
        every = alignment.apply(every, read.sym)
        print(f"\n{alignment}")
    after = average_numbers(read.network, every, parts, examples)
    print("\n".join(f"{name}: {before[name]:.6g} -> {after[name]:.6g}" for name in after))
    new = _statistics(read, every, parts, examples)
    del every
    if target is not None:
        _write(read, alignment, parts, new, target, overwrite)


# ------------------------------------------------------------ numbers
@torch.no_grad()
def _statistics(
    read: DiskNetworks, every: Params, parts: Sequence[float], examples: Examples | None
) -> Params:
    """The statistics of batch norms on the data; nothing where there are neither."""
    if examples is None or not read.has_statistics:
        return {}
    mean = reestimated(read.network, weighted_mean(every, parts), examples.inputs)
    return {n: t for n, t in mean.items() if n.rpartition(".")[2] in STATISTICS}


# ------------------------------------------------------------ writing
def _write(
    read: DiskNetworks,
    alignment: Alignment,
    parts: Sequence[float],
    new: Params,
    target: Path,
    overwrite: bool,
) -> None:
    """Read, move, average and write one tensor after the other."""
    read.forget_network()
    first = read.files[0]
    steps = iter(shown(first.stored.tensors, "writing"))
    average = _averager(read, alignment, parts)

    def value(place: str) -> Tensor:
        next(steps)
        name = first.names.get(place)
        stored = first.stored.tensors[place]
        if name is None:
            return stored.read()
        mean = new[name] if name in new else average(name)
        written = mean.to(stored.dtype)
        if written.is_floating_point() and not bool(torch.isfinite(written).all()):
            raise ValueError(f"The average of {place!r} is too large for {stored.dtype}.")
        return written

    write_like(first.stored, target, value, overwrite)
    print(f"wrote {target}")


def _averager(
    read: DiskNetworks, alignment: Alignment, parts: Sequence[float]
) -> Callable[[str], Tensor]:
    def of_member(k: int, element: Sequence[Tensor] | None) -> list[Tensor] | None:
        return None if element is None else [t[k] for t in element]

    def average(name: str) -> Tensor:
        total: Tensor | None = None
        for k, (file, part) in enumerate(zip(read.files, parts, strict=True)):
            order = [t[k] for t in alignment.permutations]
            signs, matrices = (of_member(k, e) for e in (alignment.signs, alignment.matrices))
            tensor = moved(partial(_wide, file), name, read.sym, order, signs, matrices)
            if not tensor.is_floating_point():
                total = tensor if total is None else total
                _check_same(tensor, total, file, name)
            else:
                total = tensor.mul_(part) if total is None else total.add_(tensor, alpha=part)
        assert total is not None
        return total

    return average


def _check_same(tensor: Tensor, first: Tensor, file: FittedNetwork, name: str) -> None:
    """Whole numbers have no average; only counts of batches may differ."""
    if not name.endswith("num_batches_tracked") and not torch.equal(tensor, first):
        raise ValueError(
            f"{file.stored.path}: {file.places[name]!r} holds other whole numbers than the first "
            "network, and they cannot be averaged."
        )


def _wide(file: FittedNetwork, name: str) -> Tensor:
    """A tensor that can be added to others: half precision becomes float32."""
    tensor = file.read(name)
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor

"""`lightning-bnn merge`: networks on disk, brought into one frame and averaged."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.func import functional_call

from lightning_bnn.bank import read_networks
from lightning_bnn.batch_norms import batch_norms
from lightning_bnn.commands.disk_networks import architecture, prefixes, shown, target_of
from lightning_bnn.commands.judged_examples import Examples, examples_of, loss
from lightning_bnn.loading import load
from lightning_bnn.params import Params, shares, stack_size, unstack, weighted_mean
from lightning_bnn.symmetry import Symmetries, align, discover
from lightning_bnn.symmetry.matching.repair import reestimated
from lightning_bnn.weight_files import (
    FittedNetwork,
    NetworkNames,
    StoredNetwork,
    fit,
    open_network,
    write_like,
)
from lightning_bnn.weight_files.fitting import Others
from lightning_bnn.weight_files.hugging_face import is_hugging_face

__all__ = ["merge"]

_KEPT = (
    "epoch", "global_step", "pytorch-lightning_version", "loops", "hyper_parameters",
    "hparams_name", "datamodule_hyper_parameters", "datamodule_hparams_name",
)  # fmt: skip
_HALF = (torch.float16, torch.bfloat16)


def merge(
    *sources: str,
    out: str | None = None,
    weights: list[float] | None = None,
    network: str | None = None,
    input: str = "",
    init: dict[str, Any] | None = None,
    prefix: str | None = None,
    last: int | None = None,
    plainly: bool = False,
    batch_norm: Literal["carrier", "eval"] = "carrier",
    method: Literal["joint", "reference"] = "joint",
    signs: bool = True,
    scales: Literal["min-mass"] | None = None,
    mixing: bool = False,
    seed: int = 0,
    data: str | None = None,
    like: str | None = None,
    others: Literal["refuse", "copy"] = "refuse",
    overwrite: bool = False,
    dry_run: bool = False,
) -> None:
    """Average networks after bringing all of them into the frame of the first one.

    Args:
        *sources: where at least two networks are: .safetensors, .ckpt and .pt files, folders of
            Hugging Face (config.json beside model.safetensors or its shards), banks, and folders
            that contain checkpoints at any depth, such as those of runs.
        out: output: a .safetensors or .pt file, a .ckpt that Lightning loads, or a folder if the
            form is that of one. For example: lightning-bnn merge a.safetensors b.safetensors
            runs/c/bank --weights 0.5 0.3 0.2 --out d.safetensors --network
            torchvision.models.resnet18 --input 1,3,224,224
        weights: the weight of each source, e.g. 0.5 0.3 0.2, which its networks share; by default
            all networks have equal weights.
        network: import path of a class or function that returns the network, or a configuration for
            fit (.yaml); not needed for folders of Hugging Face, if transformers is installed.
        input: shape of the input, e.g. 1,3,224,224; a type may follow a colon, e.g. 2,16:int64;
            separate several inputs by ;
        init: arguments of the class, e.g. --init.num_classes 10
        prefix: prefix of the network's tensor names in the files, dot included, e.g. net. (found
            automatically if only one fits); files that lack it everywhere are accepted.
        last: number of networks of each bank or folder, counted from the end; by default all.
        plainly: average the networks without bringing them into one frame (true or false).
        batch_norm: carrier leaves the weights before a batch norm alone; eval treats the norm as a
            fixed affine map.
        method: joint matches every network to the sum of the others, reference matches all to the
            first.
        signs: also flip the signs of units, where the network allows it (true or false).
        scales: min-mass first rescales every network to its least mass.
        mixing: also match heads, streams and adapters by matrices, which hold the signs (true or
            false).
        seed: random seed of the order of the networks, the initialisation and the example input.
        data: data that re-estimate the statistics of batch norms and judge the average: import path
            of a LightningDataModule, a configuration (.yaml), or a .pt or .safetensors file with
            inputs and targets.
        like: the file or folder whose names, types, other tensors and settings are kept; by default
            the first source that is one network, for a .ckpt the first .ckpt.
        others: what to do with tensors in files that do not belong to the network: refuse, or copy
            those of the form.
        overwrite: replace an existing file or folder at --out (true or false).
        dry_run: print what there is before averaging, and write nothing (true or false).
    """
    if mixing and scales:
        raise ValueError("`--scales` must not be given with `--mixing`: matrices hold them.")
    torch.manual_seed(seed)
    paths, given = [Path(s) for s in sources], [Path(like)] if like else []
    folder = next(filter(is_hugging_face, paths), None)
    module, example, names = architecture(network, folder, input, init or {})
    files = _files([*given, *paths], names, prefix, others)
    form = _form(out, like, files)
    target = _target(out, form, files.values(), overwrite, dry_run)
    examples = examples_of(data) if data is not None else None
    stacks = [_read(path, files.get(path), module.eval(), last, prefix) for path in paths]
    every, parts = _together(stacks, weights)
    examples = examples and examples.fitted(module, {n: t[0] for n, t in every.items()})
    sym = None if plainly else discover(module, *example, batch_norm=batch_norm)
    print(_told(sources, stacks, parts, sym), flush=True)
    before = _numbers(module, every, parts, examples)
    print("\n".join(f"{name}: {value:.6g}" for name, value in before.items()), flush=True)
    if dry_run:
        return
    if sym is not None:
        how: dict[str, Any] = {"scales": scales, "signs": signs and not mixing, "mixing": mixing}
        every = _aligned(every, sym, method=method, seed=seed, weights=parts, **how)
    after = _numbers(module, every, parts, examples)
    print("\n".join(f"{name}: {before[name]:.6g} -> {after[name]:.6g}" for name in after))
    mean = _mean(module, every, parts, examples)
    if target is not None:
        _write(mean, form, target, overwrite)


# ------------------------------------------------------------ reading
def _files(
    paths: Sequence[Path], names: NetworkNames, prefix: str | None, others: Others
) -> dict[Path, FittedNetwork]:
    """The files and folders of Hugging Face that are one network each."""
    stored = [open_network(path) for path in paths if path.is_file() or is_hugging_face(path)]
    single = [one for one in stored if prefix is not None or not _has_members(one, names)]
    starts = zip(single, prefixes(single, prefix), strict=True)
    return {one.path: fit(one, names, start, others) for one, start in starts}


def _has_members(stored: StoredNetwork, names: NetworkNames) -> bool:
    """Whether a file is of a module of this package, which has a stack of networks."""
    name, tensor = next(iter(names.tensors.items()))
    place = stored.tensors.get(f"networks.{name}")
    return place is not None and place.shape[1:] == tensor.shape


def _read(
    path: Path, file: FittedNetwork | None, module: nn.Module, last: int | None, prefix: str | None
) -> Params:
    """All networks of a source as a stack; half precision becomes float32."""
    if file is None:
        stack = read_networks(path, module, last, prefix)[0]
    else:
        stack = {name: file.read(name)[None] for name in shown(file.places, f"reading {path}")}
    for name, tensor in stack.items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise ValueError(f"{path}: {name!r} holds NaN or infinite values.")
    return {n: t.float() if t.dtype in _HALF else t for n, t in stack.items()}


def _together(
    stacks: Sequence[Params], weights: Sequence[float] | None
) -> tuple[Params, list[float]]:
    """All networks as one stack, and how much each of them counts."""
    sizes = [stack_size(one) for one in stacks]
    if sum(sizes) < 2:
        raise ValueError(f"`sources` must hold at least two networks, got {sum(sizes)}.")
    every = {n: torch.cat([one[n] for one in stacks]) for n in stacks[0]}
    if weights is None:
        return every, shares(None, sum(sizes))
    given = zip(shares(weights, len(stacks), "`--weights`"), sizes, strict=True)
    return every, [weight / size for weight, size in given for _ in range(size)]


def _told(
    sources: Sequence[str],
    stacks: Sequence[Params],
    parts: Sequence[float],
    sym: Symmetries | None,
) -> str:
    rest, lines = iter(parts), []
    for source, stack in zip(sources, stacks, strict=True):
        share = sum(itertools.islice(rest, stack_size(stack)))
        lines.append(f"{share:.3g} of {source}")
    weights = sum(t[0].numel() for t in stacks[0].values() if t.is_floating_point())
    told = f"{len(parts)} networks of {weights} weights: {', '.join(lines)}"
    return told if sym is None else f"{told}\n\n{sym}\n"


# ------------------------------------------------------------ averages
def _numbers(
    network: nn.Module, every: Params, parts: Sequence[float], examples: Examples | None
) -> dict[str, float]:
    """How far networks are from their average, and how much more it loses on examples."""
    mean = weighted_mean(every, parts)
    squares = torch.zeros((), dtype=torch.float64)
    for name in (n for n, t in mean.items() if t.is_floating_point()):
        for part, tensor in zip(parts, every[name], strict=True):
            squares += part * (tensor - mean[name]).square().sum(dtype=torch.float64)
    numbers = {"distance to the average": math.sqrt(float(squares))}
    if examples is not None:
        losses = [_loss(network, member, examples) for member in unstack(every)]
        own = sum(part * one for part, one in zip(parts, losses, strict=True))
        mean = reestimated(network, mean, examples.inputs)
        barrier = _loss(network, mean, examples) - own
        numbers[f"barrier (loss of the average above theirs) on {examples}"] = barrier
    return numbers


@torch.no_grad()
def _loss(network: nn.Module, params: Params, examples: Examples) -> float:
    total, count = 0.0, 0
    for x, y in examples.batches:
        total += float(loss(functional_call(network, params, (x,)), y)) * len(y)
        count += len(y)
    return total / count


def _aligned(every: Params, sym: Symmetries, **options: Any) -> Params:
    if not (sym.permutations or (options["mixing"] and sym.linear)):
        print("nothing to bring into one frame")
        return every
    alignment = align(every, sym, **options)
    print(alignment)
    return alignment.apply(every, sym)


def _mean(
    module: nn.Module, every: Params, parts: Sequence[float], examples: Examples | None
) -> Params:
    """The average, with statistics of batch norms on the data, if there are any."""
    for name, tensor in every.items():  # only counts of batches may differ
        whole = not tensor.is_floating_point() and not name.endswith("num_batches_tracked")
        if whole and not torch.equal(tensor, tensor[:1].expand_as(tensor)):
            raise ValueError(
                f"A network holds other whole numbers than the first one in {name!r}, and they "
                "cannot be averaged."
            )
    mean = weighted_mean(every, parts)
    if not batch_norms(module):
        return mean
    if examples is None:
        print(
            "the statistics of batch norms are averaged, too: give `--data` to estimate them anew"
        )
        return mean
    return reestimated(module, mean, examples.inputs)


# ------------------------------------------------------------ writing
def _form(
    out: str | None, like: str | None, files: Mapping[Path, FittedNetwork]
) -> FittedNetwork | None:
    """What gives names, types and other tensors: `like`, or the first file of that kind."""
    if like is not None:
        if Path(like) not in files:
            raise ValueError(f"`--like` must be a file or folder with one network, got {like}.")
        return files[Path(like)]
    checkpoint = out is not None and out.endswith(".ckpt")
    fitting = (f for path, f in files.items() if path.suffix == ".ckpt" or not checkpoint)
    return next(fitting, None)


def _target(
    out: str | None,
    form: FittedNetwork | None,
    files: Iterable[FittedNetwork],
    overwrite: bool,
    dry_run: bool,
) -> Path | None:
    """Where to write; None where only numbers are asked for."""
    suffix = Path(out or "").suffix
    if out is None or (form is not None and suffix not in (".pt", ".ckpt")):
        stored = [] if form is None else [form.stored]
        return target_of(out, [*stored, *(f.stored for f in files)], overwrite, dry_run)
    target = Path(out)
    if suffix not in (".safetensors", ".pt", ".ckpt"):
        raise ValueError(f"`--out` must end in .safetensors, .pt or .ckpt, got {out}.")
    if target.exists() and not overwrite:
        raise ValueError(f"`--out`: {out} is there already; `--overwrite true` replaces it.")
    if not target.resolve().parent.is_dir():
        raise ValueError(f"`--out`: there is no folder {target.parent}.")
    if suffix == ".ckpt" and (form is None or form.stored.path.suffix != ".ckpt"):
        raise ValueError(
            "`--like` is missing: a checkpoint of the module, whose settings a .ckpt keeps; no "
            "source is one."
        )
    return None if dry_run else target


def _write(mean: Params, form: FittedNetwork | None, target: Path, overwrite: bool) -> None:
    """Write the average, with names, types and other tensors of the form, if there is one."""

    def value(place: str) -> Tensor:
        if form is None:
            return mean[place].contiguous()
        stored = form.stored.tensors[place]
        if place not in form.names:
            return stored.read()
        written = mean[form.names[place]].to(stored.dtype)
        if written.is_floating_point() and not bool(torch.isfinite(written).all()):
            raise ValueError(f"The average of {place!r} is too large for {stored.dtype}.")
        return written.contiguous()

    if form is not None and target.suffix not in (".pt", ".ckpt"):
        write_like(form.stored, target, value, overwrite)
    elif form is not None and target.suffix == ".ckpt":
        torch.save(_checkpoint(form.stored.path, value), target)
    else:
        tensors = {place: value(place) for place in (mean if form is None else form.stored.tensors)}
        if target.suffix == ".pt":
            torch.save(tensors, target)
        else:
            save_file(tensors, target, {"format": "pt"})
    print(f"wrote {target}")


def _checkpoint(path: Path, value: Callable[[str], Tensor]) -> dict[str, Any]:
    """A checkpoint with the average in it; optimizers, which are of another network, left out."""
    content = load(path)
    if not isinstance(content, dict) or not isinstance(content.get("state_dict"), dict):
        raise ValueError(f"`--like`: {path} is no checkpoint of a LightningModule.")
    state = {name: value(name.replace("_orig_mod.", "")) for name in content["state_dict"]}
    return {**{k: content[k] for k in _KEPT if k in content}, "state_dict": state}

"""`lightning-bnn average`: one network out of banks, runs and checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from lightning_bnn.bank import find_prefix, read_networks
from lightning_bnn.batch_norms import batch_norms
from lightning_bnn.commands.average_numbers import average_numbers
from lightning_bnn.commands.disk_networks import architecture
from lightning_bnn.commands.judged_examples import Examples, examples_of
from lightning_bnn.loading import load
from lightning_bnn.params import Params, of, shares, stack_size, weighted_mean
from lightning_bnn.symmetry import Symmetries, align, discover
from lightning_bnn.symmetry.matching.repair import reestimated

__all__ = ["average"]

_KEPT = (
    "epoch", "global_step", "pytorch-lightning_version", "loops", "hyper_parameters",
    "hparams_name", "datamodule_hyper_parameters", "datamodule_hparams_name",
)  # fmt: skip


def average(
    *sources: str,
    out: str,
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
    overwrite: bool = False,
) -> None:
    """Bring all networks of banks, runs and checkpoints into one frame, and average them.

    For networks that do not fit into memory together, and for folders of Hugging Face, use merge.

    Args:
        *sources: folders of banks, folders that contain checkpoints at any depth (such as those of
            runs), or single .ckpt, .pt or .safetensors files.
        out: file to write: .safetensors or .pt with the tensors of the network, or .ckpt, a
            checkpoint as Lightning writes it. For example: lightning-bnn average runs/a/bank
            runs/b/bank --weights 2 1 --last 10 --out average.safetensors --network
            lightning_bnn.models.mlp --input 1,64 --init '{"inputs": 64, "hidden": [32], "outputs":
            10}'
        weights: the weight of each source, e.g. 2 1, which its networks share; by default all
            networks have equal weights.
        network: import path of a class or function that returns the network, or a configuration for
            fit (.yaml).
        input: shape of the input, e.g. 1,3,224,224; a type may follow a colon, e.g. 2,16:int64;
            separate several inputs by ;
        init: arguments of the class, e.g. --init.num_classes 10
        prefix: prefix of the network's tensor names in the checkpoints, dot included, e.g. net.
            (found automatically if only one fits).
        last: number of networks of each source, counted from the end; by default all.
        plainly: average the networks without bringing them into one frame (true or false).
        batch_norm: carrier leaves the weights before a batch norm alone; eval treats the norm as a
            fixed affine map.
        method: joint matches every network to the sum of the others, reference matches all to the
            first.
        signs: also flip the signs of units, where the network allows it (true or false).
        scales: min-mass first rescales every network to its least mass.
        mixing: also match heads, streams and adapters by matrices, without signs and scales (true
            or false).
        seed: random seed of the order of the networks, the initialisation and the example input.
        data: data that re-estimate the statistics of batch norms and judge the average: import path
            of a LightningDataModule, a configuration (.yaml), or a .pt or .safetensors file with
            inputs and targets.
        like: for a .ckpt: the checkpoint whose other tensors and settings are kept; by default the
            first source that is a .ckpt.
        overwrite: replace an existing file or folder at --out (true or false).
    """
    if not sources:
        raise ValueError("`sources` must be at least one, got 0.")
    target, template = _target(Path(out), overwrite, sources, like)
    torch.manual_seed(seed)
    module, example, _ = architecture(_named(network), None, input, init or {})
    module.eval()
    examples = examples_of(data) if data is not None else None
    every, parts = _networks(sources, module, last, prefix, weights)
    examples = examples and examples.fitted(module, {n: t[0] for n, t in every.items()})
    print(_told(sources, parts, every), flush=True)
    before = average_numbers(module, every, parts, examples)
    sym = None if plainly else discover(module, *example, batch_norm=batch_norm)
    if sym is not None:
        options = {"scales": scales, "signs": signs and not mixing, "mixing": mixing}
        every = _aligned(every, sym, method=method, seed=seed, weights=parts, **options)
    after = average_numbers(module, every, parts, examples)
    print("\n".join(f"{name}: {before[name]:.6g} -> {after[name]:.6g}" for name in after))
    mean = _renewed(module, weighted_mean(every, parts), examples)
    _write(mean, target, template, module, prefix)
    print(f"wrote {target}")


def _named(network: str | None) -> str:
    if network is None:
        raise ValueError(
            "`--network` is missing: give the import path of the class of the networks, e.g. "
            "--network torchvision.models.resnet18 --input 1,3,224,224"
        )
    return network


# ------------------------------------------------------------ networks
def _networks(
    sources: Sequence[str],
    module: nn.Module,
    last: int | None,
    prefix: str | None,
    weights: Sequence[float] | None,
) -> tuple[Params, list[float]]:
    """All networks as one stack, and how much each of them counts."""
    stacks = [read_networks(source, module, last, prefix)[0] for source in sources]
    sizes = [stack_size(one) for one in stacks]
    every = {n: torch.cat([one[n] for one in stacks]) for n in stacks[0]}
    every = {n: t.float() if t.dtype in _HALF else t for n, t in every.items()}
    for name, tensor in every.items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            bad = int((~tensor.flatten(1).isfinite()).any(1).nonzero()[0, 0])
            source = next(s for k, s in enumerate(sources) if bad < sum(sizes[: k + 1]))
            raise ValueError(f"{source}: {name!r} holds NaN or infinite values in some network.")
    if weights is None:
        return every, shares(None, sum(sizes))
    given = shares(weights, len(sources), "`--weights`")
    return every, [w / size for w, size in zip(given, sizes, strict=True) for _ in range(size)]


_HALF = (torch.float16, torch.bfloat16)


def _told(sources: Sequence[str], parts: Sequence[float], every: Params) -> str:
    weights = sum(t[0].numel() for t in every.values() if t.is_floating_point())
    return f"{len(parts)} networks of {weights} weights from {', '.join(sources)}"


def _aligned(every: Params, sym: Symmetries, **options: Any) -> Params:
    if not sym.permutations or stack_size(every) == 1:
        print("nothing to bring into one frame")
        return every
    alignment = align(every, sym, **options)
    print(alignment)
    return alignment.apply(every, sym)


def _renewed(module: nn.Module, mean: Params, examples: Examples | None) -> Params:
    if not batch_norms(module):
        return mean
    if examples is None:
        print(
            "the statistics of batch norms are averaged, too: give `--data` to estimate them anew"
        )
        return mean
    return reestimated(module, mean, examples.inputs)


# ------------------------------------------------------------ writing
def _target(
    out: Path, overwrite: bool, sources: Sequence[str], like: str | None
) -> tuple[Path, Path | None]:
    """Where to write, and the checkpoint that gives the form."""
    if out.suffix not in (".safetensors", ".pt", ".ckpt"):
        raise ValueError(f"`--out` must end in .safetensors, .pt or .ckpt, got {out}.")
    if out.exists() and not overwrite:
        raise ValueError(f"`--out`: {out} is there already; `--overwrite true` replaces it.")
    if not out.resolve().parent.is_dir():
        raise ValueError(f"`--out`: there is no folder {out.parent}.")
    if out.suffix != ".ckpt":
        if like is not None:
            raise ValueError(f"`--like` is for an `--out` that ends in .ckpt, got {out}.")
        return out, None
    files = [Path(like)] if like is not None else [Path(s) for s in sources]
    template = next((f for f in files if f.suffix == ".ckpt" and f.is_file()), None)
    if template is None:
        raise ValueError(
            "`--like` is missing: a checkpoint of the module, whose settings a .ckpt keeps; no "
            "source is one."
        )
    return out, template


def _write(
    mean: Params, target: Path, template: Path | None, module: nn.Module, prefix: str | None
) -> None:
    mean = {name: tensor.contiguous() for name, tensor in mean.items()}
    if target.suffix == ".safetensors":
        from safetensors.torch import save_file

        save_file(mean, target, {"format": "pt"})
    elif template is None:
        torch.save(mean, target)
    else:
        torch.save(_checkpoint(mean, template, module, prefix), target)


def _checkpoint(
    mean: Params, template: Path, module: nn.Module, prefix: str | None
) -> dict[str, Any]:
    """A checkpoint with the average in it; optimizers, which are of another network, left out."""
    content = load(template)
    if not isinstance(content, dict) or not isinstance(content.get("state_dict"), dict):
        raise ValueError(f"`--like`: {template} is no checkpoint of a LightningModule.")
    state = dict(content["state_dict"])
    names = {name.replace("_orig_mod.", ""): name for name in state}
    stripped = {plain: state[name] for plain, name in names.items()}
    start = find_prefix(template, stripped, of(module), prefix)
    for name, tensor in mean.items():
        place = names[start + name]
        state[place] = tensor.to(state[place].dtype)
    for name, tensor in module.state_dict(keep_vars=True).items():  # tied tensors have two names
        first = next((n for n, t in of(module).items() if t.data_ptr() == tensor.data_ptr()), name)
        if start + name in names and first in mean:
            state[names[start + name]] = mean[first].to(state[names[start + name]].dtype)
    return {**{k: content[k] for k in _KEPT if k in content}, "state_dict": state}

"""`weightsym rebase`: a fine-tuned network on disk, moved to another base."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from weightsym import rebase as move
from weightsym.commands.architecture import Architecture
from weightsym.commands.networks import build, fit_all, symmetries_in
from weightsym.commands.outputs import Output
from weightsym.commands.reports import Outcome
from weightsym.files import open_network


def rebase(
    finetuned: str,
    architecture: Architecture,
    old: str | None = None,
    new: str | None = None,
    out: str | None = None,
    scale: float = 1.0,
    method: Literal["reference", "mixing", "plain"] = "reference",
    others: Literal["refuse", "copy"] = "refuse",
    overwrite: bool = False,
) -> Outcome:
    """Move a fine-tuned network to another base: add what it has learnt, in the frame of that base.

    The old base is matched to the new one, and the difference between the fine-tuned network and
    the old base moves along. Statistics of batch norms are those of the new base.

    Args:
        finetuned: network that was trained from the old base: .safetensors, .ckpt, .pt, or a folder
            of Hugging Face (config.json beside model.safetensors or its shards).
        architecture: options that specify the network.
        old: base that it was trained from.
        new: base to which the difference is added.
        out: output, with names, types and other tensors of the fine-tuned network. For example:
            weightsym rebase tuned.safetensors --old base.safetensors --new base2.safetensors
            --out tuned2.safetensors --network torchvision.models.resnet18 --input 1,3,224,224
        scale: factor of the difference; -1 takes it away.
        method: reference matches by permutations and signs; mixing also by matrices that mix the
            channels of heads, streams and adapters; plain adds the difference as it is, which is
            right if the new base was trained from the old one.
        others: treatment of tensors in files that do not belong to the network: refuse, or copy
            those of the fine-tuned one.
        overwrite: replace an existing file or folder at --out (true or false).
    """
    for option, value in (("old", old), ("new", new), ("out", out)):
        if value is None:
            raise ValueError(
                f"`--{option}` is missing: rebase TUNED --old BASE --new BASE --out X."
            )
    stored = [open_network(Path(path)) for path in (finetuned, old, new) if path is not None]
    folder = next((s.path for s in stored if s.is_folder), None)
    module, example, names = build(architecture, folder)
    files = fit_all(stored, names, architecture.prefix, others)
    output = Output.checked(out, files[0], files, overwrite)
    assert output is not None
    sym = symmetries_in(module, *example, batch_norm=architecture.batch_norm)
    print(f"{sym}\n", flush=True)
    tuned, base, goal = files
    moved = move(tuned, base, goal, sym, scale=scale, method=method, seed=architecture.seed)
    output.write(moved, moved.__getitem__)
    settings = {"scale": scale, "method": method, "seed": architecture.seed}
    return Outcome({"finetuned": finetuned, "old": old, "new": new, "out": out, **settings})

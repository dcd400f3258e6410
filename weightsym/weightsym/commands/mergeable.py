"""`weightsym mergeable`: whether two networks on disk can be averaged, and by which command."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import nn

from weightsym import Mergeable, Symmetries
from weightsym import mergeable as judge
from weightsym.commands.architecture import Architecture
from weightsym.commands.examples import examples_of, loss
from weightsym.commands.networks import build, fit_all, numbers, symmetries_in
from weightsym.commands.reports import Outcome
from weightsym.files import open_network
from weightsym.matching.mergeable import Answer
from weightsym.networks.batch_norms import batch_norms
from weightsym.networks.files.stored import StoredNetwork

EXIT_CODES: Mapping[Answer, int] = {
    "as they are": 0,
    "in one frame": 3,
    "no": 4,
    "cannot be told": 5,
}
"""Exit codes of the command. 2 means a mistake of the user, 1 a crash."""
_FRAMES = {"plain": "as they are", "reference": "permutations, signs", "mixing": "matrices as well"}
_SENTENCES: Mapping[Answer, str] = {
    "as they are": "they can be averaged as they are",
    "in one frame": "they can be averaged in one frame",
    "no": "they cannot be averaged",
    "cannot be told": "weights do not tell whether they can be averaged: measure it by --data",
}
_TOKENISERS = ("tokenizer.json", "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model")


def mergeable(
    a: str,
    b: str,
    architecture: Architecture,
    data: str | None = None,
    tolerance: float = 0.1,
) -> Outcome:
    """Tell whether two networks can be averaged, what stands in the way, and by which command.

    With --data, the barrier between them decides: the largest loss on the line above the mean of
    both. Without, it is predicted from the matrix in which their weights are least alike. Exit
    codes: 0 if they can be averaged as they are, 3 after alignment, 4 if they cannot, 5 if this
    cannot be told from weights, 2 for mistakes.

    Args:
        a: a network: .safetensors, .ckpt, .pt, or a folder of Hugging Face (config.json beside
            model.safetensors or its shards).
        b: another network. For example: weightsym mergeable a.safetensors b.safetensors --network
            torchvision.models.resnet18 --input 1,3,224,224
        architecture: options that specify the network.
        data: data for the barrier: import path of a LightningDataModule, a configuration (.yaml),
            or a .pt or .safetensors file with inputs and targets.
        tolerance: largest barrier that is accepted, in units of the loss.
    """
    stored = [open_network(Path(path)) for path in (a, b)]
    examples = examples_of(data) if data is not None else None
    folder = next((s.path for s in stored if s.is_folder), None)
    module, example, names = build(architecture, folder)
    sizes = list(_other_sizes(module, *stored))
    if sizes:
        return _outcome("no", {"obstacles": sizes})
    files = fit_all(stored, names, architecture.prefix, "copy")
    first, second = (dict(numbers(file)) for file in files)
    sym = symmetries_in(module, *example, batch_norm=architecture.batch_norm)
    print(f"{sym}\n", flush=True)
    how: dict[str, Any] = {}
    if examples is not None:
        examples = examples.fitted(module, first)
        how = {"model": module, "batches": examples.batches, "loss": loss}
    found = judge(first, second, sym, **how, tolerance=tolerance, seed=architecture.seed)
    print("\n".join(_lines(found, str(examples or ""))))
    content = {
        "related": found.relation and found.relation.verdict,
        "frames": {m.method: {"cosine": m.cosine, "barrier": m.barrier} for m in found.meetings},
        "examples": str(examples or ""),
        "tolerance": tolerance,
        "obstacles": [*_other_tokenisers(*stored), *_fixed(module, sym, examples is not None)],
    }
    if found.verdict != "no":
        content["command"] = _command((a, b), found.best.method, architecture, data)
    return _outcome(found.verdict, content)


def _outcome(verdict: Answer, content: Mapping[str, Any]) -> Outcome:
    """Print what stands in the way, the command and the verdict."""
    for obstacle in content["obstacles"]:
        print(f"in the way: {obstacle}")
    if "command" in content:
        print(f"command: {content['command']}")
    print(f"verdict: {_SENTENCES[verdict]}")
    return Outcome({"verdict": verdict, **content}, EXIT_CODES[verdict])


def _lines(found: Mergeable, examples: str) -> Iterator[str]:
    if found.relation is not None:
        yield f"related: {found.relation.verdict}"
    yield f"{'':<22}{'cosine':>8}" + (f"  barrier on {examples}" if examples else "")
    for m in found.meetings:
        height = "" if m.barrier is None else f"  {m.barrier:.4g}"
        yield f"{_FRAMES[m.method]:<22}{m.cosine:>8.3f}{height}"


def _command(
    sources: Sequence[str], method: str, architecture: Architecture, data: str | None
) -> str:
    """Write the command that merges two networks."""
    usual = asdict(Architecture())
    options = {n: value for n, value in asdict(architecture).items() if value != usual[n]}
    options |= {"method": method, "data": data, "out": "merged.safetensors"}
    if Path(sources[0]).is_dir():
        options["out"] = "merged"
    words = ["weightsym", "merge", *sources]
    for option, value in options.items():
        if value is not None:
            words += [f"--{option}", value if isinstance(value, str) else json.dumps(value)]
    return shlex.join(words)


# ------------------------------------------------------------ obstacles
def _other_sizes(module: nn.Module, a: StoredNetwork, b: StoredNetwork) -> Iterator[str]:
    """Name tensors of different shapes, and say whether they are tables of tokens or positions."""
    tables = [f"{name}.weight" for name, m in module.named_modules() if isinstance(m, nn.Embedding)]
    for name in (n for n in a.tensors if n in b.tensors):
        shapes = [tuple(network.tensors[name].shape) for network in (a, b)]
        if shapes[0] != shapes[1]:
            is_table = any(name == t or name.endswith(f".{t}") for t in tables)
            rows = is_table and shapes[0][1:] == shapes[1][1:]
            kind = "other tokens or positions" if rows else "other widths"
            yield f"{kind}: {name!r} has the shapes {shapes[0]} and {shapes[1]}"


def _other_tokenisers(a: StoredNetwork, b: StoredNetwork) -> Iterator[str]:
    """Compare the files of tokenisers in two folders, of networks of equal sizes."""
    for name in _TOKENISERS if a.is_folder and b.is_folder else ():
        files = [network.path / name for network in (a, b)]
        texts = [file.read_bytes() for file in files if file.is_file()]
        if len(texts) == 2 and texts[0] != texts[1]:
            yield f"the tokenisers differ in {name}: rows of token tables may mean other tokens"


def _fixed(module: nn.Module, sym: Symmetries, with_data: bool) -> Iterator[str]:
    """Say what alignment leaves in place."""
    if batch_norms(module) and not with_data:
        yield "the statistics of batch norms: --data re-estimates them"
    for item in sym.frozen:
        yield f"units that stay where they are, since nothing is known of {item}"

"""`lightning-bnn match`: bring a network on disk into the frame of another one."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_bnn.arguments import check_count
from lightning_bnn.commands.architecture import Architecture
from lightning_bnn.commands.disk_networks import DiskNetworks, shown, target_of
from lightning_bnn.commands.judged_examples import Examples, examples_of, loss
from lightning_bnn.params import Params
from lightning_bnn.symmetry import FullMatch, Learning, MatchResult, barrier, match_all
from lightning_bnn.symmetry import match as match_networks
from lightning_bnn.weight_files import moved, open_network, write_like

__all__ = ["match"]

Move = Callable[[Callable[[str], Tensor], str], Tensor]
"""A tensor of the network in its new place, given what reads tensors, and its name."""
_BY_DATA = ("activations", "correlation", "learned")


def match(
    a: str,
    b: str,
    architecture: Architecture,
    out: str | None = None,
    method: Literal[
        "best",
        "ascent",
        "frank-wolfe",
        "mixing",
        "activations",
        "correlation",
        "learned",
    ] = "best",
    steps: int = 200,
    restarts: int = 0,
    data: str | None = None,
    others: Literal["refuse", "copy"] = "refuse",
    overwrite: bool = False,
) -> None:
    """Bring network A into the frame of network B, by its weights or by what it does on data.

    A moves, B stays as it is. The file that is written computes what A computes, has the names,
    types and metadata of A, and can be averaged with B.

    Args:
        a: the network that moves: .safetensors, .ckpt, .pt, or a folder of Hugging Face
            (config.json beside model.safetensors or its shards).
        b: the network that A is brought close to.
        architecture: options that name the network.
        out: output, a .safetensors file, or a folder if A is one; by default only numbers are
            printed. For example: lightning-bnn match a.safetensors b.safetensors --out
            c.safetensors --network torchvision.models.resnet18 --input 1,3,224,224
        method: by weights: ascent goes from group to group, frank-wolfe moves all at once, best
            takes the better result of the two; signs of units are flipped where the network allows
            it. mixing also mixes the channels of heads, streams and adapters by matrices: by
            weights or, with --data, by activations. By examples, with --data: activations and
            correlation compare what hidden units do; learned lowers the loss half way between the
            networks by gradients.
        steps: gradient steps of learned, with one batch of 64 examples each.
        restarts: number of further attempts from random permutations.
        data: data for the loss barrier before and after, and for methods that match by examples:
            import path of a LightningDataModule, a configuration (.yaml), or a .pt or .safetensors
            file with inputs and targets.
        others: what to do with tensors in A that do not belong to the network: refuse or copy.
        overwrite: replace an existing file or folder at --out (true or false).
    """
    check_count("steps", steps)
    if method in _BY_DATA and data is None:
        raise ValueError(f"`--data` must be given for method {method!r}.")
    stored = [open_network(Path(path)) for path in (a, b)]
    target = target_of(out, stored, overwrite)
    examples = examples_of(data) if data is not None else None
    if method == "learned" and examples is not None and len(examples.batches) < 2:
        raise ValueError(
            f"`--data` must hold at least two batches for method {method!r}: one of them judges; "
            f"got {examples}."
        )
    networks = DiskNetworks.of(stored, architecture, others)
    sym = networks.sym
    if not (sym.permutations or sym.signs or (method == "mixing" and sym.linear)):
        raise ValueError("The network has no units that can be exchanged: there is nothing to do.")
    pair = _Pair(networks, examples)
    print(f"{a} moves into the frame of {b}\n{networks.describe()}", flush=True)
    before = pair.numbers(lambda read, name: read(name))
    print("\n".join(f"{name}: {value:.6g}" for name, value in before.items()), flush=True)
    how = {"method": method, "restarts": restarts, "seed": architecture.seed}
    result = pair.matched(steps, how)
    print(f"\n{result}")
    after = pair.numbers(_mover(networks, result))
    print("\n".join(f"{name}: {before[name]:.6g} -> {after[name]:.6g}" for name in after))
    del pair
    if target is not None:
        _write(networks, result, target, overwrite)


class _Pair:
    """Both networks as numbers to compute with, and the examples to compare them on."""

    def __init__(self, networks: DiskNetworks, examples: Examples | None) -> None:
        self.model, self.sym = networks.network, networks.sym
        self.a, self.b = networks.read(0), networks.read(1)
        self.examples = None if examples is None else examples.fitted(self.model, self.a)

    def numbers(self, move: Move) -> dict[str, float]:
        """Measure the distance of the networks once the first has moved."""
        numbers = {"distance": distance(self.a, self.b, move)}
        if self.examples is not None:
            a = {name: move(self.a.__getitem__, name) for name in self.a}
            line = barrier(self.model, a, self.b, self.examples.batches, loss)
            numbers[f"barrier on {self.examples}"] = line.height
        return numbers

    def matched(self, steps: int, how: dict[str, Any]) -> MatchResult | FullMatch:
        """Match the first network to the second."""
        data: dict[str, Any] = {}
        if self.examples is not None:
            data = {"model": self.model, "batches": self.examples.batches}
        if how["method"] == "mixing":
            data["by"] = "activations" if data else "weights"
            return match_all(self.a, self.b, self.sym, **data)
        if how["method"] in _BY_DATA:
            how |= {**data, "loss": loss, "learning": Learning(steps=steps)}
        else:
            how["signs"] = True
        return match_networks(self.a, self.b, self.sym, **how)


def distance(a: Params, b: Params, move: Move) -> float:
    """Compute the Euclidean distance of two networks, by tensors, once the first has moved."""
    floating = (name for name, tensor in a.items() if tensor.is_floating_point())
    squares = ((move(a.__getitem__, n) - b[n]).square().sum(dtype=torch.float64) for n in floating)
    return math.sqrt(float(sum(squares)))


def _mover(networks: DiskNetworks, result: MatchResult | FullMatch) -> Move:
    signs = result.signs if isinstance(result, MatchResult) else None
    matrices = result.matrices if isinstance(result, FullMatch) else None

    def move(read: Callable[[str], Tensor], name: str) -> Tensor:
        return moved(read, name, networks.sym, result.permutations, signs, matrices)

    return move


def _write(
    networks: DiskNetworks, result: MatchResult | FullMatch, target: Path, overwrite: bool
) -> None:
    """Read, move and write one tensor after the other."""
    networks.network.to("meta")  # free its memory
    file, move = networks.files[0], _mover(networks, result)
    steps = iter(shown(file.stored.tensors, "writing"))

    def value(place: str) -> Tensor:
        next(steps)
        if place not in file.names:
            return file.stored.read(place)
        return move(file.read, file.names[place]).to(file.stored.tensors[place].dtype)

    write_like(file.stored, target, value, overwrite)
    print(f"wrote {target}")

"""`lightning-bnn match`: bring a network on disk into the frame of another one."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_bnn.commands.disk_networks import DiskNetworks, disk_networks, shown, target_of
from lightning_bnn.commands.judged_examples import Examples, examples_of, loss
from lightning_bnn.params import Params
from lightning_bnn.symmetry import MatchResult, barrier
from lightning_bnn.symmetry import match as match_weights
from lightning_bnn.weight_files import moved, open_network, write_like

__all__ = ["match"]


def match(
    a: str,
    b: str,
    out: str | None = None,
    network: str | None = None,
    input: str = "",
    init: dict[str, Any] | None = None,
    prefix: str | None = None,
    batch_norm: Literal["carrier", "eval"] = "carrier",
    method: Literal["best", "ascent", "frank-wolfe"] = "best",
    restarts: int = 0,
    signs: bool = False,
    seed: int = 0,
    data: str | None = None,
    others: Literal["refuse", "copy"] = "refuse",
    overwrite: bool = False,
    dry_run: bool = False,
) -> None:
    """Bring network A into the frame of network B, as near to it as reordering its units can.

    A moves, B stays as it is. What is written computes what A computes, with the names, types and
    metadata of A, and can be averaged with B.

    Args:
        a: the network that moves: .safetensors, .ckpt, .pt, or a folder of Hugging Face
            (config.json beside model.safetensors or its shards).
        b: the network to come close to.
        out: what to write: a .safetensors file, or a folder if A is one. For example:
            lightning-bnn match a.safetensors b.safetensors --out c.safetensors --network
            torchvision.models.resnet18 --input 1,3,224,224
        network: import path of a class or function that returns the network, or a configuration
            as fit takes it (.yaml); for folders of Hugging Face, transformers knows it.
        input: shape of the input, e.g. 1,3,224,224; with a type after a colon, e.g. 2,16:int64;
            several separated by ;
        init: arguments of the class, e.g. --init.num_classes 10
        prefix: what stands before the names of the network in the files, e.g. net. (found by
            itself when only one fits).
        batch_norm: carrier holds the weights before a batch norm; eval treats it as a fixed affine
            map.
        method: ascent goes from group to group, frank-wolfe moves all at once, best takes the
            better end.
        restarts: further tries from random permutations.
        signs: flip units as well, where the network lets them be flipped (true or false).
        seed: of the restarts, the initialisation and the example input.
        data: for the loss barrier before and after: import path of a LightningDataModule, a
            configuration (.yaml), or a .pt or .safetensors file with inputs and targets.
        others: what becomes of tensors in A that are none of the network: refuse, or copy.
        overwrite: replace what is at --out (true or false).
        dry_run: print what is there before, and write nothing (true or false).
    """
    stored = [open_network(Path(path)) for path in (a, b)]
    target = target_of(out, stored, overwrite, dry_run)
    examples = examples_of(data) if data is not None else None
    networks = disk_networks(stored, network, input, init, prefix, batch_norm, others, seed)
    if not networks.sym.permutations and not (signs and networks.sym.signs):
        raise ValueError("The network has no units that can be exchanged: there is nothing to do.")
    pair = _Pair(networks, examples)
    print(f"{a} moves into the frame of {b}\n{networks.describe()}", flush=True)
    before = pair.numbers(lambda name, tensor: tensor)
    print("\n".join(f"{name}: {value:.6g}" for name, value in before.items()), flush=True)
    if dry_run:
        return
    result = match_weights(
        pair.a, pair.b, networks.sym, method=method, restarts=restarts, signs=signs, seed=seed
    )
    print(f"\n{result}")
    after = pair.numbers(_mover(networks, result))
    print("\n".join(f"{name}: {before[name]:.6g} -> {after[name]:.6g}" for name in after))
    del pair
    if target is not None:
        _write(networks, result, target, overwrite)


class _Pair:
    """Both networks as numbers to compute with, and what they are judged on."""

    def __init__(self, networks: DiskNetworks, examples: Examples | None) -> None:
        self.model, self.examples = networks.network, examples
        self.a, self.b = networks.read(0), networks.read(1)

    def numbers(self, move: Callable[[str, Tensor], Tensor]) -> dict[str, float]:
        """How far the networks are from each other once the first has moved."""
        numbers = {"distance": distance(self.a, self.b, move)}
        if self.examples is not None:
            a = {name: move(name, tensor) for name, tensor in self.a.items()}
            line = barrier(self.model, a, self.b, self.examples.batches, loss)
            numbers[f"barrier on {self.examples}"] = line.height
        return numbers


def distance(a: Params, b: Params, move: Callable[[str, Tensor], Tensor]) -> float:
    """Euclidean distance of two networks, tensor by tensor, once the first has moved."""
    floating = (name for name, tensor in a.items() if tensor.is_floating_point())
    squares = ((move(n, a[n]) - b[n]).square().sum(dtype=torch.float64) for n in floating)
    return math.sqrt(float(sum(squares)))


def _mover(networks: DiskNetworks, result: MatchResult) -> Callable[[str, Tensor], Tensor]:
    def move(name: str, tensor: Tensor) -> Tensor:
        return moved(tensor, name, networks.sym, result.permutations, result.signs)

    return move


def _write(networks: DiskNetworks, result: MatchResult, target: Path, overwrite: bool) -> None:
    """Read, move and write one tensor after the other."""
    networks.forget_network()
    file, move = networks.files[0], _mover(networks, result)
    steps = iter(shown(file.stored.tensors, "writing"))

    def value(place: str) -> Tensor:
        next(steps)
        tensor = file.stored.read(place)
        return move(file.names[place], tensor) if place in file.names else tensor

    write_like(file.stored, target, value, overwrite)
    print(f"wrote {target}")

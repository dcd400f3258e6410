"""`lightning-bnn diff`: whether two networks on disk are one function, a copy, or independent."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch

from lightning_bnn.commands.architecture import Architecture
from lightning_bnn.commands.diff_report import (
    EXIT_CODES,
    Report,
    check_out,
    rounding_of,
    verdict_of,
    write_report,
)
from lightning_bnn.commands.disk_networks import DiskNetworks, shown
from lightning_bnn.commands.judged_examples import Examples, examples_of, loss
from lightning_bnn.symmetry import barrier, difference, fingerprint
from lightning_bnn.symmetry.matching.interpolation import (
    half_way_error,
    output_error,
    random_inputs,
)
from lightning_bnn.weight_files import open_network

__all__ = ["diff"]

ByWeights = Literal["ascent", "frank-wolfe", "best"]


def diff(
    a: str,
    b: str,
    architecture: Architecture,
    method: ByWeights = "ascent",
    nulls: int = 8,
    data: str | None = None,
    out: str | None = None,
    overwrite: bool = False,
) -> None:
    """Tell whether two networks are the same function, a copy trained further, or independent.

    Both are brought into one frame by everything that leaves their functions alone: scales and
    shifts, the order and signs of units, and matrices that mix channels. Exit codes: 0 for the same
    function, 3 for a copy that was trained further, 4 for independent networks, 2 for mistakes.
    Nothing in the files is executed.

    Args:
        a: a network: .safetensors, .ckpt, .pt, or a folder of Hugging Face (config.json beside
            model.safetensors or its shards).
        b: another network of the same architecture. For example: lightning-bnn diff a.safetensors
            b.safetensors --network torchvision.models.resnet18 --input 1,3,224,224
        architecture: options that name the network.
        method: how units are matched: ascent goes from group to group, frank-wolfe moves all at
            once, best takes the better result of the two.
        nulls: number of networks that only look like A and are matched to B, to measure what
            independent networks have in common.
        data: data for the loss barrier between the two networks: import path of a
            LightningDataModule, a configuration (.yaml), or a .pt or .safetensors file with inputs
            and targets.
        out: file for all numbers, e.g. diff.json; a figure of the distances by layer is written
            beside it, e.g. diff.png.
        overwrite: replace an existing file or folder at --out (true or false).
    """
    target = check_out(out, overwrite)
    stored = [open_network(Path(path)) for path in (a, b)]
    examples = examples_of(data) if data is not None else None
    networks = DiskNetworks.of(stored, architecture, "copy")
    print(f"{a}\n{b}\n{networks.describe('not compared')}", flush=True)
    if target is None and _are_equal(networks):
        print("every tensor is the same, bit for bit\nverdict: the same function")
        return
    report = _report(networks, examples, method, nulls, architecture.seed)
    print(report)
    if target is not None:
        write_report(report, target, {"a": a, "b": b, "method": method, "seed": architecture.seed})
        print(f"wrote {target} and {target.with_suffix('.png')}")
    if EXIT_CODES[report.verdict]:
        raise SystemExit(EXIT_CODES[report.verdict])


def _are_equal(networks: DiskNetworks) -> bool:
    """Whether files hold the same numbers; two tensors are in memory at a time."""
    a, b = networks.files
    return all(torch.equal(a.read(n), b.read(n)) for n in shown(a.places, "comparing"))


def _report(
    networks: DiskNetworks, examples: Examples | None, method: ByWeights, nulls: int, seed: int
) -> Report:
    """All numbers about two networks."""
    sym, model = networks.sym, networks.network
    as_stored = networks.read(0), networks.read(1)
    examples = examples and examples.fitted(model, as_stored[0])
    found = difference(*as_stored, sym, method=method, nulls=nulls, seed=seed)
    pairs = (as_stored, (found.a, found.b))
    inputs = random_inputs(*networks.example, seed=seed)
    types = [f.stored.tensors[place].dtype for f in networks.files for place in f.places.values()]
    rounding = rounding_of(types)
    outputs = output_error(model, *as_stored, inputs)
    barriers: tuple[float, ...] = ()
    if examples is not None:
        barriers = tuple(barrier(model, *pair, examples.batches, loss).height for pair in pairs)
    return Report(
        verdict_of(found, outputs, rounding),
        found,
        rounding,
        outputs,
        tuple(half_way_error(model, *pair, inputs) for pair in pairs),
        barriers,
        str(examples or ""),
        tuple(fingerprint(params, sym) for params in as_stored),
    )

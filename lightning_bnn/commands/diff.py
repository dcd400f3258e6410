"""`lightning-bnn diff`: whether two networks on disk are one function, a copy, or independent."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

import lightning_bnn
from lightning_bnn.commands.architecture import Architecture
from lightning_bnn.commands.disk_networks import DiskNetworks, shown
from lightning_bnn.commands.judged_examples import Examples, examples_of, loss
from lightning_bnn.plots.weights import distances_figure
from lightning_bnn.symmetry import Difference, Fingerprint, Stage, barrier, difference, fingerprint
from lightning_bnn.symmetry.matching.interpolation import (
    half_way_error,
    output_error,
    random_inputs,
)
from lightning_bnn.weight_files import open_network
from lightning_bnn.weight_files.writing import check_path

__all__ = ["EXIT_CODES", "Report", "diff", "rounding_of", "verdict_of"]

Verdict = Literal["same function", "copy that was trained on", "independent"]
EXIT_CODES: Mapping[str, int] = {
    "same function": 0,
    "copy that was trained on": 3,
    "independent": 4,
}
"""Exit codes of the command. 2 stands for mistakes, 1 for a crash."""
_SAME_OUTPUTS = 2e-3
_GAIN = 25  # of relative errors, from weights to outputs
_ARITHMETIC = 2e-6  # of symmetries that act in float32
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
    """Compare the numbers of both files, with two tensors in memory at a time."""
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


# ------------------------------------------------------------ report
@dataclass(frozen=True, eq=False)
class Report:
    """Two networks, compared.

    Attributes:
        verdict: what they are to each other.
        difference: in weights.
        rounding: the relative distance that rounding explains.
        outputs: largest relative difference of outputs on random inputs.
        half_way: how far the network half way is from the mean of both, as stored and matched.
        barriers: of the loss between both, as stored and matched; empty without examples.
        examples: on which, for people to read.
        fingerprints: of both.
    """

    verdict: Verdict
    difference: Difference
    rounding: float
    outputs: float
    half_way: tuple[float, ...]
    barriers: tuple[float, ...]
    examples: str
    fingerprints: tuple[Fingerprint, ...]

    def __str__(self) -> str:
        """A table of the steps, then one line for everything else, the verdict last."""
        return "\n".join([*_steps(self.difference), "", *_lines(self), "", _verdict(self)])

    def json(self) -> dict[str, Any]:
        """Return all numbers as plain types, and null for what is not a number."""
        d = self.difference
        return {
            "verdict": self.verdict,
            "stages": [_stage(stage) for stage in d.stages],
            "explained": d.explained,
            "rest": d.rest,
            "rounding": self.rounding,
            "unrelated": [stage.relative for stage in d.nulls],
            "share_of_unrelated": _number(d.share),
            "z": _number(d.z),
            "units_in_their_places": d.kept,
            "expected_by_chance": d.groups,
            "units": d.units,
            "chance": d.chance,
            "outputs": _number(self.outputs),
            "half_way": [_number(x) for x in self.half_way],
            "barriers": [_number(x) for x in self.barriers],
            "examples": self.examples,
            "fingerprints": [_fingerprint(f) for f in self.fingerprints],
        }


def verdict_of(difference: Difference, outputs: float, rounding: float) -> Verdict:
    """Decide what two networks are to each other.

    Args:
        difference: in weights.
        outputs: largest relative difference of outputs; NaN where none depend on the weights.
        rounding: the relative distance that rounding explains.
    """
    if difference.rest <= rounding and not outputs > max(_SAME_OUTPUTS, _GAIN * rounding):
        return "same function"
    return "copy that was trained on" if difference.related else "independent"


def rounding_of(types: Iterable[torch.dtype]) -> float:
    """The relative distance that two roundings of weights explain, and arithmetic in float32.

    Args:
        types: of the tensors in both files.
    """
    return max(_ARITHMETIC, *(torch.finfo(t).eps for t in types if t.is_floating_point))


# ------------------------------------------------------------ text
def _steps(d: Difference) -> Iterator[str]:
    yield f"{'':<16}{'distance':>11}{'relative':>11}{'explains':>11}"
    for stage in d.stages:
        share = f"{100 * d.explained[stage.name]:.1f} %" if stage is not d.stages[0] else ""
        yield f"{stage.name:<16}{stage.distance:>11.4g}{stage.relative:>11.3g}{share:>11}".rstrip()


def _lines(report: Report) -> Iterator[str]:
    d = report.difference
    yield (
        f"independent networks like these: {float(d.null.mean()):.3g} ± {float(d.null.std()):.2g} "
        f"(relative, {len(d.nulls)} made from A by rotating its units)"
    )
    yield (
        f"what is left: {d.rest:.3g}, squared {100 * d.share:.3g} % of theirs, z = {d.z:.1f}; "
        f"rounding explains {report.rounding:.1g}"
    )
    yield (
        f"units in their places: {d.kept} of {d.units} (by chance {d.groups}; probability of as "
        f"many {d.chance:.1g})"
    )
    yield f"outputs on random inputs differ by {report.outputs:.2g} (relative)"
    before, after = report.half_way
    yield f"half way, outputs miss the mean of both by {before:.2g} of their spread -> {after:.2g}"
    if report.barriers:
        before, after = report.barriers
        yield f"barrier on {report.examples}: {before:.6g} -> {after:.6g}"
    a, b = report.fingerprints
    rough = report.difference.rest <= report.rounding
    apart = "other words, which rounding of the files explains" if rough else "different orbits"
    same = "one orbit is possible" if a.agrees(b) else apart
    yield f"fingerprints: {a} and {b}: {same}"
    if not (a.attained and b.attained):
        yield "(no finite scales reach the least mass: the fingerprints depend on the scales)"


def _verdict(report: Report) -> str:
    small = report.difference.rest <= report.rounding
    if report.verdict == "same function":
        return "verdict: the same function, up to symmetries and rounding"
    if small:
        why = "weights agree up to symmetries and rounding, outputs do not (look at buffers)"
        return f"verdict: a copy whose {why}"
    if report.verdict == "independent":
        return "verdict: independent networks"
    return "verdict: a copy that was trained on, or two networks from one start"


# ------------------------------------------------------------ files
def check_out(out: str | None, overwrite: bool) -> Path | None:
    """Check where the numbers go, before the work begins.

    Args:
        out: what the user has written.
        overwrite: whether what is there may be replaced.
    """
    if out is None:
        return None
    target = Path(out)
    if target.suffix != ".json":
        raise ValueError(f"`--out` must be a .json file, got {out}.")
    for path in (target, target.with_suffix(".png")):
        check_path(path, overwrite and not path.is_dir())
    return target


def write_report(report: Report, target: Path, settings: Mapping[str, Any]) -> None:
    """Write all numbers, and a figure of the distances by layer beside them.

    Args:
        report: about two networks.
        target: a .json file.
        settings: what decides the numbers.
    """
    content = {"version": lightning_bnn.__version__, "settings": dict(settings), **report.json()}
    target.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    d = report.difference
    stages = {stage.name: stage.by_layer() for stage in d.stages}
    figure = distances_figure(stages, [null.by_layer() for null in d.nulls])
    figure.savefig(target.with_suffix(".png"), dpi=150)


def _stage(stage: Stage) -> dict[str, Any]:
    tensors = {
        name: {"distance": math.sqrt(square), "size": math.sqrt(stage.sizes[name])}
        for name, square in stage.squares.items()
    }
    return {
        "name": stage.name,
        "distance": stage.distance,
        "relative": stage.relative,
        "layers": stage.by_layer(),
        "tensors": tensors,
    }


def _fingerprint(found: Fingerprint) -> dict[str, Any]:
    return {"code": found.code, "attained": found.attained, "norms": found.norms}


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None

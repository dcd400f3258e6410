"""What `lightning-bnn diff` says about two networks: a verdict, a text, a file and a figure."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

import lightning_bnn
from lightning_bnn.plots import distances_figure
from lightning_bnn.symmetry import Difference, Fingerprint, Stage

__all__ = [
    "EXIT_CODES",
    "Report",
    "Verdict",
    "check_out",
    "rounding_of",
    "verdict_of",
    "write_report",
]

Verdict = Literal["same function", "copy that was trained on", "independent"]
EXIT_CODES: Mapping[str, int] = {
    "same function": 0,
    "copy that was trained on": 3,
    "independent": 4,
}
"""What the shell is told; 2 are mistakes, 1 is a crash."""
_SAME_OUTPUTS = 2e-3
_GAIN = 25  # of relative errors, from weights to outputs
_ARITHMETIC = 2e-6  # of symmetries that act in float32


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
        """All numbers as plain types; what is no number is null."""
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
    """What two networks are to each other.

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
    """Where the numbers go: refused before the work begins.

    Args:
        out: what the user has written.
        overwrite: whether what is there may be replaced.
    """
    if out is None:
        return None
    target = Path(out)
    if target.suffix != ".json":
        raise ValueError(f"`--out` must be a .json file, got {out}.")
    if not target.parent.is_dir():
        raise ValueError(f"`--out`: there is no folder {target.parent}.")
    for path in (target, target.with_suffix(".png")):
        if path.is_dir() or (path.exists() and not overwrite):
            raise ValueError(f"`--out`: {path} is there; `--overwrite true` replaces files.")
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

"""`weightsym diff`: the relation of two networks on disk: one function, a copy, or independent."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from weightsym import (
    Difference,
    Fingerprint,
    Relation,
    Symmetries,
    barrier,
    parents_of,
    relation,
)
from weightsym.commands.architecture import Architecture
from weightsym.commands.examples import examples_of, loss
from weightsym.commands.networks import build, fit_all, numbers, shown, symmetries_in
from weightsym.commands.reports import Outcome, report_file, write_report
from weightsym.discovery.folding import folding
from weightsym.files import NetworkNames, open_network
from weightsym.matching.difference import Network
from weightsym.matching.interpolation import output_error, random_inputs
from weightsym.matching.moved import parked
from weightsym.matching.relation import EXCESS, Verdict
from weightsym.networks.files.fitting import FittedNetwork
from weightsym.networks.files.stored import StoredNetwork

EXIT_CODES: Mapping[Verdict, int] = {
    "same function": 0,
    "made from it": 3,
    "parts of it": 3,
    "independent": 4,
    "cannot be told": 5,
}
"""Exit codes of the command. 2 means a mistake of the user, 1 a crash."""
_FARTHER = 0.01  # share of the distance by which a step makes it larger
_SAME_OUTPUTS = 2e-3
_GAIN = 25  # of relative errors, from weights to outputs
_ARITHMETIC = 2e-6  # of symmetries that act in float32


def diff(
    a: str,
    b: str,
    architecture: Architecture,
    init_b: dict[str, Any] | None = None,
    parents: list[str] | None = None,
    data: str | None = None,
    out: str | None = None,
    overwrite: bool = False,
) -> Outcome:
    """Tell whether two networks are the same function, one was made from the other, or neither.

    Both are brought into one frame by everything that preserves their functions: gains of norms,
    scales and shifts, the order and signs of units, and matrices that mix channels. One may have
    fewer units, layers, tokens or classes than the other. Exit codes: 0 for the same function, 3 if
    one network, or a part of it, was made from the other, 4 for independent ones, 5 if this cannot
    be decided, 2 for mistakes. Nothing in the files is executed.

    Args:
        a: a network: .safetensors, .ckpt, .pt, or a folder of Hugging Face (config.json beside
            model.safetensors or its shards).
        b: another network of the same class. For example: weightsym diff a.safetensors
            b.safetensors --network torchvision.models.resnet18 --input 1,3,224,224
        architecture: options that specify the network.
        init_b: arguments of the class that differ for B, e.g. --init_b.width 24; folders of Hugging
            Face have their own configurations.
        parents: further networks that A may have been merged from, beside B: the weights of all are
            found by least squares.
        data: data for the loss barrier between the two networks: import path of a
            LightningDataModule, a configuration (.yaml), or a .pt or .safetensors file with inputs
            and targets.
        out: file for all numbers, e.g. diff.json; a figure of the distances and shared units is
            written beside it, e.g. diff.png.
        overwrite: replace an existing file or folder at --out (true or false).
    """
    target = report_file(out, overwrite)
    stored = [open_network(Path(path)) for path in (a, b, *(parents or ()))]
    examples = examples_of(data) if data is not None else None
    built = _built(stored, architecture, init_b or {})
    if len(built) > 1 and (data is not None or parents):
        raise ValueError("`--data` and `--parents` need networks of one shape.")
    files = _fitted(stored, [names for *_, names in built], architecture.prefix)
    print("\n".join([a, _description(files[0]), b, _description(files[1]), ""]), flush=True)
    if target is None and not parents and _are_equal(*files[:2]):
        print("every tensor is the same, as its type rounds it\nverdict: the same function")
        return Outcome({"verdict": "same function"})
    folded = [(*folding(module, *example), example) for module, example, _ in built]
    syms = [symmetries_in(m, *x, batch_norm=architecture.batch_norm) for m, _, x in folded]
    (model, fold, example), (*_, fold_b, _) = folded[0], folded[-1]
    print("\n".join(f"{sym}\n" for sym in syms), flush=True)
    folds = fold, *[fold_b] * (len(files) - 1)
    first, second, *more = (parked(f(numbers(x))) for f, x in zip(folds, files, strict=True))
    evidence = relation(first, second, *syms, seed=architecture.seed)
    prints = () if evidence.partial else evidence.difference.fingerprints
    rounding = rounding_of(f.stored.tensors[p].dtype for f in files for p in f.names)
    inputs = random_inputs(*example, seed=architecture.seed)
    outputs = math.nan if evidence.partial else output_error(model, first, second, inputs)
    verdict = verdict_of(evidence, outputs, rounding)
    examples = examples and examples.fitted(model, dict(first))
    batches = [] if examples is None else examples.batches
    found = evidence.difference
    pairs = [(dict(first), dict(second)), (found.a, found.b)] if batches else []
    every: dict[str, Any] = {
        "verdict": verdict,
        "rounding": rounding,
        "outputs": outputs,
        "barriers": [barrier(model, *pair, batches, loss).height for pair in pairs],
        "examples": str(examples or ""),
        "parents": _parents(first, [second, *more], (b, *(parents or ())), syms[0]) if more else {},
        "fingerprints": [p.code for p in prints],
        "settings": {"a": a, "b": b, "seed": architecture.seed},
    }
    print("\n".join([*_steps(evidence.difference), "", *_lines(evidence, every, prints)]))
    content = _content(evidence, every)
    if target is not None:
        stages, shares = evidence.difference.stages, evidence.shares
        layers = {stage.name: stage.by_layer() for stage in stages}
        print(write_report(target, content, lambda plots: plots.distances_figure(layers, shares)))
    return Outcome(content, EXIT_CODES[verdict])


def _parents(
    child: Network, candidates: Sequence[Network], names: Sequence[str], sym: Symmetries
) -> dict[str, Any]:
    """Return the weights of candidates in a merged network as plain data."""
    found = parents_of(child, candidates, sym)
    by_layer = {layer: dict(zip(names, w, strict=True)) for layer, w in found.by_layer.items()}
    weights = dict(zip(names, found.weights, strict=True))
    return {"weights": weights, "rest": found.rest, "layers": by_layer}


def _built(
    stored: Sequence[StoredNetwork], architecture: Architecture, init_b: Mapping[str, Any]
) -> list[tuple[nn.Module, tuple[Tensor, ...], NetworkNames]]:
    """Build the network of the first file, and that of the second one if it has other shapes."""
    folders = [s.path for s in stored if s.is_folder]
    built = [build(architecture, folders[0] if folders else None)]
    others = replace(architecture, init={**(architecture.init or {}), **init_b})
    if init_b or (architecture.network is None and len(folders) > 1):
        built.append(build(others, folders[-1]) if folders else build(others, None))
    shapes = [{n: t.shape for n, t in module.state_dict().items()} for module, *_ in built]
    return built if shapes[0] != shapes[-1] else built[:1]


def _fitted(
    stored: Sequence[StoredNetwork], names: Sequence[NetworkNames], prefix: str | None
) -> list[FittedNetwork]:
    """Find the tensors of one network in all files, or of one network in each."""
    rows = [stored] if len(names) == 1 else [[one] for one in stored]
    try:
        pairs = zip(rows, names, strict=True)
        return [file for some, each in pairs for file in fit_all(some, each, prefix, "copy")]
    except ValueError as error:
        shapes = [sorted(t.shape for t in file.tensors.values()) for file in stored]
        if len(names) > 1 or shapes[0] == shapes[1]:
            raise
        hint = "If B has another size, `--init_b` takes the arguments of its class that differ."
        raise ValueError(f"{error} {hint}") from error


def _description(file: FittedNetwork) -> str:
    """Describe the size of a network, and the other tensors in its file."""
    tensors = [file.stored.tensors[name] for name in file.places.values()]
    types = ", ".join(sorted({str(t.dtype).removeprefix("torch.") for t in tensors}))
    count = sum(t.shape.numel() for t in tensors)
    text = f"parameters: {count} in {len(tensors)} tensors ({types})"
    if file.others:
        more = f" and {len(file.others) - 1} more" if len(file.others) > 1 else ""
        text += (
            f"\nnot compared, since not of the network: {file.others[0]!r}{more} in "
            f"{file.stored.path}"
        )
    return text


def _are_equal(a: FittedNetwork, b: FittedNetwork) -> bool:
    """Compare the numbers of both files in the coarser of their types, tensor by tensor."""

    def same(x: Tensor, y: Tensor) -> bool:
        if x.is_floating_point() and y.is_floating_point():
            coarser = max(x.dtype, y.dtype, key=lambda t: torch.finfo(t).eps)
            x, y = x.to(coarser), y.to(coarser)
        return torch.equal(x, y)

    names = shown(a.places, "comparing") if a.places.keys() == b.places.keys() else ()
    return bool(names) and all(same(a.read(n), b.read(n)) for n in names)


def verdict_of(evidence: Relation, outputs: float, rounding: float) -> Verdict:
    """Return the verdict about two networks.

    Args:
        evidence: evidence from the weights.
        outputs: largest relative difference of outputs; NaN if none depend on the weights.
        rounding: relative distance explained by rounding.
    """
    remainder = evidence.difference.rest
    if remainder <= rounding and not outputs > max(_SAME_OUTPUTS, _GAIN * rounding):
        return "same function"
    return "made from it" if evidence.verdict == "same function" else evidence.verdict


def rounding_of(types: Iterable[torch.dtype]) -> float:
    """Return the relative distance explained by two roundings of weights, and float32 arithmetic.

    Args:
        types: of the tensors in both files.
    """
    return max(_ARITHMETIC, *(torch.finfo(t).eps for t in types if t.is_floating_point))


# ------------------------------------------------------------ text
def _steps(d: Difference) -> Iterator[str]:
    yield f"{'':<16}{'distance':>11}{'relative':>11}{'explains':>11}"
    explained, before = d.explained, dict(zip(d.explained, d.stages, strict=False))
    for stage in d.stages:
        share = "" if stage is d.stages[0] else f"{100 * max(0.0, explained[stage.name]):.1f} %"
        yield f"{stage.name:<16}{stage.distance:>11.4g}{stage.relative:>11.3g}{share:>11}".rstrip()
    for name, stage in before.items():
        if explained[name] < -_FARTHER:
            times = (1 - explained[name] * d.stages[0].relative ** 2 / stage.relative**2) ** 0.5
            yield f"{name}: {times:.3g} times as far apart as before, since scales hid differences"


def _lines(
    evidence: Relation, numbers: Mapping[str, Any], prints: Sequence[Fingerprint]
) -> Iterator[str]:
    left = evidence.difference.rest
    judged = [g for g in evidence.groups if g.agreeing is not None]
    placed = [g for g in evidence.groups if g.in_place is not None]
    chance = sum(1 if g.among is None else 2 * g.units**0.5 for g in placed)
    yield (
        f"units in their places{' or in order' * evidence.partial}: "
        f"{sum(g.in_place or 0 for g in placed)} of {sum(g.units for g in placed)} "
        f"(by chance {chance:.0f}): "
        f"p = {evidence.p_exact:.1g}"
    )
    yield (
        f"units found twice: {sum(g.agreeing or 0 for g in judged)} of "
        f"{sum(g.tried for g in judged)} (independent networks: at most {100 * EXCESS:.0f} %): "
        f"p <= {evidence.p_robust:.1g}"
    )
    yield (
        f"what is left: {left:.3g} (rounding explains {numbers['rounding']:.1g}): "
        f"p <= {evidence.p_close:.1g}"
    )
    if not evidence.partial:
        yield f"outputs on random inputs differ by {numbers['outputs']:.2g} (relative)"
    if numbers["barriers"]:
        before, after = numbers["barriers"]
        yield f"barrier on {numbers['examples']}: {before:.6g} -> {after:.6g}"
    rough = left <= numbers["rounding"]
    yield from _compared(prints, rough) if prints else ()
    if numbers["parents"]:
        yield f"as a sum of candidates, with {numbers['parents']['rest']:.2g} of the norm left:"
        yield from (f"{w:>8.3f} {name}" for name, w in numbers["parents"]["weights"].items())
    if numbers["verdict"] == "parts of it":
        for g in evidence.groups:
            count = max(g.in_place or 0, g.agreeing or 0)
            yield f"shared: {0 if g.is_apart else count} of {g.among or g.units} of {g.name}"
    yield f"\nverdict: {_sentence(numbers['verdict'], rough)}"


def _compared(prints: Sequence[Fingerprint], rough: bool) -> Iterator[str]:
    a, b = prints
    apart = "other words, which rounding of the files explains" if rough else "different orbits"
    yield f"fingerprints: {a} and {b}: {'one orbit is possible' if a.agrees(b) else apart}"
    if not (a.attained and b.attained):
        yield "(no finite scales reach the least mass: the fingerprints depend on the scales)"


def _sentence(verdict: Verdict, rough: bool) -> str:
    if verdict == "made from it" and rough:
        return (
            "one was made from the other: weights agree up to symmetries and rounding, "
            "but outputs do not (check the buffers)"
        )
    return {
        "same function": "the same function, up to symmetries and rounding",
        "made from it": "one was made from the other, or both from one start",
        "parts of it": "parts of one were made from the other, or both from one start",
        "independent": "independent networks",
        "cannot be told": "cannot be told: too few units of these networks can be compared",
    }[verdict]


# ------------------------------------------------------------ files
def _content(evidence: Relation, numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Return all numbers as plain data."""
    return {
        **numbers,
        "stages": [{"name": s.name, "relative": s.relative, "layers": s.by_layer()}
                   for s in evidence.difference.stages],
        "explained": evidence.difference.explained,
        "rest": evidence.difference.rest,
        "p": {"exact": evidence.p_exact, "robust": evidence.p_robust, "close": evidence.p_close},
        "groups": [asdict(group) for group in evidence.groups],
    }  # fmt: skip

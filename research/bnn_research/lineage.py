"""Tests of lineage on attacked children of small networks, ours beside published ones."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from scipy.stats import kstest

import lightning_bnn
import weightsym
from bnn_research.families import ATTACKS, FAMILIES, LEVELS, SCALES, Bases, Scale, family
from bnn_research.rivals import RIVALS, Suspect
from bnn_research.scales import settings_of
from lightning_bnn.findings import Findings, publish, results_folder
from lightning_bnn.plots import Line, lines_figure
from lightning_bnn.tables import Cell, Table
from weightsym import Outcome, Relation, kinship, likeness, relation
from weightsym import params as P
from weightsym.files import write_whole
from weightsym.params import Params, keyed_generator


def lineage(
    scale: Literal["small", "paper"] = "small",
    families: list[str] | None = None,
    networks: int | None = None,
    width: int | None = None,
    hidden: int | None = None,
    steps: int | None = None,
    seed: int = 0,
    out: str = "studies/lineage",
) -> Outcome:
    """Train five families of small networks, make children, attack them, and ask who is found.

    Languages are of tinyshakespeare, letter by letter (text/tinyshakespeare.txt in the folder of
    the data), images of MNIST. Negatives are networks of other seeds, of the same data and recipe,
    and one distilled from the parent. If the command is interrupted, the next call trains again,
    and continues where comparing stopped, unless settings or code of weightsym or of this study
    have changed.

    Args:
        scale: small, which takes about ten minutes, or paper, with more and larger networks.
        families: some of Llama, GPT-2, ViT, CNN, MLP; by default all.
        networks: number of independent networks of each family.
        width: of the streams; the CNN has as many channels at most.
        hidden: number of hidden units of a layer.
        steps: number of training steps.
        seed: random seed of the starts, the batches and the attacks.
        out: folder for the results.
    """
    chosen = list(families or FAMILIES)
    if unknown := sorted({*chosen} - {*FAMILIES}):
        raise ValueError(f"`families` must be some of {', '.join(FAMILIES)}, got {unknown[0]!r}.")
    folder = results_folder(out, "lineage")
    settings = settings_of(
        SCALES, scale, networks=networks, width=width, hidden=hidden, steps=steps
    )
    if settings.networks < 2:
        raise ValueError(f"`networks` must be at least 2, got {settings.networks}.")
    start = time.process_time()
    trials = {name: Trial.of(name, settings, seed, folder) for name in chosen}
    minutes = (time.process_time() - start) / 60
    return publish(_findings(trials, settings, minutes), folder)


# ------------------------------------------------------------ comparisons
@dataclass(frozen=True, eq=False)
class Compared:
    """A suspect beside a network that may be its parent, as plain numbers.

    Attributes:
        child: how it was made, empty for another seed.
        attack: what was done to it then.
        related: whether it was made from the other one.
        verdict: of our tests.
        in_place: log10 p of units in their places.
        twice: log10 p of units found twice.
        left: what no symmetry explains.
        groups: by group the numbers of units, in their places, and found twice.
        accuracy: of the suspect, in per cent.
        scores: of all methods; the higher, the more in common.
        seconds: of all methods.
    """

    child: str
    attack: str
    related: bool
    verdict: str
    in_place: float
    twice: float
    left: float
    groups: Sequence[tuple[int, int | None, int | None]]
    accuracy: float
    scores: Mapping[str, float]
    seconds: Mapping[str, float]

    @property
    def share(self) -> float:
        """The share of units that are found twice, among all that can be."""
        return self.scores["units found twice"]


def _share(groups: Sequence[tuple[int, int | None, int | None]]) -> float:
    judged = [(units, twice) for units, _, twice in groups if twice is not None]
    units = sum(count for count, _ in judged)
    return sum(twice for _, twice in judged) / units if units else math.nan


@dataclass(frozen=True, eq=False)
class Suspected:
    """A network that is asked about: how it was made, its attack, and who may be its parent."""

    child: str
    attack: str
    base: int
    related: bool
    params: Params


@dataclass(frozen=True, eq=False)
class Trial:
    """All comparisons of a family."""

    bases: Bases
    compared: Sequence[Compared]
    breaking: Sequence[Compared]

    @classmethod
    def of(cls, name: str, settings: Scale, seed: int, folder: Path) -> Trial:
        """Train, make children, attack and compare, from where a run of the folder has stopped."""
        bases = Bases.of(family(name, settings), settings, seed)
        children = itertools.product(bases.children().items(), ATTACKS)
        every = [Suspected(child, attack, 0, True, w) for (child, w), attack in children]
        pairs = itertools.combinations(range(settings.networks), 2)
        every += [Suspected("", "none", j, False, P.of(bases.networks[k])) for j, k in pairs]
        taught = bases.distilled()
        every += [Suspected("distilled", attack, 0, False, taught) for attack in ATTACKS[::4]]
        every += [Suspected(how, "at a price", 0, True, w) for how, w in bases.breaking()]
        kept = folder / f"{name}-{digest(settings, seed)}.json"
        compared = _Judge(bases).compare(every, kept)
        breaking = [c for c in compared if c.attack == "at a price"]
        return cls(bases, [c for c in compared if c not in breaking], breaking)


def digest(settings: Scale, seed: int) -> str:
    """Tell apart runs of other settings, versions, or code that judges.

    Args:
        settings: of the study.
        seed: of the study.
    """
    own = [Path(__file__).with_name(f"{name}.py") for name in ("families", "lineage", "rivals")]
    sources = [*sorted(Path(weightsym.__file__).parent.rglob("*.py")), *own]
    code = [file.read_bytes() for file in sources]
    key = repr((lightning_bnn.__version__, settings, seed, code))
    return hashlib.sha256(key.encode()).hexdigest()[:12]


class _Judge:
    """Compares suspects with bases by all methods, and takes the time."""

    def __init__(self, bases: Bases) -> None:
        self.bases, self.inputs = bases, bases.family.held[0][:64]
        stored = [P.of(net) for net in bases.networks]
        self.folded = bases.fold(stored)
        self.shelf = [likeness(w, bases.sym_folded) for w in self.folded]
        self.seen = [self._seen(w) for w in stored]

    def compare(self, every: Sequence[Suspected], file: Path) -> list[Compared]:
        """Attack all suspects, fold their gains, and compare those that the file has not yet."""
        stored = self.bases.attacked([s.params for s in every], [s.attack for s in every])
        stored = [{n: t.detach() for n, t in w.items()} for w in stored]
        folded = self.bases.fold(stored)
        rows = json.loads(file.read_text()) if file.is_file() else []
        for each in [*zip(every, stored, folded, strict=True)][len(rows) :]:
            rows.append(asdict(self._compare(*each)))
            write_whole(file, json.dumps(rows), wait=False)
        return [Compared(**{**row, "groups": [*map(tuple, row["groups"])]}) for row in rows]

    def _seen(self, params: Params) -> Suspect:
        module, names = self.bases.networks[0], self.bases.family.names
        return Suspect.of(module, params, names, self.inputs)

    def _compare(self, suspect: Suspected, stored: Params, folded: Params) -> Compared:
        scores, seconds = dict[str, float](), dict[str, float]()

        def timed(name: str, function: Callable[[], Any]) -> Any:
            start = time.process_time()
            result = function()
            seconds[name] = time.process_time() - start
            return result

        base, sym = suspect.base, self.bases.sym_folded
        found: Relation = timed("ours", lambda: relation(folded, self.folded[base], sym))
        groups = [(g.units, g.in_place, g.agreeing) for g in found.groups]
        scores["units found twice"] = _share(groups)
        scores["units in place"] = -math.log10(found.p_exact)
        scores["sketch"] = timed("sketch", lambda: self._sketch(folded, base))
        seen = timed("forward", lambda: self._seen(stored))
        for name, score in RIVALS.items():
            scores[name] = timed(name, functools.partial(score, seen, self.seen[base]))
        accuracy = self.bases.family.accuracy(self.bases.networks[0], stored)
        return Compared(
            suspect.child, suspect.attack, suspect.related, found.verdict,
            math.log10(found.p_exact), math.log10(found.p_robust), found.difference.rest,
            groups, accuracy, scores, seconds,
        )  # fmt: skip

    def _sketch(self, folded: Params, base: int) -> float:
        """Correlate the sketches beyond what all networks have in common."""
        return float(kinship([likeness(folded, self.bases.sym_folded), *self.shelf])[0, base + 1])


# ------------------------------------------------------------ tables
def _findings(trials: Mapping[str, Trial], settings: Scale, minutes: float) -> Findings:
    tables = {
        "auc": _cells(trials, "Area under the ROC curve", auc),
        "found": _cells(
            trials, "Children found at 1 % false ones (above all negatives), %", true_positives
        ),
        "children": _children(trials),
        "nulls": _nulls(trials),
        "breaks": _breaks(trials),
        "seconds": _seconds(trials),
    }
    cautions = [
        "Negatives of each cell are all pairs of independent networks of the family, and the "
        "distilled network: the rate of false ones is 0 of as many.",
        f"{minutes:.1f} CPU minutes.",
    ]
    title = "Lineage: children, attacks, and who finds them"
    figures = {"noise": _figure(trials)}
    return Findings("lineage", title, tables, figures, cautions, {"scale": settings.__dict__})


def auc(positives: Sequence[float], negatives: Sequence[float]) -> float:
    """Return the share of pairs of scores in the right order, NaN if one is undefined.

    Args:
        positives: of related networks.
        negatives: of independent ones.
    """
    above = np.subtract.outer(positives, negatives)
    return math.nan if np.isnan(above).any() else float(((above > 0) + 0.5 * (above == 0)).mean())


def true_positives(positives: Sequence[float], negatives: Sequence[float]) -> float:
    """Return the percentage of positives above all but 1 % of the negatives.

    Args:
        positives: scores of related networks.
        negatives: of independent ones.
    """
    limit = np.quantile(negatives, 0.99, method="higher")
    return math.nan if np.isnan(limit) else 100 * float((np.array(positives) > limit).mean())


def _cells(
    trials: Mapping[str, Trial],
    title: str,
    judged: Callable[[Sequence[float], Sequence[float]], float],
) -> Table:
    """A row for every family and attack, a column for every method."""
    rows: list[Mapping[str, Cell]] = []
    for (name, trial), attack in itertools.product(trials.items(), ATTACKS):
        negatives = [c.scores for c in trial.compared if not c.related]
        positives = [c.scores for c in trial.compared if c.related and c.attack == attack]
        methods = {
            m: judged([s[m] for s in positives], [s[m] for s in negatives]) for m in positives[0]
        }
        rows.append({"family": name, "attack": attack, **methods})
    return Table.of(title, rows, 2 if judged is auc else 0)


def _children(trials: Mapping[str, Trial]) -> Table:
    """Tabulate the results of our tests for every child, as it is and after all attacks."""
    rows: list[Mapping[str, Cell]] = []
    for name, trial in trials.items():
        by_child: dict[str, dict[str, Compared]] = {}
        for each in (c for c in trial.compared if c.child):
            by_child.setdefault(each.child, {})[each.attack] = each
        for child, c in by_child.items():
            plain, attacked = c[ATTACKS[0]], c[ATTACKS[-1]]
            rows.append({
                "family": name, "child": child, "accuracy, %": plain.accuracy,
                "in place": plain.in_place, "twice": plain.twice,
                "left": plain.left,
                "attacked: accuracy, %": attacked.accuracy,
                "attacked: in place": attacked.in_place,
                "attacked: twice": attacked.twice,
                "attacked: left": attacked.left,
                "verdict": attacked.verdict,
            })  # fmt: skip
    digits = {name: 1 for name in rows[0]} | {"left": 3, "attacked: left": 3}
    title = "Log10 p of units in their places and of units found twice, and what is left"
    return Table.of(title, rows, digits)


def _nulls(trials: Mapping[str, Trial]) -> Table:
    """Tabulate what independent networks have in common."""
    rows: list[Mapping[str, Cell]] = []
    for name, trial in trials.items():
        pairs = [c for c in trial.compared if not c.related]
        shares = [k / n for c in pairs for n, _, k in c.groups if k is not None]
        generator = keyed_generator("lineage", name)
        values = [u for c in pairs if not c.child for u in _uniform(c, generator)]
        rows.append({
            "family": name, "pairs": len(pairs), "called independent": sum(
                c.verdict == "independent" for c in pairs),
            "mean share found twice": float(np.mean(shares)),
            "largest share of a group": max(shares),
            "largest share of a pair": max(c.share for c in pairs),
            "groups in place": len(values), "KS p": float(kstest(values, "uniform").pvalue),
        })  # fmt: skip
    return Table.of("Independent and distilled networks", rows)


def _uniform(pair: Compared, generator: torch.Generator) -> Iterator[float]:
    """By group the probability of as many units in place, made continuous by a random share."""
    counts = [(units, placed) for units, placed, _ in pair.groups if placed is not None]
    for units, fixed in counts:
        law = [_fixed(k, units) for k in range(min(units, 30) + 1)]
        share = float(torch.rand((), generator=generator))
        yield sum(law[fixed + 1 :]) + share * law[fixed]


def _fixed(k: int, units: int) -> float:
    """The probability of exactly k fixed points of a uniform permutation."""
    left = min(units - k, 30)
    return sum((-1) ** j / math.factorial(j) for j in range(left + 1)) / math.factorial(k)


def _breaks(trials: Mapping[str, Trial]) -> Table:
    """Tabulate attacks at a price, and distillation."""
    rows: list[Mapping[str, Cell]] = [
        {
            "family": name, "attack": c.child, "accuracy before, %": _before(trial),
            "accuracy after, %": c.accuracy, "found twice, %": 100 * c.share,
            "in place": c.in_place, "twice": c.twice,
            "verdict": c.verdict,
        }
        for name, trial in trials.items()
        for c in (*trial.breaking, *(d for d in trial.compared if d.child == "distilled"))
        if c.attack in ("none", "at a price")
    ]  # fmt: skip
    return Table.of("Attacks at a price: accuracy, and results of our tests", rows, 1)


def _before(trial: Trial) -> float:
    bases = trial.bases
    return bases.family.accuracy(bases.networks[0], P.of(bases.networks[0]))


def _seconds(trials: Mapping[str, Trial]) -> Table:
    """CPU seconds of a pair."""
    rows: list[Mapping[str, Cell]] = []
    for name, trial in trials.items():
        for kind, related in (("child", True), ("independent", False)):
            taken = [c.seconds for c in trial.compared if c.related == related]
            means = {m: float(np.mean([s[m] for s in taken])) for m in taken[0]}
            rows.append({"family": name, "pair": kind, **means})
    return Table.of("CPU seconds of a pair", rows)


def _figure(trials: Mapping[str, Trial]) -> Any:
    """The share of units found twice and the accuracy, by the size of the noise."""
    panels = {}
    for name, trial in trials.items():
        noises = trial.breaking[: len(LEVELS)]
        sizes = torch.tensor([0.0, *LEVELS])
        found = torch.tensor([100.0, *(100 * c.share for c in noises)])
        right = torch.tensor([_before(trial), *(c.accuracy for c in noises)])
        panels[name] = {"units found twice": Line(sizes, found), "accuracy": Line(sizes, right)}
    return lines_figure(panels, ("noise, in standard deviations of the weights", "%"))

"""P2's question: what does symmetrized VI gain over mean-field VI that starts as well as it can?"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from tqdm.auto import tqdm

import lightning_bnn
from lightning_bnn.comparison.tables import Cell, Measured, Table, interval, spread
from lightning_bnn.metrics.laws import law_mmd
from lightning_bnn.params import Params
from lightning_bnn.plots import dots_figure
from lightning_bnn.quiet_runs import one_thread
from lightning_bnn.studies.findings import Findings, publish, results_folder, settings_of
from lightning_bnn.studies.small_posteriors import Chains, Problem, sampled
from lightning_bnn.studies.tuned_vi import (
    CRITERIA,
    KINDS,
    Choice,
    Effort,
    Fitted,
    best,
    fitted,
    tuned,
)
from lightning_bnn.symmetry import canonicalise, discover

__all__ = ["symmetrization"]

Numbers = dict[str, Any]
_TUNING_SEEDS = 1000
"""Training sets from here on are those on which starts are chosen."""
_PAIRED = "paired difference over training sets, with its 95 % interval"


@dataclass(frozen=True)
class Scale:
    """The problems, and how much is spent on each."""

    problems: Mapping[str, Problem]
    seeds: int
    tuning: int
    effort: Effort
    chains: int
    transitions: int
    leapfrogs: int


_BASE = Problem()
SCALES = {
    "smallest": Scale(
        {"base": Problem(width=3, examples=8)}, 2, 1, Effort(3, 2, (0.03, 0.3), (0.0, 0.3)),
        2, 30, 2,
    ),
    "small": Scale(
        {
            "base": _BASE,
            "n 10": Problem(examples=10),
            "n 10, prior 2": Problem(examples=10, prior_std=2.0),
            "n 160": Problem(examples=160),
            "noise 1": Problem(noise=1.0),
            "5 units": Problem(width=5),
            "20 units": Problem(width=20),
            "ReLU": Problem(activation="relu"),
            "two moons": Problem(task="moons"),
        },
        6, 3, Effort(500, 2, (0.001, 0.01, 0.1, 0.4), (0.0, 0.3)), 4, 270, 25,
    ),
}  # fmt: skip


def symmetrization(
    scale: Literal["smallest", "small"] = "small",
    seeds: int | None = None,
    out: str = "studies/symmetrization",
) -> None:
    """Compare symmetrized and mean-field VI, each from its best start, with HMC as reference.

    Starts and warm-ups are chosen on other training sets than those that are reported: by the
    negative log-likelihood on validation data, by the objective itself, and for both methods by the
    symmetrized bound. A problem that is finished is not computed again.

    Args:
        scale: smallest, to see that it runs; or small.
        seeds: number of training sets that are reported.
        out: folder for the results.
    """
    folder = results_folder(out, "symmetrization")
    settings = settings_of(SCALES, scale, seeds=seeds)
    numbers = {}
    for name, problem in tqdm(settings.problems.items(), desc="problems"):
        with one_thread():
            numbers[name] = _remembered(problem, settings, folder / "problems")
    publish(_findings(numbers, settings), folder)


# ------------------------------------------------------------ one problem
def _remembered(problem: Problem, settings: Scale, folder: Path) -> Numbers:
    """The numbers of a problem, from disk if they were computed with the same settings."""
    decides = {**settings.__dict__, "problems": None, "criteria": CRITERIA, "problem": problem}
    decides["version"] = lightning_bnn.__version__
    text = json.dumps(decides, default=dataclasses.asdict)
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    file = folder / f"{problem.name}_{digest}.json"
    if not file.is_file():
        folder.mkdir(exist_ok=True)
        found = json.dumps(_numbers(problem, settings))
        unfinished = file.with_suffix(".part")
        unfinished.write_text(found)
        unfinished.rename(file)
    read: Numbers = json.loads(file.read_text())
    return read


def _numbers(problem: Problem, settings: Scale) -> Numbers:
    """What both kinds reach, by every criterion, and the reference."""
    seeds = list(range(settings.seeds))
    chains = sampled(problem, seeds, settings.chains, settings.transitions, settings.leapfrogs)
    tuning = [_TUNING_SEEDS + k for k in range(settings.tuning)]
    races = {kind: tuned(problem, kind, tuning, settings.effort) for kind in KINDS}
    chosen = {
        kind: {criterion: best(races[kind], criterion, kind) for criterion in CRITERIA}
        for kind in KINDS
    }
    reported: Numbers = {}
    for kind in KINDS:
        runs: dict[Choice, Fitted] = {}
        for choice in set(chosen[kind].values()):
            runs |= fitted(problem, kind, seeds, [choice], settings.effort)
        judged = {choice: _judged(run, chains, problem) for choice, run in runs.items()}
        reported[kind] = {c: judged[choice] for c, choice in chosen[kind].items()}
    return {
        "reference": {name: getattr(chains, name).tolist() for name in ("nll", "rhat", "least")},
        "chosen": chosen,
        "reported": reported,
        "starts": {
            kind: {f"{choice.start:g}": run.test.mean(1).tolist() for choice, run in race.items()
                   if choice.warmup == 0}
            for kind, race in races.items()
        },
    }  # fmt: skip


def _judged(run: Fitted, chains: Chains, problem: Problem) -> dict[str, list[float]]:
    """Numbers of every training set, means over the runs on it."""
    found = {name: getattr(run, name).mean(1) for name in ("test", "elbo", "bound")}
    laws = [_laws(problem, chains, run.networks, seed) for seed in range(len(run.test))]
    found["law"], found["ns_law"] = torch.tensor(laws).unbind(1)
    return {name: values.tolist() for name, values in found.items()}


def _laws(problem: Problem, chains: Chains, networks: Params, seed: int) -> tuple[float, float]:
    """MMD^2 x 100 between laws of weights for one training set, raw and without symmetries."""
    reference, runs = ({n: t[seed] for n, t in s.items()} for s in (chains.networks, networks))
    some = {n: t[:, ::4] for n, t in reference.items()}
    stacks = [{n: t.flatten(0, 1) for n, t in s.items()} for s in (some, runs)]
    labels = [_labels(s) for s in (some, runs)]
    x, _ = problem.held_out("test")
    sym = discover(problem.network(), x[:2])
    forms = [canonicalise(stack, sym) for stack in stacks]
    raw, ns = (
        100 * float(law_mmd(x, y, labels[1], chains=labels[0]).value) for x, y in (stacks, forms)
    )
    return raw, ns


def _labels(networks: Params) -> list[int]:
    """Which chain or run every network is of, ``(chains, draws, ...)``."""
    count, draws = next(iter(networks.values())).shape[:2]
    return torch.arange(count).repeat_interleave(draws).tolist()


# ------------------------------------------------------------ tables and a figure
def _findings(numbers: Mapping[str, Numbers], settings: Scale) -> Findings:
    tables = {"reference": _reference(numbers)}
    for criterion in CRITERIA:
        tables[criterion] = _table(numbers, criterion)
    tables["starts"] = _by_start(numbers, settings.effort.starts)
    note = (
        "Base: a sine, 10 tanh units, 40 examples, noise 0.3, prior N(0, 1); the others change "
        f"what their names say. Of each problem {settings.seeds} training sets, "
        f"{settings.effort.inits} runs on each; starts and warm-ups were chosen on "
        f"{settings.tuning} others. Differences are symmetrized minus MFVI, from the same networks "
        "and the same noise."
    )
    title = "Symmetrized VI against mean-field VI, both tuned (P2)"
    figures = {"differences": _figure(numbers)}
    return Findings("symmetrization", title, tables, figures, [note], dataclasses.asdict(settings))


def _of(numbers: Numbers, kind: str, criterion: str, name: str) -> Tensor:
    return torch.tensor(numbers["reported"][kind][criterion][name], dtype=torch.float64)


def _difference(numbers: Numbers, criterion: str, name: str, plain: str = "") -> Measured:
    first, second = (
        _of(numbers, kind, criterion, key)
        for kind, key in zip(KINDS, (plain or name, name), strict=True)
    )
    return interval(second - first)


def _reference(numbers: Mapping[str, Numbers]) -> Table:
    rows: list[list[Cell]] = []
    for name, of in numbers.items():
        nll, rhat, least = (torch.tensor(of["reference"][key]) for key in ("nll", "rhat", "least"))
        rows.append([name, spread(nll), float(rhat.max()), int(least.min()),
                     f"{int((rhat <= 1.05).sum())} of {len(rhat)}"])  # fmt: skip
    header = ["", "test NLL", "largest R-hat", "least effective draws", "converged"]
    return Table(
        "HMC", header, rows, {"test NLL": 3, "largest R-hat": 3},
        "R-hat of predictions, largest over test points and training sets; a training set counts "
        "as converged at 1.05 or below.",
    )  # fmt: skip


def _table(numbers: Mapping[str, Numbers], criterion: str) -> Table:
    rows: list[list[Cell]] = []
    for name, of in numbers.items():
        chosen = ["{:g}/{:g}".format(*of["chosen"][kind][criterion]) for kind in KINDS]
        rows.append([
            name, ", ".join(chosen),
            float(_of(of, "MFVI", criterion, "test").mean()),
            _difference(of, criterion, "test"),
            float(_of(of, "MFVI", criterion, "elbo").mean()),
            _difference(of, criterion, "bound", "elbo"),
            _difference(of, criterion, "bound"),
            float(_of(of, "MFVI", criterion, "law").mean()),
            _difference(of, criterion, "law"),
            float(_of(of, "MFVI", criterion, "ns_law").mean()),
            _difference(of, criterion, "ns_law"),
        ])  # fmt: skip
    header = [
        "", "start/warm-up", "NLL", "∆NLL", "ELBO", "L^G - ELBO", "∆L^G", "MMD²", "∆MMD²",
        "NS-MMD²", "∆NS-MMD²",
    ]  # fmt: skip
    digits = {"MMD²": 2, "∆MMD²": 2, "NS-MMD²": 2, "∆NS-MMD²": 2}
    note = (
        f"NLL, ELBO and MMD² (law of weights to HMC's, x 100) of MFVI; ∆: {_PAIRED}. L^G - ELBO: "
        "the bound of symmetrized VI over the one of MFVI; ∆L^G: over that of all permuted copies "
        "of MFVI's Gaussian, what training on it gains. ELBO and L^G per example."
    )
    return Table(f"Starts and warm-ups chosen by {criterion}", header, rows, digits, note)


def _by_start(numbers: Mapping[str, Numbers], starts: Sequence[float]) -> Table:
    """The difference at the same start, where neither is tuned."""
    rows: list[list[Cell]] = []
    for name, of in numbers.items():
        cells: list[Cell] = [name]
        for start in starts:
            plain, ours = (
                torch.tensor(of["starts"][kind][f"{start:g}"], dtype=torch.float64)
                for kind in KINDS
            )
            cells += [float(plain.mean()), interval(ours - plain)]
        rows.append(cells)
    header = ["", *(text for s in starts for text in (f"MFVI from {s:g}", f"∆ from {s:g}"))]
    note = f"On the training sets of the choice, without warm-up; ∆: {_PAIRED}."
    return Table("Test NLL by start, the same for both", header, rows, 3, note)


def _figure(numbers: Mapping[str, Numbers]) -> Any:
    columns = {
        "∆NLL ↓": ("test", ""), "∆L^G ↑": ("bound", ""), "∆MMD² x 100 ↓": ("law", ""),
        "∆NS-MMD² x 100 ↓": ("ns_law", ""),
    }  # fmt: skip
    panels = {
        title: {
            f"chosen by {c}": [_difference(of, c, *keys) for of in numbers.values()]
            for c in CRITERIA
        }
        for title, keys in columns.items()
    }
    figure = dots_figure(panels, list(numbers), label="symmetrized - MFVI")
    for ax in figure.axes:
        ax.axvline(0, color="grey", linewidth=1, zorder=0)
    return figure

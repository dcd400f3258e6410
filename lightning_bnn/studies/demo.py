"""The first thing to run: a reference, seven posteriors, one page that shows them."""

from __future__ import annotations

import math
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch

import lightning_bnn
from lightning_bnn.evaluation.comparison import collect
from lightning_bnn.evaluation.reference import LARGEST, MEDIAN
from lightning_bnn.evaluation.report import distances_table
from lightning_bnn.plots import Line, lines_figure
from lightning_bnn.plots.page import Section, html_report
from lightning_bnn.posteriors import Empirical
from lightning_bnn.quiet_runs import one_thread
from lightning_bnn.studies.collapse import collapse_findings
from lightning_bnn.studies.compare import findings_of
from lightning_bnn.studies.findings import Findings, publish, results_folder
from lightning_bnn.studies.marginals import forms_of, units_figure
from lightning_bnn.studies.mass import mass_findings
from lightning_bnn.studies.populations import Population
from lightning_bnn.studies.runs import Job, Run, run_jobs
from lightning_bnn.tables import Measured, Table
from weightsym import params as P

__all__ = ["demo", "demo_jobs"]

METHODS = {
    "ensemble": "Ensemble",
    "dropout": "Dropout",
    "mfvi": "MFVI",
    "symmetrized_vi": "Symmetrized VI",
    "swag": "SWAG",
    "laplace": "Laplace",
    "sghmc": "SGHMC",
}
"""The posteriors of the demo: the preset of each is ``demo_`` and its name."""
REFERENCE = "reference"
SAMPLED = "hmc"
"""Eight chains that sample the posterior: the other reference."""


def demo(
    out: str = "demo",
    size: Literal["full", "smallest"] = "full",
    restart: bool = False,
) -> None:
    """Train a reference and seven posteriors on the digits, compare them, write one page.

    Takes about three minutes on two cores and works offline. If it is interrupted, the next call
    continues where it stopped; if it has finished, the next call only writes the page again.

    Args:
        out: folder for all results.
        size: full, or smallest: the smallest demo that runs through, to try the installation.
        restart: begin anew: remove the earlier runs in this folder.
    """
    started = time.perf_counter()
    folder = results_folder(out, "demo")
    if restart:
        for name in ("runs", "compare", "compare_sampled"):
            shutil.rmtree(folder / name, ignore_errors=True)
    jobs = [*demo_jobs(size), sampled_job(size)]
    with one_thread():
        runs = run_jobs(jobs, folder / "runs")
        sections, findings = _sections(runs, folder)
    page = folder / "report.html"
    about = (
        f"lightning_bnn {lightning_bnn.__version__}, lightning {L.__version__}, torch "
        f"{torch.__version__}; written in "
        f"{time.perf_counter() - started:.0f} s (runs of earlier calls are not made again)."
    )
    page.write_text(html_report("Posteriors up to symmetries", about, sections), encoding="utf-8")
    publish(findings, folder / "compare")
    print(
        f"\nthe page:    {page.resolve()}\nlive curves: tensorboard --logdir {folder / 'runs'}"
        f"\nnext:        lightning-bnn presets demo_mfvi > my.yaml; lightning-bnn fit -c my.yaml"
    )


def demo_jobs(size: str, hidden: Sequence[int] | None = None) -> list[Job]:
    """The reference and all posteriors.

    Args:
        size: full or smallest.
        hidden: sizes of the hidden layers, if not those of the demo.
    """
    jobs = []
    for name in (REFERENCE, *METHODS):
        overrides = _smallest(name) if size == "smallest" else {}
        if hidden is not None:
            overrides["model.init_args.network.init_args.hidden"] = list(hidden)
        jobs.append(Job(name, f"demo_{name}", overrides))
    return jobs


def sampled_job(size: str) -> Job:
    """Chains of the same network that sample the posterior.

    Args:
        size: full or smallest.
    """
    changes = {"model.init_args.members": 3, "trainer.max_epochs": 24}
    changes |= {"model.init_args.burn_in": 4, "trainer.check_val_every_n_epoch": 24}
    sampler = "model.init_args.optimizer.init_args"
    changes |= {f"{sampler}.leapfrog_steps": 4, f"{sampler}.adapt_steps": 4}
    return Job(SAMPLED, f"demo_{SAMPLED}", changes if size == "smallest" else {})


def _smallest(name: str) -> dict[str, Any]:
    """Members and epochs that are enough to see that everything runs."""
    members, long = {REFERENCE: 12, "ensemble": 3}.get(name, 2), name in ("sghmc", "swag")
    changes = {"model.init_args.members": members, "trainer.max_epochs": 6 if long else 2}
    if name == "sghmc":
        changes |= {"model.init_args.burn_in": 0, "model.init_args.every_n_epochs": 1}
    elif name == "swag":
        changes["model.init_args.start"] = 2
    else:
        changes["trainer.check_val_every_n_epoch"] = 1
    return changes


# ------------------------------------------------------------ the page
def _sections(runs: Mapping[str, Run], folder: Path) -> tuple[list[Section], Findings]:
    run = runs[REFERENCE]
    posterior = run.module().posterior()
    assert isinstance(posterior, Empirical)
    reference = Population(posterior.networks, run.problem())
    comparison, chains = _compared(runs, folder)
    places = {name: runs[name].folder.relative_to(folder) for name in (REFERENCE, "mfvi")}
    closing = Section(
        "Next steps",
        ["TensorBoard shows the curves and figures of every run. In the folder of this page, run"],
        "tensorboard --logdir runs\nlightning-bnn presets\n"
        f"lightning-bnn compare --reference {places[REFERENCE]} --posteriors.MFVI {places['mfvi']}",
    )
    words = Section("Terms", [f"{word}: {meaning}." for word, meaning in GLOSSARY.items()])
    sections = [
        *_opening(runs, reference, chains),
        _comparison(comparison),
        _permutations(runs),
        *_functions(reference),
        closing,
        words,
    ]
    return sections, comparison


def _compared(runs: Mapping[str, Run], folder: Path) -> tuple[Findings, str]:
    """Compare all methods with both references, and describe the chains."""
    places = {title: str(runs[name].folder) for name, title in METHODS.items()}
    trained = findings_of(
        collect(str(runs[REFERENCE].folder), places, folder / "compare").require_one()
    )
    sampled = collect(str(runs[SAMPLED].folder), places, folder / "compare_sampled").require_one()
    tables = {"distances": trained.tables["distances"], "sampled": distances_table(sampled)}
    tables |= dict(trained.tables)
    tables["compared"] = _beside_page(tables["compared"], folder)
    settings = sampled.settings
    chains = on_chains(settings["reference_chains"] or 1, settings["reference_rhat"])
    return replace(trained, tables=tables), chains


def _beside_page(table: Table, folder: Path) -> Table:
    """A table whose paths begin where the page lies."""

    def relative(text: str) -> str:
        for start in (folder.resolve(), folder):
            text = text.replace(f"{start}{os.sep}", "")
        return text

    rows = [[relative(c) if isinstance(c, str) else c for c in row] for row in table.rows]
    return replace(table, rows=rows, note=relative(table.note))


def _opening(runs: Mapping[str, Run], reference: Population, chains: str) -> list[Section]:
    """The runs, and the symmetries of the network."""
    networks, sym = reference.networks, reference.problem.symmetries()
    done = [
        f"{P.stack_size(networks)} small networks (64-16-10) were trained on scikit-learn's digits "
        "from different initialisations. P1 uses such networks as its stand-in for the posterior. "
        f"{chains} Seven methods approximate it, each from several starts; the callbacks "
        "PermutationTau, MassGap and PosteriorFigures watched the runs.",
        "Every run is a preset. These commands repeat the runs one by one:",
    ]
    symmetries = (
        "Hidden units can be reordered and rescaled without changing the function. The package has "
        "found these symmetries in the network:"
    )
    caption = (
        "Largest weight of three of the units, over all reference networks. As trained, all units "
        "have the same distribution, since any unit could take any place. Scaled to unit norm and "
        "sorted, each unit has a distribution of its own; the functions are the same."
    )
    figures = {caption: units_figure(forms_of(networks, sym), sym)}
    return [
        Section("What was done", done, "\n".join(run.job.command for run in runs.values())),
        Section("The same function many times", [symmetries], str(sym), figures=figures),
    ]


def _comparison(findings: Findings) -> Section:
    text = (
        "MMD compares weights with both references, as they are and with symmetries removed (NS). "
        "It is given for the law of a method (any of its networks), for one mode (one start), and "
        "for the mixture of all modes. A method that is near the trained networks is not "
        "necessarily near the posterior. The next table judges predictions, in distribution and on "
        "scrambled digits."
    )
    caption = (
        "Distances to the trained networks and four numbers of the predictions, with their "
        "errors. Grey: what networks of the reference's own law would have, plus and minus two "
        "standard deviations."
    )
    sentences = [
        on_distances(findings.tables["distances"], "trained"),
        on_distances(findings.tables["sampled"], "sampled"),
    ]
    figures = {caption: findings.figures["metrics"]}
    return _section("How good are the posteriors?", [text, *sentences], findings, figures)


def _permutations(runs: Mapping[str, Run]) -> Section:
    text = (
        "Kendall's tau between the orders of the units before and after each step, by their "
        "largest weights: 1 means that no pair of units has changed places."
    )
    curves = {METHODS.get(name, name): _curve(run.folder, "tau") for name, run in runs.items()}
    figure = lines_figure(
        {"": {name: line for name, line in curves.items() if len(line.x)}},
        ("per cent of the run", "Kendall's tau"),
    )
    figures = {"Tau, mean over units and members, by share of the run.": figure}
    return Section("Permutations while training", [text], figures=figures)


def _functions(reference: Population) -> list[Section]:
    """The mass that the networks could save, and the differences of their functions."""
    masses, pairs = mass_findings(reference), collapse_findings(reference)
    saved = {
        "Each point is a network of the reference.": masses.figures["mass"],
        "The excess, which rescaling would save.": masses.figures["excess"],
    }
    shared = {"In distribution, and on scrambled digits.": pairs.figures["pairs"]}
    penalty = "The L2 penalty of every network, and its minimum over all rescalings of its units."
    information = ["Mutual information of all pairs of reference networks."]
    information.append(on_pairs(pairs.tables["pairs"]))
    return [
        _section("Mass that changes nothing", [penalty], masses, saved),
        _section("Are the networks different functions?", information, pairs, shared),
    ]


def _section(
    title: str, text: Sequence[str], findings: Findings, figures: Mapping[str, Any]
) -> Section:
    return Section(title, text, tables=list(findings.tables.values()), figures=figures)


def _curve(folder: Path, tag: str) -> Line:
    """A scalar by per cent of its run, from all files of a run that was resumed."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    points: dict[int, float] = {}
    files = sorted(folder.rglob("events.out.tfevents.*"), key=lambda p: p.stat().st_mtime)
    for file in files:
        events = EventAccumulator(str(file)).Reload()
        if tag in events.Tags()["scalars"]:
            points |= {event.step: event.value for event in events.Scalars(tag)}
    steps = sorted(points)
    values = torch.tensor([points[step] for step in steps])
    return Line(100 * torch.tensor(steps) / max(steps, default=1), values)


GLOSSARY = {
    "posterior": "the distribution over the weights of a network, given data and a prior",
    "mode": "a part of a posterior that was found independently, from a start of its own",
    "law": "the distribution of a method's networks, over runs and draws",
    "mixture": "the average of several modes as they are; a single network is a point in it",
    "NS": "no symmetries: weights are compared with scales removed and units in order",
    "floor": "the distance of as many networks drawn from the reference's own law",
    "MMD²": "squared maximum mean discrepancy, a distance between two sets of networks; around "
    "zero, and sometimes negative, if both have the same distribution",
    "Agree, TV": "share of equal predicted classes; total variation between predictions",
    "Acc, NLL, Brier": "accuracy; negative log-likelihood in nats; squared error of probabilities",
    "ECE, ACE": "calibration errors: how far confidence is from accuracy",
    "AUPR, FPR95": "how well out-of-distribution (OOD) examples are detected: area under the "
    "precision-recall curve; rate of false positives where 95 % of them are found",
    "IDMI, OODMI": "mutual information: how much networks disagree, in and out of distribution",
    "tau": "Kendall's rank correlation of the orders of units before and after a step",
    "mass": "the sum of squares of all weights, without biases",
    "VI, MFVI": "variational inference; with independent Gaussians, mean-field",
    "SWAG, SGHMC, HMC": "a Gaussian through the networks along a run; Hamiltonian Monte Carlo with "
    "batches (SG) and with all data",
}
"""Words and acronyms of the page."""
_ERRORS = 2.0
_COPIES = 5.0
"""Per cent of the mean disagreement: pairs with less are as good as copies."""
_COUNTS = dict(enumerate(("Two", "Three", "Four", "Five", "Six", "Seven", "Eight"), 2))


def on_chains(chains: int, rhat: Sequence[float] | None) -> str:
    """Say how many chains sampled the posterior, and whether they agree.

    Args:
        chains: how many.
        rhat: of their predictions, in the median and at most; None for too few draws.

    >>> on_chains(8, (1.005, 1.039))[:68]
    'Eight chains of Hamiltonian Monte Carlo sample the posterior itself,'
    """
    several = f"{_COUNTS.get(chains, str(chains))} chains of Hamiltonian Monte Carlo"
    if rhat is None:
        return (
            f"{several} set out to sample the posterior itself; they are too short to tell whether "
            "they agree."
        )
    agree = rhat[0] <= MEDIAN and rhat[1] <= LARGEST
    verdict = "agree" if agree else "do not agree yet"
    numbers = f"{rhat[0]:.3f} in the median and at most {rhat[1]:.3f}"
    return (
        f"{several} sample the posterior itself, and {verdict} (R-hat of predictions: {numbers})."
    )


def on_distances(table: Table, reference: str) -> str:
    """Name the methods that are nearest to a reference and farthest, with symmetries removed.

    Args:
        table: of distances, one row for each method.
        reference: its name in the sentence.
    """
    laws = _column(table, "NS law")
    if not laws:
        return f"No law beside the {reference} networks is known: every method has a single mode."
    near = [name for name, law in laws.items() if abs(law.value) <= _ERRORS * law.error]
    order = sorted(laws, key=lambda name: laws[name].value)
    names = f"{_listed(near)} cannot" if near else "every method can"
    return (
        f"With symmetries removed, {names} be told from the {reference} networks (within "
        f"{_ERRORS:g} errors of zero); {order[0]} is closest ({laws[order[0]].value:.2f}), "
        f"{order[-1]} farthest ({laws[order[-1]].value:.2f})."
    )


def on_pairs(table: Table) -> str:
    """Say whether any two networks are nearly one function.

    Args:
        table: of what pairs of networks disagree about, in and out of distribution, in nats.
    """
    mean, least = table.header.index("mean ± sd"), table.header.index("min")
    cells: list[Any] = [cell for row in table.rows for cell in (row[mean], row[least])]
    inner, low, outer, _ = cells
    share = 100 * low / inner.value if inner.value > 0 else 0.0
    verdict = (
        "Yes: no two of them are the same function in different weights"
        if share >= _COPIES
        else "Not all of them: some pairs are nearly the same function in different weights"
    )
    times = outer.value / max(inner.value, 1e-12)
    return (
        f"{verdict}. The two that are most alike disagree about the test digits by {low:.4f} nats, "
        f"which is {share:.0f} % of the mean over all pairs ({inner.value:.4f}); for copies of one "
        f"network it would be 0. About scrambled digits, pairs disagree {times:.1f} times as much "
        f"({outer.value:.4f} nats)."
    )


def _column(table: Table, title: str) -> dict[str, Measured]:
    """Finite numbers of a column by method."""
    numbers = {}
    for row in table.rows:
        cells = dict(zip(table.header, row, strict=True))
        value, name = cells.get(title), str(cells["method"])
        if isinstance(value, Measured) and math.isfinite(value.value) and "Noise" not in name:
            numbers[name] = value
    return numbers


def _listed(names: Sequence[str]) -> str:
    """Names as in a sentence.

    >>> _listed(["a", "b", "c"])
    'a, b and c'
    """
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"

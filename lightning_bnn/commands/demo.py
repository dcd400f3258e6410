"""The first command to run: a reference, seven posteriors, and one page about them."""

from __future__ import annotations

import io
import os
import re
import shutil
import sys
import time
import webbrowser
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, redirect_stderr
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch

import lightning_bnn
from lightning_bnn.commands.runs import Job, StoredRun, beside, run_jobs
from lightning_bnn.evaluation.compare import findings_of, metrics_figure
from lightning_bnn.evaluation.comparison import Comparison, collect
from lightning_bnn.evaluation.populations import (
    Population,
    collapse_findings,
    forms_of,
    mass_findings,
    units_figure,
)
from lightning_bnn.evaluation.reference_networks import Options
from lightning_bnn.evaluation.report import NEEDS, advice_table, distances_table, reference_text
from lightning_bnn.findings import Findings, publish, results_folder
from lightning_bnn.plots.page import html_report, section
from lightning_bnn.posteriors import Empirical
from lightning_bnn.quiet_runs import one_thread
from lightning_bnn.tables import Table
from weightsym import params as P
from weightsym.files import write_whole

METHODS = {
    "ensemble": "Ensemble",
    "dropout": "Dropout",
    "mfvi": "MFVI",
    "symmetrized_vi": "Symmetrized VI",
    "swag": "SWAG",
    "laplace": "Laplace",
    "sghmc": "SGHMC",
}
"""Titles of the demo's posteriors by name; the preset of each is ``demo_`` and its name."""
REFERENCE = "reference"
SAMPLED = "hmc"
"""The other reference: eight chains that sample the posterior."""
SECOND = ("ensemble", "dropout", "swag", "sghmc", SAMPLED)
"""Jobs of a second process, which take half of the time."""
_SAMPLES = 50
"""Number of networks of every mode that are compared."""


def demo(
    out: str = "demo",
    size: Literal["full", "smallest"] = "full",
    restart: bool = False,
) -> None:
    """Train a reference and seven posteriors on the digits, compare them, and write one page.

    Takes one to three minutes on two cores, and works offline. If it is interrupted, the next call
    continues where it stopped. If it has finished, the next call only writes the page again.

    Args:
        out: folder for all results.
        size: full, or smallest: the smallest demo that tests the installation.
        restart: remove earlier runs in this folder first.
    """
    started, begun = time.perf_counter(), time.process_time()
    folder = results_folder(out, "demo")
    if restart:
        for name in ("runs", "compare", "compare_sampled"):
            shutil.rmtree(folder / name, ignore_errors=True)
    jobs, runs_folder, is_full = demo_jobs(size), folder / "runs", size == "full"
    with one_thread():
        with beside(_second_half, jobs, folder) if is_full else nullcontext():
            first = [job for job in jobs if not (is_full and job.name in SECOND)]
            count, described = _about_reference(run_jobs(first, runs_folder)[REFERENCE])
            trained = _compared_with_trained(_finished(jobs, folder), folder)
        runs = run_jobs(jobs, runs_folder)
        if len(trained.settings["posteriors"]) < len(METHODS):
            trained = _compared_with_trained(runs, folder)
        sampled = _compared_with_sampled(runs, folder)
        findings = _with_sampled(findings_of(trained), sampled)
    sections = [
        *_opening(sampled),
        _comparison(findings),
        *described,
        *_closing(runs, count, sampled, folder),
        _costs(runs, time.process_time() - begun),
    ]
    page = folder / "report.html"
    about = (
        f"lightning_bnn {lightning_bnn.__version__}, lightning {L.__version__}, torch "
        f"{torch.__version__}; written in "
        f"{time.perf_counter() - started:.0f} s (runs of earlier calls are not made again)."
    )
    write_whole(page, html_report("Posteriors up to symmetries", about, sections), wait=False)
    publish(findings, folder / "compare")
    print(
        f"\nthe page:    {page.resolve()}\nlive curves: tensorboard --logdir {folder / 'runs'}"
        f"\nnext:        lightning-bnn presets demo_mfvi > my.yaml; lightning-bnn fit -c my.yaml"
    )
    if has_screen():
        webbrowser.open(page.resolve().as_uri())


def _second_half(jobs: Sequence[Job], folder: Path) -> None:
    """Train some of the posteriors, then compare all existing ones with HMC."""
    run_jobs([job for job in jobs if job.name in SECOND], folder / "runs", 1)
    with redirect_stderr(io.StringIO()):  # the bar of another process is where this one would be
        _compared_with_sampled(_finished(jobs, folder), folder)


def _finished(jobs: Sequence[Job], folder: Path) -> dict[str, StoredRun]:
    """Return the finished runs, of this process and of the other one."""
    runs = {job.name: StoredRun(job, folder / "runs" / job.name) for job in jobs}
    return {name: run for name, run in runs.items() if run.is_finished}


def has_screen() -> bool:
    """Return whether the user is at a terminal with a screen that can show a page."""
    graphical = {"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys()
    return sys.stdout.isatty() and bool(graphical or sys.platform in ("darwin", "win32"))


def _costs(runs: Mapping[str, StoredRun], own_seconds: float) -> str:
    """Return the CPU time of every run, in this call or an earlier one, and of this process."""
    titles = {REFERENCE: "Reference", SAMPLED: "HMC", **METHODS}
    rows = [(titles[name], round(run.seconds, 1)) for name, run in runs.items()]
    rows.append(("This call, in its first process", round(own_seconds, 1)))
    text = "CPU seconds. Ensemble, dropout, SWAG, samplers and distances to HMC: a second process."
    return section("How long did it take?", [text], tables=[Table("CPU time", ("part", "s"), rows)])


def demo_jobs(size: str) -> list[Job]:
    """Return jobs for the two references and all posteriors.

    Args:
        size: full or smallest.
    """
    names = (REFERENCE, *METHODS, SAMPLED)
    return [Job(n, f"demo_{n}", _smallest(n) if size == "smallest" else {}) for n in names]


def _smallest(name: str) -> dict[str, Any]:
    """Return settings with the fewest members and epochs that run through."""
    members = {REFERENCE: 12, "ensemble": 3, SAMPLED: 3}.get(name, 2)
    epochs = {"sghmc": 6, "swag": 6, SAMPLED: 12}.get(name, 2)
    changes = {"model.init_args.members": members, "trainer.max_epochs": epochs}
    changes["trainer.check_val_every_n_epoch"] = epochs
    if name in ("sghmc", SAMPLED):
        changes["model.init_args.burn_in"] = 0
    if name == "sghmc":
        changes["model.init_args.every_n_epochs"] = 1
    if name == "swag":
        changes["model.init_args.start"] = 2
    if name == SAMPLED:
        sampler = "model.init_args.optimizer.init_args"
        changes |= {f"{sampler}.leapfrog_steps": 4, f"{sampler}.adapt_steps": 0}
    return changes


# ------------------------------------------------------------ the page
def _about_reference(run: StoredRun) -> tuple[int, list[str]]:
    """Return the number of the reference networks, and what the page says about them alone."""
    posterior = run.module().posterior()
    assert isinstance(posterior, Empirical)
    reference = Population(posterior.networks, run.problem())
    return P.stack_size(posterior.networks), [_symmetries(reference), *_functions(reference)]


def _with_sampled(findings: Findings, sampled: Comparison) -> Findings:
    """Put the distances to the sampled networks behind those to the trained ones."""
    tables = {"distances": findings.tables["distances"], "sampled": distances_table(sampled)}
    tables |= {n: t for n, t in findings.tables.items() if n not in ("compared", "advice")}
    return replace(findings, tables=tables)


def _compared_with_sampled(runs: Mapping[str, StoredRun], folder: Path) -> Comparison:
    reference = str(runs[SAMPLED].folder)
    return _compared(reference, runs, folder / "compare_sampled")


def _compared_with_trained(runs: Mapping[str, StoredRun], folder: Path) -> Comparison:
    return _compared(str(runs[REFERENCE].folder), runs, folder / "compare")


def _compared(reference: str, runs: Mapping[str, StoredRun], folder: Path) -> Comparison:
    places = {title: str(runs[name].folder) for name, title in METHODS.items() if name in runs}
    return collect(reference, places, folder, options=Options(samples=_SAMPLES)).require_one()


def _opening(sampled: Comparison) -> list[str]:
    """Return three sentences and a figure, and a table of recommended methods."""
    advice = advice_table(sampled)
    take = {str(need): (str(best), str(level)) for need, best, level, _ in advice.rows}
    closest = {name: _closest(sampled, name) for name in ("law", "ns_law")}
    sentences = (
        "Seven methods approximated the posterior of a small network that reads handwritten "
        "digits: the distribution of all networks that explain the data. Weight by weight, "
        f"{closest['law']} is closest to draws of the posterior; once interchangeable units are "
        f"sorted and scaled alike, it is {closest['ns_law']}. For probabilities to act on take "
        f"{_taken(take, 'nll')}; for warnings of images that are no digits, {_taken(take, 'aupr')}."
    )
    caption = (
        "Left: distance to draws of the posterior, symmetries removed (MMD² x 100; around zero: "
        "cannot be told apart). Right: negative log-likelihood of test images (NLL, in nats). "
        "One mode: networks of one start; multi mode: of all starts. Lines are standard errors."
    )
    figures = {caption: metrics_figure(sampled, ("ns_law", "nll"))}
    guide = (
        "Find your purpose, and use the method beside it. Methods level with it are as good "
        "within the errors, so choose the cheapest. The numbers are for this network and these "
        "data: `lightning-bnn compare` makes the same table for yours."
    )
    return [
        section("", [sentences], figures=figures),
        section("What does this mean for me?", [guide], tables=[explained(advice)], folds=False),
    ]


def _closest(comparison: Comparison, name: str) -> str:
    """Return the method with the smallest distance, and the distance."""
    values = {row.method: row.numbers[name] for row in comparison.rows if name in row.numbers}
    method = min(values, key=lambda m: values[m].value)
    return f"{method} ({100 * values[method].value:.2f})"


def _taken(take: Mapping[str, tuple[str, str]], name: str) -> str:
    best, level = take[NEEDS[name]]
    others = {"none": "", "all others": ", or any other, which is level with it"}
    return best + others.get(level, f" (or {level}, level with it)")


def explained(table: Table) -> Table:
    """Explain the abbreviations of a table in its note.

    Args:
        table: any.
    """
    text = " ".join([*table.header, *(str(c) for row in table.rows for c in row)])
    words = [w for w in GLOSSARY if re.search(rf"(?<!\w){re.escape(w)}(?!\w)", text)]
    terms = "; ".join(f"{word}: {GLOSSARY[word]}" for word in words)
    return replace(table, note=f"{terms}. {table.note}" if words else table.note)


def _symmetries(reference: Population) -> str:
    """Return the symmetries of the network, and their effect on its units."""
    networks, sym = reference.networks, reference.problem.symmetries()
    text = (
        "Hidden units can be reordered and rescaled without changing the function. The package has "
        "found these symmetries in the network:"
    )
    caption = (
        "Largest weight of three of the units, over all reference networks. As trained, all units "
        "have the same distribution, since any unit could take any place. Scaled to unit norm and "
        "sorted, each unit has a distribution of its own; the functions are the same."
    )
    figures = {caption: units_figure(forms_of(networks, sym), sym)}
    return section("The same function many times", [text], str(sym), figures=figures)


def _closing(
    runs: Mapping[str, StoredRun], networks: int, sampled: Comparison, folder: Path
) -> list[str]:
    """Return the list of runs, and the next steps."""
    done = [
        f"{networks} small networks (64-16-10) were trained on "
        "scikit-learn's digits from different initialisations: the trained reference, which P1 "
        "takes for the posterior. Chains of Hamiltonian Monte Carlo (HMC) sampled the posterior "
        f"itself. {reference_text(sampled.settings)} Each of the seven methods ran from several "
        "starts; the callbacks PermutationTau, MassGap and PosteriorFigures watched the runs.",
        "Every run is a preset. These commands repeat the runs one by one:",
    ]
    places = {name: runs[name].folder.relative_to(folder) for name in (REFERENCE, "mfvi")}
    following = (
        "TensorBoard shows the curves of every run (losses, masses, and how often units change "
        "places, tau) and figures of reference, MFVI and SGHMC. In the folder of this page, run"
    )
    return [
        section("What was done", done, "\n".join(run.job.command for run in runs.values())),
        section(
            "Next steps",
            [following],
            "tensorboard --logdir runs\nlightning-bnn presets\n"
            f"lightning-bnn compare {places[REFERENCE]} --posteriors.MFVI {places['mfvi']}",
        ),
    ]


def _comparison(findings: Findings) -> str:
    text = (
        "The tables compare weights with both references by the maximum mean discrepancy (MMD), "
        "as they are and with symmetries removed (NS), and judge predictions of test images and "
        "of scrambled ones, which are out of distribution (OOD). A method that is near the trained "
        "networks is not necessarily near the posterior; one that is near by weights may be far by "
        "functions. Click on a title to open its table."
    )
    laplace = (
        "Laplace predicts with linearised networks and is still too uncertain: where a network is "
        "confident its curvature vanishes, and the Gaussian is as wide as the prior. Samples of "
        "this Gaussian, run as networks, are worse, since networks are not linear in their weights."
    )
    caption = (
        "Distances to the trained networks and four metrics of the predictions, with their "
        "errors. Grey: what networks of the reference's own law would have, plus and minus two "
        "standard deviations."
    )
    figures = {caption: findings.figures["metrics"]}
    return _section("How good are the posteriors?", [text, laplace], findings, figures)


def _functions(reference: Population) -> list[str]:
    """Return the mass that the networks could save, and the differences of their functions."""
    masses, pairs = mass_findings(reference), collapse_findings(reference)
    saved = {
        "Each point is a network of the reference.": masses.figures["mass"],
        "The excess, which rescaling would save.": masses.figures["excess"],
    }
    shared = {"In distribution, and on scrambled digits.": pairs.figures["pairs"]}
    excess: Any = masses.tables["mass"].rows[-1][1]
    penalty = (
        "The L2 penalty of every network, and its minimum over all rescalings of its units: it is "
        f"{excess.value:.2g} % above on average."
    )
    information = (
        "Mutual information of all pairs of reference networks, in nats: zero for two copies of "
        "one function. Compare the minimum with the mean."
    )
    return [
        _section("Mass that changes nothing", [penalty], masses, saved),
        _section("Are the networks different functions?", [information], pairs, shared),
    ]


def _section(
    title: str, text: Sequence[str], findings: Findings, figures: Mapping[str, Any]
) -> str:
    tables = [explained(table) for table in findings.tables.values()]
    return section(title, text, tables=tables, figures=figures)


GLOSSARY = {
    "law": "distribution of a method's networks, over runs and draws",
    "NS": "no symmetries, scales removed and units sorted",
    "mixture": "average of several modes as they are; a single network is a point in it",
    "mode": "part of a posterior that was found from a start of its own",
    "floor": "distance of as many networks drawn from the reference's own law",
    "Acc": "accuracy, the share of right classes",
    "ECE": "expected calibration error, how far confidence is from accuracy",
    "ACE": "the same with equally filled bins",
    "Brier": "squared error of probabilities",
    "NLL": "negative log-likelihood of the true class, in nats",
    "Agree": "share of classes predicted as the reference does",
    "TV": "total variation, by how much probabilities differ from the reference's",
    "KL": "Kullback-Leibler divergence from the reference's prediction",
    "AUPR": "area under the precision-recall curve of finding OOD images",
    "FPR95": "false alarms where 95 % of the OOD images are found",
    "IDMI": "mutual information, how much networks disagree, in distribution",
    "OODMI": "the same out of distribution",
    "AURC": "error rate of the most confident predictions, averaged over their shares",
    "Set90": "size of prediction sets that hold the true class nine times in ten",
    "Held90": "how often they do",
    "(T)": "after temperature scaling",
    "mass": "sum of squares of all weights, without biases",
    "MFVI": "mean-field variational inference, independent Gaussians",
    "VI": "variational inference",
    "SWAG": "a Gaussian through the networks along a training run",
    "SGHMC": "Hamiltonian Monte Carlo with batches",
}
"""Abbreviations, explained below each table that has them."""

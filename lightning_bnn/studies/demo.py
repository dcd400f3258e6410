"""The first thing to run: a reference, seven posteriors, one page that shows them."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch

import lightning_bnn
from lightning_bnn.evaluation.comparison import Comparison, collect
from lightning_bnn.evaluation.report import distances_table, reference_text
from lightning_bnn.plots.page import Section, html_report
from lightning_bnn.posteriors import Empirical
from lightning_bnn.quiet_runs import one_thread
from lightning_bnn.studies.collapse import collapse_findings
from lightning_bnn.studies.comparisons import findings_of
from lightning_bnn.studies.findings import Findings, publish, results_folder
from lightning_bnn.studies.marginals import forms_of, units_figure
from lightning_bnn.studies.mass import mass_findings
from lightning_bnn.studies.runs import Job, Population, Run, beside, run_jobs
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

    Takes about two minutes on two cores and works offline. If it is interrupted, the next call
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
    jobs, place = demo_jobs(size), folder / "runs"
    with one_thread():
        if size == "full":  # the chains take half of the time
            with beside(jobs[-1:], place):
                _compared_with_trained(run_jobs(jobs[:-1], place), folder)
        runs = run_jobs(jobs, place)
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


def demo_jobs(size: str) -> list[Job]:
    """The two references and all posteriors.

    Args:
        size: full or smallest.
    """
    names = (REFERENCE, *METHODS, SAMPLED)
    return [Job(n, f"demo_{n}", _smallest(n) if size == "smallest" else {}) for n in names]


def _smallest(name: str) -> dict[str, Any]:
    """Members and epochs that are enough to see that everything runs."""
    members = {REFERENCE: 12, "ensemble": 3, SAMPLED: 3}.get(name, 2)
    epochs = {"sghmc": 6, "swag": 6, SAMPLED: 24}.get(name, 2)
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
def _sections(runs: Mapping[str, Run], folder: Path) -> tuple[list[Section], Findings]:
    run = runs[REFERENCE]
    posterior = run.module().posterior()
    assert isinstance(posterior, Empirical)
    reference = Population(posterior.networks, run.problem())
    comparison, chains = _compared(runs, folder)
    places = {name: runs[name].folder.relative_to(folder) for name in (REFERENCE, "mfvi")}
    closing = Section(
        "Next steps",
        [
            "TensorBoard shows the curves and figures of every run: losses, masses, tau of the "
            "orders of units. In the folder of this page, run"
        ],
        "tensorboard --logdir runs\nlightning-bnn presets\n"
        f"lightning-bnn compare {places[REFERENCE]} --posteriors.MFVI {places['mfvi']}",
    )
    words = Section("Terms", [f"{word}: {meaning}." for word, meaning in GLOSSARY.items()])
    sections = [
        *_opening(runs, reference, chains),
        _comparison(comparison),
        *_functions(reference),
        closing,
        words,
    ]
    return sections, comparison


def _compared(runs: Mapping[str, Run], folder: Path) -> tuple[Findings, str]:
    """Compare all methods with both references, and describe the sampled one."""
    trained = findings_of(_compared_with_trained(runs, folder))
    sampled = collect(
        str(runs[SAMPLED].folder), _places(runs), folder / "compare_sampled"
    ).require_one()
    tables = {"distances": trained.tables["distances"], "sampled": distances_table(sampled)}
    tables |= {name: t for name, t in trained.tables.items() if name != "compared"}
    return replace(trained, tables=tables), reference_text(sampled.settings)


def _compared_with_trained(runs: Mapping[str, Run], folder: Path) -> Comparison:
    places = _places(runs)
    return collect(str(runs[REFERENCE].folder), places, folder / "compare").require_one()


def _places(runs: Mapping[str, Run]) -> dict[str, str]:
    return {title: str(runs[name].folder) for name, title in METHODS.items()}


def _opening(runs: Mapping[str, Run], reference: Population, chains: str) -> list[Section]:
    """The runs, and the symmetries of the network."""
    networks, sym = reference.networks, reference.problem.symmetries()
    done = [
        f"{P.stack_size(networks)} small networks (64-16-10) were trained on scikit-learn's digits "
        "from different initialisations. P1 uses such networks as its stand-in for the posterior. "
        f"A second reference are chains of Hamiltonian Monte Carlo. {chains} "
        "Seven methods approximate the posterior, each from several starts; the callbacks "
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
        "necessarily near the posterior; one that is near by weights may be far by functions. The "
        "next table judges predictions, in distribution and on scrambled digits."
    )
    laplace = (
        "Laplace predicts with linearised networks and is still too uncertain: where a network is "
        "confident its curvature vanishes, and the Gaussian is as wide as the prior. Samples of "
        "this Gaussian, run as networks, are worse, since networks are not linear in their weights."
    )
    caption = (
        "Distances to the trained networks and four numbers of the predictions, with their "
        "errors. Grey: what networks of the reference's own law would have, plus and minus two "
        "standard deviations."
    )
    figures = {caption: findings.figures["metrics"]}
    return _section("How good are the posteriors?", [text, laplace], findings, figures)


def _functions(reference: Population) -> list[Section]:
    """The mass that the networks could save, and the differences of their functions."""
    masses, pairs = mass_findings(reference), collapse_findings(reference)
    saved = {
        "Each point is a network of the reference.": masses.figures["mass"],
        "The excess, which rescaling would save.": masses.figures["excess"],
    }
    shared = {"In distribution, and on scrambled digits.": pairs.figures["pairs"]}
    penalty = "The L2 penalty of every network, and its minimum over all rescalings of its units."
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
) -> Section:
    return Section(title, text, tables=list(findings.tables.values()), figures=figures)


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

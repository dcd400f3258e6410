"""The first thing to run: a reference, seven posteriors, one page that shows them."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from torch import Tensor

import lightning_bnn
from lightning_bnn import params as P
from lightning_bnn.comparison.collect import collect
from lightning_bnn.params import Params
from lightning_bnn.plots import Line, lines_figure
from lightning_bnn.posteriors import Empirical
from lightning_bnn.quiet import one_thread
from lightning_bnn.studies.collapse import collapse_findings
from lightning_bnn.studies.compare import findings_of
from lightning_bnn.studies.findings import Findings, publish, results_folder
from lightning_bnn.studies.marginals import units_figure
from lightning_bnn.studies.mass import mass_findings
from lightning_bnn.studies.report import Section, html_report
from lightning_bnn.studies.runs import Job, Run, run_jobs
from lightning_bnn.symmetry import Symmetries, canonicalise, discover

__all__ = ["METHODS", "REFERENCE", "demo", "demo_jobs"]

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
_SMALLEST = {"reference": 12, "ensemble": 3, "others": 2, "epochs": 2}
"""Members and epochs that are enough to see that everything runs."""


def demo(
    out: str = "demo",
    size: Literal["full", "smallest"] = "full",
    restart: bool = False,
) -> None:
    """Train a reference and seven posteriors on the digits, compare them, write one page.

    Takes about a minute and a half on two cores and needs no network. Interrupted, it goes on where
    it was when it is called again; finished, it writes its page again.

    Args:
        out: folder of everything.
        size: full, or the smallest that runs through, to try the installation.
        restart: begin anew: remove the runs that this folder has from before.
    """
    started = time.perf_counter()
    folder = results_folder(out, "demo")
    if restart:
        for part in ("runs", "compare"):
            shutil.rmtree(folder / part, ignore_errors=True)
    jobs = demo_jobs(size)
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
        overrides: dict[str, Any] = {}
        if size == "smallest":
            members = _SMALLEST.get(name, _SMALLEST["others"])
            overrides = {"model.init_args.members": members, **_short(name)}
        if hidden is not None:
            overrides["model.init_args.network.init_args.hidden"] = list(hidden)
        jobs.append(Job(name, f"demo_{name}", overrides))
    return jobs


def _short(name: str) -> dict[str, Any]:
    """A few epochs, and what is counted in epochs along with them."""
    epochs = _SMALLEST["epochs"]
    if name == "sghmc":
        return {
            "trainer.max_epochs": 3 * epochs,
            "model.init_args.burn_in": 0,
            "model.init_args.every_n_epochs": 1,
        }
    if name == "swag":
        return {"trainer.max_epochs": 3 * epochs, "model.init_args.start": epochs}
    return {"trainer.max_epochs": epochs, "trainer.check_val_every_n_epoch": 1}


# ------------------------------------------------------------ the page
def _sections(runs: Mapping[str, Run], folder: Path) -> tuple[list[Section], Findings]:
    reference = runs[REFERENCE]
    around = reference.surroundings()
    posterior = reference.module().posterior()
    assert isinstance(posterior, Empirical)
    networks = posterior.networks
    sym = discover(around.template, around.example())
    places = {title: str(runs[name].folder) for name, title in METHODS.items()}
    comparison = findings_of(collect(str(reference.folder), places, folder / "compare"))
    return [
        _what_was_done(runs, P.stack_size(networks)),
        _symmetries(networks, sym),
        _comparison(comparison),
        Section(
            "Permutations while training",
            [
                "Kendall's tau between the orders of the units before and after each step, by "
                "their largest weights: 1 means that no pair of units has changed places.",
            ],
            figures={"Tau, mean over units and members.": _taus(runs)},
        ),
        _mass(mass_findings(networks, sym, {})),
        _pairs(collapse_findings(networks, around, None, {})),
        Section(
            "Go on",
            ["TensorBoard shows the curves and figures of every run:"],
            f"tensorboard --logdir {folder / 'runs'}\nlightning-bnn presets\n"
            f"lightning-bnn compare --reference {reference.folder} --posteriors.MFVI "
            f"{runs['mfvi'].folder}",
        ),
    ], comparison


def _what_was_done(runs: Mapping[str, Run], count: int) -> Section:
    return Section(
        "What was done",
        [
            f"{count} small networks (64-16-10) were trained on scikit-learn's digits from "
            "different starts. They stand for the posterior: a reference. Seven methods "
            "approximate it, each from several starts; the callbacks PermutationTau, MassGap "
            "and PosteriorFigures watched all of them.",
            "Every run is a preset; the same by hand:",
        ],
        "\n".join(run.job.command for run in runs.values()),
    )


def _symmetries(networks: Params, sym: Symmetries) -> Section:
    forms = {"as trained": networks, "symmetries removed": canonicalise(networks, sym)}
    return Section(
        "The same function many times",
        [
            "Hidden units can be reordered, and rescaled, without any change of the function. "
            "What this package has found in the network:",
        ],
        str(sym),
        figures={
            "Largest weight of three of the units, over all reference networks. As trained, "
            "all units are alike: any could take any place. Scaled to unit norm and sorted, "
            "each has a place of its own, and the functions are the same.": units_figure(
                forms, sym
            ),
        },
    )


def _comparison(found: Findings) -> Section:
    return Section(
        "How good are the posteriors?",
        [
            "MMD compares weights with the reference, as they are and with symmetries removed "
            "(NS). One mode is one start; multi mode mixes all starts. Other columns judge "
            "predictions, in distribution and on scrambled digits.",
        ],
        tables=list(found.tables.values()),
        figures={
            "All numbers with their errors. Grey: the noise floor, MMD between random parts of the "
            "reference, and two deviations around it.": found.figures["metrics"],
        },
    )


def _mass(found: Findings) -> Section:
    return Section(
        "Mass that changes nothing",
        ["The L2 penalty of every network, and its minimum over all rescalings of its units."],
        tables=list(found.tables.values()),
        figures={
            "Each point is a network of the reference.": found.figures["mass"],
            "What rescaling would save.": found.figures["excess"],
        },
    )


def _pairs(found: Findings) -> Section:
    return Section(
        "Are the networks different functions?",
        ["Mutual information of all pairs of reference networks."],
        tables=list(found.tables.values()),
        figures={"In distribution, and on scrambled digits.": found.figures["pairs"]},
    )


def _taus(runs: Mapping[str, Run]) -> Any:
    curves = {name: _scalar(run.folder, "tau") for name, run in runs.items()}
    shown = {
        METHODS.get(name, name): Line(*curve) for name, curve in curves.items() if len(curve[0])
    }
    return lines_figure({"": shown}, ("step", "Kendall's tau"))


def _scalar(folder: Path, tag: str) -> tuple[Tensor, Tensor]:
    """Steps and values of a scalar of a run; one that was resumed has several files."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    points: dict[int, float] = {}
    files = sorted(folder.rglob("events.out.tfevents.*"), key=lambda p: p.stat().st_mtime)
    for file in files:
        held = EventAccumulator(str(file)).Reload()
        if tag in held.Tags()["scalars"]:
            points |= {event.step: event.value for event in held.Scalars(tag)}
    steps = sorted(points)
    return torch.tensor(steps), torch.tensor([points[step] for step in steps])

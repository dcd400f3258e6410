"""A report as Markdown for loggers, as one figure, and as one HTML page."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lightning_bnn.doctor.checks.chains import log_densities
from lightning_bnn.doctor.evidence import Evidence, NotPossible
from lightning_bnn.doctor.findings import Report, shown, words
from lightning_bnn.evaluation.predictions import ClassPredictions
from lightning_bnn.plots.health import health_figure
from lightning_bnn.plots.page import Section, html_report

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "PAGE_FILE", "REPORT_FILE", "drawn", "html_of", "looks_of", "markdown_of", "write_report",
]  # fmt: skip

REPORT_FILE, PAGE_FILE = "doctor.json", "doctor.html"
_ABOUT = (
    "What was measured on a posterior, why it matters, and what to do. A fault makes results "
    "wrong, a warning may, a note explains what is seen."
)


def looks_of(report: Report, evidence: Evidence) -> dict[str, dict[str, Any]]:
    """Collect what the checks looked at: arguments of `health_figure` by the name of the panel.

    Args:
        report: of the examination.
        evidence: what was examined.
    """
    curves = {name: {"curves": {name: c}} for name, c in report.curves.items() if len(c) > 1}
    others: dict[str, Any] = _on_held_out(evidence)
    with contextlib.suppress(NotPossible):
        others["densities"] = log_densities(evidence)
    return curves | {name: {name: value} for name, value in others.items()}


def drawn(looks: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Some of the panels as one figure.

    Args:
        looks: arguments by panel.
    """
    every = {k: v for of_panel in looks.values() for k, v in of_panel.items() if k != "curves"}
    curves = {k: v for of_panel in looks.values() for k, v in of_panel.get("curves", {}).items()}
    return health_figure(curves, **every)


def _on_held_out(evidence: Evidence) -> dict[str, Any]:
    """Predict the held-out examples, if there are any, beside what they are."""
    if evidence.held_out is None:
        return {}
    try:
        outputs, targets = evidence.on_held_out, evidence.held_out.targets
        if evidence.classes:
            rows = [ClassPredictions.of(evidence.likelihood, o).probs for o in outputs]
            most = torch.stack(rows).mean(0).max(-1)
            return {"confidence": (most.values, most.indices == targets)}
        if evidence.numbers and not evidence.alone:
            prediction = evidence.likelihood.predictive(torch.cat(outputs))  # type: ignore[operator]  # it has one
            return {"spreads": (targets - prediction.mean) / prediction.variance.sqrt()}
    except (NotPossible, ValueError):
        pass  # what cannot be predicted is not drawn
    return {}


def markdown_of(report: Report) -> str:
    """The findings as Markdown, as TensorBoard shows it.

    Args:
        report: of the examination.
    """
    lines = [f"**{report.headline()}**", ""]
    for finding in report.findings:
        lines += [f"**{finding.severity}: {words(finding.name)}.** {finding.says}", ""]
        lines += [f"*Why:* {finding.why}", "", f"*Do:* {finding.fix}", ""]
    if report.fine:
        lines += [f"Fine: {', '.join(map(words, report.fine))}.", ""]
    return "\n".join(lines)


def html_of(report: Report, figure: Figure | None = None) -> str:
    """One page that needs no other file.

    Args:
        report: of the examination.
        figure: what the checks have looked at.
    """
    sections = [
        Section(
            f"{finding.severity.capitalize()}: {words(finding.name)}",
            [finding.says, finding.why, f"What to do: {finding.fix}"],
        )
        for finding in report.findings
    ]
    if figure is not None:
        sections.append(
            Section("What was looked at", figures={"Training, predictions, chains.": figure})
        )
    fine = ", ".join(map(words, report.fine)) or "nothing"
    sections.append(Section("Found to be fine", [f"{fine[0].upper()}{fine[1:]}."]))
    if report.skipped:
        skipped = [f"{words(name)}: {why}" for name, why in report.skipped.items()]
        sections.append(Section("Not looked at", code="\n".join(skipped)))
    facts = [f"{name}: {shown(value)}" for name, value in report.facts.items()]
    sections.append(Section("What was examined", code="\n".join(facts)))
    return html_report(f"The posterior: {report.headline()}", _ABOUT, sections)


def write_report(report: Report, looks: Mapping[str, Any] | None, folder: Path) -> None:
    """Write a report as JSON and as a page.

    Args:
        report: of the examination.
        looks: what `looks_of` returned; None draws nothing.
        folder: of the files; it is made.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / REPORT_FILE).write_text(report.to_json() + "\n", encoding="utf-8")
    page = html_of(report, None if looks is None else drawn(looks))
    (folder / PAGE_FILE).write_text(page, encoding="utf-8")

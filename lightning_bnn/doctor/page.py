"""A report as Markdown for loggers, as one figure, and as one HTML page."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lightning_bnn.doctor.chain_values import log_densities
from lightning_bnn.doctor.evidence import Evidence, NotPossible
from lightning_bnn.doctor.findings import Report, shown, words
from lightning_bnn.judging.averages import Averages
from lightning_bnn.plots import health_figure
from lightning_bnn.plots.page import Section, html_report

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["figure_of", "html_of", "markdown_of"]

_ABOUT = (
    "What was measured on a posterior, why it matters, and what to do. A fault makes results "
    "wrong, a warning may, a note explains what is seen."
)


def figure_of(report: Report, evidence: Evidence) -> Figure:
    """What the checks have looked at.

    Args:
        report: of the examination.
        evidence: what was examined.
    """
    confidence = spreads = densities = None
    if evidence.held_out is not None:
        try:
            outputs, targets = evidence.on_held_out, evidence.held_out.targets
            if evidence.classes:
                rows = [Averages.of(evidence.likelihood, o).probs for o in outputs]
                most = torch.stack(rows).mean(0).max(-1)
                confidence = (most.values, most.indices == targets)
            elif evidence.numbers and not evidence.alone:
                prediction = evidence.likelihood.predictive(torch.cat(outputs))  # type: ignore[operator]  # it has one
                spreads = (targets - prediction.mean) / prediction.variance.sqrt()
        except (NotPossible, ValueError):
            confidence = spreads = None  # what cannot be predicted is not drawn
    try:
        densities = log_densities(evidence)
    except NotPossible:
        densities = None
    return health_figure(report.curves, confidence, spreads, densities)


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
            Section("What was looked at", figures={"loss, predictions, chains": figure})
        )
    fine = ", ".join(map(words, report.fine)) or "nothing"
    sections.append(Section("Found to be fine", [f"{fine}."]))
    if report.skipped:
        skipped = [f"{words(name)}: {why}" for name, why in report.skipped.items()]
        sections.append(Section("Not looked at", code="\n".join(skipped)))
    facts = [f"{name}: {shown(value)}" for name, value in report.facts.items()]
    sections.append(Section("What was examined", code="\n".join(facts)))
    return html_report(f"The posterior: {report.headline()}", _ABOUT, sections)

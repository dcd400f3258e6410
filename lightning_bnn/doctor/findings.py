"""Findings with their numbers, reasons and remedies, and a report of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from weightsym.files import json_text, parse_json, write_whole

Severity = Literal["fault", "warning", "note"]
"""A fault makes results wrong, a warning may, a note explains what is seen."""
SEVERITIES: tuple[Severity, ...] = get_args(Severity)
REPORT_FILE = "doctor.json"
_MARKS = {"fault": "FAULT", "warning": "WARNING", "note": "note"}


@dataclass(frozen=True)
class Finding:
    """One finding of a check.

    Attributes:
        severity: whether results are wrong, may be, or are only explained.
        says: one sentence with the number that was measured.
        why: why that matters.
        fix: what to do.
        numbers: what was measured, by name.
        name: of the verdict, such as ``"step_too_large"``; `examine` fills in that of the check.

    >>> says = "The losses of 3 steps are not numbers."
    >>> why, fix = "Nothing is learned.", "Take smaller steps."
    >>> finding = Finding("fault", says, why, fix)
    >>> print(finding.text())
    FAULT  The losses of 3 steps are not numbers.
        Nothing is learned.
        Do: Take smaller steps.
    """

    severity: Severity
    says: str
    why: str
    fix: str
    numbers: Mapping[str, float | int] = field(default_factory=dict)
    name: str = ""

    def text(self) -> str:
        """The finding in a few lines, as they are printed."""
        return f"{_MARKS[self.severity]}  {self.says}\n    {self.why}\n    Do: {self.fix}"


@dataclass(frozen=True)
class Report:
    """The findings of all checks, and the checks that found nothing.

    Attributes:
        findings: the gravest first.
        fine: checks that found nothing.
        skipped: checks that were not possible, and the reasons.
        facts: what was examined: kind, modes, draws, examples, seconds.
        curves: numbers of every epoch, by name.

    >>> fault = Finding("fault", "Losses are NaN.", "All lost.", "Stop.", name="loss_not_converged")
    >>> report = Report([fault], ["labels_out_of_range"], {"not_burnt_in": "there are no chains"})
    >>> report.headline(), report.names()
    ('1 fault (loss not converged); 2 checks made, 1 not possible', {'loss_not_converged'})
    """

    findings: Sequence[Finding]
    fine: Sequence[str] = ()
    skipped: Mapping[str, str] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    curves: Mapping[str, Sequence[float]] = field(default_factory=dict)

    @property
    def faults(self) -> list[Finding]:
        """Findings that make results wrong."""
        return [f for f in self.findings if f.severity == "fault"]

    def names(self) -> set[str]:
        """The names of all findings."""
        return {f.name for f in self.findings}

    def headline(self) -> str:
        """One sentence for all of it."""
        found = [(s, [f.name for f in self.findings if f.severity == s]) for s in SEVERITIES]
        listed = ", ".join(_counted(s, names) for s, names in found if names) or "nothing found"
        looked = len(self.fine) + len(self.names())
        if not looked:
            return "nothing could be looked at"
        if not self.findings and len(self.skipped) > looked:
            reason, _ = Counter(self.skipped.values()).most_common(1)[0]
            total = looked + len(self.skipped)
            return f"only {looked} of {total} checks possible ({reason}); they found nothing"
        return f"{listed}; {looked} checks made, {len(self.skipped)} not possible"

    def text(self) -> str:
        """Everything, as the command prints it."""
        facts = "; ".join(f"{name} {shown(value)}" for name, value in self.facts.items())
        parts = [f"{self.headline()}.", facts, *(f"\n{f.text()}" for f in self.findings)]
        if self.fine:
            parts.append(f"\nfine: {', '.join(words(name) for name in self.fine)}")
        if self.skipped:
            parts.append("\nnot looked at:")
            parts += [f"  {words(name)}: {why}" for name, why in self.skipped.items()]
        return "\n".join(paragraph for paragraph in parts if paragraph)

    def markdown(self) -> str:
        """The findings as TensorBoard shows them."""
        lines = [f"**{self.headline()}**", ""]
        for finding in self.findings:
            lines += [f"**{finding.severity}: {words(finding.name)}.** {finding.says}", ""]
            lines += [f"*Why:* {finding.why}", "", f"*Do:* {finding.fix}", ""]
        if self.fine:
            lines += [f"Fine: {', '.join(map(words, self.fine))}.", ""]
        return "\n".join(lines)

    def write(self, folder: Path, network: str = "") -> Path:
        """Write the report as JSON, and return the file.

        Args:
            folder: of the file; it is made.
            network: that is named in the file's name, if there are several.
        """
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / (f"doctor-{network}.json" if network else REPORT_FILE)
        write_whole(file, self.to_json() + "\n", wait=False)
        return file

    def to_json(self) -> str:
        """Return the report as JSON, with null for numbers that are not finite."""
        return json_text(asdict(self))

    @classmethod
    def read(cls, path: Path) -> Report:
        """A report that was written as JSON.

        Args:
            path: the file.
        """
        try:
            content = parse_json(path.read_text(encoding="utf-8"))
            findings = [Finding(**finding) for finding in content.pop("findings")]
            curves = {
                name: [math.nan if value is None else float(value) for value in values]
                for name, values in content.pop("curves").items()
            }
            return cls(findings, **content, curves=curves)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(
                f"{path} is not a report of the doctor ({type(error).__name__}: {error})."
            ) from None


def _counted(severity: Severity, names: Sequence[str]) -> str:
    """How many findings there are, with the names of those that ask for something."""
    named = "" if severity == "note" else f" ({', '.join(dict.fromkeys(map(words, names)))})"
    return f"{len(names)} {severity}{'s' * (len(names) > 1)}{named}"


def words(name: str) -> str:
    """A verdict's name as words.

    >>> words("step_too_large"), words("not_the_posterior_of_bayes")
    ('step too large', 'not the posterior of Bayes')
    """
    return name.replace("_", " ").replace("bayes", "Bayes")


def shown(value: Any) -> str:
    """A fact as text, numbers with three digits."""
    return f"{value:.3g}" if isinstance(value, float) else str(value)

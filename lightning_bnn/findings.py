"""Results of a command: tables and figures, printed and written to a folder."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning_bnn
from lightning_bnn.tables import Table
from weightsym import Outcome
from weightsym.files import draft_of, write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MARKER = ".lightning_bnn"
"""File with the command's name, in folders that it may overwrite."""


@dataclass(frozen=True, repr=False)
class Findings:
    """Tables and figures of one command.

    Attributes:
        name: of the command, for files and tags.
        title: one line.
        tables: by file name.
        figures: by file name.
        cautions: warnings for the reader, such as a substitute for missing data.
        settings: everything that determines the numbers.
    """

    name: str
    title: str
    tables: Mapping[str, Table]
    figures: Mapping[str, Figure]
    cautions: Sequence[str] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        first, *others = self.tables.values()
        tables = [first.html(), *(table.html(folded=True) for table in others)]
        cautions = [f"<p>{html.escape(text)}</p>" for text in self.cautions]
        title = f"<h3>{html.escape(self.title)}</h3>"
        return "\n".join([title, *tables, *cautions])

    def to_pandas(self) -> dict[str, Any]:
        """Return all tables as data frames, by name."""
        return {name: table.to_pandas() for name, table in self.tables.items()}

    def text(self) -> str:
        """Return title, tables and cautions as printed."""
        return "\n\n".join([self.title, *(t.text() for t in self.tables.values()), *self.cautions])

    def markdown(self) -> str:
        """Return tables, figures and cautions as one document."""
        pictures = [f"![{name}]({name}.png)" for name in self.figures]
        tables = [table.markdown() for table in self.tables.values()]
        return "\n\n".join([f"# {self.title}", *tables, *pictures, *self.cautions]) + "\n"

    def json(self) -> dict[str, Any]:
        """Return all numbers and settings as plain types."""
        return {
            "study": self.name,
            "version": lightning_bnn.__version__,
            "settings": dict(self.settings),
            "tables": {name: table.json() for name, table in self.tables.items()},
            "cautions": list(self.cautions),
        }


def publish(findings: Findings, folder: Path) -> Outcome:
    """Print the tables, and write them and the figures, see `write_findings`.

    Args:
        findings: of a command.
        folder: for the files.
    """
    write_findings(findings, folder)
    return report(findings, folder)


def report(findings: Findings, folder: Path) -> Outcome:
    """Print the tables, and name the folder with the files.

    Args:
        findings: of a command.
        folder: of the files.
    """
    print(findings.text())
    print(f"\nwrote {folder.resolve()}")
    return Outcome(findings.json())


def write_findings(findings: Findings, folder: Path) -> None:
    """Write tables (CSV, Markdown, JSON) and figures (PNG, SVG), without printing.

    Args:
        findings: of a command.
        folder: for the files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, table in findings.tables.items():
        write_whole(folder / f"{name}.csv", table.csv(), wait=False)
    write_whole(folder / "README.md", findings.markdown(), wait=False)
    for name, figure in findings.figures.items():
        for form in ("png", "svg"):
            with draft_of(folder / f"{name}.{form}", wait=False) as draft:
                figure.savefig(draft, format=form, dpi=150)
    content = json.dumps(findings.json(), indent=1, default=str)
    write_whole(folder / "results.json", content + "\n", wait=False)  # it says that all is there


def results_folder(out: str, command: str) -> Path:
    """Return the folder for a command's results: a new one, or an earlier one of the command.

    Args:
        out: chosen by the user.
        command: its name; folders of other programs or commands are refused.
    """
    folder = Path(out).expanduser()
    marker = folder / _MARKER
    try:
        folder.mkdir(parents=True, exist_ok=True)
        is_own = marker.is_file() and marker.read_text().strip() == command
        if not is_own and any(folder.iterdir()):
            raise ValueError(
                f"`out` {folder} holds files other than results of {command}: choose a new folder."
            )
        marker.write_text(f"{command}\n")
    except OSError as error:
        raise ValueError(f"`out` must be a writable folder: {error}.") from error
    return folder

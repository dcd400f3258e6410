"""The results of a command: tables and figures, printed and written where the user looks."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning_bnn
from lightning_bnn.tables import Table
from weightsym.files import draft_of, write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MARKER = ".lightning_bnn"
"""In folders that a command may write to, and remove things from: its name."""


@dataclass(frozen=True, repr=False)
class Findings:
    """Tables and figures of one command.

    Attributes:
        name: of the command, for files and tags.
        title: one line.
        tables: by file name.
        figures: by file name.
        cautions: what a reader must know, such as a substitute for data that are not there.
        settings: everything that decides the numbers.
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
        """All tables as data frames, by name."""
        return {name: table.to_pandas() for name, table in self.tables.items()}

    def text(self) -> str:
        """Title, tables and cautions as they are printed."""
        return "\n\n".join([self.title, *(t.text() for t in self.tables.values()), *self.cautions])

    def markdown(self) -> str:
        """Tables, figures and cautions as one document."""
        pictures = [f"![{name}]({name}.png)" for name in self.figures]
        tables = [table.markdown() for table in self.tables.values()]
        return "\n\n".join([f"# {self.title}", *tables, *pictures, *self.cautions]) + "\n"

    def json(self) -> dict[str, Any]:
        """All numbers, and what decides them, as plain types."""
        return {
            "study": self.name,
            "version": lightning_bnn.__version__,
            "settings": dict(self.settings),
            "tables": {name: table.json() for name, table in self.tables.items()},
            "cautions": list(self.cautions),
        }


def publish(findings: Findings, folder: Path) -> None:
    """Print the tables, and write them and the figures, see `write_findings`.

    Args:
        findings: of a command.
        folder: where the files go.
    """
    write_findings(findings, folder)
    report(findings, folder)


def report(findings: Findings, folder: Path) -> None:
    """Print the tables, and name the folder in which they are.

    Args:
        findings: of a command.
        folder: where the files are.
    """
    print(findings.text())
    print(f"\nwrote {folder.resolve()}")


def write_findings(findings: Findings, folder: Path) -> None:
    """Write tables (CSV, Markdown, JSON) and figures (PNG, SVG), without printing.

    Args:
        findings: of a command.
        folder: where the files go.
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
    """The folder of one command: new, or one that the same command has made before.

    Args:
        out: where the user wants it.
        command: its name; what other programs or commands have put into a folder is left alone.
    """
    folder = Path(out).expanduser()
    marker = folder / _MARKER
    try:
        folder.mkdir(parents=True, exist_ok=True)
        is_own = marker.is_file() and marker.read_text().strip() == command
        if not is_own and any(folder.iterdir()):
            raise ValueError(
                f"`out` {folder} holds other things than results of {command}: choose a new folder."
            )
        marker.write_text(f"{command}\n")
    except OSError as error:
        raise ValueError(f"`out` must be a folder that can be written to: {error}.") from error
    return folder

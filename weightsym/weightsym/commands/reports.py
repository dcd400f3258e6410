"""What commands that compare networks write: all numbers as JSON, with a figure beside them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import weightsym
from weightsym.extras import MissingPackage, of_the_plug_in
from weightsym.networks.files.drafts import draft_of, write_whole
from weightsym.networks.files.loading import json_text
from weightsym.networks.files.writing import check_path


@dataclass(frozen=True)
class Outcome:
    """The result of a command that decides or measures.

    Attributes:
        content: all numbers and settings, as plain data.
        exit_code: of the process.
    """

    content: Mapping[str, Any]
    exit_code: int = 0

    def json(self) -> str:
        """Return the content as JSON, with null for numbers that are not finite."""
        return json_text(json.loads(json.dumps(self.content, default=str)))


def report_file(out: str | None, overwrite: bool) -> Path | None:
    """Check the output file before the work begins.

    Args:
        out: path of a .json file; None for no report.
        overwrite: whether an existing report may be replaced.
    """
    if out is None:
        return None
    target = Path(out)
    if target.suffix != ".json":
        raise ValueError(f"`--out` must be a .json file, got {out}.")
    for path in (target, target.with_suffix(".png")):
        check_path(path, overwrite and not path.is_dir())
    return target


def write_report(target: Path, content: Mapping[str, Any], figure: Callable[[Any], Any]) -> str:
    """Write all numbers with a figure beside them, and name both files.

    Args:
        target: of `report_file`.
        content: the numbers.
        figure: draws, given the module of the plug-in that has figures of weights.
    """
    write_whole(target, json_text({"version": weightsym.__version__, **content}) + "\n", wait=False)
    try:
        plots = of_the_plug_in("plots.weights", "The figure beside it")
    except MissingPackage as missing:
        return f"wrote {target}. {missing}"
    with draft_of(target.with_suffix(".png"), wait=False) as draft:
        figure(plots).savefig(draft, format="png", dpi=150)
    return f"wrote {target} and {target.with_suffix('.png')}"

"""The steps of a reproduction: which study is called, how, and how often."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import yaml

__all__ = ["PAPERS", "STEPS", "Size", "Step", "chosen_steps"]

Size = Literal["full", "smallest"]
PAPERS = {
    "p1": "A symmetry-aware exploration of Bayesian neural network posteriors",
    "p2": "Variational inference failures under model symmetries",
    "p3": "A compact representation for Bayesian neural networks",
}


@dataclass(frozen=True)
class Step:
    """A study, called in a folder of its own.

    The head of `steps.yaml` explains the fields.
    """

    name: str
    paper: str
    study: str
    minutes: int | float | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    smallest: Mapping[str, Any] | None = field(default_factory=dict)
    seeded: bool = True
    after: str = ""
    results: str = ""

    @property
    def source(self) -> Path:
        """The file of its study."""
        return Path(__file__).parents[1] / f"{self.study}.py"

    def seeds(self, count: int) -> Sequence[int]:
        """The seeds it is called with."""
        return range(count) if self.seeded else (0,)

    def folder(self, root: Path, seed: int) -> Path:
        """The folder that a repetition writes to."""
        return root / self.name / f"seed_{seed}" if self.seeded else root / self.name

    def arguments(self, root: Path, seed: int, size: Size) -> dict[str, Any]:
        """Everything that its function is called with.

        Args:
            root: folder of everything.
            seed: which repetition.
            size: full or smallest.
        """
        options = self.options if size == "full" else self.smallest
        assert options is not None
        arguments = {name: _placed(value, root) for name, value in options.items()}
        if self.seeded:
            arguments["seed"] = seed
        return {**arguments, "out": str(self.folder(root, seed))}

    def function(self) -> Any:
        """Import the function of the study."""
        return getattr(importlib.import_module(f"lightning_bnn.studies.{self.study}"), self.study)


def chosen_steps(only: Sequence[str]) -> list[Step]:
    """Select the steps of papers, or those with names, by default all.

    Args:
        only: names of papers and steps.
    """
    known = [*PAPERS, *(step.name for step in STEPS)]
    for name in only:
        if name not in known:
            raise ValueError(f"`only` must be of {', '.join(known)}, got {name!r}.")
    return [step for step in STEPS if not only or {step.name, step.paper} & set(only)]


def _placed(value: Any, root: Path) -> Any:
    if isinstance(value, str):
        return value.replace("{root}", str(root))
    if isinstance(value, Mapping):
        return {name: _placed(part, root) for name, part in value.items()}
    return value


def _steps() -> tuple[Step, ...]:
    text = resources.files(__package__).joinpath("steps.yaml").read_text(encoding="utf-8")
    return tuple(
        Step(name=name, **{"study": name, **about}) for name, about in yaml.safe_load(text).items()
    )


STEPS = _steps()
"""All steps, in the order in which they run."""

"""Rows of the leaderboard: methods with their settings, for any reference and budget."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from weightsym.files import read_settings

_SHARE = re.compile(r"(\d+(?:\.\d+)?)%")
_LEAST_BATCH = 10
_OF_THE_REFERENCE = ("network", "likelihood", "prior_std")


@dataclass(frozen=True)
class Entry:
    """A method, and its use of a budget.

    Attributes:
        title: of the method in tables, the first line of its file.
        method: class of the module.
        settings: its arguments; a number with a percent sign is a share of the epochs.
        batch: examples in a batch, as a share of the data.
        gradients_per_epoch: of one member.
        candidates: alternative rows, each given by its changes to this row.
    """

    title: str
    method: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    batch: str = "100%"
    gradients_per_epoch: int = 1
    candidates: Sequence[Mapping[str, Any]] = ()

    @classmethod
    def read(cls, path: Path) -> Entry:
        """Read one row, with its candidates, from its YAML file."""
        title = path.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
        try:
            entry = cls(title, **read_settings(path))
            if not all(isinstance(x, dict) for x in [entry.settings, *entry.candidates]):
                raise ValueError(f"`settings` and each of `candidates` of {path} must be groups.")
            entries = entry.alternatives()
        except TypeError as error:
            raise ValueError(f"{path} is not a row of the leaderboard: {error}.") from None
        for each in entries:
            each._check(path)
        return entry

    def _check(self, path: Path) -> None:
        members = self.settings.get("members", 1)
        checks: dict[str, tuple[Any, bool]] = {
            "method": (self.method, isinstance(self.method, str)),
            "batch": (self.batch, bool(_SHARE.fullmatch(str(self.batch)))),
            "gradients_per_epoch": (self.gradients_per_epoch, _is_count(self.gradients_per_epoch)),
            "members": (members, _is_count(members)),
        }
        for name, (value, holds) in checks.items():
            if not holds:
                raise ValueError(f"`{name}` of {path} cannot be {value!r}.")

    def alternatives(self) -> list[Entry]:
        """The row itself, followed by its candidates as rows."""
        alike = {"title": self.title, "candidates": ()}
        return [
            Entry(**{**_merged(asdict(self), changes), **alike})
            for changes in ({}, *self.candidates)
        ]

    def epochs(self, budget: int) -> int:
        """Compute the number of epochs whose cost equals the budget, with all members.

        Args:
            budget: gradients of one network for all the data.
        """
        members = self.settings.get("members", 1)
        return max(1, round(budget / (members * self.gradients_per_epoch)))

    def configuration(self, reference: Mapping[str, Any], budget: int, examples: int) -> str:
        """Return a configuration for `fit` with the network, prior and data of the reference.

        Args:
            reference: its settings.
            budget: gradients of one network for all the data, of all members together.
            examples: number of training examples.
        """
        epochs = self.epochs(budget)
        model = reference["model"]["init_args"]
        shared = {name: model[name] for name in _OF_THE_REFERENCE if name in model}
        data = dict(reference["data"])
        batch = max(_LEAST_BATCH, round(_of(self.batch, examples)))
        data["init_args"] = {**data.get("init_args", {}), "batch_size": min(batch, examples)}
        trainer = {"max_epochs": epochs, "limit_val_batches": 0, "enable_model_summary": False}
        arguments = {**shared, "seed": 1, **_in_epochs(self.settings, epochs)}
        settings = {
            "seed_everything": 1,
            "model": {"class_path": self.method, "init_args": arguments},
            "data": data,
            "trainer": {**trainer, "log_every_n_steps": 100},
        }
        return f"# {self.title}\n{yaml.safe_dump(settings, sort_keys=False)}"


def read_entries(folder: Path | None = None) -> dict[str, Entry]:
    """Read all rows of a folder by name, by default those of this package."""
    root = folder or Path(str(files("bnn_research") / "rows"))
    paths = sorted(root.glob("*.yaml"))
    if not paths:
        raise ValueError(f"There are no YAML files in {root}.")
    entries = {path.stem: Entry.read(path) for path in paths}
    titles = [entry.title for entry in entries.values()]
    again = sorted({title for title in titles if titles.count(title) > 1})
    if again:
        raise ValueError(
            f"Every row of {root} must have a unique title in its first line, but several "
            f"have {again[0]!r}."
        )
    return entries


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _merged(settings: Any, others: Mapping[str, Any]) -> dict[str, Any]:
    """Override some settings at any depth."""
    settings = settings if isinstance(settings, Mapping) else {}
    both = {
        name: _merged(settings.get(name), value) if isinstance(value, Mapping) else value
        for name, value in others.items()
    }
    return {**settings, **both}


def _in_epochs(settings: Any, epochs: int) -> Any:
    """Convert shares to whole numbers of epochs."""
    if isinstance(settings, Mapping):
        return {name: _in_epochs(value, epochs) for name, value in settings.items()}
    if isinstance(settings, str) and _SHARE.fullmatch(settings):
        return max(1, round(_of(settings, epochs)))
    return settings


def _of(share: str, whole: int) -> float:
    return float(share.removesuffix("%")) / 100 * whole

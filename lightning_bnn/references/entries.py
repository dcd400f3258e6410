"""Rows of the leaderboard: methods with their settings, for any reference and budget."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from weightsym.settings_files import read_settings

__all__ = ["Entry", "read_entries"]

_SHARE = re.compile(r"(\d+(?:\.\d+)?)%")
_LEAST_BATCH = 10
_OF_THE_REFERENCE = ("network", "likelihood", "prior_std")


@dataclass(frozen=True)
class Entry:
    """A method, and how it spends what it may spend.

    Attributes:
        title: in tables, the first line of its file.
        method: class of the module.
        settings: its arguments; a number with a percent sign is a share of the epochs.
        batch: examples in a batch, as a share of the data.
        gradients_per_epoch: of one member.
        per_reference: other settings for some references, by their names.
    """

    title: str
    method: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    batch: str | int = "100%"
    gradients_per_epoch: int = 1
    per_reference: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Entry:
        """One row from its YAML file."""
        title = path.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
        try:
            entry = cls(title, **read_settings(path))
        except TypeError as error:
            raise ValueError(f"{path} is no row of the leaderboard: {error}.") from None
        groups = [entry.settings, entry.per_reference]
        if not all(isinstance(group, dict) for group in groups):
            raise ValueError(f"`settings` and `per_reference` of {path} must be groups.")
        checks: dict[str, tuple[Any, bool]] = {
            "method": (entry.method, isinstance(entry.method, str)),
            "batch": (entry.batch, bool(_SHARE.fullmatch(str(entry.batch)))),
            "gradients_per_epoch": (
                entry.gradients_per_epoch,
                _is_count(entry.gradients_per_epoch),
            ),
            "members": (m := entry.settings.get("members", 1), _is_count(m)),
        }
        for name, (value, holds) in checks.items():
            if not holds:
                raise ValueError(f"`{name}` of {path} cannot be {value!r}.")
        return entry

    def epochs(self, budget: int) -> int:
        """Compute the number of epochs that cost the budget, with all members.

        Args:
            budget: gradients of one network for all the data.
        """
        members = self.settings.get("members", 1)
        return max(1, round(budget / (members * self.gradients_per_epoch)))

    def settings_for(self, name: str) -> dict[str, Any]:
        """The settings for a reference, by its name."""
        return _merged(self.settings, self.per_reference.get(name, {}))

    def configuration(
        self, name: str, reference: Mapping[str, Any], budget: int, examples: int
    ) -> str:
        """Return a configuration for `fit` with the network, prior and data of the reference.

        Args:
            name: of the reference.
            reference: its settings.
            budget: gradients of one network for all the data, of all members together.
            examples: training examples.
        """
        epochs = self.epochs(budget)
        model = reference["model"]["init_args"]
        shared = {name: model[name] for name in _OF_THE_REFERENCE if name in model}
        data = dict(reference["data"])
        batch = max(_LEAST_BATCH, round(_of(str(self.batch), examples)))
        data["init_args"] = {**data.get("init_args", {}), "batch_size": min(batch, examples)}
        trainer = {"max_epochs": epochs, "limit_val_batches": 0, "enable_model_summary": False}
        arguments = {**shared, "seed": 1, **_in_epochs(self.settings_for(name), epochs)}
        settings = {
            "seed_everything": 1,
            "model": {"class_path": self.method, "init_args": arguments},
            "data": data,
            "trainer": {**trainer, "log_every_n_steps": 100},
        }
        return f"# {self.title}\n{yaml.safe_dump(settings, sort_keys=False)}"


def read_entries(folder: Path | None = None) -> dict[str, Entry]:
    """All rows of a folder by name, by default those that come with the package."""
    root = folder or Path(str(files("lightning_bnn") / "references" / "rows"))
    paths = sorted(root.glob("*.yaml"))
    if not paths:
        raise ValueError(f"There are no YAML files in {root}.")
    entries = {path.stem: Entry.read(path) for path in paths}
    titles = [entry.title for entry in entries.values()]
    again = sorted({title for title in titles if titles.count(title) > 1})
    if again:
        raise ValueError(
            f"Every row of {root} must have a title of its own in the first line, several have "
            f"{again[0]!r}."
        )
    return entries


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _merged(settings: Any, others: Mapping[str, Any]) -> dict[str, Any]:
    """Override some settings, however deep they lie."""
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

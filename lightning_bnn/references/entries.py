"""Rows of the leaderboard: a method with its settings, whatever the reference and the budget."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from lightning_bnn.settings_files import read_settings

__all__ = ["Entry", "read_entries"]

_SHARE = re.compile(r"(\d+(?:\.\d+)?)%")
_FIELDS = ("method", "settings", "batch", "gradients_per_epoch", "per_reference")
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
        content = read_settings(path)
        unknown = set(content) - set(_FIELDS)
        if unknown or "method" not in content:
            problem = f"`{min(unknown)}` is none of them" if unknown else "`method` is missing"
            raise ValueError(
                f"{path} must have `method`, and may have {', '.join(_FIELDS[1:])}: {problem}."
            )
        entry = cls(path.read_text(encoding="utf-8").splitlines()[0].removeprefix("# "), **content)
        if not _SHARE.fullmatch(str(entry.batch)):
            raise ValueError(f"`batch` of {path} must be a share such as 25%, got {entry.batch!r}.")
        return entry

    def epochs(self, budget: int) -> int:
        """How many epochs cost the budget, with all members.

        Args:
            budget: gradients of one network for all the data.
        """
        members = int(self.settings.get("members", 1))
        return max(1, round(budget / (members * self.gradients_per_epoch)))

    def settings_for(self, name: str) -> dict[str, Any]:
        """The settings for a reference, by its name."""
        return _merged(self.settings, self.per_reference.get(name, {}))

    def configuration(
        self, name: str, reference: Mapping[str, Any], budget: int, examples: int
    ) -> str:
        """What `lightning-bnn fit` runs: the network, prior and data are those of the reference.

        Args:
            name: of the reference.
            reference: its settings.
            budget: gradients of one network for all the data, of all members together.
            examples: training examples.
        """
        epochs = self.epochs(budget)
        given = reference["model"]["init_args"]
        kept = {name: given[name] for name in _OF_THE_REFERENCE if name in given}
        data = dict(reference["data"])
        batch = max(_LEAST_BATCH, round(_of(str(self.batch), examples)))
        data["init_args"] = {**data.get("init_args", {}), "batch_size": min(batch, examples)}
        trainer = {"max_epochs": epochs, "limit_val_batches": 0, "enable_model_summary": False}
        arguments = {**kept, "seed": 1, **_in_epochs(self.settings_for(name), epochs)}
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
    return {path.stem: Entry.read(path) for path in paths}


def _merged(settings: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with some others in their place, however deep these lie."""
    both = {
        name: _merged(settings[name], value) if isinstance(value, Mapping) else value
        for name, value in others.items()
    }
    return {**settings, **both}


def _in_epochs(settings: Any, epochs: int) -> Any:
    """Settings with shares as whole numbers of epochs."""
    if isinstance(settings, Mapping):
        return {name: _in_epochs(value, epochs) for name, value in settings.items()}
    if isinstance(settings, str) and _SHARE.fullmatch(settings):
        return max(1, round(_of(settings, epochs)))
    return settings


def _of(share: str, whole: int) -> float:
    return float(share.removesuffix("%")) / 100 * whole

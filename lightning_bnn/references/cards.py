"""Cards of references: facts about their draws, as JSON and as text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lightning_bnn.references.diagnosis import Diagnosis
from lightning_bnn.tables import Measured
from weightsym.files import json_text, parse_json, write_whole

_LEAST = 0.01
"""Smallest p-value, times their number, of a calibrated sampler."""
_SEEDS = 3
"""Number of other seeds with which a gold reference must have been sampled again."""


@dataclass(frozen=True)
class Card:
    """A record of the origin of a posterior's draws, and of their diagnostics.

    Attributes:
        name: of the reference.
        about: data, network, prior and likelihood in one sentence.
        made: sampler, settings, cost, machine and versions.
        sha256: of the draws, see `lightning_bnn.bank.shipped.digest_of_networks`.
        diagnosis: of the stored draws, in their precision.
        again: diagnostics of runs from other seeds, and their distances to the run of the stored
            draws, all in the precision of the sampling.
        licence: of the data, and of the draws.
        calibration: p-values of uniform ranks on simulated data, by statistic, if the sampler was
            tested with these settings (`bnn-research sbc`).

    >>> from lightning_bnn.references.shipped import reference_folder
    >>> card = Card.read(reference_folder("two_gaussians") / "card.json")
    >>> card.name, card.verdict, card.diagnosis.chains
    ('two_gaussians', 'gold', 8)
    >>> from dataclasses import replace
    >>> once = replace(card, again=())  # as if it had been sampled from one seed only
    >>> once.verdict, once.failures
    ('long run', ['sampled from 0 other seeds, not 3'])
    """

    name: str
    about: str
    made: Mapping[str, Any]
    sha256: str
    diagnosis: Diagnosis
    again: Sequence[Mapping[str, Any]] = ()
    licence: str = ""
    calibration: Mapping[str, float] = field(default_factory=dict)

    @property
    def failures(self) -> list[str]:
        """The criteria of gold that these draws, or those from other seeds, fail."""
        count = len(self.again)
        few = [] if count >= _SEEDS else [f"sampled from {count} other seeds, not {_SEEDS}"]
        of_seeds = [f"seed {o['seed']}: {text}" for o in self.again for text in o["failures"]]
        return [*self.diagnosis.failures(), *few, *of_seeds]

    @property
    def verdict(self) -> str:
        """Verdict: gold, or a long run, which represents only itself."""
        return "long run" if self.failures else "gold"

    @property
    def level(self) -> str:
        """Level of evidence, see `level_of`."""
        return level_of(self.calibration)

    def write(self, path: Path) -> None:
        """Write the card as JSON, with its failures for readers."""
        write_whole(path, json_text({**asdict(self), "failures": self.failures}) + "\n")

    @classmethod
    def read(cls, path: Path) -> Card:
        """Read a card that `write` has written, with failures computed from its numbers."""
        try:
            content = parse_json(path.read_text(encoding="utf-8"), object_hook=_with_nan)
            del content["failures"]
            diagnosis = content.pop("diagnosis")
            diagnosis["halves"] = _measured(diagnosis["halves"])
            for run in content["again"]:
                run["distances"] = _measured(run["distances"])
            return cls(**content, diagnosis=Diagnosis(**diagnosis))
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise ValueError(
                f"{path} is not a card of a reference, or it is damaged ({error})."
            ) from None


def level_of(p_values: Mapping[str, float]) -> str:
    """Return the level of evidence for a sampler: by ranks on simulated data, or diagnosed only.

    >>> level_of({"loss": 0.3, "function": 0.1}), level_of({})
    ('calibrated, p = 0.2', 'diagnosed')

    Args:
        p_values: of uniform ranks, by statistic.
    """
    if not p_values:
        return "diagnosed"
    least = min(1.0, len(p_values) * min(p_values.values()))
    word = "calibrated" if least > _LEAST else "not calibrated"
    return f"{word}, p = {least:.2g}"


def _with_nan(group: dict[str, Any]) -> dict[str, Any]:
    """Convert null to NaN, which JSON does not have."""
    return {name: math.nan if value is None else value for name, value in group.items()}


def _measured(pairs: Mapping[str, Sequence[float | None]]) -> dict[str, Measured]:
    """Convert pairs of JSON to numbers with errors."""
    return {
        name: Measured(*(math.nan if number is None else number for number in pair))
        for name, pair in pairs.items()
    }

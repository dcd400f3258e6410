"""What is known of a reference, in a file beside its draws."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lightning_bnn.comparison.tables import Measured
from lightning_bnn.references.diagnosis import Diagnosis

__all__ = ["Card"]


@dataclass(frozen=True)
class Card:
    """How the draws of a posterior were made, and what they say about themselves.

    Attributes:
        name: of the reference.
        about: data, network, prior and likelihood in one sentence.
        made: sampler, settings, cost, machine and versions.
        sha256: of the draws, see `lightning_bnn.bank.digest_of_networks`.
        diagnosis: of the draws that are stored.
        again: what runs with other seeds say, and their distances to these draws.
        licence: of the data, and of the draws.

    >>> from lightning_bnn.references import reference_folder
    >>> card = Card.read(reference_folder("two_gaussians") / "card.json")
    >>> card.name, card.verdict, card.diagnosis.chains
    ('two_gaussians', 'gold', 8)
    >>> from dataclasses import replace
    >>> replace(card, failures=["3 chains, not 4"]).verdict
    'long run'
    """

    name: str
    about: str
    made: Mapping[str, Any]
    sha256: str
    diagnosis: Diagnosis
    again: Sequence[Mapping[str, Any]] = ()
    licence: str = ""
    failures: Sequence[str] = field(default=())

    @property
    def verdict(self) -> str:
        """Gold, or a long run, which stands for nothing but itself."""
        return "long run" if self.failures else "gold"

    def write(self, path: Path) -> None:
        """Write the card as JSON."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Card:
        """From a file that `write` has written."""
        content = json.loads(path.read_text(encoding="utf-8"))
        diagnosis = content.pop("diagnosis")
        diagnosis["halves"] = _measured(diagnosis["halves"])
        for other in content["again"]:
            other["distances"] = _measured(other["distances"])
        return cls(**content, diagnosis=Diagnosis(**diagnosis))


def _measured(pairs: Mapping[str, Sequence[float]]) -> dict[str, Measured]:
    """Numbers with their errors, which JSON holds as pairs."""
    return {name: Measured(*pair) for name, pair in pairs.items()}

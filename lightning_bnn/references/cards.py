"""What is known of a reference, in a file beside its draws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightning_bnn.references.card_files import read_card_file, write_card_file
from lightning_bnn.references.diagnosis import Diagnosis
from lightning_bnn.tables import Measured

__all__ = ["Card"]

_SEEDS = 3
"""From so many other seeds gold must have been sampled again."""


@dataclass(frozen=True)
class Card:
    """How the draws of a posterior were made, and what they say about themselves.

    Attributes:
        name: of the reference.
        about: data, network, prior and likelihood in one sentence.
        made: sampler, settings, cost, machine and versions.
        sha256: of the draws, see `lightning_bnn.bank.digest_of_networks`.
        diagnosis: of the draws that are stored, in the precision in which they are.
        again: what runs from other seeds say, and how far they are from the run whose draws are
            stored; all of that in the precision in which it was sampled.
        licence: of the data, and of the draws.

    >>> from lightning_bnn.references import reference_folder
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

    @property
    def failures(self) -> list[str]:
        """What these draws, or those from other seeds, lack to be gold; nothing if they are."""
        count = len(self.again)
        few = [] if count >= _SEEDS else [f"sampled from {count} other seeds, not {_SEEDS}"]
        of_seeds = [f"seed {o['seed']}: {text}" for o in self.again for text in o["failures"]]
        return [*self.diagnosis.failures(), *few, *of_seeds]

    @property
    def verdict(self) -> str:
        """Gold, or a long run, which stands for nothing but itself."""
        return "long run" if self.failures else "gold"

    def write(self, path: Path) -> None:
        """Write the card as JSON, with its failures for whoever reads the file."""
        write_card_file({**asdict(self), "failures": self.failures}, path)

    @classmethod
    def read(cls, path: Path) -> Card:
        """From a file that `write` has written; the failures are those of its numbers."""
        content = read_card_file(path)
        del content["failures"]
        diagnosis = content.pop("diagnosis")
        diagnosis["halves"] = _measured(diagnosis["halves"])
        for other in content["again"]:
            other["distances"] = _measured(other["distances"])
        return cls(**content, diagnosis=Diagnosis(**diagnosis))


def _measured(pairs: Mapping[str, Sequence[float]]) -> dict[str, Measured]:
    """Numbers with their errors, which JSON holds as pairs."""
    return {name: Measured(*pair) for name, pair in pairs.items()}

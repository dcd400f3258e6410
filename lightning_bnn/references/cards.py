"""Cards of references: what is known of their draws, in a JSON file and in words."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightning_bnn.references.diagnosis import SPACES, Diagnosis
from lightning_bnn.tables import Measured

__all__ = ["Card", "licence_of", "read_card_file", "write_card_file"]


_DRAWS = "draws: Apache 2.0"
_OF_UCI = {
    "Airfoil": "C5VW2C", "Concrete": "C5PK67", "Energy": "C51307", "Yacht": "C5XG7R",
}  # fmt: skip
"""Tables under CC BY 4.0, and where they are from."""
_OTHERS = {
    "Digits": f"data: those of scikit-learn, https://doi.org/10.24432/C50P49; {_DRAWS}",
    "NoisySine": "Apache 2.0, data and draws",
    "TwoGaussians": "Apache 2.0, data and draws",
}


def licence_of(data: str, table: str = "") -> str:
    """State the licences of the data and of the draws in one line, as far as they are known.

    >>> licence_of("UCI", "yacht")
    'data: CC BY 4.0, https://doi.org/10.24432/C5XG7R; draws: Apache 2.0'
    >>> licence_of("my.own.Data")
    'data: not known; draws: Apache 2.0'

    Args:
        data: the class of a datamodule, as configurations name it.
        table: which of its tables, where it has several.
    """
    name = data.rpartition(".")[2]
    source = _OF_UCI.get(table.capitalize() if name == "UCI" else name)
    if source is not None:
        return f"data: CC BY 4.0, https://doi.org/10.24432/{source}; {_DRAWS}"
    return _OTHERS.get(name, f"data: not known; {_DRAWS}")


_MEASURED = {...: (float, float)}
_SPACES = dict.fromkeys(
    SPACES, dict.fromkeys(("rhat_max", "rhat_median", "ess_min", "ess_tail_min"), float)
)
_MADE = {
    "sampler": str, "settings": {...: object}, "transitions": int, "burn_in": int, "every": int,
    "seconds": int, "gradients": int, "acceptance": float, "versions": str, "machine": str,
}  # fmt: skip
_CARD = {
    "name": str,
    "about": str,
    "made": _MADE,
    "sha256": str,
    "diagnosis": {"chains": int, "draws": int, "spaces": _SPACES, "halves": _MEASURED},
    "again": [
        {"seed": int, "failures": [str], "spaces": _SPACES, "halves": _MEASURED,
         "distances": _MEASURED}
    ],
    "licence": str,
    "failures": [str],
}  # fmt: skip
"""Groups by name (`...`: any names), lists, pairs; a number may be null."""


def write_card_file(content: Mapping[str, Any], path: Path) -> None:
    """Write a card, with null for numbers that are not finite.

    Args:
        content: of the card, in plain types.
        path: of the file.
    """
    text = json.dumps(_finite(content), indent=1, allow_nan=False)
    path.write_text(text + "\n", encoding="utf-8")


def read_card_file(path: Path) -> dict[str, Any]:
    """Read such a file, with NaN for numbers that are null.

    Args:
        path: of the file.
    """
    try:
        content = _shaped(json.loads(path.read_text(encoding="utf-8")), _CARD, "card")
    except ValueError as error:
        raise ValueError(f"{path} is no card of a reference, or it is damaged ({error}).") from None
    return dict(content)


def _finite(content: Any) -> Any:
    if isinstance(content, Mapping):
        return {name: _finite(value) for name, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


# ------------------------------------------------------------ the shape of what is read
def _shaped(content: Any, shape: Any, name: str) -> Any:
    """Check the shape of the content, and convert its numbers to floats."""
    if isinstance(shape, dict):
        return _group(content, shape, name)
    if isinstance(shape, list):
        return [_shaped(item, shape[0], name) for item in _of_kind(content, list, name)]
    if isinstance(shape, tuple):
        if len(_of_kind(content, list, name)) != len(shape):
            raise ValueError(f"`{name}` must have {len(shape)} numbers, got {len(content)}")
        return tuple(_shaped(*pair, name) for pair in zip(content, shape, strict=True))
    if shape is float:
        return math.nan if content is None else float(_of_kind(content, (int, float), name))
    return _of_kind(content, shape, name)


def _group(content: Any, shape: Mapping[Any, Any], name: str) -> dict[str, Any]:
    given = _of_kind(content, dict, name)
    if ... in shape:
        return {key: _shaped(value, shape[...], key) for key, value in given.items()}
    for key in given.keys() ^ shape.keys():
        raise ValueError(f"`{key}` of `{name}` is {'missing' if key in shape else 'not known'}")
    return {key: _shaped(given[key], inner, key) for key, inner in shape.items()}


def _of_kind(content: Any, kind: Any, name: str) -> Any:
    if not isinstance(content, kind) or (isinstance(content, bool) and kind is not object):
        raise ValueError(f"`{name}` cannot be {content!r:.40}")
    return content


_SEEDS = 3
"""From so many other seeds gold must have been sampled again."""


@dataclass(frozen=True)
class Card:
    """A record of how the draws of a posterior were made, and of what they say about themselves.

    Attributes:
        name: of the reference.
        about: data, network, prior and likelihood in one sentence.
        made: sampler, settings, cost, machine and versions.
        sha256: of the draws, see `lightning_bnn.bank.shipped.digest_of_networks`.
        diagnosis: of the draws that are stored, in the precision in which they are.
        again: what runs from other seeds say, and how far they are from the run whose draws are
            stored; all of that in the precision in which it was sampled.
        licence: of the data, and of the draws.

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

    @property
    def failures(self) -> list[str]:
        """List what these draws, or those from other seeds, lack to be gold."""
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
        """Read a file that `write` has written, with failures that follow from its numbers."""
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

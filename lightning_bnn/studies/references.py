"""The cards of all references, computed again from the draws that come with the package."""

from __future__ import annotations

import math

from tqdm.auto import tqdm

from lightning_bnn.bank import digest_of_networks
from lightning_bnn.comparison.tables import Cell, Table
from lightning_bnn.quiet_runs import one_thread
from lightning_bnn.references import (
    Card,
    diagnose,
    read_reference,
    readable_card,
    reference_folder,
    reference_names,
)
from lightning_bnn.references.diagnosis import Diagnosis
from lightning_bnn.studies.reference_tables import agreement_table, distances_table

__all__ = ["references"]

_CLOSE = 1e-3
"""Relative difference from which a number of a card is another one."""


def references(name: str | None = None) -> None:
    """Print what the sampled posteriors of the package are worth, computed from their draws.

    Args:
        name: only this one, with its card and its distances to chains of other seeds.
    """
    names = reference_names() if name is None else [name]
    found: dict[str, Diagnosis] = {}
    cards: dict[str, Card] = {}
    with one_thread():
        for each in tqdm(names, desc="references", disable=len(names) < 2):
            posterior, problem, cards[each] = read_reference(each)
            found[each] = diagnose(posterior, problem)
    if name is not None:
        card = cards[name]
        print(readable_card(name, card) + "\n")
        print(distances_table(found[name], card.again).text() + "\n")
    print(agreement_table(found).text() + "\n")
    print(_verdicts(cards, found).text())


def _verdicts(cards: dict[str, Card], found: dict[str, Diagnosis]) -> Table:
    rows: list[list[Cell]] = [
        [each, "; ".join(card.failures) or "nothing", _as_on(each, card, found[each]), card.verdict]
        for each, card in cards.items()
    ]
    header = ["reference", "what is missing", "numbers", "verdict"]
    return Table("Verdicts, with those of other seeds", header, rows)


def _as_on(name: str, card: Card, found: Diagnosis) -> str:
    """Whether the draws and their numbers are those of the card."""
    if digest_of_networks(reference_folder(name) / "bank") != card.sha256:
        return "OTHER DRAWS THAN THE CARD'S"
    pairs = [
        (value, found.spaces[space][key])
        for space, numbers in card.diagnosis.spaces.items()
        for key, value in numbers.items()
    ]
    same = all(math.isclose(a, b, rel_tol=_CLOSE) for a, b in pairs)
    return "as on the card" if same else "NOT AS ON THE CARD"

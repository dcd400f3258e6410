"""The cards of all references, computed again from the draws that come with the package."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tqdm.auto import tqdm

from lightning_bnn.bank import digest_of_networks
from lightning_bnn.quiet_runs import one_thread
from lightning_bnn.references import (
    Card,
    diagnose,
    read_reference,
    readable_card,
    reference_folder,
    reference_names,
)
from lightning_bnn.references.differences import differences
from lightning_bnn.studies.reference_tables import agreement_table, distances_table
from lightning_bnn.tables import Cell, Table

__all__ = ["references"]


def references(name: str | None = None) -> None:
    """Print what the sampled posteriors of the package are worth, computed from their draws.

    Args:
        name: only this one (`lightning-bnn references digits`), with its card and its distances to
            chains of other seeds.
    """
    names = reference_names() if name is None else [name]
    cards: dict[str, Card] = {}
    now: dict[str, Card] = {}
    with one_thread():
        for each in tqdm(names, desc="references", disable=len(names) < 2):
            posterior, problem, cards[each] = read_reference(each)
            now[each] = replace(cards[each], diagnosis=diagnose(posterior, problem))
    if name is not None:
        print(readable_card(name, now[name]) + "\n")
        print(distances_table(now[name].diagnosis, now[name].again).text() + "\n")
    print(agreement_table({each: card.diagnosis for each, card in now.items()}).text() + "\n")
    print(_verdicts(cards, now).text())


def _verdicts(cards: Mapping[str, Card], now: Mapping[str, Card]) -> Table:
    """By the numbers of the draws as they are now, and by those of other seeds."""
    moved = {each: differences(card.diagnosis, now[each].diagnosis) for each, card in cards.items()}
    rows: list[list[Cell]] = [
        [each, "; ".join(card.failures) or "nothing", _as_on(card, moved[each]), card.verdict]
        for each, card in now.items()
    ]
    header = ["reference", "what is missing", "numbers", "verdict"]
    note = "\n".join(f"{each}: {text} on the card." for each, of in moved.items() for text in of)
    return Table("Verdicts, with those of other seeds", header, rows, note=note)


def _as_on(card: Card, moved: Sequence[str]) -> str:
    """Whether the draws and their numbers are those of the card."""
    if digest_of_networks(reference_folder(card.name) / "bank") != card.sha256:
        return "OTHER DRAWS THAN THE CARD'S"
    return "NOT AS ON THE CARD" if moved else "as on the card"

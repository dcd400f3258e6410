"""The cards of all references, recomputed from the draws of lightning-bnn-data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tqdm.auto import tqdm

from lightning_bnn.bank.shipped import digest_of_networks, missing_data
from lightning_bnn.evaluation.report import PREDICTIONS, distance, numbers_table
from lightning_bnn.quiet_runs import one_thread
from lightning_bnn.references import Card, diagnose, read_reference, reference_names
from lightning_bnn.references.diagnosis import SPACES, Diagnosis
from lightning_bnn.references.shipped import readable_card, reference_folder
from lightning_bnn.tables import Cell, Table
from weightsym import Outcome

_NUMBERS = {
    "rhat_median": "R-hat median",
    "rhat_max": "largest",
    "ess_min": "least ESS",
    "ess_tail_min": "of tails",
}
_LAWS = {
    "law": distance("law"), "ns_law": distance("NS law"), "f_law": distance("function law"),
}  # fmt: skip
_GOLD = (
    "R-hat: of ranks and folded ranks, the larger of both. Least ESS: effective draws of the worst "
    "number for its mean, and for its 5 and 95 % quantiles. Gold: R-hat of predictions at most "
    "1.01 in the median and 1.05 at the worst point, 400 effective draws there, four chains, laws "
    "of both halves of the chains within three errors of each other; all again from three seeds."
)
_DISTANCES = (
    "MMD² x 100 between laws, raw, without symmetries (NS), and of predictions, with jackknife "
    "errors; the others compare mean predictions."
)


def references(name: str | None = None) -> Outcome:
    """Print diagnostics of the sampled posteriors, computed from their draws.

    Args:
        name: name of one reference (`lightning-bnn references digits`), to print its card and its
            distances to chains of other seeds.
    """
    names = reference_names() if name is None else [name]
    if not names:
        raise missing_data("This table")
    cards: dict[str, Card] = {}
    with one_thread():
        for each in tqdm(names, desc="references", disable=len(names) < 2 or None):
            posterior, problem, card = read_reference(each)
            cards[each] = replace(card, diagnosis=diagnose(posterior, problem))
    if name is not None:
        print(readable_card(name, cards[name]) + "\n")
        print(distances_table(cards[name].diagnosis, cards[name].again).text() + "\n")
    agreement = agreement_table({each: card.diagnosis for each, card in cards.items()})
    verdicts = _verdicts(cards)
    print(f"{agreement.text()}\n\n{verdicts.text()}")
    return Outcome({"agreement": agreement.json(), "verdicts": verdicts.json()})


def _verdicts(cards: Mapping[str, Card]) -> Table:
    """Return the verdicts, from the draws and from the other seeds on the cards."""
    rows: list[list[Cell]] = [
        [name, "; ".join(card.failures) or "nothing", _draws(card), card.level, card.verdict]
        for name, card in cards.items()
    ]
    header = ["reference", "what is missing", "draws", "level", "verdict"]
    return Table("Verdicts, with those of other seeds", header, rows)


def _draws(card: Card) -> str:
    same = digest_of_networks(reference_folder(card.name) / "bank") == card.sha256
    return "those of the card" if same else "OTHER DRAWS THAN THE CARD'S"


# ------------------------------------------------------------ tables
def agreement_table(diagnoses: Mapping[str, Diagnosis]) -> Table:
    """Return R-hat and effective sizes in every space.

    Args:
        diagnoses: by the name of the chains.
    """
    rows: list[list[Cell]] = [
        [name, card.chains, card.draws, SPACES[space], *(numbers[key] for key in _NUMBERS)]
        for name, card in diagnoses.items()
        for space, numbers in card.spaces.items()
    ]
    header = ["chains of", "chains", "draws", "compared by", *_NUMBERS.values()]
    digits = {"least ESS": 0, "of tails": 0}
    return Table("Do the chains agree?", header, rows, digits, _GOLD)


def distances_table(diagnosis: Diagnosis, again: Sequence[Mapping[str, Any]] = ()) -> Table:
    """Compare halves of the chains with each other, and all chains with those of other seeds.

    Args:
        diagnosis: of the chains.
        again: other seeds with their ``distances``.
    """
    every = {"halves of the chains": diagnosis.halves}
    every |= {f"seed {repeat['seed']}": repeat["distances"] for repeat in again}
    beside = {name: PREDICTIONS[name] for name in diagnosis.halves if name in PREDICTIONS}
    rows = [({"beside": name}, numbers) for name, numbers in every.items()]
    return numbers_table("Are they draws of one law?", rows, {**_LAWS, **beside}, _DISTANCES)

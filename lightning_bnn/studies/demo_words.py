"""Sentences about the demo's numbers, and the words that its page uses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from lightning_bnn.evaluation.reference import LARGEST, MEDIAN
from lightning_bnn.tables import Measured, Table

__all__ = [
    "GLOSSARY",
    "on_chains",
    "on_distances",
    "on_pairs",
]

GLOSSARY = {
    "posterior": "the distribution over the weights of a network, given data and a prior",
    "mode": "a part of a posterior that was found independently, from a start of its own",
    "law": "the distribution of a method's networks, over runs and draws",
    "mixture": "the average of several modes as they are; a single network is a point in it",
    "NS": "no symmetries: weights are compared with scales removed and units in order",
    "floor": "the distance of as many networks drawn from the reference's own law",
    "MMD²": "squared maximum mean discrepancy, a distance between two sets of networks; around "
    "zero, and sometimes negative, if both have the same distribution",
    "Agree, TV": "share of equal predicted classes; total variation between predictions",
    "Acc, NLL, Brier": "accuracy; negative log-likelihood in nats; squared error of probabilities",
    "ECE, ACE": "calibration errors: how far confidence is from accuracy",
    "AUPR, FPR95": "how well out-of-distribution (OOD) examples are detected: area under the "
    "precision-recall curve; rate of false positives where 95 % of them are found",
    "IDMI, OODMI": "mutual information: how much networks disagree, in and out of distribution",
    "tau": "Kendall's rank correlation of the orders of units before and after a step",
    "mass": "the sum of squares of all weights, without biases",
    "VI, MFVI": "variational inference; with independent Gaussians, mean-field",
    "SWAG, SGHMC, HMC": "a Gaussian through the networks along a run; Hamiltonian Monte Carlo with "
    "batches (SG) and with all data",
}
"""Words and acronyms of the page."""
_ERRORS = 2.0
_COPIES = 5.0
"""Per cent of the mean disagreement: pairs with less are as good as copies."""
_COUNTS = dict(enumerate(("Two", "Three", "Four", "Five", "Six", "Seven", "Eight"), 2))


def on_chains(chains: int, rhat: Sequence[float] | None) -> str:
    """Say how many chains sampled the posterior, and whether they agree.

    Args:
        chains: how many.
        rhat: of their predictions, in the median and at most; None for too few draws.

    >>> on_chains(8, (1.005, 1.039))[:68]
    'Eight chains of Hamiltonian Monte Carlo sample the posterior itself,'
    """
    several = f"{_COUNTS.get(chains, str(chains))} chains of Hamiltonian Monte Carlo"
    if rhat is None:
        return (
            f"{several} set out to sample the posterior itself; they are too short to tell whether "
            "they agree."
        )
    agree = rhat[0] <= MEDIAN and rhat[1] <= LARGEST
    verdict = "agree" if agree else "do not agree yet"
    numbers = f"{rhat[0]:.3f} in the median and at most {rhat[1]:.3f}"
    return (
        f"{several} sample the posterior itself, and {verdict} (R-hat of predictions: {numbers})."
    )


def on_distances(table: Table, reference: str) -> str:
    """Name the methods that are nearest to a reference and farthest, with symmetries removed.

    Args:
        table: of distances, one row for each method.
        reference: its name in the sentence.
    """
    laws = _column(table, "NS law")
    if not laws:
        return f"No law beside the {reference} networks is known: every method has a single mode."
    near = [name for name, law in laws.items() if abs(law.value) <= _ERRORS * law.error]
    order = sorted(laws, key=lambda name: laws[name].value)
    names = f"{_listed(near)} cannot" if near else "every method can"
    return (
        f"With symmetries removed, {names} be told from the {reference} networks (within "
        f"{_ERRORS:g} errors of zero); {order[0]} is closest ({laws[order[0]].value:.2f}), "
        f"{order[-1]} farthest ({laws[order[-1]].value:.2f})."
    )


def on_pairs(table: Table) -> str:
    """Say whether any two networks are nearly one function.

    Args:
        table: of what pairs of networks disagree about, in and out of distribution, in nats.
    """
    mean, least = table.header.index("mean ± sd"), table.header.index("min")
    cells: list[Any] = [cell for row in table.rows for cell in (row[mean], row[least])]
    inner, low, outer, _ = cells
    share = 100 * low / inner.value if inner.value > 0 else 0.0
    verdict = (
        "Yes: no two of them are the same function in different weights"
        if share >= _COPIES
        else "Not all of them: some pairs are nearly the same function in different weights"
    )
    times = outer.value / max(inner.value, 1e-12)
    return (
        f"{verdict}. The two that are most alike disagree about the test digits by {low:.4f} nats, "
        f"which is {share:.0f} % of the mean over all pairs ({inner.value:.4f}); for copies of one "
        f"network it would be 0. About scrambled digits, pairs disagree {times:.1f} times as much "
        f"({outer.value:.4f} nats)."
    )


def _column(table: Table, title: str) -> dict[str, Measured]:
    """Finite numbers of a column by method."""
    numbers = {}
    for row in table.rows:
        cells = dict(zip(table.header, row, strict=True))
        value, name = cells.get(title), str(cells["method"])
        if isinstance(value, Measured) and math.isfinite(value.value) and "Noise" not in name:
            numbers[name] = value
    return numbers


def _listed(names: Sequence[str]) -> str:
    """Names as in a sentence.

    >>> _listed(["a", "b", "c"])
    'a, b and c'
    """
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"

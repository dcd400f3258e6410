"""Sentences about the demo's numbers, and the words that its page uses."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_bnn.evaluation.reference import LARGEST, MEDIAN
from lightning_bnn.tables import Measured, Table

__all__ = [
    "GLOSSARY",
    "on_chains",
    "on_distances",
    "on_masses",
    "on_pairs",
    "on_predictions",
    "on_taus",
    "percent_of_run",
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

    >>> on_chains(8, (1.005, 1.039))[:69]
    'Eight chains of Hamiltonian Monte Carlo sampled the posterior itself,'
    """
    several = f"{_COUNTS.get(chains, str(chains))} chains of Hamiltonian Monte Carlo"
    if rhat is None:
        return (
            f"{several} set out to sample the posterior itself; they are too short for anybody to "
            "say whether they agree, so that distances to them show no more than how this works."
        )
    median, largest = rhat
    if median <= MEDIAN and largest <= LARGEST:
        return (
            f"{several} sampled the posterior itself, and agree (R-hat of their predictions is at "
            f"most {largest:.3f})."
        )
    return (
        f"{several} set out to sample the posterior itself, and do not agree yet (R-hat of their "
        f"predictions is {median:.3f} in the median and up to {largest:.3f}): distances to them "
        "are distances to where they have come."
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
    near = [n for n, m in laws.items() if abs(m.value) <= _ERRORS * m.error]
    order = sorted(laws, key=lambda name: laws[name].value)
    told = (
        f"With symmetries removed, {_listed(near)} cannot be told from the {reference} networks "
        f"(within {_ERRORS:g} errors of zero)"
        if near
        else f"With symmetries removed, every method can be told from the {reference} networks"
    )
    return (
        f"{told}; {order[0]} is closest ({laws[order[0]].value:.2f}), {order[-1]} farthest "
        f"({laws[order[-1]].value:.2f})."
    )


def on_predictions(table: Table) -> str:
    """Name the method that predicts best, by likelihood, and the one that detects best.

    Args:
        table: of predictions, rows of one and of several modes.
    """
    nlls, aupr = _column(table, "NLL", "Multi mode"), _column(table, "AUPR", "Multi mode")
    if not nlls:
        return "No method has a likelihood of several modes."
    best = min(nlls, key=lambda name: nlls[name].value)
    worst = max(nlls, key=lambda name: nlls[name].value)
    sentence = (
        f"With all modes, {best} has the least negative log-likelihood "
        f"({nlls[best].value:.3f}) and {worst} the largest ({nlls[worst].value:.3f})"
    )
    if not aupr:
        return f"{sentence}."
    finds = max(aupr, key=lambda name: aupr[name].value)
    return f"{sentence}; {finds} detects scrambled digits best (AUPR {aupr[finds].value:.1f} %)."


def on_taus(curves: Mapping[str, Tensor]) -> str:
    """Say how often units still change places at the beginning and at the end of runs.

    Args:
        curves: values of tau by run.
    """
    ends = {name: _mean(values[-max(1, len(values) // 5) :]) for name, values in curves.items()}
    known = {name: value for name, value in ends.items() if math.isfinite(value)}
    if not known:
        return "No run has logged tau."
    low, high = min(known, key=known.__getitem__), max(known, key=known.__getitem__)
    first = _mean(torch.tensor([_mean(v[: max(1, len(v) // 5)]) for v in curves.values()]))
    return (
        f"In the first fifth of the runs tau is {first:.4f} in the mean; in the last fifth it goes "
        f"from {known[low]:.4f} ({low}) to {known[high]:.4f} ({high})."
    )


def on_masses(table: Table) -> str:
    """Say how much of the penalty is free.

    Args:
        table: of masses, with quantiles over networks.
    """
    (row,) = (row for row in table.rows if row[0] == "excess %")
    low, middle, high = (_number(row[table.header.index(q)])[0] for q in ("5 %", "median", "95 %"))
    return (
        f"The penalty of the median network is {middle:.1f} % above its minimum, and that of nine "
        f"in ten between {low:.1f} and {high:.1f} % above: rescaling alone would save that much."
    )


def on_pairs(table: Table) -> str:
    """Say whether any two networks are nearly one function.

    Args:
        table: of what pairs of networks disagree about, in and out of distribution, in nats.
    """
    mean, least = table.header.index("mean ± sd"), table.header.index("min")
    (inner, low), (outer, _) = ((row[mean], _number(row[least])[0]) for row in table.rows)
    assert isinstance(inner, Measured)
    assert isinstance(outer, Measured)
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


def percent_of_run(steps: Tensor) -> Tensor:
    """Steps as per cent of the last one, so that runs of any length can be compared.

    >>> percent_of_run(torch.tensor([1, 2, 4]))
    tensor([ 25.,  50., 100.])
    """
    return 100 * steps.float() / steps.max() if len(steps) else steps.float()


def _column(table: Table, title: str, mode: str | None = None) -> dict[str, Measured]:
    """Finite numbers of a column by method, of rows of a mode if one is named."""
    if title not in table.header:
        return {}
    place, name = table.header.index(title), table.header.index("method")
    found: dict[str, Measured] = {}
    for row in table.rows:
        cell: Any = row[place]
        value = cell if isinstance(cell, Measured) else Measured(*_number(cell))
        wanted = mode is None or mode in row
        if wanted and math.isfinite(value.value) and not str(row[name]).startswith("Noise"):
            found[str(row[name])] = value
    return found


def _number(cell: Any) -> tuple[float]:
    return (float(cell) if isinstance(cell, (int, float)) else math.nan,)


def _mean(values: Tensor) -> float:
    return float(values.double().mean()) if len(values) else math.nan


def _listed(names: Sequence[str]) -> str:
    """Names as in a sentence.

    >>> _listed(["a", "b", "c"])
    'a, b and c'
    """
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"

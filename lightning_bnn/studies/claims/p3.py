"""P3: posteriors as one Gaussian, pruning, barriers and swaps."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence

from lightning_bnn.studies.claims.claim import Claim, Judgement
from lightning_bnn.studies.claims.evidence import Evidence, Missing
from lightning_bnn.studies.claims.numbers import (
    Answer,
    Number,
    above,
    all_of,
    below,
    compared,
    minus,
    over_seeds,
    within,
)

__all__ = ["CLAIMS"]

_ROWS = (
    "HMC networks", "HMC q_d", "HMC q_r", "Ensemble networks", "Ensemble q_d", "Ensemble q_r", "VI",
)  # fmt: skip
_PAPER: Mapping[str, Sequence[float]] = {
    "accuracy %": (98.43, 11.11, 82.34, 98.66, 52.25, 97.72, 98.11),
    "of the mean %": (math.nan, 28.06, 92.25, math.nan, 86.40, 97.97, 98.04),
    "agreement": (math.nan, 0.1212, 0.8249, 0.9931, 0.5239, 0.9868, 0.9885),
    "total variation": (math.nan, 0.8641, 0.6570, 0.0229, 0.7210, 0.0495, 0.0235),
}
"""Table 1 of the paper; what is not in it is NaN."""
_CHANCE = 10.0


# ------------------------------------------------------------ table 1
def _row(e: Evidence, name: str, column: str = "accuracy %") -> Number:
    return e.number("compact", "table1", name, column)


def _order(column: str, e: Evidence) -> Judgement:
    """Whether every two rows are in the paper's order."""
    paper = {name: v for name, v in zip(_ROWS, _PAPER[column], strict=True) if not math.isnan(v)}
    here = {name: _row(e, name, column) for name in paper}
    digits = 1 if column.endswith("%") else 3
    text = ", ".join(f"{name} {number.shown(digits)}" for name, number in here.items())
    turned: list[str] = []
    unclear: list[str] = []
    for a, b in itertools.combinations(paper, 2):
        low, high = (a, b) if paper[a] < paper[b] else (b, a)
        answer = compared(here[high], here[low])
        if answer is not True:
            (turned if answer is False else unclear).append(f"{low} below {high}")
    checks: dict[str, Answer] = {f"every two rows are in its order{_named(turned)}": not turned}
    if unclear:
        checks[f"{len(unclear)} pairs{_named(unclear)}"] = None
    return Judgement(text, checks)


def _named(pairs: Sequence[str]) -> str:
    """The first pairs of rows, and how many more there are."""
    more = f" and {len(pairs) - 3} more" if len(pairs) > 3 else ""
    return f": {', '.join(pairs[:3])}{more}" if pairs else ""


def _paper_text(column: str) -> str:
    digits = 1 if column.endswith("%") else 3
    pairs = zip(_ROWS, _PAPER[column], strict=True)
    return ", ".join(f"{name} {v:.{digits}f}" for name, v in pairs if not math.isnan(v))


def _worthless(e: Evidence) -> Judgement:
    plain = _row(e, "HMC q_d")
    return Judgement(plain.shown(1, " %"), {"less than twice chance": below(plain, 2 * _CHANCE)})


def _predicts(e: Evidence) -> Judgement:
    texts: list[str] = []
    checks: dict[str, Answer] = {}
    for name in ("HMC", "Ensemble"):
        plain, matched = (_row(e, f"{name} {kind}") for kind in ("q_d", "q_r"))
        texts.append(f"{name} {plain.shown(1)} → {matched.shown(1, ' %')}")
        checks[f"{name}: matched, draws are more accurate"] = compared(matched, plain)
    return Judgement(", ".join(texts), checks)


def _lost(e: Evidence, name: str) -> tuple[str, Number]:
    """What draws of the matched Gaussian lose beside the networks."""
    networks, matched = (_row(e, f"{name} {kind}") for kind in ("networks", "q_r"))
    return f"{name} {networks.shown(1)} and {matched.shown(1, ' %')}", minus(networks, matched)


def _nearly(e: Evidence) -> Judgement:
    here, lost = _lost(e, "Ensemble")
    return Judgement(here, {"less than two points are lost": below(lost, 2.0)})


def _less_well(e: Evidence) -> Judgement:
    here, lost = _lost(e, "HMC")
    beside, of_ensemble = _lost(e, "Ensemble")
    return Judgement(
        f"{here}, {beside}",
        {
            "more is lost than for the ensemble": compared(lost, of_ensemble),
            "less than 20 points are lost (16 in the paper)": below(lost, 20.0),
        },
    )


# ------------------------------------------------------------ pruning
def _kept(e: Evidence, curve: str, share: int) -> Number:
    return e.number("compact", "pruning", curve, f"{share} %")


def _curves(e: Evidence) -> list[str]:
    return [row[0] for row in e.rows("compact", "pruning")]


def _at_half(e: Evidence) -> tuple[str, dict[str, Number]]:
    found = {curve: _kept(e, curve, 50) for curve in _curves(e)}
    return ", ".join(f"{curve} {n.shown(1)}" for curve, n in found.items()), found


def _best(e: Evidence) -> Judgement:
    text, found = _at_half(e)
    best = found.pop("VI, own deviations")
    whole, most = (_kept(e, "VI, own deviations", share) for share in (100, 40))
    return Judgement(
        f"half of the weights kept: {text}; VI with all {whole.shown(1)}, 40 % {most.shown(1)}",
        {
            "VI is the best of all with half of the weights": all_of(
                compared(best, n) for n in found.values()
            ),
            "it loses less than 3 points": below(minus(whole, best), 3.0),
        },
    )


def _worst(e: Evidence) -> Judgement:
    text, found = _at_half(e)
    own = found.pop("Ensemble q_r, own deviations")
    answer = all_of(compared(n, own) for n in found.values())
    here = f"half of the weights kept: {own.shown(1)}, the others {_range(found)}"
    return Judgement(here, {"it is the worst of all with half of the weights": answer})


def _of_others(e: Evidence) -> Judgement:
    _, found = _at_half(e)
    own = found["Ensemble q_r, own deviations"]
    others = {m: found[f"Ensemble q_r, deviations of {m}"] for m in ("HMC", "VI")}
    here = ", ".join(f"of {m} {n.shown(1)}" for m, n in others.items())
    checks = {f"with those of {m} it is better": compared(n, own) for m, n in others.items()}
    return Judgement(f"half of the weights kept: {here}, its own {own.shown(1)}", checks)


def _single(e: Evidence) -> Judgement:
    curve = "one network, deviations of HMC"
    whole, half = (_kept(e, curve, share) for share in (100, 50))
    here = f"{whole.shown(1)} with all, {half.shown(1, ' %')} with half of the weights"
    return Judgement(
        here,
        {
            "with half of them it is twice as good as chance": above(half, 2 * _CHANCE),
            "it loses less than 5 points": below(minus(whole, half), 5.0),
        },
    )


def _range(numbers: Mapping[str, Number]) -> str:
    values = [n.value for n in numbers.values()]
    return f"{min(values):.1f} to {max(values):.1f}"


# ------------------------------------------------------------ barriers and swaps
def _column(e: Evidence, table: str, column: str) -> dict[str, list[float]]:
    """A column of a table, one number for each seed, by the first cell of its rows."""
    names = [row[0] for row in e.rows("transpositions", table)]
    return {n: e.values("transpositions", table, n, column) for n in names}


def _last(column: Mapping[str, list[float]]) -> list[float]:
    return list(column.values())[-1]


def _most(e: Evidence) -> int:
    """The most swaps that there can be."""
    return int(e.of("transpositions")[0]["settings"]["scale"]["hidden"]) - 1


def _barrier(e: Evidence) -> Judgement:
    plain, matched = (_last(_column(e, "training", n)) for n in ("barrier", "matched barrier"))
    share = over_seeds([b / a for a, b in zip(plain, matched, strict=True)])
    here = f"at the end {over_seeds(plain).shown(3)} and {over_seeds(matched).shown(3)} nats"
    return Judgement(
        here,
        {
            "there is a barrier": above(over_seeds(plain), 0.01),
            "matched, less than a quarter of it is left": below(share, 0.25),
        },
    )


def _swaps_at_all_times(e: Evidence) -> Judgement:
    swaps, most = _column(e, "training", "swaps"), _most(e)
    every = [v for values in swaps.values() for v in values]
    distance, matched = (
        over_seeds(_last(_column(e, "training", n))) for n in ("distance", "matched distance")
    )
    here = (
        f"{min(every):.0f} to {max(every):.0f} of {most} at all epochs and seeds; distance at the "
        f"end {distance.shown(1)}, matched {matched.shown(1)}"
    )
    return Judgement(here, {"nine tenths of the most, at all epochs": min(every) >= 0.9 * most - 1})


def _recovered(e: Evidence) -> Judgement:
    after = _column(e, "sweep", "swaps after")
    pairs = [(float(before), v) for before, values in after.items() for v in values]
    right = sum(a == b for a, b in pairs)
    wrong = max(abs(a - b) for a, b in pairs)
    return Judgement(
        f"{right} of {len(pairs)} exactly, the largest difference is {wrong:.0f}",
        {"every number of swaps comes out exactly": right == len(pairs)},
    )


def _grows(e: Evidence) -> Judgement:
    from scipy.stats import spearmanr

    plain, matched = (_column(e, "sweep", n) for n in ("barrier", "matched barrier"))
    seeds = range(len(_last(plain)))
    swaps = [float(name) for name in plain]
    rho = over_seeds(
        [float(spearmanr(swaps, [v[s] for v in plain.values()]).statistic) for s in seeds]
    )
    first, last = (over_seeds(values) for values in (list(plain.values())[0], _last(plain)))
    left = over_seeds(
        [max(v[s] for v in matched.values()) / max(v[s] for v in plain.values()) for s in seeds]
    )
    here = (
        f"{first.shown(3)} → {last.shown(3)} nats, rank correlation {rho.shown(2)}; after matching "
        f"at most {100 * left.value:.1f} % of the largest"
    )
    return Judgement(
        here,
        {
            "rank correlation of swaps and barrier above 0.8": above(rho, 0.8),
            "none after matching: less than 5 % of the largest": below(left, 0.05),
        },
    )


def _along(e: Evidence) -> Judgement:
    line, most = _column(e, "line", "swaps"), _most(e)
    means = {position: over_seeds(values) for position, values in line.items()}
    here = ", ".join(f"{position}: {n.shown(0)}" for position, n in means.items())
    values = [n.value for n in means.values()]
    quarter = len(values) // 5
    return Judgement(
        here,
        {
            "they do not fall, up to two swaps": all(
                b >= a - 2 for a, b in itertools.pairwise(values)
            ),
            "S-shaped: less than a tenth in the first fifth": values[quarter] < 0.1 * most,
            "S-shaped: nearly none are gained in the last fifth": (
                values[-1] - values[-1 - quarter] < 0.1 * most
            ),
        },
    )


def _settles(e: Evidence) -> Judgement:
    drift, most = _column(e, "drift", "swaps"), _most(e)
    if len(drift) < 4:
        raise Missing("there are too few epochs")
    names = list(drift)
    early = names[2 * (len(names) - 1) // 5]
    gains = over_seeds([b - a for a, b in zip(drift[early], drift[names[-1]], strict=True)])
    first, last = over_seeds(drift[early]), over_seeds(drift[names[-1]])
    here = f"{first.shown(0)} of {most} after {early} epochs, {last.shown(0)} after {names[-1]}"
    return Judgement(
        here,
        {
            "the order changes in the first two fifths of training": above(first, 0.1 * most),
            "less than a tenth of the most is added later": within(gains, -most, 0.1 * most),
        },
    )


_TABLE, _PRUNING = (
    "Posteriors as one Gaussian (table 1)",
    "Pruning by standard deviations (figure 3)",
)
_SWAPS = "Barriers, distances and swaps (figures 1 and 2)"
CLAIMS = (
    *(
        Claim(_TABLE, f"table 1, {column}", _paper_text(column), functools.partial(_order, column))
        for column in _PAPER
    ),
    Claim(
        _TABLE, "HMC's weights as they are (q_d) make a worthless Gaussian", "11.1 %", _worthless
    ),
    Claim(
        _TABLE,
        "with permutations removed (q_r) it predicts",
        "HMC 11.1 → 82.3 %, Ensemble 52.3 → 97.7 %",
        _predicts,
    ),
    Claim(_TABLE, "nearly as well as the networks for an ensemble", "98.7 and 97.7 %", _nearly),
    Claim(_TABLE, "less well for HMC", "98.4 and 82.3 %", _less_well),
    Claim(_PRUNING, "deviations of VI prune best", "figure", _best),
    Claim(
        _PRUNING,
        "an ensemble's own deviations prune worst",
        "figure",
        _worst,
    ),
    Claim(
        _PRUNING,
        "the ensemble's mean with deviations of another method is better than with its own",
        "figure",
        _of_others,
    ),
    Claim(_PRUNING, "deviations of HMC prune a single network, too", "figure", _single),
    Claim(
        _SWAPS,
        "between networks of different starts there is a barrier; matched, it is nearly gone",
        "figure",
        _barrier,
    ),
    Claim(
        _SWAPS,
        "matching takes nearly as many swaps as there can be, from the start to the end of "
        "training",
        "figure",
        _swaps_at_all_times,
    ),
    Claim(
        _SWAPS,
        "a start and its copy permuted by k swaps end k swaps apart, for every k",
        "figure",
        _recovered,
    ),
    Claim(_SWAPS, "the barrier grows with the number of swaps", "figure", _grows),
    Claim(_SWAPS, "swaps grow along the line between two networks", "figure", _along),
    Claim(
        _SWAPS, "swaps between a network and its own past: the order settles", "figure", _settles
    ),
)

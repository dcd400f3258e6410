"""P1, figures 2, 3, 7 and 8, and its open question: masses, pairs of networks, correlations."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

from lightning_bnn.studies.claims.claim import Claim, Judgement
from lightning_bnn.studies.claims.evidence import Evidence
from lightning_bnn.studies.claims.numbers import (
    Answer,
    above,
    below,
    compared,
    in_every_run,
    over_seeds,
    within,
)

__all__ = ["CLAIMS"]

_PAIRS = {"collapse": "digits", "mnist/collapse": "MNIST"}
_SKEWED = 0.5
_QUALITY = ("Acc", "ECE", "Brier", "NLL")
_DETECTION = ("AUPR", "FPR95")


# ------------------------------------------------------------ mass
def _excess(step: str, e: Evidence) -> Judgement:
    mean = e.number(step, "mass", "excess %", "mean ± sd")
    low, median, high = (
        e.number(step, "mass", "excess %", column) for column in ("5 %", "median", "95 %")
    )
    here = (
        f"{mean.shown(1, ' %')}, median {median.shown(1)}, 5–95 %: {low.value:.1f}–{high.value:.1f}"
    )
    return Judgement(
        here,
        {
            "95 % of the networks have an excess above 1 %": above(low, 1.0),
            "95 % of them have one within the paper's range, below 57 %": below(high, 57.0),
        },
    )


def _masses(e: Evidence) -> Judgement:
    step = "mnist/mass"
    texts, medians = [], {}
    for name in ("mass", "minimum mass"):
        mean = e.number(step, "mass", name, "mean ± sd")
        medians[name] = e.number(step, "mass", name, "median")
        texts.append(f"{name} {mean.shown(1)} (median {medians[name].value:.0f})")
    least = e.number(step, "mass", "minimum mass", "5 %")
    return Judgement(
        ", ".join(texts),
        {
            "the median mass is in the paper's bulk": within(medians["mass"], 125, 185),
            "95 % of the minimum masses are from 95 on": above(least, 95.0),
        },
    )


def _layers(step: str, e: Evidence) -> Judgement:
    rows = e.rows(step, "layers")
    sizes = {row[0]: row[1] for row in rows}
    fewest = min(sizes, key=lambda name: sizes[name])
    largest, masses = {}, {}
    for name in sizes:
        largest[name] = [
            e.number(step, "layers", name, column)
            for column in ("largest weight", "at the minimum ")
        ]
        masses[name] = e.number(step, "layers", name, "at the minimum").value
    parts = [
        f"{name} ({sizes[name]} weights) {a.value:.2f} → {b.value:.2f}"
        for name, (a, b) in largest.items()
    ]
    here = (
        f"{', '.join(parts)}; masses there {min(masses.values()):.2f} to {max(masses.values()):.2f}"
    )
    alike = max(masses.values()) - min(masses.values()) < 1e-3 * max(masses.values())
    others = [b.value for name, (_, b) in largest.items() if name != fewest]
    at_least = largest[fewest]
    return Judgement(
        here,
        {
            "at the minimum the layer of the fewest weights has the largest maximum": (
                at_least[1].value > max(others)
            ),
            "its maximum grows": at_least[1].value > at_least[0].value,
            "all layers have the same mass at the minimum": alike,
        },
    )


# ------------------------------------------------------------ pairs of networks
def _symmetric(e: Evidence) -> Judgement:
    def check(step: str) -> tuple[str, Answer]:
        mean = e.number(step, "pairs", "in distribution", "mean ± sd")
        skews = e.values(step, "pairs", "in distribution", "skewness")
        met = in_every_run(skews, lambda skew: abs(skew) < _SKEWED)
        return f"{mean.shown(4)}, skewness {over_seeds(skews).shown(2)}", met

    return _of_both(e, check, f"the skewness is below {_SKEWED} in every run")


def _larger_outside(e: Evidence) -> Judgement:
    checks: dict[str, Answer] = {}
    texts = []
    for step, data in _there(e, _PAIRS):
        name = str(e.rows(step, "pairs")[1][0])
        inner, outer = (
            over_seeds(e.values(step, "pairs", row, "mean ± sd"))
            for row in ("in distribution", name)
        )
        skew = e.number(step, "pairs", name, "skewness")
        texts.append(
            f"{data}: {inner.shown(3)}, outside {outer.shown(3)}, skewness {skew.shown(2)}"
        )
        checks[f"{data}: it is larger out of distribution"] = compared(outer, inner)
        checks[f"{data}: it is skewed to the right there in every run"] = in_every_run(
            e.values(step, "pairs", name, "skewness"), lambda skew: skew > 0
        )
    return Judgement("; ".join(texts), checks)


def _correlated(e: Evidence) -> Judgement:
    checks: dict[str, Answer] = {}
    texts = []
    for step, data in _there(e, _PAIRS):
        found = e.values(step, "correlation", "all pairs", "Pearson's r")
        r = over_seeds(found)
        worst = max(e.values(step, "correlation", "all pairs", "p"))
        texts.append(f"{data}: r = {r.shown(2)}, p at most {worst:.2g} (Mantel)")
        checks[f"{data}: positive in every run"] = in_every_run(found, lambda r: r > 0)
        checks[f"{data}: significant, p < 0.01"] = worst < 0.01
        checks[f"{data}: very low, below 0.2, in every run"] = in_every_run(
            found, lambda r: r < 0.2
        )
    return Judgement("; ".join(texts), checks)


def _collapsed(e: Evidence) -> Judgement:
    def check(step: str) -> tuple[str, Answer]:
        means = e.values(step, "pairs", "in distribution", "mean ± sd")
        least = e.values(step, "pairs", "in distribution", "min")
        shares = [a / b for a, b in zip(least, means, strict=True)]
        text = f"the closest pair has {over_seeds(shares).shown(2)} of the mean"
        return text, in_every_run(shares, lambda share: share < 0.1)

    return _of_both(e, check, "in every run the closest pair has less than a tenth of the mean")


def _of_both(e: Evidence, check: Callable[[str], tuple[str, Answer]], text: str) -> Judgement:
    parts = {data: check(step) for step, data in _there(e, _PAIRS)}
    here = "; ".join(f"{data}: {shown}" for data, (shown, _) in parts.items())
    return Judgement(here, {f"{data}: {text}": answer for data, (_, answer) in parts.items()})


def _there(e: Evidence, steps: Mapping[str, str]) -> Sequence[tuple[str, str]]:
    """Those of several steps that have results; why the first has none if none has."""
    found = [(step, data) for step, data in steps.items() if e.results.get(step)]
    if not found:
        e.of(next(iter(steps)))
    return found


# ------------------------------------------------------------ the open question
def _predicts(metrics: Sequence[str], e: Evidence) -> Judgement:
    checks: dict[str, Answer] = {}
    texts = []
    distances = dict.fromkeys(row[0] for row in e.rows("correlation", "correlation"))
    for distance in distances:
        parts, answers = [], []
        for metric in metrics:
            row = (distance, metric)
            rho = e.number("correlation", "correlation", row, "rank correlation")
            low = over_seeds(e.values("correlation", "correlation", row, "2.5 %"))
            high = over_seeds(e.values("correlation", "correlation", row, "97.5 %"))
            parts.append(f"{metric} {rho.value:.2f} ({low.value:.2f}, {high.value:.2f})")
            answers.append(low.value > 0)
        texts.append(f"{distance}: {', '.join(parts)}")
        checks[f"the interval is above 0 for every one of these, by {distance}"] = all(answers)
    return Judgement("; ".join(texts), checks)


_MASS_SECTION, _PAIRS_SECTION = "Mass (figure 2)", "Pairs of networks (figures 3, 7, 8)"
_QUESTION = "Does a closer posterior predict better? (open question)"
_ABOVE = "trained networks are far above their minimum mass"
_SMALL_LAYERS = "at the minimum layers with few parameters have larger maxima"
CLAIMS = (
    Claim(
        _MASS_SECTION,
        _ABOVE,
        "excess 1–57 %, peaks at about 10 and 30 %",
        functools.partial(_excess, "mnist/mass"),
    ),
    Claim(_MASS_SECTION, f"{_ABOVE} (digits)", "–", functools.partial(_excess, "mass")),
    Claim(_MASS_SECTION, "mass, minimum mass", "bulk 125–185; from 95", _masses),
    Claim(_MASS_SECTION, _SMALL_LAYERS, "yes", functools.partial(_layers, "mnist/mass")),
    Claim(_MASS_SECTION, f"{_SMALL_LAYERS} (digits)", "–", functools.partial(_layers, "mass")),
    Claim(
        _PAIRS_SECTION,
        "mutual information of pairs in distribution is nearly Gaussian",
        "CIFAR-100: mode 0.108",
        _symmetric,
    ),
    Claim(
        _PAIRS_SECTION,
        "out of distribution it is larger and skewed to the right",
        "mode 0.22, range 0.17–0.32",
        _larger_outside,
    ),
    Claim(
        _PAIRS_SECTION,
        "both are correlated: positive, significant, very low",
        "not recovered",
        _correlated,
    ),
    Claim(
        _PAIRS_SECTION,
        "functional collapse: some pairs are nearly the same function",
        "–",
        _collapsed,
    ),
    Claim(
        _QUESTION,
        "closer posteriors are better in accuracy, calibration and likelihood",
        "open",
        functools.partial(_predicts, _QUALITY),
    ),
    Claim(
        _QUESTION,
        "closer posteriors detect better what is out of distribution",
        "open",
        functools.partial(_predicts, _DETECTION),
    ),
)

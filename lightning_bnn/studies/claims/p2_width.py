"""P2: width, and estimates of the information."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lightning_bnn.studies.claims.claim import Claim, Judgement
from lightning_bnn.studies.claims.evidence import Evidence, Missing
from lightning_bnn.studies.claims.numbers import (
    Answer,
    Number,
    all_of,
    compared,
    meets,
)

__all__ = ["CLAIMS"]

_DIGITS, _MNIST, _START = "width", "width_mnist", "width_small_start"


# ------------------------------------------------------------ width
def _widths(e: Evidence, step: str) -> list[str]:
    return list(e.tables(step, "accuracy")[0]["header"])[1:]


def _at_widths(e: Evidence, step: str, table: str, method: str) -> list[Number]:
    count = e.of(step)[0]["settings"].get("scale", {}).get("members")
    return [e.number(step, table, method, width, count) for width in _widths(e, step)]


def _gains(method: str, steps: Sequence[str], e: Evidence) -> Judgement:
    """How much more accurate a method is than MFVI, by width."""
    texts: list[str] = []
    checks: dict[str, Answer] = {}
    for step in steps:
        if not e.results.get(step):
            continue
        plain, other = (_at_widths(e, step, "accuracy", m) for m in ("MFVI", method))
        pairs = zip(_widths(e, step), plain, other, strict=True)
        shown = ", ".join(f"{w}: {a.shown(2)} → {b.shown(2)}" for w, a, b in pairs)
        texts.append(f"{step}: {shown}")
        checks[f"{step}: more accurate than MFVI at every width"] = all_of(
            compared(b, a) for a, b in zip(plain, other, strict=True)
        )
    if not texts:
        e.of(steps[0])
    return Judgement("; ".join(texts), checks)


def _drawn_gain(e: Evidence) -> Judgement:
    return _gains("SGM, K=20", (_MNIST, _DIGITS), e)


def _bound_gain(e: Evidence) -> Judgement:
    return _gains("ours", (_MNIST, _DIGITS, _START), e)


def _higher_bound(e: Evidence) -> Judgement:
    texts: list[str] = []
    checks: dict[str, Answer] = {}
    for step in (_MNIST, _DIGITS):
        if not e.results.get(step):
            continue
        names = [row[0] for row in e.rows(step, "elbo")]
        gaps = [
            above_.value - below_.value
            for name in names
            for below_, above_ in zip(
                _at_widths(e, step, "elbo", name),
                _at_widths(e, step, "symmetrized", name),
                strict=True,
            )
        ]
        texts.append(f"{step}: by {min(gaps):.4f} to {max(gaps):.4f} nats per example")
        checks[f"{step}: for every method and width"] = min(gaps) > 0
    if not texts:
        e.of(_DIGITS)
    return Judgement("; ".join(texts), checks)


def _grows(e: Evidence) -> Judgement:
    texts: list[str] = []
    checks: dict[str, Answer] = {}
    for step in (_MNIST, _DIGITS):
        if not e.results.get(step):
            continue
        for method in ("MFVI", "ours"):
            acc = _at_widths(e, step, "accuracy", method)
            texts.append(f"{step}, {method}: {acc[0].shown(1)} → {acc[-1].shown(1)}")
            checks[f"{step}, {method}: the widest is more accurate than the narrowest"] = compared(
                acc[-1], acc[0]
            )
    if not texts:
        e.of(_DIGITS)
    return Judgement("; ".join(texts), checks)


# ------------------------------------------------------------ estimates of the information
def _saturates(e: Evidence) -> Judgement:
    (table,) = e.tables("information", "information")
    columns = [name for name in table["header"] if name.startswith("uniform ")]
    wide = [row[0] for row in table["rows"] if int(row[0]) >= 10]
    if not wide:
        raise Missing("no layer has ten units or more")
    shares = {
        f"{width}, K = {name.split()[1]}": e.number("information", "information", width, name).value
        / math.log(int(name.split()[1]))
        for width in wide
        for name in columns
    }
    here = f"from ten units on {min(shares.values()):.3f} to {max(shares.values()):.3f} of log K"
    return Judgement(
        here,
        {
            "it is at most log K": max(shares.values()) <= 1 + 1e-9,
            "from ten units on it is log K, up to 1 %": min(shares.values()) > 0.99,
        },
    )


def _unbiased(e: Evidence) -> Judgement:
    """Draws near the identity, where the exact value is known."""
    parts, answers = [], []
    for row in _known(e):
        exact = e.number("information", "information", row, "exact", _samples(e))
        names = [n for n in _columns(e) if n.startswith("near ")]
        near_ = e.number("information", "information", row, names[-1], _samples(e))
        parts.append(f"{row} units: {near_.shown(2)} beside {exact.shown(2)}")
        answers.append(meets(near_, exact.value, exact.value))
    return Judgement(
        "; ".join(parts),
        {"with the most draws its mean agrees with the exact value": all_of(answers)},
    )


def _bethe(e: Evidence) -> Judgement:
    parts, answers = [], []
    for row in _known(e):
        exact = e.number("information", "information", row, "exact", _samples(e))
        bethe = e.number("information", "information", row, "Bethe", _samples(e))
        parts.append(f"{row} units: {bethe.shown(2)} beside {exact.shown(2)}")
        answers.append(meets(bethe, exact.value - exact.doubt, exact.value + exact.doubt))
    return Judgement("; ".join(parts), {"within the error of the exact value": all_of(answers)})


def _bracketed(e: Evidence) -> Judgement:
    wide = [row[0] for row in e.rows("information", "information") if row[0] not in _known(e)]
    if not wide:
        raise Missing("the exact value of all layers is known")
    names = ("capacity", "Bethe", "transpositions")
    numbers = {w: [e.number("information", "information", w, n) for n in names] for w in wide}
    here = "; ".join(
        f"{w}: {low.value:.1f}, {bethe.value:.1f}, {high.value:.1f}"
        for w, (low, bethe, high) in numbers.items()
    )
    ordered = all_of(
        compared(larger, smaller)
        for low, bethe, high in numbers.values()
        for larger, smaller in ((bethe, low), (high, bethe))
    )
    return Judgement(here, {"capacity ≤ Bethe ≤ transpositions at every width beyond": ordered})


def _known(e: Evidence) -> list[str]:
    index = _columns(e).index("exact")
    rows = [row[0] for row in e.rows("information", "information") if row[index] != ""]
    if not rows:
        raise Missing("no layer is so small that the exact value is known")
    return rows


def _columns(e: Evidence) -> list[str]:
    return list(e.tables("information", "information")[0]["header"])


def _samples(e: Evidence) -> int:
    return int(e.of("information")[0]["settings"]["samples"])


_WIDTH, _INFORMATION = "Width (table 1)", "Estimates of the information (section 4)"
CLAIMS = (
    Claim(
        _WIDTH,
        "symmetrized VI (uniform draws, K = 20) is more accurate than MFVI",
        "MNIST: 88.38 → 88.41, ..., 95.43 → 95.55",
        _drawn_gain,
    ),
    Claim(_WIDTH, "the same with the Bethe bound, which draws nothing", "–", _bound_gain),
    Claim(_WIDTH, "symmetrized ELBO above ELBO", "yes", _higher_bound),
    Claim(_WIDTH, "accuracy grows with width", "88.4 → 95.4", _grows),
    Claim(
        _INFORMATION,
        "the estimate by uniform draws is at most log K, and saturates",
        "at most",
        _saturates,
    ),
    Claim(
        _INFORMATION,
        "draws near the identity are better (proposed for further work)",
        "proposed",
        _unbiased,
    ),
    Claim(_INFORMATION, "the Bethe bound follows the exact value", "–", _bethe),
    Claim(
        _INFORMATION,
        "capacity and transposition bounds bracket it where no exact value is known",
        "–",
        _bracketed,
    ),
)

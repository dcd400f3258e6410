"""P2: one Gaussian for two modes, and two ReLU units."""

from __future__ import annotations

import math

from lightning_bnn.studies.claims.claim import Claim, Judgement
from lightning_bnn.studies.claims.evidence import Evidence, Missing
from lightning_bnn.studies.claims.numbers import (
    Number,
    all_of,
    below,
    compared,
    near,
    within,
)

__all__ = ["CLAIMS"]

_JUMPS = "interpolation"
_METHODS = ("MFVI", "symmetrized, K=2", "symmetrized, exact")


# ------------------------------------------------------------ one Gaussian for two modes
def _thresholds(e: Evidence) -> list[dict[str, list[float]]]:
    """Every row of the table by column, one number for each seed."""
    header = e.tables(_JUMPS, "thresholds")[0]["header"]
    rows = [table["rows"] for table in e.tables(_JUMPS, "thresholds")]
    return [
        {name: [_plain(seed[k][c]) for seed in rows] for c, name in enumerate(header)}
        for k in range(len(rows[0]))
    ]


def _plain(cell: str | int | float | None) -> float:
    return math.nan if cell is None else float(cell)


def _jump(e: Evidence) -> Judgement:
    rows = _thresholds(e)
    between = [v for row in rows for v in row["measure between"]]
    on_mode = [v for row in rows for v in row["measure on a mode"]]
    steps = [
        b - a
        for row in rows
        for a, b in zip(row["last alpha between"], row["first alpha on a mode"], strict=True)
    ]
    seen = [v for v in between if not math.isnan(v)]
    after = [v for v in on_mode if not math.isnan(v)]
    if not seen or not after:
        raise Missing("the Gaussians have not left the middle on this grid")
    here = (
        f"the last measure before the jump is {min(seen):.2f} to {max(seen):.2f}, the first after "
        f"it at most {max(after):.2f}, {max(steps):g} farther"
    )
    return Judgement(
        here,
        {
            "just before the jump the measure is ½, up to 0.05": all(
                abs(v - 0.5) < 0.05 for v in seen
            ),
            "just after it it is 0, up to 0.05": all(abs(v) < 0.05 for v in after),
        },
    )


def _proportional(e: Evidence) -> Judgement:
    by_sigma: dict[float, list[tuple[float, float]]] = {}
    for row in _thresholds(e):
        pairs = zip(row["last alpha between"], row["first alpha on a mode"], strict=True)
        by_sigma.setdefault(row["sigma"][0], []).extend(pairs)
    spans = {s: (min(a for a, _ in p), max(b for _, b in p)) for s, p in by_sigma.items()}
    here = ", ".join(f"σ = {s:g}: between {a:g} and {b:g}" for s, (a, b) in spans.items())
    meets = all(a <= 5 * s <= b for s, (a, b) in spans.items())
    exact = all(a < 4.825 * s <= b for s, (a, b) in spans.items())
    return Judgement(
        f"{here} (the grid's steps)",
        {"5σ is within the step of the grid at which it jumps": meets,
         "so is 4.825σ, where it jumps by quadrature": exact},
    )  # fmt: skip


def _no_dimension(e: Evidence) -> Judgement:
    places: dict[float, set[tuple[float, float]]] = {}
    dims = set()
    for row in _thresholds(e):
        dims.add(f"{row['dimension'][0]:g}")
        pairs = zip(row["last alpha between"], row["first alpha on a mode"], strict=True)
        places.setdefault(row["sigma"][0], set()).update(pairs)
    if len(dims) < 2:
        raise Missing("there is one dimension only")
    different = [s for s, found in places.items() if len(found) > 1]
    here = (
        f"the same for {', '.join(sorted(dims, key=float))}"
        if not different
        else (f"different for σ = {', '.join(f'{s:g}' for s in different)}")
    )
    return Judgement(
        here, {"it jumps at the same step of the grid in all dimensions": not different}
    )


def _peak(e: Evidence) -> Judgement:
    variance = e.number(_JUMPS, "exact", "4.8", "variance")
    std = math.sqrt(variance.value)
    here = f"just before the jump the variance along u is {variance.value:.2f}, its root {std:.2f}"
    return Judgement(
        here,
        {
            "the determinant, which is that variance, is 2.3 up to 0.05": near(variance, 2.3, 0.05),
            "its root, the standard deviation, is": near(Number(std), 2.3, 0.05),
        },
    )


def _levels(e: Evidence) -> Judgement:
    paper = {"5": 0.139, "30": 0.023, "100": 0.007}
    columns = ("KL", "KL / dimension")
    whole, each = ({d: e.number(_JUMPS, "levels", d, column) for d in paper} for column in columns)
    here = ", ".join(f"{d}: {whole[d].value:.3f}" for d in paper)
    divided = ", ".join(f"{each[d].value:.4f}" for d in paper)
    return Judgement(
        f"{here} (log 2 = 0.693); divided by the dimension {divided}",
        {
            "the KL has the paper's levels": all_of(
                near(whole[d], v, 0.001) for d, v in paper.items()
            ),
            "the KL divided by the dimension has": all_of(
                near(each[d], v, 0.001) for d, v in paper.items()
            ),
        },
    )


# ------------------------------------------------------------ two ReLU units
def _slopes(e: Evidence) -> list[str]:
    return list(e.tables("tractable", "table2")[0]["header"])[1:]


def _runs(e: Evidence) -> int:
    return int(e.of("tractable")[0]["settings"]["seeds"])


def _apart(e: Evidence) -> Judgement:
    slope = _slopes(e)[0]
    plain, drawn, exact = (e.number("tractable", "apart", m, slope, _runs(e)) for m in _METHODS)
    here = f"distance of the units, of that of the modes, at {slope}: " + ", ".join(
        f"{n.shown(2)} ({m})" for m, n in zip(_METHODS, (plain, drawn, exact), strict=True)
    )
    return Judgement(
        here,
        {
            "mean-field: less than half of the way": below(plain, 0.5),
            "symmetrized: farther apart": all_of(compared(n, plain) for n in (drawn, exact)),
            "symmetrized exactly: on the mode, up to a quarter": within(exact, 0.75, 1.25),
        },
    )


def _errors(e: Evidence) -> Judgement:
    rows = {
        m: [e.number("tractable", "table2", m, s, _runs(e)) for s in _slopes(e)] for m in _METHODS
    }
    here = "; ".join(f"{m}: {', '.join(n.shown(4) for n in ns)}" for m, ns in rows.items())
    plain, *others = rows.values()
    pairs = [(a, b) for other in others for a, b in zip(plain, other, strict=True)]
    return Judgement(
        here,
        {
            "smaller in the mean, for both and at all slopes": all(
                a.value > b.value for a, b in pairs
            ),
            "beyond the deviation over seeds": all_of(compared(a, b) for a, b in pairs),
        },
    )


def _bounds(e: Evidence) -> Judgement:
    exact = {m: [_elbo(e, m, "L^G, exact", s) for s in _slopes(e)] for m in _METHODS}
    plain = {m: [_elbo(e, m, "L_VI", s) for s in _slopes(e)] for m in _METHODS}
    here = "L^G: " + "; ".join(
        f"{m} {', '.join(f'{v:.4f}' for v in vs)}" for m, vs in exact.items()
    )
    mean_field, drawn, best = (exact[m] for m in _METHODS)
    triples = list(zip(mean_field, drawn, best, strict=True))
    return Judgement(
        here,
        {
            "L^G is above L_VI for every method and slope": all(
                g >= v for m in _METHODS for g, v in zip(exact[m], plain[m], strict=True)
            ),
            "L^G is higher where it is optimised, at every slope": all(
                a < min(b, c) for a, b, c in triples
            ),
            "it is highest where it is optimised exactly": all(b <= c for _, b, c in triples),
        },
    )


def _differences(e: Evidence) -> Judgement:
    most = max(
        _elbo(e, m, "L^G, exact", s) - _elbo(e, m, "L_VI", s) for m in _METHODS for s in _slopes(e)
    )
    bound = math.log(2) / 100
    here = f"at most {most:.4f}; no more than log 2 / 100 = {bound:.4f} if divided by the examples"
    return Judgement(here, {"differences reach nine tenths of 0.024": most > 0.9 * 0.024})


def _elbo(e: Evidence, method: str, bound: str, slope: str) -> float:
    return e.number("tractable", "table3", f"{method}: {bound}", slope).value


_TWO, _UNITS = "One Gaussian for two modes (section 3, appendix A)", "Two ReLU units (section 5.1)"
CLAIMS = (
    Claim(
        _TWO,
        "below a distance the Gaussian lies between the modes (measure ½), above it on one (0)",
        "yes",
        _jump,
    ),
    Claim(
        _TWO,
        "where it jumps is proportional to σ: 1.25, 2.5, 5, 10 for σ = 0.25, 0.5, 1, 2",
        "about 5σ",
        _proportional,
    ),
    Claim(_TWO, "it does not depend on the dimension (5, 30, 100)", "yes", _no_dimension),
    Claim(_TWO, '"det Σ" peaks at 2.3', "2.3", _peak),
    Claim(_TWO, "KL levels off at 0.139, 0.023, 0.007", "0.139, 0.023, 0.007", _levels),
    Claim(
        _UNITS,
        "mean-field Gaussians lie between the modes at small slopes, symmetrized ones on a mode",
        "figure",
        _apart,
    ),
    Claim(
        _UNITS,
        "test MSE is smaller (α = 0.05 ... 0.2)",
        "0.11, 0.12, 0.13, 0.18 → 0.09, 0.09, 0.10, 0.12",
        _errors,
    ),
    Claim(_UNITS, "L^G above L_VI, and higher when it is optimised", "yes", _bounds),
    Claim(_UNITS, "differences of up to 0.024 in table 3", "0.024", _differences),
)

"""Claims that no relation between a few numbers decides."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

from lightning_bnn.studies.claims.claim import Judgement
from lightning_bnn.studies.claims.evidence import Evidence, Missing
from lightning_bnn.studies.claims.numbers import Answer, above

__all__ = ["FUNCTIONS"]


def _layers(e: Evidence, study: str) -> Judgement:
    """The layer of the fewest weights has the largest maximum at the minimum of the mass."""
    columns = ("weights", "largest weight", "largest at the minimum", "at the minimum")
    sizes, before, after, masses = (
        {layer: q.number.value for layer, q in e.read(study, "layers", "*", column).items()}
        for column in columns
    )
    fewest = min(sizes, key=lambda layer: sizes[layer])
    others = [value for layer, value in after.items() if layer != fewest]
    most, least = max(masses.values()), min(masses.values())
    here = ", ".join(f"{layer} {before[layer]:.2f} → {after[layer]:.2f}" for layer in sizes)
    return Judgement(
        f"{here}; masses there {least:.2f} to {most:.2f}",
        {
            "at the minimum the layer of the fewest weights has the largest maximum": (
                after[fewest] > max(others)
            ),
            "its maximum grows": after[fewest] > before[fewest],
            "all layers have the same mass at the minimum": most - least < 1e-3 * most,
        },
    )


def _proportional(e: Evidence, study: str) -> Judgement:
    """The Gaussian jumps at 5 sigma, or at 4.825 sigma, within the step of the grid."""
    spans = {
        sigma: (min(a for a, _ in pairs), max(b for _, b in pairs))
        for sigma, pairs in _jumps(e, study).items()
    }
    here = ", ".join(f"σ = {s:g}: between {a:g} and {b:g}" for s, (a, b) in spans.items())
    return Judgement(
        f"{here} (the grid's steps)",
        {
            "5σ is within the step of the grid at which it jumps": all(
                a <= 5 * s <= b for s, (a, b) in spans.items()
            ),
            "so is 4.825σ, where it jumps by quadrature": all(
                a < 4.825 * s <= b for s, (a, b) in spans.items()
            ),
        },
    )


def _no_dimension(e: Evidence, study: str) -> Judgement:
    """The Gaussian jumps at the same step of the grid in all dimensions."""
    dims = {key.split(", ")[0] for key in e.read(study, *_thresholds("last alpha between"))}
    if len(dims) < 2:
        raise Missing("there is one dimension only")
    different = [s for s, pairs in _jumps(e, study).items() if len(set(pairs)) > 1]
    names = ", ".join(f"{s:g}" for s in different)
    here = f"different for σ = {names}" if different else f"the same in {len(dims)} dimensions"
    return Judgement(
        here, {"it jumps at the same step of the grid in all dimensions": not different}
    )


def _thresholds(column: str) -> tuple[str, Sequence[str], str]:
    return "thresholds", ("*", "*"), column


def _jumps(e: Evidence, study: str) -> dict[float, list[tuple[float, float]]]:
    """The last distance between the modes and the first on one, by sigma."""
    last, first = (
        e.read(study, *_thresholds(c)) for c in ("last alpha between", "first alpha on a mode")
    )
    found: dict[float, list[tuple[float, float]]] = {}
    for key, q in last.items():
        pairs = zip(q.values, first[key].values, strict=True)
        found.setdefault(float(key.split(", ")[1]), []).extend(pairs)
    return found


def _order(e: Evidence, study: str, column: str, paper: Mapping[str, float]) -> Judgement:
    """Every two rows are in the paper's order."""
    here = {name: e.read(study, "table1", name, column)[""].number for name in paper}
    digits = 1 if column.endswith("%") else 3
    text = ", ".join(f"{name} {number.shown(digits)}" for name, number in here.items())
    turned: list[str] = []
    unclear: list[str] = []
    for a, b in itertools.combinations(paper, 2):
        low, high = (a, b) if paper[a] < paper[b] else (b, a)
        answer = above(here[high], here[low])
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


FUNCTIONS: Mapping[str, Callable[..., Judgement]] = {
    "layers": _layers,
    "proportional": _proportional,
    "no_dimension": _no_dimension,
    "order": _order,
}
"""By the name that the table of claims uses."""

"""P1, figures 1, 4, 5 and 9: two hidden units, marginals, permutations during training."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_bnn.studies.claims.claim import Claim, Judgement
from lightning_bnn.studies.claims.evidence import Evidence, Missing
from lightning_bnn.studies.claims.numbers import (
    Answer,
    Number,
    above,
    all_of,
    below,
    in_every_run,
    near,
    over_seeds,
)

__all__ = ["CLAIMS"]

_RAW, _REMOVED = "as trained", "symmetries removed"
_MARGINALS = {"marginals": "digits", "mnist/marginals": "MNIST"}
_TAUS = {"permutations": "digits", "mnist/permutations": "MNIST"}
_STILL = "steps without change %"


# ------------------------------------------------------------ two hidden units
def _converged(e: Evidence) -> Judgement:
    shares = e.values("toy", "weights", "not converged, %", 1)
    met = in_every_run(shares, lambda share: share < 1)
    return Judgement(over_seeds(shares).shown(2, " %"), {"fewer than 1 % in every run": met})


def _norms(e: Evidence) -> Judgement:
    paper = {"median": 3.09, "5 %": 2.89, "95 %": 3.92}
    here = {q: e.number("toy", "weights", f"norm of both weights, {q}", 1) for q in paper}
    checks = {
        f"{q} within a tenth of the paper's": near(here[q], v, v / 10) for q, v in paper.items()
    }
    median, low, high = (number.shown(2) for number in here.values())
    return Judgement(f"{median} ({low}, {high})", checks)


def _quadrants(e: Evidence) -> Judgement:
    paper = {"++": 0.23, "--": 0.22, "+-": 0.27, "-+": 0.28}
    here = {q: e.number("toy", "weights", f"quadrant {q}", 1) for q in paper}
    near_all = all_of(near(here[q], share, 0.05) for q, share in paper.items())
    text = ", ".join(number.shown(3) for number in here.values())
    return Judgement(text, {"each within 0.05 of the paper's": near_all})


def _same_marginals(e: Evidence) -> Judgement:
    forms = ("as trained", "scaled", "scaled and ordered")
    p = {f: e.values("toy", "weights", f"KS of the marginals, {f}: p", 1) for f in forms}
    here = "; ".join(f"{form}: {_list(values)}" for form, values in p.items())
    return Judgement(
        here,
        {
            "as trained no test refuses at 1 %": _none_refuses(p["as trained"]),
            "scaled no test refuses at 1 %": _none_refuses(p["scaled"]),
            "ordered every test refuses, as it must": max(p["scaled and ordered"]) < 0.01,
        },
    )


# ------------------------------------------------------------ marginals
def _exchangeable(e: Evidence) -> Judgement:
    return _tested(e, "KS p", "p < 0.05 %")


def _largest(e: Evidence) -> Judgement:
    return _tested(e, "largest weight: chi-square p")


def _tested(e: Evidence, column: str, beside: str = "") -> Judgement:
    """A test that units of networks as trained pass, and without symmetries fail."""
    checks: dict[str, Answer] = {}
    texts: list[str] = []
    for step, data in _there(e, _MARGINALS):
        layers = _by_layer(e, step, column)
        raw, removed = layers[_RAW], layers[_REMOVED]
        shares = _by_layer(e, step, beside) if beside else {}
        for form, ps in layers.items():
            often = [_list(values) for values in shares.get(form, {}).values()]
            more = f" ({'; '.join(often)} % of the tests below 0.05)" if often else ""
            texts.append(f"{data}, {form}: p = {'; '.join(map(_list, ps.values()))}{more}")
        refused = _none_refuses([p for ps in raw.values() for p in ps])
        checks[f"{data}: no layer is refused at 1 %"] = refused
        fails = any(max(ps) < 0.01 for ps in removed.values())
        checks[f"{data}: with symmetries removed a layer is refused"] = fails
    return Judgement("; ".join(texts), checks)


def _first_version(e: Evidence) -> Judgement:
    checks: dict[str, Answer] = {}
    texts: list[str] = []
    for step, data in _there(e, _MARGINALS):
        layers = _by_layer(e, step, "between inputs: KS p")[_RAW]
        name, values = next(iter(layers.items()))
        texts.append(f"{data}, {name}: p = {_list(values)} between inputs")
        checks[f"{data}: all weights of the first layer have the same marginal"] = _none_refuses(
            values
        )
    return Judgement("; ".join(texts), checks)


def _components(e: Evidence) -> Judgement:
    checks: dict[str, Answer] = {}
    texts: list[str] = []
    for step, data in _there(e, _MARGINALS):
        raw, removed = (e.number(step, "pca", form, "2") for form in (_RAW, _REMOVED))
        texts.append(f"{data}: two explain {raw.shown(1)} % ({removed.shown(1)} with {_REMOVED})")
        checks[f"{data}: as trained, two components explain less than half"] = below(raw, 50.0)
        checks[f"{data}: nor with {_REMOVED}"] = below(removed, 50.0)
    return Judgement("; ".join(texts), checks)


def _mean_shift(e: Evidence) -> Judgement:
    checks: dict[str, Answer] = {}
    texts: list[str] = []
    for step, data in _there(e, _MARGINALS):
        for form in (_RAW, _REMOVED):
            counts = e.values(step, "pca", form, "clusters")
            share = e.number(step, "pca", form, "in the largest %")
            found = ", ".join(f"{count:.0f}" for count in counts)
            texts.append(f"{data}, {form}: {found} ({share.shown(0)} % in the largest)")
            checks[f"{data}, {form}: nine of ten networks are in one cluster"] = above(share, 89.9)
    return Judgement("; ".join(texts), checks)


def _by_layer(e: Evidence, step: str, column: str) -> dict[str, dict[str, list[float]]]:
    """A column of the tests of exchangeability, by form and layer, one number for each seed."""
    found: dict[str, dict[str, list[float]]] = {}
    for form, layer, *_ in e.rows(step, "equal"):
        found.setdefault(form, {})[layer] = e.values(step, "equal", (form, layer), column)
    return found


# ------------------------------------------------------------ permutations during training
def _settling(e: Evidence) -> Judgement:
    checks: dict[str, Answer] = {}
    texts: list[str] = []
    for step, data in _there(e, _TAUS):
        phases = _phases(e, step)
        texts.append(f"{data}: {_shown_phases(phases)}")
        taus, still = [tau for _, tau, _ in phases], [still for *_, still in phases]
        checks[f"{data}: fewer steps change the order after every drop"] = all(
            a.value < b.value for a, b in zip(still, still[1:], strict=False)
        )
        checks[f"{data}: hardly ever after the first drop, tau above 0.999"] = above(taus[1], 0.999)
        ends = e.values(step, "tau", (_names(e, step)[-1], "all layers"), _STILL)
        checks[f"{data}: never at the end, in 99.9 % of the steps of every run"] = in_every_run(
            ends, lambda share: share >= 99.9
        )
    return Judgement("; ".join(texts), checks)


def _rare(e: Evidence) -> Judgement:
    phases = _phases(e, "mnist/permutations")
    _, tau, still = phases[0]
    return Judgement(
        _shown_phases(phases[:1]),
        {
            "tau above 0.98 at the highest rate": above(tau, 0.98),
            "most steps change nothing at the highest rate": above(still, 50.0),
        },
    )


def _phases(e: Evidence, step: str) -> list[tuple[float, Number, Number]]:
    """Learning rate, mean tau and steps without change of every phase, the highest rate first."""
    names = _names(e, step)
    if len(names) < 2:
        raise Missing(f"the learning rate of `{step}` has not dropped")
    columns = ("learning rate", "tau, mean", _STILL)
    rows = [[e.number(step, "tau", (n, "all layers"), column) for column in columns] for n in names]
    return [(rate.value, tau, still) for rate, tau, still in rows]


def _names(e: Evidence, step: str) -> list[str]:
    """The phases between drops of the learning rate, by their steps."""
    return [row[0] for row in e.rows(step, "tau") if row[1] == "all layers"]


def _shown_phases(phases: list[tuple[float, Number, Number]]) -> str:
    return ", ".join(
        f"{rate:g}: tau {tau.shown(4)}, {still.shown(1)} % without change"
        for rate, tau, still in phases
    )


# ------------------------------------------------------------ all of these
def _there(e: Evidence, steps: Mapping[str, str]) -> list[tuple[str, str]]:
    """Those of several steps that have results; why the first has none if none has."""
    found = [(step, data) for step, data in steps.items() if e.results.get(step)]
    if not found:
        e.of(next(iter(steps)))
    return found


def _none_refuses(p: list[float]) -> bool:
    """No test refuses at 1 %, all together (Bonferroni)."""
    return min(p) * len(p) > 0.01


def _list(values: list[float]) -> str:
    return ", ".join(f"{value:.2g}" for value in values)


_TOY, _SAME = "Two hidden units (figure 1)", "Exchangeable marginals (corollary, figure 9)"
_TRAINING = "Permutations during training (figure 4)"
CLAIMS = (
    Claim(
        _TOY,
        "less than 1 % of the runs have not converged (loss of the last epoch above 0.01)",
        "0.5 %",
        _converged,
    ),
    Claim(_TOY, "norm of both outgoing weights: median (5 %, 95 %)", "3.09 (2.89, 3.92)", _norms),
    Claim(_TOY, "quadrants ++, −−, +−, −+", ".23, .22, .27, .28", _quadrants),
    Claim(
        _TOY,
        "the marginals of both weights are the same: Kolmogorov–Smirnov p",
        "0.97",
        _same_marginals,
    ),
    Claim(_SAME, "a weight has the same marginal in all units of a layer", "yes", _exchangeable),
    Claim(
        _SAME,
        "each unit is equally likely to hold the largest weight (chi-square)",
        "yes",
        _largest,
    ),
    Claim(
        _SAME,
        "v1's stronger form: all marginals of a layer are the same",
        "yes (v1); not in the published version",
        _first_version,
    ),
    Claim(_SAME, "principal components do not show the posterior in a plane", "yes", _components),
    Claim(_SAME, "mean shift finds no modes in weight space", "yes", _mean_shift),
    Claim(
        _TRAINING,
        "units change places while the learning rate is high, hardly ever after it has "
        "dropped, and never at the end",
        "figure",
        _settling,
    ),
    Claim(_TRAINING, "on MNIST instabilities are rare", "figure", _rare),
)

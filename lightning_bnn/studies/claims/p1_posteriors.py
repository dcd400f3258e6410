"""P1, tables 1 and 2: what it says about posteriors of one mode and of several."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from lightning_bnn.studies.claims.claim import Claim, Judgement
from lightning_bnn.studies.claims.evidence import Evidence, Missing
from lightning_bnn.studies.claims.numbers import (
    Answer,
    Number,
    all_of,
    compared,
    meets,
    minus,
)

__all__ = ["CLAIMS"]

_MNIST, _DIGITS = "mnist/compare", "demo"
_DISTANCES = {
    "the pooled MMD², as P1 measures it": ("mmd", "mmd"),
    "the law MMD²": ("mixture", "law"),
}
"""The name of the number of one mode, and of several."""
_ONE, _MULTI = "one", "multi"
_ENSEMBLE = "Ensemble"


def _single_accuracy(e: Evidence) -> Judgement:
    acc = _hundred(e.posterior(_MNIST, _ENSEMBLE, _ONE, "acc"))
    in_range = meets(acc, 87.9, 88.3)
    return Judgement(
        acc.shown(1, " %"), {"the mean over networks agrees with the paper's range": in_range}
    )


def _ensemble_accuracy(e: Evidence) -> Judgement:
    one, multi = (_hundred(e.posterior(_MNIST, _ENSEMBLE, mode, "acc")) for mode in (_ONE, _MULTI))
    here = f"{one.shown(1)} → {multi.shown(1, ' %')}"
    return Judgement(here, {"the ensemble is more accurate than one network": compared(multi, one)})


def _closer(step: str, e: Evidence) -> Judgement:
    """Several modes beside one: all networks alike, as P1 measures it, and by their law."""
    e.of(step)
    texts: list[str] = []
    checks: dict[str, Answer] = {}
    for title, (of_one, of_several) in _DISTANCES.items():
        try:
            pairs = _both_modes(e, step, of_one, of_several)
        except Missing:
            continue
        parts = [f"{m} {_times(one, multi)}" for m, (one, multi) in pairs.items()]
        texts.append(f"{title}: a single mode's is {', '.join(parts)} times as large")
        checks[f"closer for every method, by {title}"] = all_of(
            compared(one, multi) for one, multi in pairs.values()
        )
    if not checks:
        raise Missing(f"`{step}` has no distances of one mode and of several")
    return Judgement("; ".join(texts), checks)


def _at_the_noise(step: str, e: Evidence) -> Judgement:
    e.of(step)
    texts: list[str] = []
    checks: dict[str, Answer] = {}
    for title, (_, name) in _DISTANCES.items():
        try:
            everyone = {
                m: e.posterior(step, m, _MULTI, name) for m in e.methods(step, _MULTI, name)
            }
            zero = e.pooled_floor(step, _ENSEMBLE, _MULTI, name) if name == "mmd" else Number(0.0)
        except Missing:
            continue
        ensemble = everyone.pop(_ENSEMBLE, None)
        if ensemble is None:
            raise Missing(f"`{step}` has no ensemble")
        others = ", ".join(f"{m} {_hundred(n).shown(2)}" for m, n in everyone.items())
        shown, noise = (_hundred(n).shown(2) for n in (ensemble, zero))
        texts.append(f"{title}, x 100: {shown} (noise {noise}); {others}")
        checks[f"closest by {title}"] = all_of(compared(n, ensemble) for n in everyone.values())
        checks[f"at the noise by {title}"] = meets(minus(ensemble, zero), 0.0, 0.0)
    if not checks:
        raise Missing(f"`{step}` has no distances of several modes")
    return Judgement("; ".join(texts), checks)


def _removed(e: Evidence) -> Judgement:
    one = _of_methods(e, _ONE, "ns")
    multi = _of_methods(e, _MULTI, "ns")
    pooled = _of_methods(e, _ONE, "mmd")
    least, most = min(one.values(), key=_value), max(multi.values(), key=_value)
    here = (
        f"one mode: NS {_range(one, 100)}, MMD {_range(pooled, 100)}; several: NS "
        f"{_range(multi, 100)}"
    )
    text = "without symmetries, too, every single mode is farther than any posterior of several"
    return Judgement(here, {text: compared(least, most)})


def _calibration(e: Evidence) -> Judgement:
    one, multi = (_of_methods(e, mode, "ece") for mode in (_ONE, _MULTI))
    better = {m: compared(multi[m], one[m]) for m in one if m in multi}
    here = f"ECE {_list(one, 100)} (one); {_list(multi, 100)} (several)"
    won = [m for m, answer in better.items() if answer]
    text = "a single mode of some method is better calibrated than several"
    return Judgement(here, {text: bool(won) or (None if None in better.values() else False)})


def _information(e: Evidence) -> Judgement:
    one, multi = (_of_methods(e, mode, "idmi") for mode in (_ONE, _MULTI))
    out = _of_methods(e, _MULTI, "oodmi")
    single_out = _of_methods(e, _ONE, "oodmi")
    here = (
        f"{_range(one, 100, 1)} → {_range(multi, 100, 1)} x 100 nats; out of distribution "
        f"{_range(single_out, 100, 1)} → {_range(out, 100, 1)}"
    )
    return Judgement(
        here,
        {
            "it is larger for several modes than for one, for every method": all_of(
                compared(multi[m], one[m]) for m in one if m in multi
            ),
            "of several modes it is larger out of distribution, for every method": all_of(
                compared(out[m], multi[m]) for m in multi if m in out
            ),
        },
    )


def _laplace(e: Evidence) -> Judgement:
    pairs = {
        mode: [_hundred(e.posterior(_MNIST, m, mode, "mmd")) for m in ("Laplace", "SWAG")]
        for mode in (_MULTI, _ONE)
    }
    names = {_MULTI: "several modes", _ONE: "one mode"}
    here = "; ".join(
        f"{names[mode]}: {a.shown(1)} and {b.shown(1)}" for mode, (a, b) in pairs.items()
    )
    checks = {f"{names[mode]}": compared(b, a) for mode, (a, b) in pairs.items()}
    return Judgement(here, checks)


def _variational(e: Evidence) -> Judgement:
    names = {_ONE: "of one mode", _MULTI: "of several"}
    checks: dict[str, Answer] = {}
    texts: list[str] = []
    for mode, text in names.items():
        acc = _of_methods(e, mode, "acc")
        mfvi = acc.pop("MFVI", None)
        if mfvi is None:
            raise Missing(f"`{_MNIST}` has no accuracy of MFVI")
        texts.append(f"{text}: MFVI {_hundred(mfvi).shown(1)}, {_list(acc, 100)}")
        checks[f"lowest accuracy {text}"] = all_of(compared(n, mfvi) for n in acc.values())
    return Judgement("; ".join(texts), checks)


def _dropout(e: Evidence) -> Judgement:
    dropout, plain = (_hundred(e.posterior(_MNIST, m, _ONE, "acc")) for m in ("Dropout", _ENSEMBLE))
    here = f"{dropout.shown(1)} beside {plain.shown(1, ' %')} without"
    return Judgement(here, {"one mode is less accurate with dropout": compared(plain, dropout)})


# ------------------------------------------------------------ reading and showing
def _of_methods(e: Evidence, mode: str, name: str) -> dict[str, Number]:
    return {m: e.posterior(_MNIST, m, mode, name) for m in e.methods(_MNIST, mode, name)}


def _both_modes(
    e: Evidence, step: str, of_one: str, of_several: str
) -> dict[str, tuple[Number, Number]]:
    """Distances of one mode and of several, for every method whose modes are more than a network.

    A mode that is a single network has no MMD² as P1 measures it, and is an atom by its law.
    """
    one = e.methods(step, _ONE, of_one)
    both = [m for m in e.methods(step, _MULTI, of_several) if m in one and m != _ENSEMBLE]
    if not both:
        raise Missing(f"no method of `{step}` has {of_one!r} for one mode and for several")
    return {
        m: (e.posterior(step, m, _ONE, of_one), e.posterior(step, m, _MULTI, of_several))
        for m in both
    }


def _hundred(n: Number) -> Number:
    return Number(100 * n.value, 100 * n.sd, 100 * n.doubt)


def _value(n: Number) -> float:
    return n.value


def _times(one: Number, multi: Number) -> str:
    """How many times as large; of what may be zero there is no telling."""
    return f"{one.value / multi.value:.1f}" if multi.value > multi.doubt else "/"


def _range(numbers: Mapping[str, Number], scale: int | float, digits: int = 0) -> str:
    values = [scale * n.value for n in numbers.values()]
    return f"{min(values):.{digits}f} to {max(values):.{digits}f}"


def _list(numbers: Mapping[str, Number], scale: int | float) -> str:
    return ", ".join(f"{m} {scale * n.value:.1f}" for m, n in numbers.items())


_SECTION = "OptuNet on MNIST (tables 1 and 2)"
_SEVERAL = "several modes are closer to the posterior than one, for every method"
_NOISE = "deep ensembles are closest, at the noise"
CLAIMS = (
    Claim(_SECTION, "accuracy of a single OptuNet", "87.9–88.3 %", _single_accuracy),
    Claim(_SECTION, "an ensemble is more accurate", "95.3 % (10)", _ensemble_accuracy),
    Claim(_SECTION, _SEVERAL, "MMD² falls by 6 to 9 times", functools.partial(_closer, _MNIST)),
    Claim("The digits", f"{_SEVERAL} (digits)", "–", functools.partial(_closer, _DIGITS)),
    Claim(_SECTION, _NOISE, "0.0", functools.partial(_at_the_noise, _MNIST)),
    Claim("The digits", f"{_NOISE} (digits)", "–", functools.partial(_at_the_noise, _DIGITS)),
    Claim(
        _SECTION,
        "removing symmetries does not make single modes good",
        "NS often above MMD",
        _removed,
    ),
    Claim(
        _SECTION,
        "single-mode methods can win on calibration",
        "ECE of one mode below that of several for Laplace and others",
        _calibration,
    ),
    Claim(
        _SECTION,
        "mutual information grows with modes, and is larger out of distribution",
        "yes",
        _information,
    ),
    Claim(
        _SECTION,
        "Laplace is closer than SWAG",
        "yes, clearly (0.6 against 5.0 on CIFAR-100)",
        _laplace,
    ),
    Claim(_SECTION, "variational networks are worst", "lowest accuracy on CIFAR-100", _variational),
    Claim(_SECTION, "dropout hurts OptuNet", "–", _dropout),
)

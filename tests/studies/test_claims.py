"""Verdicts follow from numbers and their errors: other numbers, other verdicts."""

import copy
import inspect
import math
import re

import pytest
from pages import page
from scipy.stats import ttest_1samp

from lightning_bnn.studies.claims.claim import judged, verdict_of
from lightning_bnn.studies.claims.evidence import Evidence, Missing
from lightning_bnn.studies.claims.numbers import (
    Number,
    above,
    all_of,
    below,
    compared,
    in_every_run,
    measured,
    meets,
    minus,
    near,
    over_seeds,
    within,
)
from lightning_bnn.studies.claims.over_seeds import over_all_seeds
from lightning_bnn.studies.claims.papers import CLAIMS
from lightning_bnn.studies.claims.steps import PAPERS, STEPS, chosen_steps

EVERY = {claim.text: claim for claims in CLAIMS.values() for claim in claims}


# ------------------------------------------------------------ numbers
@pytest.mark.parametrize("values", [[1.0, 2.0, 4.0], [0.3, 0.1], [-5.0, -5.5, -4.0, -4.7]])
def test_the_doubt_about_a_mean_is_that_of_the_t_test(values):
    number = over_seeds(values)
    low, high = map(float, ttest_1samp(values, 0.0).confidence_interval(0.95))
    assert (number.value - number.doubt, number.value + number.doubt) == pytest.approx((low, high))
    for bound in (low - 1e-6, low + 1e-6, high + 1e-6):
        wanted = None if low < bound < high else bound < low
        assert above(number, bound) is wanted
        assert below(Number(-number.value, 0, number.doubt), -bound) is wanted


def test_what_is_within_the_errors_is_neither_yes_nor_no():
    one = measured(1.0, 0.1)
    assert compared(one, measured(0.9, 0.1)) is None
    assert compared(one, measured(0.5, 0.1)) is True
    assert compared(measured(0.5, 0.1), one) is False
    assert within(one, 0.8, 2) is near(one, 0.9, 0.3) is True
    assert within(one, 1.1, 2) is near(one, 0.7, 0.2) is None
    assert within(one, 1.3, 2) is near(one, 0.5, 0.2) is False
    assert meets(one, 1.1, 2) is True
    assert meets(one, 1.3, 2) is False
    assert in_every_run([1.0, 2.0], lambda v: v > 0) is True
    assert in_every_run([1.0, 2.0], lambda v: v > 1) is None
    assert in_every_run([1.0, math.nan], lambda v: v > 1) is False
    assert minus(one, one).doubt == pytest.approx(math.sqrt(2) * 1.96 * 0.1)
    assert measured(1.0, 0.1, 4).doubt == pytest.approx(3.1824 * 0.05, rel=1e-4)


def test_a_single_number_decides_and_nan_decides_nothing():
    assert above(over_seeds([1.0]), 0.99) is True
    assert above(over_seeds([1.0]), 1.0) is False
    nan = over_seeds([math.nan, 1.0])
    assert above(nan, 0) is below(nan, 0) is within(nan, 0, 1) is meets(nan, 0, 1) is None
    assert nan.shown() == "/"
    for empty in (over_seeds, all_of):
        with pytest.raises(ValueError, match="got none"):
            empty([])


def test_verdicts():
    yes, no, open_ = {"a": True}, {"b": False}, {"c": None}
    assert verdict_of(yes) == "holds"
    assert verdict_of(no) == "does not hold"
    assert verdict_of(open_) == "undecided: within the errors"
    assert verdict_of({**yes, **no}) == "partly (not: b)"
    assert verdict_of({**open_, **no}) == "partly (not: b; within the errors: c)"
    with pytest.raises(ValueError, match="checks"):
        verdict_of({})


# ------------------------------------------------------------ results
def table(header, *rows):
    return {"title": "", "header": header, "rows": [list(row) for row in rows], "note": ""}


def stored(settings=None, rows=(), **tables):
    return {"settings": settings or {}, "tables": tables, "rows": rows}


def test_numbers_are_found_by_name_over_seeds():
    seeds = [
        stored(t=table(["", "x", "y"], ["a", {"value": v, "error": 0.5}, None])) for v in (1, 3)
    ]
    found = Evidence({"s": seeds}, {"other": "`other` failed: reason"})
    assert found.values("s", "t", "a", "x") == [1, 3]
    assert found.number("s", "t", "a", "x").value == 2
    assert math.isnan(found.values("s", "t", "a", "y")[0])
    assert Evidence({"s": seeds[:1]}).number("s", "t", "a", "x").sd == 0.5
    for wrong, text in (
        (("s", "u", "a", "x"), "no table 'u'"),
        (("s", "t", "b", "x"), "no row 'b'"),
        (("s", "t", "a", "z"), "no column 'z'"),
        (("s", "t", "a", 0), "no number, but 'a'"),
        (("other", "t", "a", "x"), "`other` failed: reason"),
        (("never", "t", "a", "x"), "has not been run"),
    ):
        with pytest.raises(Missing, match=text):
            found.values(*wrong)


def test_tables_of_several_seeds_become_one():
    def seed(value, error, name="a"):
        return stored(t=table(["", "n", "x"], [name, 7, {"value": value, "error": error}]))

    (merged,) = over_all_seeds([seed(1.0, 0.1), seed(3.0, 0.2)])
    assert merged.rows == [["a", 7, (2.0, pytest.approx(math.sqrt(2)))]]
    (alone,) = over_all_seeds([seed(1.0, 0.1)])
    assert alone.rows == [["a", 7, (1.0, 0.1)]]
    (first,) = over_all_seeds([seed(1.0, 0.1), seed(3.0, 0.2, "b")])
    assert first.rows == alone.rows


# ------------------------------------------------------------ claims, with numbers made up
def posterior(method, mode, seeds=5, **numbers):
    pairs = {name: [value, 0.01 * abs(value)] for name, value in numbers.items()}
    return {"method": method, "mode": mode, "seeds": seeds, "pooled": 10, "numbers": pairs}


def comparison(ensemble=0.004, several=0.13, law=0.5):
    rows = [posterior("Ensemble", "multi", 10, mmd=ensemble, law=0.0)]
    for method, one in (("SWAG", 0.6), ("Laplace", 0.45)):
        rows += [
            posterior(method, "one", mmd=one, mixture=one, ns=one),
            posterior(method, "multi", mmd=several, law=law, ns=several),
        ]
    floor = table(["mode", "method", "MMD²"], ["Noise floor", "10 networks", floor_cell()])
    return {"mnist/compare": [stored(rows=rows, table1=floor)]}


def floor_cell():
    return {"value": 0.1, "error": 0.3}


def mass(low, high):
    header = ["", "mean ± sd", "5 %", "median", "95 %"]
    cells = ["excess %", {"value": 25.0, "error": 8.0}, low, 25.0, high]
    return {"mass": [stored(mass=table(header, cells))]}


def toy(*shares):
    rows = (table(["", "", " "], ["not converged, %", share, ""]) for share in shares)
    return {"toy": [stored(weights=one) for one in rows]}


def marginals(raw, removed):
    header = ["", "layer", "units", "largest weight: chi-square p"]
    rows = [["as trained", "w", 4, raw], ["symmetries removed", "w", 4, removed]]
    return {"marginals": [stored(equal=table(header, *rows))]}


def interpolation(*pairs):
    header = ["dimension", "sigma", "last alpha between", "first alpha on a mode"]
    rows = [[str(dim), 1.0, *pair] for dim, pair in zip((5, 30), pairs, strict=True)]
    return {"interpolation": [stored(thresholds=table(header, *rows))]}


def tractable(plain, drawn):
    cells = [[name, {"value": value, "error": 0.001}] for name, value in (
        ("MFVI", plain), ("symmetrized, K=2", drawn), ("symmetrized, exact", drawn),
    )]  # fmt: skip
    return {"tractable": [stored({"seeds": 10}, table2=table(["", "alpha=0.1"], *cells))]}


def compact(hmc_plain, hmc_matched):
    rows = [["HMC q_d", hmc_plain], ["HMC q_r", hmc_matched]]
    rows += [["Ensemble q_d", 40.0], ["Ensemble q_r", 96.0]]
    return {"compact": [stored(table1=table(["", "accuracy %"], *rows))]}


def sweep(*after):
    rows = [[str(k + 1), swaps] for k, swaps in enumerate(after)]
    return {"transpositions": [stored(sweep=table(["", "swaps after"], *rows))]}


_CLOSER = "several modes are closer to the posterior than one, for every method"
_CLOSEST = "deep ensembles are closest, at the noise"
VERDICTS = [
    (_CLOSER, comparison(law=0.1), "holds"),
    (_CLOSER, comparison(law=0.7), "partly (not: closer for every method, by the law MMD²)"),
    (_CLOSER, comparison(several=0.7, law=0.7), "does not hold"),
    (_CLOSEST, comparison(), "holds"),
    (_CLOSEST, comparison(ensemble=0.2),
     "partly (not: closest by the pooled MMD², as P1 measures it; not: at the noise by the pooled "
     "MMD², as P1 measures it)"),
    ("Laplace is closer than SWAG", comparison(), "partly (within the errors: several modes)"),
    ("trained networks are far above their minimum mass (digits)", mass(9.0, 40.0), "holds"),
    ("trained networks are far above their minimum mass (digits)", mass(0.1, 90.0),
     "does not hold"),
    ("less than 1 % of the runs have not converged (loss of the last epoch above 0.01)",
     toy(0.7, 0.8, 0.75), "holds"),
    ("less than 1 % of the runs have not converged (loss of the last epoch above 0.01)",
     toy(1.7, 1.8, 1.75), "does not hold"),
    ("less than 1 % of the runs have not converged (loss of the last epoch above 0.01)",
     toy(0.2, 1.5, 0.7), "undecided: within the errors"),
    ("each unit is equally likely to hold the largest weight (chi-square)", marginals(0.5, 1e-9),
     "holds"),
    ("each unit is equally likely to hold the largest weight (chi-square)", marginals(1e-9, 1e-9),
     "partly (not: digits: no layer is refused at 1 %)"),
    ("each unit is equally likely to hold the largest weight (chi-square)", marginals(1e-9, 0.5),
     "does not hold"),
    ("it does not depend on the dimension (5, 30, 100)", interpolation((4.5, 5), (4.5, 5)),
     "holds"),
    ("it does not depend on the dimension (5, 30, 100)", interpolation((4.5, 5), (4, 4.5)),
     "does not hold"),
    ("test MSE is smaller (α = 0.05 ... 0.2)", tractable(0.11, 0.09), "holds"),
    ("test MSE is smaller (α = 0.05 ... 0.2)", tractable(0.0911, 0.0909),
     "partly (within the errors: beyond the deviation over seeds)"),
    ("test MSE is smaller (α = 0.05 ... 0.2)", tractable(0.09, 0.11), "does not hold"),
    ("with permutations removed (q_r) it predicts", compact(4.0, 70.0), "holds"),
    ("with permutations removed (q_r) it predicts", compact(70.0, 4.0),
     "partly (not: HMC: matched, draws are more accurate)"),
    ("a start and its copy permuted by k swaps end k swaps apart, for every k", sweep(1, 2, 3),
     "holds"),
    ("a start and its copy permuted by k swaps end k swaps apart, for every k", sweep(1, 2, 4),
     "does not hold"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "results", "verdict"), VERDICTS)
def test_verdicts_follow_from_the_numbers(text, results, verdict):
    assert judged(EVERY[text], Evidence(results)).verdict == verdict


def test_a_law_that_is_not_there_leaves_the_judgement_to_what_is():
    results = comparison()
    for row in results["mnist/compare"][0]["rows"]:
        row["numbers"].pop("law", None)
    found = judged(EVERY[_CLOSER], Evidence(results))
    assert list(found.checks) == ["closer for every method, by the pooled MMD², as P1 measures it"]


@pytest.mark.parametrize("text", EVERY)
def test_without_results_nothing_is_tested_and_the_reason_is_said(text):
    absent = {step.name: f"`{step.name}` failed: a reason" for step in STEPS}
    found = judged(EVERY[text], Evidence({}, absent))
    assert re.fullmatch(r"not tested: `[\w/]+` failed: a reason", found.verdict)
    assert not found.checks


def test_results_are_not_changed_by_judging():
    results = comparison()
    kept = copy.deepcopy(results)
    for claim in EVERY.values():
        judged(claim, Evidence(results))
    assert results == kept


# ------------------------------------------------------------ what there is
def test_claims_are_told_apart():
    claims = [claim for claims in CLAIMS.values() for claim in claims]
    assert len(claims) == len(EVERY)
    assert CLAIMS.keys() == PAPERS.keys()
    assert all(claim.section and claim.paper for claim in claims)


@pytest.mark.parametrize("paper", CLAIMS)
def test_every_claim_of_the_pages_is_judged_and_every_other_one_is_on_them(paper):
    known = {claim.text for claim in CLAIMS[paper] if "Width" not in claim.section}
    assert known == set(claims_on(page(f"docs/{paper}.md")))


def claims_on(text):
    """First cells of the tables of claims, but for those about width."""
    for section in re.split(r"^## ", text, flags=re.MULTILINE):
        if not section.startswith("Width"):
            for block in re.findall(
                r"^\| claim \|.*\n\|[-|]+\n((?:\|.*\n)+)", section, re.MULTILINE
            ):
                yield from (line.split(" | ")[0].removeprefix("| ") for line in block.splitlines())


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
@pytest.mark.parametrize("size", ["full", "smallest"])
def test_studies_take_the_arguments_of_their_steps(step, size, tmp_path):
    if size == "smallest" and step.smallest is None:
        return
    arguments = step.arguments(tmp_path, 1, size)
    inspect.signature(step.function()).bind(**arguments)
    assert step.source.is_file()
    assert ("seed" in arguments) == step.seeded
    assert not step.after or step.after in [s.name for s in STEPS[: STEPS.index(step)]]
    assert "{" not in str(arguments["out"])


def test_steps_are_chosen_by_paper_and_name():
    assert chosen_steps([]) == list(STEPS)
    assert {s.paper for s in chosen_steps(["p3"])} == {"p3"}
    assert [s.name for s in chosen_steps(["width", "toy"])] == ["toy", "width"]
    with pytest.raises(ValueError, match=r"`only` must be of p1, .*, got 'p4'"):
        chosen_steps(["p4"])

"""Verdicts follow from numbers and their errors: other numbers, other verdicts."""

import inspect
import math
import re

import numpy as np
import pytest
from pages import page
from scipy.stats import t, ttest_1samp

from bnn_research.claims.steps import PAPERS, STEPS, chosen_steps
from bnn_research.claims.verdicts import (
    CLAIMS,
    DERIVED,
    RELATIONS,
    Evidence,
    Missing,
    Number,
    answer,
    judged,
    over_seeds,
    verdict_of,
    with_error,
)

CLAIMED = {claim.name: claim for claims in CLAIMS.values() for claim in claims}
ABOVE = RELATIONS["above"]


# ------------------------------------------------------------ numbers
@pytest.mark.parametrize("values", [[1.0, 2.0, 4.0], [0.3, 0.1], [-5.0, -5.5, -4.0, -4.7]])
def test_the_doubt_about_a_mean_is_that_of_the_t_test(values):
    number = over_seeds(values)
    low, high = map(float, ttest_1samp(values, 0.0).confidence_interval(0.95))
    assert (number.value - number.doubt, number.value + number.doubt) == pytest.approx((low, high))
    for bound in (low - 1e-6, low + 1e-6, high + 1e-6):
        assert ABOVE(number, Number([bound])) is (None if low < bound < high else bound < low)
        assert ABOVE(Number([bound]), number) is (None if low < bound < high else bound > high)


@pytest.mark.parametrize(
    ("relation", "yes", "unclear", "no"),
    [
        ("above", (0.8,), (1.1,), (1.3,)),
        ("below", (1.3,), (1.1,), (0.8,)),
        ("at_least", (0.8,), (1.1,), (1.3,)),
        ("at_most", (1.3,), (1.1,), (0.8,)),
        ("within", (0.8, 2), (1.1, 2), (1.3, 2)),
        ("near", (0.9, 0.3), (0.7, 0.2), (0.5, 0.2)),
        ("agrees", (1.1, 2), None, (1.3, 2)),
    ],
)
def test_what_is_within_the_errors_is_neither_yes_nor_no(relation, yes, unclear, no):
    def related(number, values):
        return RELATIONS[relation](number, *(Number([v]) for v in values))

    one = with_error([1.0], 0.1)
    assert related(one, yes) is True
    assert unclear is None or related(one, unclear) is None
    assert related(one, no) is False
    assert related(over_seeds([math.nan, 1.0]), yes) is None


def test_errors_of_differences_are_independent():
    one = {"": with_error([1.0], 0.1)}
    assert DERIVED["minus"](one, one)[""].doubt == pytest.approx(math.sqrt(2) * 1.96 * 0.1)
    assert with_error([1.0], 0.1, 4).doubt == pytest.approx(3.1824 * 0.05, rel=1e-4)
    assert with_error([1.0], 0.1, 1).doubt == 0
    assert [ABOVE(over_seeds([1.0]), Number([v])) for v in (0.99, 1.0)] == [True, False]
    assert str(with_error([1.0], 0.25)) == "1 ± 0.25"


@pytest.mark.parametrize(
    ("values", "run", "all_", "mean"),
    [
        ([2.0, 3.0], True, True, True),
        ([0.0, 3.0], None, False, True),
        ([0.0, -3.0], False, False, False),
        ([math.nan, 3.0], True, False, False),
        ([math.nan], None, False, False),
    ],
)
def test_runs_and_means_are_compared_one_by_one(values, run, all_, mean):
    rows = [[{"": over_seeds(values)}, {"": Number([1.0])}]]
    assert answer("above", rows, "run") is run
    assert answer("above", rows, "all") is all_
    assert answer("above", rows, "mean") is mean


def test_what_further_seeds_may_undo_is_undecided():
    """One in forty of the closest thresholds that are met is not met by the next three seeds.

    The doubt about the mean alone, by which other claims are decided, lets twice as many pass.
    """
    runs, widths = 3000, {"number": 1.0, "again": math.sqrt(2)}
    undone = dict.fromkeys(widths, 0)
    for first, second in np.random.default_rng(0).normal(size=(runs, 2, 3)).tolist():
        number = over_seeds(first)
        for by, width in widths.items():
            edges = [number.value - share * width * number.doubt for share in (1.001, 0.999)]
            rows = ([[{"": number}, {"": Number([edge])}]] for edge in edges)
            assert [answer("above", row, by) for row in rows] == [True, None]
            undone[by] += math.fsum(second) / 3 < edges[0]
    alone = t.sf(t.ppf(0.975, 2) / math.sqrt(2), 2)
    assert undone["again"] / runs == pytest.approx(0.025, abs=0.009)
    assert undone["number"] / runs == pytest.approx(alone, abs=0.012)
    assert alone > 0.045


def test_pruning_of_p3_is_decided_as_further_seeds_would():
    """Accuracies there are numbers such as 41 ± 16 and 55 ± 11."""
    claims = [c for c in CLAIMS["p3"] if c.section.startswith("Pruning")]
    assert len(claims) == 4
    assert {check["by"] for c in claims for check in c.row["checks"].values()} == {"again"}
    rows = [[{"": over_seeds([25.0, 41.0, 57.0])}, {"": over_seeds([9.8, 9.9, 10.0])}]]
    assert [answer("above", rows, by) for by in ("mean", "again")] == [True, None]
    worst = [[{"": over_seeds([31.2, 45.2, 59.2])}, {"": over_seeds([9.8, 9.9, 10.0])}]]
    assert [answer("above", worst, by) for by in ("number", "again")] == [True, None]


@pytest.mark.parametrize(
    ("values", "every", "some"),
    [((2, 3), True, True), ((0, 3), False, True), ((1, 3), None, True), ((0, 1), False, None)],
)
def test_all_rows_must_meet_a_relation_or_some(values, every, some):
    rows = [[{"": Number([v], 0.1, 0.2)}, {"": Number([1])}] for v in values]
    assert answer("above", rows) is every
    assert answer("above", rows, some=True) is some


def three(*values):
    return {str(k): over_seeds(v) for k, v in enumerate(values, start=1)}


@pytest.mark.parametrize(
    ("name", "rows", "values"),
    [
        ("least", three([1, 5], [3, 2]), [1, 2]),
        ("most", three([1, 5], [3, 2]), [3, 5]),
        ("where least", three([7, 8], [3, 2]), [3, 2]),
        ("rank correlation", three([1, 3], [2, 2], [3, 1]), [1, -1]),
        ("bonferroni", three([0.5, 0.2], [0.4, 0.3]), [0.8]),
        ("bonferroni", three([math.nan, 0.5]), [math.nan]),
        ("bonferroni", three([0.5, math.nan]), [math.nan]),
    ],
)
def test_one_number_is_derived_from_several_rows(name, rows, values):
    more = [three([2], [1])] if name == "where least" else []
    assert DERIVED[name](rows, *more)[""].values == pytest.approx(values, nan_ok=True)


@pytest.mark.parametrize(
    ("place", "count", "row"),
    [(0, 3, 0), (1, 3, 1), (-1, 3, 2), (0.2, 11, 2), (0.4, 11, 4), (0.8, 11, 8), (0.4, 6, 2)],
)
def test_rows_are_chosen_by_number_or_share(place, count, row):
    rows, where = three(*([k] for k in range(count))), {"": Number([place])}
    assert DERIVED["row"](rows, where)[""].values == [row]
    with pytest.raises(Missing, match="there are only 2 rows"):
        DERIVED["row"](three([1], [2]), {"": Number([2])})


def test_verdicts():
    yes, no, open_ = {"a": True}, {"b": False}, {"c": None}
    for answers, verdict in (
        (yes, "holds"),
        (no, "does not hold"),
        (open_, "undecided: within the errors"),
        (yes | no, "partly (not: b)"),
        (open_ | no, "partly (not: b; within the errors: c)"),
    ):
        assert verdict_of(answers) == verdict


# ------------------------------------------------------------ results
def table(header, *rows):
    return {"title": "", "header": header, "rows": [list(row) for row in rows], "note": ""}


def stored(settings=None, rows=(), **tables):
    return {"settings": settings or {}, "tables": tables, "rows": rows}


def test_numbers_are_found_by_name_over_seeds():
    rows = (["a", {"value": v, "error": 0.5}, None] for v in (1, 3))
    seeds = [stored(t=table(["", "x", "y"], row)) for row in rows]
    found = Evidence({"s": seeds}, {"other": "`other` failed: reason"})
    (x,) = found.read("s", "t", "a", "x").values()
    assert (x.values, x.value) == ([1, 3], 2)
    assert math.isnan(found.read("s", "t", "a", "y")[""].values[0])
    assert Evidence({"s": seeds[:1]}).read("s", "t", "a", "x")[""].sd == 0.5
    for wrong, text in (
        (("s", "u", "a", "x"), "no table 'u'"),
        (("s", "t", "b", "x"), "no number in row 'b'"),
        (("s", "t", "a", "z"), "no number in row 'a' and column 'z'"),
        (("s", "t", "a", ""), "no number in"),
        (("other", "t", "a", "x"), "`other` failed: reason"),
        (("never", "t", "a", "x"), "has not been run"),
    ):
        with pytest.raises(Missing, match=text):
            found.read(*wrong)


@pytest.mark.parametrize(
    ("row", "column", "numbers"),
    [
        (["a", "*"], "x 1", {"u": 1, "v": 3}),
        (["*", "u"], "x 2", {"a": 2}),
        (["* but a", "u"], "x 1", {"b": 5}),
        (["a", "u"], "*", {"x 1": 1, "x 2": 2}),
        (["a", "*"], "last *", {"u": 2, "v": 4}),
        ("b", "*", {"x 1": 5}),
    ],
)
def test_wildcards_stand_for_rows_and_columns(row, column, numbers):
    rows = (["a", "u", 1, 2], ["a", "v", 3, 4], ["b", "u", 5, "text"])
    found = Evidence({"s": [stored(t=table(["", "", "x 1 ", "x 2"], *rows))]})
    read = found.read("s", "t", row, column)
    assert {key: number.value for key, number in read.items()} == numbers


# ------------------------------------------------------------ claims, with numbers made up


@pytest.mark.parametrize("name", CLAIMED)
def test_without_results_nothing_is_tested_and_the_reason_is_said(name):
    absent = {step.name: f"`{step.name}` failed: a reason" for step in STEPS}
    found = judged(CLAIMED[name], Evidence({}, absent))
    assert re.fullmatch(r"not tested: `[\w/]+` failed: a reason", found.verdict)
    assert not found.checks


# ------------------------------------------------------------ what there is
@pytest.mark.parametrize("paper", PAPERS)
def test_every_claim_of_the_pages_is_judged_and_every_other_one_is_on_them(paper):
    known = [claim.text for claim in CLAIMS[paper] if "Width" not in claim.section]
    sections = re.split(r"^## ", page(f"docs/results/{paper}.md"), flags=re.MULTILINE)
    text = "".join(section for section in sections if not section.startswith("Width"))
    blocks = re.findall(r"^\| claim \|.*\n\|[-|]+\n((?:\|.*\n)+)", text, re.MULTILINE)
    rows = [line for block in blocks for line in block.splitlines()]
    assert sorted(known) == sorted(row.split(" | ")[0].removeprefix("| ") for row in rows)


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
@pytest.mark.parametrize("size", ["full", "smallest"])
def test_studies_take_the_arguments_of_their_steps(step, size, tmp_path):
    arguments = step.arguments(tmp_path, 1, "full" if step.smallest is None else size)
    inspect.signature(step.function()).bind(**arguments)
    assert step.source.is_file()
    assert ("seed" in arguments) == step.seeded
    assert not step.after or step.after in [s.name for s in STEPS[: STEPS.index(step)]]
    assert "{" not in str(arguments["out"])


def test_steps_are_chosen_by_paper_and_name():
    assert chosen_steps([]) == list(STEPS)
    assert {s.paper for s in chosen_steps(["p3"])} == {"p3"}
    assert [s.name for s in chosen_steps(["width", "toy"])] == ["toy", "width"]

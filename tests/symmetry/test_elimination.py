"""Integer equations: all solutions are found, and the first unknowns stay free."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_array

from lightning_bnn.symmetry.discovery.constants.elimination import solutions
from lightning_bnn.symmetry.discovery.constants.expressions import Expressions


def matrix(rows):
    return csr_array(np.array(rows, dtype=np.int64))


small = st.integers(1, 8).flatmap(
    lambda n: st.lists(
        st.lists(st.sampled_from([0, 0, 0, 1, -1]), min_size=n, max_size=n), min_size=1, max_size=7
    )
)


@settings(max_examples=60, deadline=None)
@given(small)
def test_solutions_solve_and_are_as_many_as_the_rank_says(rows):
    equations = np.array(rows)
    found = solutions(matrix(rows)).toarray()
    assert not (equations @ found).any()
    np.testing.assert_array_equal(found @ found, found)
    rank = np.linalg.matrix_rank(equations)
    free = np.flatnonzero((found == np.eye(len(found), dtype=int)).all(1) & found.any(1))
    assert np.linalg.matrix_rank(found) == len(free) <= equations.shape[1] - rank


@pytest.mark.parametrize(
    ("rows", "free"),
    [
        ([[1, 1, 1]], [0, 1]),
        ([[1, -1, 0], [0, 1, -1]], [0]),
        ([[1, 1, 0], [0, 1, 1], [1, 0, 1]], []),
        ([[1, 1, 0], [0, 1, 1], [1, 0, -1]], [0]),
        ([[2, 1, 0]], [0, 2]),
        ([[1, 2, 0], [0, 0, 3]], [1]),
        ([[2, 3]], []),  # only fractions
        ([[1, 1, 1, 1], [1, 2, 3, 4]], [0, 1]),
    ],
)
def test_what_is_free(rows, free):
    found = solutions(matrix(rows)).toarray()
    assert np.flatnonzero(found.diagonal() == 1).tolist() == free


def test_too_many_equations_for_the_general_way_hold_what_is_in_them(monkeypatch):
    from lightning_bnn.symmetry.discovery.constants import elimination

    rows = [[1, 1, 1, 0], [1, 2, 3, 0], [3, 2, 2, 0]]
    assert solutions(matrix(rows[:2])).toarray()[0].any()
    monkeypatch.setattr(elimination, "_MOST_ROWS", 1)
    assert not solutions(matrix(rows[:2])).toarray()[:3].any()


# ------------------------------------------------------------ combinations
def terms(system, numbers):
    found = system.every_term(numbers.numpy().ravel())
    return list(zip(*(t.tolist() for t in found), strict=True))


def test_combinations_are_named_once_and_cancel():
    system = Expressions()
    a, b = system.fresh(3), system.fresh(1)
    total = system.combine([(a, 1), (b.expand(3), -2)])
    assert terms(system, total) == [(k, *x) for k in range(3) for x in ((k + 1, 1), (4, -2))]
    assert system.combine([(total, 1), (total, -1)]) is None
    assert system.combine([(a, 1)]).tolist() == a.tolist()
    back = system.combine([(total, 1), (b.expand(3), 2)])
    assert back.tolist() == a.tolist()


def test_what_is_stopped_is_nothing_from_then_on():
    system = Expressions()
    a, b = system.fresh(2), system.fresh(2)
    system.stop(a[:1])
    assert system.live(a).tolist() == [0, 2]
    assert system.combine([(a, 1), (b, 1)]).tolist()[0] == 3
    system.stop(a)
    assert system.live(a) is None


def test_where_there_are_too_many_terms_nothing_is_free(monkeypatch):
    from lightning_bnn.symmetry.discovery.constants import expressions

    system = Expressions()
    a, b = system.fresh(4), system.fresh(4)
    monkeypatch.setattr(expressions, "_MOST_TERMS", 9)
    assert system.combine([(a, 1), (b, 1)]) is None
    assert system.live(a) is None
    assert system.live(b) is None

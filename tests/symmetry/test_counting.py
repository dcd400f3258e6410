import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import kendalltau

from weightsym import (
    kendall_tau,
    transpositions,
)


def fewest_swaps(permutation):
    """Brute force: breadth-first over swaps."""
    goal, seen = tuple(range(len(permutation))), {tuple(permutation)}
    level, steps = [tuple(permutation)], 0
    while goal not in seen:
        steps += 1
        new = set()
        for p in level:
            for i, j in itertools.combinations(range(len(p)), 2):
                q = list(p)
                q[i], q[j] = q[j], q[i]
                new.add(tuple(q))
        level = list(new - seen)
        seen |= new
    return steps


def test_transpositions_of_all_permutations_of_five():
    every = torch.tensor(list(itertools.permutations(range(5))))
    found = transpositions(every)
    assert found.tolist() == [fewest_swaps(p) for p in every.tolist()]


def test_transpositions_of_long_cycles_and_shapes():
    n = 1000
    assert transpositions(torch.arange(n).roll(1)) == n - 1
    assert transpositions(torch.arange(n)) == 0
    assert transpositions(torch.arange(n).reshape(-1, 2).flip(1).flatten()) == n // 2
    assert transpositions(
        torch.stack([torch.randperm(7) for _ in range(6)]).reshape(2, 3, 7)
    ).shape == (2, 3)
    assert transpositions(torch.tensor([0])) == 0


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(2, 70), st.integers(1, 12), st.integers(0, 10**6))
def test_kendall_tau_is_scipys_with_and_without_ties(n, values, seed):
    generator = torch.Generator().manual_seed(seed)
    a = torch.randint(values, (3, n), generator=generator).double()
    b = torch.rand(3, n, generator=generator).argsort(-1)
    expected = [kendalltau(x, y).statistic for x, y in zip(a.numpy(), b.numpy(), strict=True)]
    torch.testing.assert_close(
        kendall_tau(a, b), torch.tensor(expected, dtype=torch.float64), equal_nan=True
    )


def test_kendall_tau_broadcasts_over_members():
    order = torch.stack([torch.randperm(9) for _ in range(4)])
    assert kendall_tau(order, torch.arange(9)).shape == (4,)
    assert (kendall_tau(order, order) == 1).all()
    assert (kendall_tau(order, 8 - order) == -1).all()


# ------------------------------------------------------------ degrees of freedom


@pytest.mark.bad_input
def test_errors():
    with pytest.raises(ValueError, match="every index from 0 to n - 1"):
        transpositions(torch.tensor([0, 0, 2]))
    with pytest.raises(ValueError, match="`permutation` must be a tensor of indices, got a list"):
        transpositions([torch.tensor([1, 0])])
    with pytest.raises(ValueError, match="two or more units, got 1 and 1"):
        kendall_tau(torch.zeros(1), torch.zeros(1))

"""Permutations are as many as their groups say: counted by sympy, on the entries of the weights."""

import math

import numpy as np
import pytest
import torch
from scipy.sparse import csr_matrix
from sympy.combinatorics import Permutation, PermutationGroup
from torch import nn

from weightsym import discover, identity, permute
from weightsym import params as P
from weightsym.groups.symmetries import _rank


class Pairs(nn.Module):
    """What all pairs of units have between them."""

    def __init__(self, units, function):
        super().__init__()
        self.a, self.b, self.function = nn.Linear(4, units), nn.Linear(units**2, 3), function

    def forward(self, x):
        h = self.a(x).tanh()
        return self.b(self.function(h[:, :, None], h[:, None]).flatten(1))


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.out = nn.MultiheadAttention(6, 3, batch_first=True), nn.Linear(6, 2)

    def forward(self, x):
        return self.out(self.attention(x, x, x, need_weights=False)[0])


class Table(nn.Module):
    """Rows and columns of a table of parameters."""

    def __init__(self):
        super().__init__()
        self.a, self.w, self.b = nn.Linear(4, 3), nn.Parameter(torch.randn(3, 2)), nn.Linear(2, 5)

    def forward(self, x):
        return self.b((self.a(x).tanh() @ self.w.tanh()).relu())


class SquareTable(nn.Module):
    """Rows change places with columns."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.randn(n)) for n in ((4, 3, 3), (3,), (3,)))

    def forward(self, x):
        table = torch.einsum("nk,kij->nij", x, self.a).relu()
        return torch.einsum("nij,i,j->n", table, self.b, self.c)


PAIR, TOKENS = torch.randn(2, 4), torch.randn(2, 3, 6)
DIVIDE = lambda x, y: x / (y + 3)  # noqa: E731
NETWORKS = {
    **{f"{k} differences": (Pairs(k, torch.sub), PAIR) for k in (2, 3, 4)},
    **{f"{k} quotients": (Pairs(k, DIVIDE), PAIR) for k in (2, 3, 4)},
    **{f"{k} maxima": (Pairs(k, torch.maximum), PAIR) for k in (2, 3, 4)},
    "heads": (Heads(), TOKENS),
    "table": (Table(), PAIR),
    "square table": (SquareTable(), PAIR),
}


def transpositions(params, sym):
    """Of the first unit of every group with each other one, as permutations of all entries."""
    sizes = [t.numel() for t in params.values()]
    numbers = torch.arange(sum(sizes), dtype=torch.float64).split(sizes)
    ids = {name: k.view(t.shape) for (name, t), k in zip(params.items(), numbers, strict=True)}
    for index, group in enumerate(sym.permutations):
        for unit in range(1, group.units):
            element = identity(sym)
            element[index][[0, unit]] = element[index][[unit, 0]]
            moved = permute(ids, sym, element)
            yield Permutation(torch.cat([moved[name].flatten() for name in ids]).int().tolist())


@pytest.mark.parametrize(("model", "x"), NETWORKS.values(), ids=NETWORKS)
def test_groups_have_as_many_elements_together_as_their_sizes_say(model, x):
    sym = discover(model, x)
    found = PermutationGroup([*transpositions(P.of(model), sym)]).order()
    assert found == math.prod(math.factorial(g.units) for g in sym.permutations) > 1
    assert math.log10(found) == pytest.approx(sym.log10_permutations)


@pytest.mark.parametrize("seed", range(40))
def test_rank_of_sparse_tables_is_that_of_dense_ones(seed):
    generator = np.random.default_rng(seed)
    for _ in range(10):
        rows, columns = generator.integers(1, 30), generator.integers(1, 14)
        table = np.zeros((rows, columns), int)
        for row in table:
            count = min(generator.choice([0, 1, 2, 2, 2, 3, 4]), columns)
            chosen = generator.choice(columns, count, replace=False)
            row[chosen] = generator.choice([-2, -1, -1, 1, 1], count)
        assert _rank(csr_matrix(table)) == np.linalg.matrix_rank(table.astype(float))

"""Scales of products and of several axes: none changes the function, none says what others say."""

from functools import cache

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cases import CASES, Forward
from test_joint_mass import least_by_descent
from torch import nn

from lightning_bnn import params as P
from lightning_bnn.symmetry import canonicalise, discover, min_mass, random_scales, rescale
from lightning_bnn.symmetry.actions import permute
from lightning_bnn.symmetry.discovery.factors import NO_ACTIONS, Actions
from lightning_bnn.symmetry.discovery.independence import independent
from lightning_bnn.symmetry.elements import random_permutations
from lightning_bnn.symmetry.placements import Axis


def with_tensors(network, **shapes):
    for name, shape in shapes.items():
        setattr(network, name, nn.Parameter(torch.randn(shape)))
    return network


def products_of_rows():
    """A row of gains for each factor, both of fixed channels."""

    def forward(self, x):
        q, k = (x[..., :3].sin()[:, :, None] * self.g).unbind(2)
        return (q * k).sum(-1)

    return with_tensors(Forward(forward), g=(2, 3))


def products_of_columns():
    def forward(self, x):
        q, k = (x[..., :3].sin()[..., None] * self.g).unbind(-1)
        return (q * k).sum(-1)

    return with_tensors(Forward(forward), g=(3, 2))


def quotients_of_rows():
    def forward(self, x):
        q, k = (x[..., :3].exp()[:, :, None] * self.g).unbind(2)
        return (q / k).sum(-1)

    return with_tensors(Forward(forward), g=(2, 3))


def gated_attention(bias, softmax):
    """Queries and keys of one map, with gains of their own."""

    def forward(self, x):
        both = torch.einsum("btd,nd->btnd", F.silu(self.z(x)), self.g)
        q, k = (both + self.b if bias else both).unbind(2)
        scores = q @ k.mT
        return self.o((scores.softmax(-1) if softmax else F.relu(scores)) @ self.v(x).tanh())

    def build():
        network = Forward(forward, z=nn.Linear(4, 3), v=nn.Linear(4, 5), o=nn.Linear(5, 4))
        return with_tensors(network, g=(2, 3), **({"b": (2, 3)} if bias else {}))

    return build


def normalised_tensor():
    """Every entry of a row of norms has the scale of its row and that of its column."""

    def forward(self, x):
        return self.o(torch.einsum("btd,dep->btep", x, F.normalize(self.w, dim=0)).relu())

    return with_tensors(Forward(forward, o=nn.Linear(3, 2)), w=(4, 2, 3))


def soft_experts():
    """Tokens mixed into the slots of experts by normalised directions."""

    def forward(self, x):
        directions = F.normalize(self.phi, dim=0)
        logits = torch.einsum("btd,dep->btep", F.normalize(x, dim=-1), directions)
        slots = torch.einsum("btep,btd->bepd", logits.softmax(1), x)
        hidden = torch.einsum("bepd,edh->beph", slots, self.w).relu()
        back = logits.flatten(2).softmax(-1).view_as(logits)
        return self.o(torch.einsum("btep,beph->bth", back, hidden))

    return with_tensors(Forward(forward, o=nn.Linear(5, 4)), phi=(4, 3, 2), w=(3, 4, 5))


def residual():
    """The plainest residual network: a stream that feeds itself."""

    def forward(self, x):
        h = self.i(x)
        return self.o(h + self.b(self.a(h).relu()))

    maps = {"i": nn.Linear(4, 5), "a": nn.Linear(5, 6), "b": nn.Linear(6, 5), "o": nn.Linear(5, 3)}
    return Forward(forward, **maps)


NETWORKS = {
    "products of rows": (products_of_rows, 3),
    "products of columns": (products_of_columns, 3),
    "quotients of rows": (quotients_of_rows, 3),
    "gated attention": (gated_attention(False, False), 2),
    "gated attention, softmax": (gated_attention(False, True), 1),
    "gated attention, biases": (gated_attention(True, True), 1),
    "normalised tensor": (normalised_tensor, 4),
    "soft experts": (soft_experts, 9),
    "residual": (residual, 11),
}


@cache
def known(name):
    torch.manual_seed(0)
    network = NETWORKS[name][0]().double()
    return network, discover(network, torch.randn(2, 5, 4).double())


def random_weights(sym, seed=0):
    g = torch.Generator().manual_seed(seed)
    return {n: torch.randn(s, generator=g, dtype=torch.float64) for n, s in sym.shapes.items()}


def log_factors(sym):
    """What a unit of every log scale adds to the logs of all weights, one row for each scale."""
    count = sym.scaling_dof
    if not count:
        return torch.zeros(0, 1, dtype=torch.float64)
    ones = {n: torch.ones(count, *s, dtype=torch.float64) for n, s in sym.shapes.items()}
    logs = torch.eye(count, dtype=torch.float64).split([g.units for g in sym.scalings], 1)
    moved = rescale(ones, sym, [u.exp() for u in logs])
    return torch.cat([t.log().reshape(count, -1) for t in moved.values()], 1).round()


def rank(sym):
    factors = log_factors(sym)
    return int(torch.linalg.matrix_rank(factors @ factors.mT))


# ------------------------------------------------------------ no wrong group
@pytest.mark.parametrize("name", NETWORKS)
def test_scales_keep_the_function_without_the_help_of_the_check(name):
    """Zeros as an example show the check little or nothing: what is proposed must be right."""
    torch.manual_seed(0)
    network = NETWORKS[name][0]().double()
    blind = discover(network, torch.zeros(2, 5, 4).double())
    weights, x = random_weights(blind), torch.randn(2, 5, 4).double()

    def outputs(params):
        return torch.func.functional_call(network, params, (x,))

    g = torch.Generator().manual_seed(1)
    before = outputs(weights)
    assert blind.scaling_dof == NETWORKS[name][1]
    for moved in (
        rescale(weights, blind, random_scales(blind, g)),
        permute(weights, blind, random_permutations(blind, g)),
    ):
        torch.testing.assert_close(outputs(moved), before)
    if name != "quotients of rows":  # whose sizes do not count
        alike = {n: 2 * t for n, t in weights.items()}
        assert not torch.allclose(outputs(alike), before)


@pytest.mark.parametrize("name", ["products of rows", "products of columns"])
def test_one_factor_grows_as_the_other_shrinks(name):
    _, sym = known(name)
    both = log_factors(sym).unflatten(1, next(iter(sym.shapes.values())))
    both = both.sum(1 if name.endswith("rows") else 2)
    assert not sym.frozen
    assert torch.equal(both, torch.zeros_like(both))


# ------------------------------------------------------------ a basis
@pytest.mark.parametrize("name", NETWORKS)
def test_scales_are_independent(name):
    _, sym = known(name)
    count = NETWORKS[name][1]
    assert sym.scaling_dof == count
    assert rank(sym) == count


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_scales_of_known_networks_are_independent(case):
    sym = case.known()[2]
    assert rank(sym) == sym.scaling_dof


def acting(*rows):
    return Actions(*np.array(rows, np.int64).reshape(-1, 4).T)


AXES = (Axis("w", 0, 2, "out"), Axis("w", 1, 3, "in"), Axis("b", 0, 2, "bias"))
SHAPES = {"w": torch.Size([2, 3]), "b": torch.Size([2])}
ROWS = [(0, k, 0, 1) for k in range(2)]
COLUMNS = [(1, k, 1, -1) for k in range(3)]


def test_rows_and_columns_say_the_same():
    """All rows times s and all columns over s: one of both scales is dropped, the further one."""
    for first, further, left in (
        (acting(*ROWS, *COLUMNS), NO_ACTIONS, [0]),
        (acting(*COLUMNS), acting(*ROWS), []),
    ):
        kept, more = independent(AXES, SHAPES, first, further)
        assert sorted({*kept.variables.tolist()}) == (left or [1])
        assert not more.variables.size


def test_what_acts_elsewhere_or_on_some_rows_only_is_kept():
    for rows in (
        [*ROWS, (0, 0, 2, 1), (0, 1, 2, 1), *COLUMNS],  # the bias shows the rows
        [ROWS[0], *COLUMNS],
        [*ROWS, *COLUMNS[:2]],
    ):
        kept, _ = independent(AXES, SHAPES, acting(*rows), NO_ACTIONS)
        assert len(kept.variables) == len(rows)


def test_what_changes_nothing_is_dropped():
    rows = [(0, 0, 0, 1), (0, 1, 0, 1), *[(0, k, 1, -1) for k in range(3)]]
    kept, _ = independent(AXES, SHAPES, acting(*rows), NO_ACTIONS)
    assert not kept.variables.size


def test_blocks_of_rows_see_columns_apart():
    """Columns that one block of rows divides by s and the other does not: no scale of all rows."""
    axes = (AXES[0], Axis("w", 1, 3, "in", 2))
    one = [(1, k, 1, -1) for k in range(3)]
    both = [*one, *[(1, 3 + k, 1, -1) for k in range(3)]]
    for columns, count in ((one, 2), (both, 1)):
        kept, _ = independent(axes, SHAPES, acting(*ROWS, *columns), NO_ACTIONS)
        assert len(np.unique(kept.variables)) == count


# ------------------------------------------------------------ the least mass
@pytest.mark.parametrize("name", NETWORKS)
def test_the_least_mass_has_a_certificate(name):
    _, sym = known(name)
    for seed in range(8):
        found = min_mass(random_weights(sym, seed), sym)
        assert found.minimum.isfinite()
        assert found.gap < 1e-8
        assert all(bool((s > 0).all()) for s in found.scales)


def test_scales_that_say_the_same_do_not_disturb_the_least_mass(monkeypatch):
    """A description of before, with more scales than are independent, is also minimised."""
    network, sym = known("gated attention")
    target = "lightning_bnn.symmetry.discovery.solve.independent"
    monkeypatch.setattr(target, lambda axes, shapes, first, further: (first, further))
    redundant = discover(network, torch.randn(2, 5, 4).double())
    assert redundant.scaling_dof == rank(redundant) + 1 == sym.scaling_dof + 1
    stack = P.stack([random_weights(sym, seed) for seed in range(8)])
    found = min_mass(stack, redundant)
    torch.testing.assert_close(found.minimum, min_mass(stack, sym).minimum)
    assert bool((found.gap < 1e-8).all())


def test_no_descent_finds_less_in_a_stream_that_feeds_itself():
    _, sym = known("residual")
    for seed in range(3):
        weights = random_weights(sym, seed)
        found = min_mass(weights, sym, mixing=True)
        assert found.attained
        assert least_by_descent(weights, sym, 0) == pytest.approx(float(found.minimum), rel=1e-10)


@pytest.mark.bad_input
def test_norms_do_not_fix_scales_of_some_units_only():
    _, sym = known("normalised tensor")
    with pytest.raises(ValueError, match=r"`scaling` must be 'min-mass' .* in the same way"):
        canonicalise(random_weights(sym), sym, scaling="unit-norm")


# ------------------------------------------------------------ state that nothing reads
def running(update):
    """A network with a running number for every hidden unit, which no output depends on."""

    def forward(self, x):
        h = self.a(x).relu()
        if self.training:
            update(self.ema, h.detach())
        return self.b(h)

    def build():
        network = Forward(forward, a=nn.Linear(4, 3), b=nn.Linear(3, 2))
        network.register_buffer("ema", torch.zeros(3))
        return network.double()

    return build


def after_a_step(build, params, x):
    network = build().train()
    network.load_state_dict(params)
    network(x)
    return {n: t.detach() for n, t in network.state_dict().items()}


def test_statistics_that_nothing_reads_move_with_their_units():
    build = running(lambda ema, h: ema.mul_(0.9).add_(h.mean(0), alpha=0.1))
    x = torch.randn(5, 4).double()
    sym = discover(build(), x)
    weights, g = random_weights(sym), torch.Generator().manual_seed(0)
    scales, orders = random_scales(sym, g), random_permutations(sym, g)
    assert sym.scaling_dof == 3

    def moved(params):
        return permute(rescale(params, sym, scales), sym, orders)

    first, second = moved(after_a_step(build, weights, x)), after_a_step(build, moved(weights), x)
    torch.testing.assert_close(first["ema"], second["ema"])
    assert not torch.allclose(after_a_step(build, weights, x)["ema"], second["ema"])


def test_statistics_that_nothing_reads_take_no_scale_away():
    build = running(lambda ema, h: ema.copy_(h.mean(0) / (1 + h.norm())))
    sym = discover(build(), torch.randn(5, 4).double())
    assert "ema" not in sym.touched
    assert sym.scaling_dof == 3

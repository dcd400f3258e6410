"""Rules of users: what an operation of others does, in operations of torch."""

import pytest
import torch
from cases import Forward
from torch import nn

from weightsym import UnsupportedModel, discover, verify


@torch.library.custom_op("lightning_bnn_test::gate", mutates_args=())
def gate(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x * y.clamp_min(0)


gate.register_fake(lambda x, y: torch.empty_like(x))


@torch.library.custom_op("lightning_bnn_test::unit_rows", mutates_args=())
def unit_rows(x: torch.Tensor) -> torch.Tensor:
    return x / x.norm(dim=1, keepdim=True)


unit_rows.register_fake(torch.empty_like)


def gated():
    torch.manual_seed(0)
    layers = {"a": nn.Linear(4, 5), "b": nn.Linear(4, 5), "c": nn.Linear(5, 2)}
    model = Forward(lambda s, x: s.c(gate(s.a(x), s.b(x))), **layers)
    return model.double(), torch.randn(3, 4).double()


def test_an_operation_that_mixes_units_is_held_until_it_has_a_rule():
    layers = {"a": nn.Linear(4, 5), "b": nn.Linear(5, 2)}
    model = Forward(lambda s, x: s.b(unit_rows(s.a(x))), **layers)
    x = torch.randn(3, 4)
    held = discover(model, x)
    assert not held.permutations
    assert held.frozen[0].operation == "lightning_bnn_test.unit_rows"
    rules = {"lightning_bnn_test.unit_rows": lambda x: x / x.square().sum(1, True).sqrt()}
    sym = discover(model, x, rules=rules)
    assert not sym.frozen
    assert ([g.units for g in sym.permutations], sym.scaling_dof, sym.sign_dof) == ([5], 1, 5)


@pytest.mark.parametrize("rule", [lambda x, y: x * torch.relu(y), "pointwise"])
@pytest.mark.parametrize("name", ["lightning_bnn_test::gate", "lightning_bnn_test.gate.default"])
def test_a_rule_says_what_an_operation_does(name, rule):
    model, x = gated()
    sym = discover(model, x, rules={name: rule})
    assert not sym.frozen
    assert ([g.units for g in sym.permutations], sym.scaling_dof, sym.sign_dof) == ([5], 10, 5)
    assert verify(model, sym, x) < 1e-12


@pytest.mark.bad_input
def test_a_wrong_rule_is_refused():
    layers = {"a": nn.Linear(5, 8), "b": nn.Linear(8, 3)}
    model = Forward(lambda s, x: s.b(torch.cumsum(s.a(x), -1)), **layers)
    refused = r"A rule in `rules` is wrong.*a\.weight"
    for name in ("cumsum", "aten::cumsum"):
        with pytest.raises(UnsupportedModel, match=refused):
            discover(model, torch.randn(2, 5), rules={name: lambda x, dim: x})


@pytest.fixture(scope="module")
def graded():
    def graded(x: torch.Tensor) -> torch.Tensor:
        return x * torch.arange(1.0, 4.0, dtype=x.dtype)

    name = "lightning_bnn_tests::graded"
    torch.library.custom_op(name, graded, mutates_args=()).register_fake(torch.empty_like)
    return torch.ops.lightning_bnn_tests.graded


@pytest.mark.parametrize("seed", range(4))
def test_a_wrong_exchange_is_found_out_below_noise_too(graded, seed):
    def forward(s, x):
        return s.b(graded(nn.functional.dropout(torch.relu(s.a(x)), 0.5, training=True)))

    torch.manual_seed(seed)
    layers = {"a": nn.Linear(4, 3, bias=False), "b": nn.Linear(3, 5, bias=False)}
    model, x = Forward(forward, **layers).double(), torch.randn(6, 4, dtype=torch.float64)
    with pytest.raises(UnsupportedModel, match="the groups at a.weight change the outputs"):
        discover(model, x, rules={"lightning_bnn_tests.graded": lambda x: 1 * x})
    factors = torch.arange(1.0, 4.0, dtype=x.dtype)
    sym = discover(model, x, rules={"lightning_bnn_tests.graded": lambda x: x * factors})
    assert (len(sym.permutations), sym.scaling_dof, sym.unchecked) == (0, 3, "")


def test_a_rule_for_an_operation_that_does_not_occur_is_named(caplog):
    model, x = gated()
    discover(model, x, rules={"mylib.swihs.default": torch.relu})
    assert "no operation 'mylib.swihs'" in caplog.text


def test_an_example_that_a_rule_cannot_take_is_an_error_of_the_rule():
    """Negative control: the function is called, and called with the arguments of the operation."""
    model, x = gated()
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        discover(model, x, rules={"lightning_bnn_test.gate": lambda x, y, z: x})

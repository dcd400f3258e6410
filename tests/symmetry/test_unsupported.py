"""Forwards that cannot be read are refused in a sentence; others may compute and keep much."""

import copy
import random
import re

import pytest
import torch
from cases import Forward
from torch import nn

from lightning_bnn import models
from weightsym import UnsupportedModel, discover, permute, random_permutations, verify
from weightsym import params as P


def layers(**more):
    return {"a": nn.Linear(5, 6), "b": nn.Linear(6, 2), "c": nn.Linear(6, 6), **more}


# ------------------------------------------------------------ what depends on numbers
def assigned_data(s, x):
    s.a.weight.data = s.a.weight.data / 2
    return s.a(x)


def by_autograd(s, x):
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        return torch.autograd.grad(s.a(x).tanh().sum(), x, create_graph=True)[0]


def exported():
    return torch.export.export(models.mlp(5, [4], 3), (torch.ones(2, 5),))


def not_copied():
    model = nn.Linear(5, 2)
    model.stream = iter(k for k in range(3))
    return model


def counting(calls):
    return lambda s, x: s.a(x) + (calls.append(0) or len(calls))


def noise(size, source):
    return lambda s, x: s.b(torch.relu(s.a(x))) + size * source.random()


NUMBERS = r"test_unsupported.py:\d+ .*: an `if`, a loop or a size depends on numbers .*torch.where"
NUMBERS += ".*Pass the submodule"
DERIVATIVES = r"it takes derivatives .* inside its forward\."
HINT = "pass the original module"
REFUSED = {
    "an if": (lambda s, x: s.a(x) if x.sum() > 0 else s.a(-x), NUMBERS),
    "an item": (lambda s, x: s.a(x) if x.sum().item() > 0 else s.a(-x), NUMBERS),
    "a size": (lambda s, x: s.a(x)[:, : int((x > 0).sum())], NUMBERS),
    "chosen rows": (lambda s, x: s.a(x[x.sum(-1) > 0]), "depends on values in the input"),
    "sorted rows": (
        lambda s, x: s.a(x[x.sum(-1) > 0]).sort(0)[0].sum(0),
        "depends on values in the input",
    ),
    "assigned data": (assigned_data, r"it assigns to `\.data` inside its forward"),
    "derivatives": (by_autograd, DERIVATIVES),
    "calls": (counting([]), "different outputs for the same input"),
    "little noise": (noise(1e-4, random.Random(1)), "different outputs for the same input"),
    "noise": (noise(1.0, random.Random(1)), "different outputs for the same input"),
    "a program": (exported, f"got ExportedProgram: {HINT}"),
    "its module": (lambda: exported().module(), f"an exported program, .*{HINT}"),
    "its module inside": (
        lambda: Forward(lambda s, x: s.net(x), net=exported().module()),
        f"an exported program, .*{HINT}",
    ),
    "a generator": (not_copied, "Linear cannot be copied: cannot pickle 'generator'"),
    "nothing": (lambda s, x: None, "returns None, .* return its outputs as tensors"),
    "a text": (lambda s, x: "yes", "returns a str without a tensor"),
    "a list": (lambda s, x: [], "returns a list without a tensor"),
}


@pytest.mark.bad_input
@pytest.mark.parametrize("name", REFUSED)
def test_forwards_that_cannot_be_read_are_refused(name):
    make, sentence = REFUSED[name]
    model = Forward(make, **layers()) if make.__code__.co_argcount else make()
    with pytest.raises(ValueError, match=sentence) as refused:
        discover(model, torch.ones(2, 5))
    assert not re.search("u0|guard", str(refused.value))


def test_derivatives_by_torch_func_are_named_or_nothing_is_free():
    """torch 2.6 exports the derivative as a constant, and later ones do not export it."""
    by_func = Forward(lambda s, x: torch.func.grad(lambda z: s.a(z).tanh().sum())(x), **layers())
    try:
        said = str(discover(by_func, torch.ones(1, 5)))
    except UnsupportedModel as error:
        said = str(error)
    nothing = r"permutations: 10\^0\.0 .*scales: 0 .*signs: 0 .*\n.*outputs depend on no weight"
    assert re.search(f"{DERIVATIVES}|{nothing}", said)


def by_data(s, x):
    return s.b(torch.relu(s.a(x)).data * s.c.weight.data[0].exp())


def by_clamped_data(s, x):
    s.a.weight.data.clamp_(-0.1, 0.1)
    return s.b(torch.relu(s.a(x)))


@pytest.mark.parametrize(("forward", "scales"), [(by_data, 6), (by_clamped_data, 0)])
def test_data_of_tensors_is_read_as_they_are(forward, scales):
    model, x = Forward(forward, **layers()).double(), torch.randn(3, 5).double()
    before = copy.deepcopy(model.state_dict())
    sym = discover(model, x)
    assert ([g.units for g in sym.permutations], sym.scaling_dof) == ([6], scales)
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
    assert verify(copy.deepcopy(model), sym, x) < 1e-12


# ------------------------------------------------------------ what a forward remembers
def step(s, x, state):
    return torch.tanh(s.a(x) + s.c(state))


def replaced(s, x):
    s.state = step(s, x, s.state)
    return s.b(s.state)


def begun(s, x):
    s.state = torch.zeros(len(x), 6) if s.state is None else s.state
    return replaced(s, x)


def in_place(s, x):
    s.state.copy_(step(s, x, s.state))
    return s.b(s.state)


def in_a_list(s, x):
    s.state[0] = step(s, x, s.state[0])
    return s.b(s.state[0])


def counted(s, x):
    """As a decoder counts tokens."""
    s.state += 1
    return s.b(torch.tanh(s.a(x) + s.c.weight[s.state]))


STATEFUL = {
    "replaced": (replaced, lambda: torch.zeros(2, 6)),
    "begins with nothing": (begun, lambda: None),
    "in place": (in_place, lambda: torch.zeros(2, 6)),
    "in a list": (in_a_list, lambda: [torch.zeros(2, 6)]),
    "behind weights of zero": (replaced, lambda: torch.zeros(2, 6)),
    "a number": (counted, lambda: 0),
}


@pytest.mark.bad_input
@pytest.mark.parametrize("name", STATEFUL)
def test_state_in_an_attribute_is_refused_by_name(name):
    forward, state = STATEFUL[name]
    cell = Forward(forward, **layers(state=state()))
    if name == "behind weights of zero":  # which do not show it as long as nobody trains them
        nn.init.zeros_(cell.c.weight)
    outer = Forward(lambda s, x: s.parts["cell"](x), parts=nn.ModuleDict({"cell": cell}))
    with pytest.raises(UnsupportedModel, match=r"keeps 'parts\.cell\.state' .*register_buffer"):
        discover(outer, torch.randn(2, 5))


def test_state_in_a_buffer_moves_at_every_call():
    torch.manual_seed(0)
    cell = Forward(replaced, **layers(state=nn.Buffer(torch.zeros(2, 6)))).double()
    x = torch.randn(3, 2, 5).double()
    sym = discover(cell, x[0])
    assert [g.units for g in sym.permutations] == [6]
    twice = Forward(lambda s, x: [s.cell(y) for y in x], cell=cell)
    moved = permute(P.of(cell), sym, random_permutations(sym))
    moved = {f"cell.{name}": t for name, t in moved.items()}
    outputs = torch.func.functional_call(twice, moved, (x,))
    torch.testing.assert_close(outputs, twice(x), rtol=1e-9, atol=1e-9)
    assert verify(cell, sym, x[0]) < 1e-12


def noted(s, x):
    """Leaves behind what nobody reads again."""
    s.state = torch.tanh(s.a(x))
    return s.b(s.state)


def tabled(s, x):
    """Computes a table once, as rotary positions do."""
    s.state = torch.arange(6.0).to(x).cos() if s.state is None else s.state
    return s.b(torch.tanh(s.a(x)) * s.state)


@pytest.mark.parametrize("forward", [noted, tabled])
def test_what_changes_no_later_call_is_no_state(forward):
    torch.manual_seed(0)
    model = Forward(forward, **layers(state=None))
    assert discover(model, torch.randn(2, 5)).sign_dof == 6
    assert model.state is None


def test_state_of_training_makes_what_is_found_one_of_evaluation():
    def in_training(s, x):
        return replaced(s, x) if s.training else s.b(torch.tanh(s.a(x)))

    model = Forward(in_training, **layers(state=torch.zeros(2, 6)))
    sym = discover(model, torch.randn(2, 5))
    assert "'state' from one call to the next" in sym.evaluation_only

"""Mistakes of a caller end in a sentence, never in a silent or wrong result."""

import functools

import pytest
import torch
from checked_symmetries import find
from torch import nn

import weightsym
from lightning_bnn import models
from weightsym import UnsupportedModel, discover
from weightsym import params as P
from weightsym.groups import orbits

pytestmark = pytest.mark.bad_input

NAMES = {name: getattr(weightsym, name) for name in weightsym.__all__}
NAMES |= {name: getattr(torch, name) for name in ("arange", "eye", "full", "ones", "zeros")}
NAMES |= {"P": P, "nn": nn, "torch": torch, "nan": torch.nan, "loss": nn.functional.cross_entropy}
NAMES |= {"orbit_directions": orbits.orbit_directions}


class Whole(nn.Module):
    """A network around another one, whose names have a prefix."""

    def __init__(self):
        super().__init__()
        self.net = models.mlp(6, [5, 4], 3)

    def forward(self, x):
        return self.net(x)


def tied():
    """A layer whose weight is that of another."""
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2))
    model[2].weight = model[0].weight
    return model


def normed():
    layers = nn.BatchNorm1d(6), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 5), nn.ReLU()
    return nn.Sequential(*layers, nn.Linear(5, 3)).eval()


X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
MODELS = {
    "mlp": lambda: models.mlp(6, [5, 4], 3),
    "tanh": lambda: models.mlp(6, [5], 3, nn.Tanh),
    "normed": normed,
    "maps": lambda: nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2)),
    "tied": tied,
}


@functools.cache
def names_of(name):
    """What stands in the calls: a network, its symmetries, its weights and those of others."""
    torch.manual_seed(0)
    if name in MODELS:
        model, x = MODELS[name](), X
        sym = discover(model, x)
    else:
        model, x, sym, _ = find(name)
    stack, pairs = P.populate(model, 3), [(x, torch.zeros(len(x)).long())] * 2
    return NAMES | {
        "model": model, "x": x, "sym": sym, "params": P.of(model), "stack": stack,
        "one": P.unstack(stack)[0], "last": P.unstack(stack)[2], "pairs": pairs,
        "whole": Whole(), "other": P.of(Whole()), "line": nn.Linear(6, 3),
        "live": dict(model.named_parameters()),
        "data": {"model": model, "batches": pairs}, "learned": {"method": "learned"},
        "by_data": {"by": "activations", "model": model},
        "broken": lambda w, name, value: w | {name: w[name] * value}, "with_state": with_state,
        "huge": stack | {n: t * 1e30 for n, t in stack.items() if n == "3.weight"},
        "tiny": {n: t * 1e-30 for n, t in stack.items()},
    }  # fmt: skip


def with_state(model, kind=torch.optim.SGD, **state):
    """An optimizer with this state of the first parameter."""
    optimizer = kind(model.parameters())
    optimizer.state[next(model.parameters())].update(state)
    return optimizer


NOT_FINITE = "holds NaN or infinite values"
OVERFLOW = "the squares of '3.weight' overflow in torch.float32"
TWO_FORMS = "give networks of one orbit different forms of"
LACKS = r"`params` lacks '1.weight' \(it holds 'net.1.weight'\): were the symmetries found for"
SYM = "`sym` must be a `Symmetries` from `discover`, got "
TAKE_WEIGHTS = ("mass({}, sym)", "min_mass({}, sym)", "canonicalise({}, sym)",
                "permute({}, sym, identity(sym))")  # fmt: skip
FOR_PLAIN = {
    # elements
    "permute(params, sym, [arange(5)])": "one tensor per group: 2, got 1",
    "permute(params, sym, [0 * arange(5), arange(4)])": "`permutations.0.` must hold every index",
    "permute(params, sym, [arange(5) - 1, arange(4)])": "`permutations.0.` must hold every index",
    "permute(params, sym, [1.0 * arange(5), arange(4)])": "`permutations.0.` must hold every",
    "permute(stack, sym, random_permutations(sym, members=2))": "for each of 3 members, got",
    "permute(params, sym, random_permutations(sym, members=2))": "must have shape .*, got",
    "rescale(params, sym, [ones(5)] * 2)": r"scales\[1\]` must have shape \(4,\) \(3.weight\), got",
    "rescale(params, sym, [-ones(5), ones(4)])": r"`scales\[0\]` must be positive and finite",
    "rescale(params, sym, [0 * ones(5), ones(4)])": r"`scales\[0\]` must be positive and finite",
    "rescale(params, sym, [nan * ones(5), ones(4)])": r"`scales\[0\]` must be positive and finite",
    # of another network, or of none
    **{call.format("other"): LACKS for call in TAKE_WEIGHTS},
    **{call.format("{}"): "it is empty" for call in TAKE_WEIGHTS},
    **{call.format("{'1.weight': params['1.weight']}"): "lacks '1.bias'" for call in TAKE_WEIGHTS},
    "mass(whole, sym)": "must be a dict of tensors .* got Whole",
    "verify(whole, sym, x)": "`model` lacks '1.weight'",
    "identity(None)": SYM + "NoneType",
    "random_permutations(None)": SYM + "NoneType",
    "random_scales(None)": SYM + "NoneType",
    "random_signs(None)": SYM + "NoneType",
    "random_mixings({})": SYM + "dict",
    "mix(params, None, [])": SYM + "NoneType",
    "orbit_directions(params, None)": SYM + "NoneType",
    "transform_optimizer_state(with_state(model), P.of(whole), Element.identity(sym))":
        "`names` lacks",
    "transform_optimizer_state(with_state(whole), live, Element.identity(sym))":
        "is not a parameter of the optimizer",
    "transform_optimizer_state(with_state(model), live, sym)": "`element` must be an `Element`",
    "Element.random(None)": SYM + "NoneType",
    "Element.identity({})": SYM + "dict",
    "Element.of_groups(sym, permutations=[])": "`permutations` must hold one tensor per group",
    # least mass, canonical forms, orders
    "min_mass(params, sym, max_iterations=0)": "`max_iterations` at least 1, got 1e-10 and 0",
    "min_mass(params, sym, tolerance=nan)": "`tolerance` must be positive",
    "min_mass(params, sym, tolerance=nan, mixing=True)": "`tolerance` must be positive",
    "min_mass(params, sym, start=[nan * ones(5), ones(4)])": "`start.0.` must be positive and",
    "min_mass(params, sym, start=[nan * ones(5), ones(4)], mixing=True)": "`start.0.` must be",
    "min_mass(params, sym, mixing='all')": "`mixing` must be True, False or 'only', got 'all'",
    "canonicalise(params, sym, 'norm')": "`scaling` must be one of unit-norm, .* got 'norm'",
    "canonicalise(params, sym, target=0)": "`target` must be positive and finite, got 0",
    "canonicalise(params, sym, mixing='qr')": "`mixing` must be 'balanced' or None, got 'qr'",
    "sort_permutations(params, sym, 'size')": "`by` must be one of max, first, .* got 'size'",
    "UnitOrders(sym, 'largest')": "`by` must be one of max, first",
    "UnitOrders(discover(line, x))(P.of(line))": "no permutation symmetry",
    "plan_removal(params, sym)": "`networks` must be a stack",
    "plan_removal([], sym)": "at least one stack",
    "plan_removal(stack, sym).rows('net.1.weight', ones(3, 5, 6))": "no tensor 'net.1.weight'",
    "plan_removal(stack, sym).rows('1.weight', ones(1, 5, 6))": "has 1 networks, but `rows` has 3",
    "transpositions(torch.tensor([0, 0, 2]))": "every index from 0 to n - 1",
    "transpositions([arange(2)])": "`permutation` must be a tensor of indices, got a list",
    "kendall_tau(zeros(1), zeros(1))": "two or more units, got 1 and 1",
    # matching
    "match(params, stack, sym)": "`reference` must be one network",
    "match(one, params, sym, method='hungarian')": "one of best, ascent, frank-wolfe,",
    "match(one, params, sym, **data | {'batches': None})": "both be given for method 'best'",
    "match(one, params, sym, **learned, model=model)": "`model` and `batches` must both be given",
    "match(one, params, sym, **learned, **data)": "`loss` must be given for method 'learned'",
    "match(one, params, sym, **learned, **data, signs=True)": "`signs` must be False",
    "match(one, params, sym, method='activations', **data, signs=True)": "`signs` must be False",
    "match(one, params, sym, **learned, model=model, batches=pairs[:1], loss=loss)": "at least two",
    "match(one, params, sym, **learned, model=model, batches=iter(pairs), loss=loss)": "at least",
    "match(one, params, sym, **learned, model=model, batches=x, loss=loss)": "of at least two",
    "match(one, params, sym, **learned, model=model, batches=[x, x], loss=loss)": "input, target",
    "match(one, params, sym, **learned, **data, loss=lambda o, y: nan * o.sum())": "NaN or",
    "match_activations(nn.Linear(2, 2), one, params, sym, [x])": "must hold all tensors of the",
    "match_activations(model, one, params, sym, [])": "`batches` is empty",
    "match_activations(model, one, params, sym, x)": "put one tensor into a list",
    "match_activations(model, one, params, sym, [nan * x])": "`batches` lead to activations that",
    "match_activations(model, one, params, sym, [x[:0]])": "`batches` holds an empty batch",
    "match(one, params, sym, method='activations', model=whole, batches=[x])":
        "`params` must hold all tensors of the network",
    "Learning(steps=0)": "`steps` must be at least 1, got 0",
    "Learning(held_back=1.0)": "`held_back` must be between 0 and 1, got 1.0",
    "Learning(rate=nan)": "`rate` must be positive, got nan",
    # between two networks
    "barrier(model, one, params, [], points=1)": "`points` must be at least 3, got 1",
    "barrier(model, one, params, [])": "`batches` is empty",
    "barrier(model, one, params, [], repair=True)": "`batches` is empty",
    "barrier(model, one, params, [], batch_norm='x')": "`batch_norm` must be 'reestimate' or 'as-",
    "repair(model, one, one, params, 1.5, [x])": "`weight` must lie between 0 and 1, got 1.5",
    "repair(model, one, one, params, 0.5, x)": "`batches` must be a list of inputs",
    "repair(model, one, one, params, 0.5, iter([x]))": "`batches` must be a list of inputs",
    "repair(model, one, one, params, 0.5, [])": "`batches` is empty",
    "repair(model, one, one, stack, 0.5, [x])": "`b` must hold all tensors of one network",
    "repair(model, one, one, params, 0.5, [nan * x])": "`batches` lead to preactivations that are",
    "repair(model, one, one, params, 0.5, [x[:0]])": r"an empty batch, of shape \(0, 6\)",
    "interpolate(one, broken(params, '1.bias', ones(2, 1)), 0.5)": r"shapes \(5,\) and \(2, 5\)",
    "interpolate(params, model, 0.5)": "`b` must be a dict of tensors .* got Sequential",
    "interpolate(one, params, nan)": "`weight` must be a finite number, got nan",
    "interpolate(one, params, None)": "`weight` must be a finite number, got None",
    "difference(stack, params, sym)": "must be one network",
    "difference(params, stack, sym)": "must be one network",
    "difference(P.of(line), P.of(line), discover(line, x))": "units that can be exchanged",
    "fingerprint(stack, sym)": "must be one network",
    # many networks
    "align(one, sym)": "`stack` must be a stack of networks",
    "align(stack, sym, method='mean')": "`method` must be 'joint' or 'reference'",
    "align(stack, sym, sweeps=0)": "`sweeps` must be at least 1, got 0",
    "align(stack, sym, mixing=True, signs=True)": "`mixing` does not go with `signs`",
    "average(one, sym)": "must be a stack of networks, not one network",
    "average(stack, sym, [1, 2])": "`weights` must be 3 non-negative numbers",
    "average(stack, sym, [1, 2, -1])": "non-negative numbers, one for each network, got 1 2 -1",
    "average(stack, sym, [0, 0, 0])": "non-negative",
    "average(stack, sym, [1, 2, nan])": "non-negative",
    "average(stack, sym, [1, 2, True])": "non-negative",
    "average(stack, sym, 3)": "non-negative",
    "average(stack, sym, model=model)": "`model` and `batches` go together",
    "average(stack, sym, reference={})": "`reference` lacks",
    # squares that overflow or vanish
    "match(huge, one, sym)": f"`params`: {OVERFLOW}",
    "match(one, P.unstack(huge)[0], sym)": f"`reference`: {OVERFLOW}",
    "match_all(huge, one, sym)": f"`params`: {OVERFLOW}",
    "align(huge, sym)": f"`stack`: {OVERFLOW}",
    "min_mass(huge, sym)": f"`params`: {OVERFLOW}",
    "canonicalise(huge, sym, 'unit-norm')": f"`params`: {OVERFLOW}",
    "match(tiny, one, sym)": "all squared weights underflow, the largest weight is .*e-3[01]",
    "align(tiny, sym)": "all squared weights underflow, the largest weight is .*e-3[01]",
    # examples
    "discover(model, torch.ones(1, 7))": r"does not accept an input of shape \(1, 7\)",
    "discover(model, x.long())": r"an input of shape \(4, 6\) \(int64\)",
    "discover(model, (x,))": r"does not accept a tuple \(unpack it with \*\)",
    "discover(model)": "does not accept a call without inputs",
    "discover(model, x, batch_norm='fold')": "`batch_norm` must be 'carrier' or 'eval'",
    "discover(model, x, explain='1.wieght')": "tensor '1.wieght'; they depend on .*1.weight",
    "discover(model, x, rules={'cumsum': None})": "an equivalent function of torch",
    "discover(model, x, rules={'cumsum': 'homogeneous'})": "an equivalent function of torch",
    "discover(lambda x: x, x)": "`model` must be a torch.nn.Module, got function",
    "discover(nn.DataParallel(model), x)": "DataParallel only wraps a network",
    "discover(nn.Module(), x)": "Module has no forward; pass the submodule",
    "discover(nn.Linear(6, 2, dtype=torch.complex64), x)": "complex parameters",
}  # fmt: skip
ROWS = {
    "mlp": FOR_PLAIN,
    "tanh": {
        "flip(params, sym, [torch.tensor([True] * 5)])": r"`signs\[0\]` must hold \+1 and -1",
        "flip(params, sym, [zeros(5)])": r"`signs\[0\]` must hold \+1 and -1",
        "flip(params, sym, [2 * ones(5)])": r"`signs\[0\]` must hold \+1 and -1",
        "shift_logits(params, discover(nn.Sequential(model, nn.Tanh()), x), zeros(5))":
            "does not end in a layer",
    },
    "tied": {"repair(model, *[params] * 3, 0.5, [x])": "'0.weight' is computed, or is also the"},
    "normed": {
        "match(broken(stack, '3.weight', nan), one, sym)": f"`params`: '3.weight' {NOT_FINITE}",
        "match(broken(stack, '1.bias', torch.inf), one, sym)": f"'1.bias' {NOT_FINITE}, first in",
        "align(broken(stack, '0.running_mean', nan), sym)": f"'0.running_mean' {NOT_FINITE}",
        "average(broken(stack, '3.weight', nan), sym)": f"'3.weight' {NOT_FINITE}",
        "canonicalise(broken(stack, '3.weight', nan), sym)": f"'3.weight' {NOT_FINITE}",
        "min_mass(broken(stack, '3.weight', torch.inf), sym)": f"'3.weight' {NOT_FINITE}",
        "match_all(broken(stack, '3.weight', nan), one, sym)": f"'3.weight' {NOT_FINITE}",
        "match(one, broken(last, '3.weight', nan), sym)": f"`reference`: '3.weight' {NOT_FINITE}",
        "fingerprint(broken(last, '3.weight', nan), sym)": f"'3.weight' {NOT_FINITE}",
        "difference(one, broken(last, '3.weight', nan), sym)": f"'3.weight' {NOT_FINITE}",
        "average(stack, sym, model=model, batches=[])": "`batches` is empty",
        "average(stack, sym, model=model, batches=x)": "put one tensor into a list",
        "barrier(model, one, params, pairs, batch_norm='as-is', repair=True)":
            "`batch_norm` must be 'reestimate' with `repair`",
        "orbit_directions(params, sym).onto({})": "`vectors` lacks .*, which moves along the orbit",
        "orbit_directions(params, sym).onto(dict.fromkeys(params))": "lacks .*, which moves along",
        "orbit_directions(params, sym).onto(params | {'3.weight': ones(1)})": "must have shape",
        "orbit_directions(params, sym).times(ones(1))": "must have shape",
    },
    "maps": {
        "mix(params, sym, None)": "`matrices` must hold one tensor per group, got NoneType",
        "mix(params, sym, ['a'])": "`matrices` must hold one tensor per group, got list",
        "mix(params, sym, [1j * eye(4)[None]])": "be a dense tensor .*complex64",
        "mix(params, sym, [eye(4)[None].to('meta')])": "be a dense tensor .*meta",
        "mix(params, sym, [1e-310 * eye(4).double()[None]])": "an inverse overflows",
        "mix(params | {'0.weight': ones(4, 6).long()}, sym, [eye(4)[None]])": "a dense tensor of",
        "mix({n: t.to('meta') for n, t in params.items()}, sym, [eye(4)[None]])": "a dense tensor",
        "random_mixings(sym, spread=nan)": "`spread` must be at least 0 and finite, got nan",
        "shift(params, sym, [1j * ones(4)])": r"`shifts\[0\]` must be a dense tensor",
        "transform_optimizer_state(with_state(model, torch.optim.LBFGS, old_dirs=[zeros(3)]), live,"
        " Element.identity(sym))": "'old_dirs' of LBFGS does not have the shape of a",
        "Element.of_groups(sym, matrices=[ones(9, 4, 4)])":
            r"`matrices\[0\]` must have shape",
        "Element.random(sym).dual": "`dual`: shifts are not linear maps",
    },
    "rotary half": {
        "mix(params, sym, random_mixings(sym)[:1])": "one tensor per group",
        "mix(params, sym, [torch.diag(torch.tensor([1.0, -1])).expand(4, 2, 2), eye(4).expand(2,"
        " -1, -1)])": "form",
        "mix(params, sym, [eye(2).expand(4, 2, 2), zeros(2, 4, 4)])": "be invertible",
        "mix(params, sym, [eye(2).expand(4, 2, 2), full((2, 4, 4), nan)])": "be finite",
        "mix(params, sym, [eye(2).expand(4, 2, 2), eye(4)])": "must have shape",
        "mix(params, sym, [eye(2).expand(4, 2, 2), eye(4).expand(3, 2, 4, 4)])": "must have shape",
    },
    "stream": {"mix(params, sym, [2 * m for m in random_mixings(sym)])": "be orthogonal"},
    "attention": {
        "shift(params, sym, [zeros(6)])": "`shifts",
        "shift(params, sym, [zeros(6), zeros(5)])": "`shifts",
        "shift(params, sym, [zeros(3, 6)] * 2)": "`shifts",
        "shift(params, sym, [full((6,), nan)] * 2)": "finite",
    },
    "branches, summed": {
        "Element.of_groups(sym, permutations=[arange(g.units).flip(0) for g in sym.permutations])"
        ".on_some({'e.0.0.weight': params['e.0.0.weight']})": "must hold 'e.2.0.weight'",
    },
    "biases of a part": {
        "canonicalise(params, sym)": TWO_FORMS,
        "plan_removal(stack, sym)": TWO_FORMS,
    },
    "running sums": {"canonicalise(params, sym, 'unit-norm')": TWO_FORMS},
    "soft experts": {"canonicalise(params, sym, 'unit-norm')": f"{TWO_FORMS} 'phi'"},
    "linear attention and products": {
        "canonicalise(params, sym, 'unit-norm', mixing='balanced')": f"beside .* {TWO_FORMS}",
    },
    "heads": {
        "balancing_matrices({n: 1e200 * t for n, t in params.items()}, sym)": "in torch.float64",
        "balancing_matrices({n: t[:0] for n, t in stack.items()}, sym)": "got an empty stack",
    },
    "centred": {
        "match_all(one, params, sym, by='both')": "`by` must be one of weights, activations, got",
        "match_all(one, params, sym, **by_data)": "needs `model` and `batches`",
        "match_all(one, params, sym, **by_data, batches=[])": "`batches` is empty",
        "match_all(one, params, sym, **by_data, batches=x)": "put one tensor into a list",
        "match_all(one, params, sym, **by_data, batches=[nan * x])": "activations that are not",
        "match_all(one, params, sym, sweeps=0)": "`sweeps` must be at least 1, got 0",
        "match_all(one, stack, sym)": "`reference` must be one network",
        "learn_match([], one, params, sym, model, pairs)": "`start` must be what `match_all` ret",
        "learn_match(match_all(one, params, sym), one, params, sym, model, pairs[:1])": "at least",
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "call", "sentence"),
    [(name, *row) for name, rows in ROWS.items() for row in rows.items()],
)
def test_a_mistake_is_refused_in_a_sentence(name, call, sentence):
    with pytest.raises((ValueError, UnsupportedModel), match=sentence):
        eval(call, dict(names_of(name)))  # noqa: S307


def test_lists_and_examples_of_another_precision_are_taken():
    n = names_of("mlp")
    lists = [list(range(5)), list(range(4))]
    torch.testing.assert_close(weightsym.permute(n["params"], n["sym"], lists), n["params"])
    assert weightsym.verify(n["model"], n["sym"], X.double()) < 1e-5

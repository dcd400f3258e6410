import itertools

import numpy as np
import pytest
import torch
from cases import CASES
from torch import nn

from lightning_bnn import models
from weightsym import (
    Learning,
    discover,
    interpolate,
    match,
    match_activations,
    match_all,
    permute,
    random_permutations,
)
from weightsym import params as P
from weightsym.matching.activations import activation_tables
from weightsym.matching.frank_wolfe import doubly_stochastic
from weightsym.matching.learned import HalfWay, parted, passed_through
from weightsym.matching.plan import Plan

cross_entropy = nn.functional.cross_entropy


def smooth_optunet():
    """Groups and no dead units, which activations could not tell apart."""
    layers = [nn.Conv2d(1, 2, 4), nn.Tanh(), nn.Conv2d(2, 10, 5, groups=2), nn.Tanh()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(10, 10))


def network(name):
    if name == "smooth optunet":
        return smooth_optunet().double(), torch.randn(8, 1, 12, 12).double()
    if name == "batch norm":
        layers = [nn.Conv2d(2, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.AdaptiveAvgPool2d(1)]
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(5, 3)).double(), torch.randn(
            8, 2, 6, 6
        ).double()
    model, x = next(c for c in CASES if c.name == name).make()
    return model.double(), x.double()


def batches_of(model, params, x, count=3):
    inputs = [torch.randn(8, *x.shape[1:]).to(x) for _ in range(count)]
    outputs = [P.apply(model, params, x) for x in inputs]
    return [
        (x, (y + 0.1 * torch.randn_like(y)).detach()) for x, y in zip(inputs, outputs, strict=True)
    ]


def pair(name):
    """Two networks, one a permutation of the other, with data that the other has labelled."""
    model, x = network(name)
    model.eval()
    sym, params = discover(model, x), P.of(model)
    planted = permute(params, sym, random_permutations(sym))
    data = {"model": model, "batches": batches_of(model, params, x), "loss": nn.MSELoss()}
    return sym, planted, params, data


@pytest.mark.parametrize("name", ["attention", "smooth optunet", "batch norm"])
def test_every_way_recovers_a_planted_permutation(name):
    sym, planted, params, data = pair(name)
    for method in ("activations", "best", "learned"):
        found = match(planted, params, sym, method=method, learning=Learning(steps=2), **data)
        back = found.apply(planted, sym)
        assert all(torch.equal(back[n], params[n]) for n in params), method
        wanted = ("ascent", "frank-wolfe") if method == "best" else (method,)
        assert found.method in wanted
    assert any(not torch.equal(planted[n], params[n]) for n in params)


# ------------------------------------------------------------ activations
def two_mlps():
    a, b = models.mlp(4, [6, 5], 3, nn.Tanh).double(), models.mlp(4, [6, 5], 3, nn.Tanh).double()
    return a, P.of(a), P.of(b), [torch.randn(20, 4).double() + 1 for _ in range(3)]


def hidden(model, params, batches):
    x = torch.tanh(torch.cat(batches) @ params["1.weight"].T + params["1.bias"])
    return x.T.detach().numpy()


def test_what_is_compared_is_what_numpy_computes():
    model, a, b, batches = two_mlps()
    plan = Plan(discover(model, batches[0]))
    ours = activation_tables(plan, model, P.stack([b]), a, batches)[0][0]
    assert np.allclose(ours, hidden(model, a, batches) @ hidden(model, b, batches).T)


def test_the_objective_is_the_sum_over_matched_units_and_the_largest():
    model, a, b, batches = two_mlps()
    sym = discover(model, batches[0])
    measure = hidden(model, a, batches) @ hidden(model, b, batches).T
    found = match(b, a, sym, method="activations", model=model, batches=batches)
    table = activation_tables(Plan(sym), model, P.stack([b]), a, batches)[1][0]
    best = max(measure[range(6), p].sum() for p in itertools.permutations(range(6)))
    top = max(table[range(5), p].sum() for p in itertools.permutations(range(5)))
    assert measure[range(6), found[0]].sum() == pytest.approx(best)
    assert float(found.objective) == pytest.approx(best + float(top))


def test_one_name_for_the_old_function():
    model, a, b, batches = two_mlps()
    sym = discover(model, batches[0])
    stack = P.stack([b, a])
    found = match(stack, a, sym, method="activations", model=model, batches=batches)
    old = match_activations(model, stack, a, sym, batches)
    assert all(torch.equal(p, q) for p, q in zip(found, old, strict=True))
    assert found.objective.shape == (2,)
    assert found.method == ("activations", "activations")
    assert torch.equal(found[0][1], torch.arange(6))


# ------------------------------------------------------------ what learns
def learning_pair(seed=0):
    torch.manual_seed(seed)
    model = models.mlp(3, [4, 4], 2).double()
    a, b = P.of(model), P.of(models.mlp(3, [4, 4], 2).double())
    sym = discover(model, torch.randn(1, 3).double())
    batches = [
        (x := torch.randn(16, 3).double(), (P.apply(model, a, x).argmax(1))) for _ in range(6)
    ]
    return model, {n: 3 * t.detach() for n, t in a.items()}, b, sym, batches


def test_the_gradient_that_is_passed_through_is_that_of_the_midpoint():
    model, a, b, sym, batches = learning_pair()
    permutations = random_permutations(sym, members=2)
    half_way, names = HalfWay(model, a, cross_entropy, batches), Plan(sym).compared
    network = permute(P.stack([b, a]), sym, permutations)
    free = {n: torch.zeros_like(network[n]).requires_grad_() for n in names}
    stack = {n: passed_through(t, free[n]) if n in free else t for n, t in network.items()}
    losses = half_way.losses(stack, batches[0])
    found = dict(zip(names, torch.autograd.grad(losses.sum(), list(free.values())), strict=True))
    moved = permute(b, sym, [p[0] for p in permutations])
    x, y = batches[0]

    def loss(name, index, step):
        changed = {n: t.detach().clone() for n, t in moved.items()}
        changed[name].view(-1)[index] += step
        return float(cross_entropy(P.apply(model, interpolate(a, changed, 0.5), x), y))

    for name in names:
        for index in range(moved[name].numel()):
            slope = (loss(name, index, 1e-5) - loss(name, index, -1e-5)) / 2e-5
            assert float(found[name][0].reshape(-1)[index]) == pytest.approx(slope, abs=1e-7)


def judge(model, reference, batches, settings):
    """Losses half way on the batches that `match` holds back."""
    return HalfWay(model, reference, cross_entropy, parted(batches, settings.held_back, 0)[1]).judge


def test_learning_never_does_worse_than_its_start():
    model, a, b, sym, batches = learning_pair()
    settings, method = Learning(steps=10, every=2, rate=0.1), "learned"
    data = {"model": model, "batches": batches, "loss": cross_entropy, "learning": settings}
    stack = P.stack([b, P.of(models.mlp(3, [4, 4], 2).double())])
    found = match(stack, a, sym, method=method, **data)
    judged = judge(model, a, batches, settings)
    after = judged(found.apply(stack, sym))
    start = match(stack, a, sym, **data)
    other = match(stack, a, sym, method="activations", **data)
    before = torch.minimum(*(judged(s.apply(stack, sym)) for s in (start, other)))
    assert torch.allclose(found.objective, -after)
    assert bool((after <= before).all())
    again = match(stack, a, sym, method=method, **data)
    assert all(torch.equal(p, q) for p, q in zip(found, again, strict=True))


def test_learning_reaches_a_midpoint_that_weights_do_not():
    """The best of all permutations, by brute force over both groups, is nearer than the start."""
    model, a, b, sym, batches = learning_pair()
    settings = Learning(steps=60, every=1, rate=0.1)
    data = {"model": model, "batches": batches, "loss": cross_entropy, "learning": settings}
    found = match(b, a, sym, method="learned", **data)
    judged = judge(model, a, batches, settings)
    every = list(itertools.product(itertools.permutations(range(4)), repeat=2))
    orders = [torch.tensor([pair[g] for pair in every]) for g in range(2)]
    stack = {n: t.expand(len(every), *t.shape) for n, t in b.items()}
    best = -judged(permute(stack, sym, orders)).min()
    start = match(b, a, sym)
    first = -judged(P.stack([start.apply(b, sym)]))[0]
    assert first < found.objective <= best + 1e-12


def test_the_networks_and_data_are_left_alone():
    model, a, b, sym, batches = learning_pair()
    before = {n: t.clone() for n, t in model.state_dict().items()}
    mode, ends = model.training, [{n: t.clone() for n, t in w.items()} for w in (a, b)]
    for method in ("learned", "activations"):
        settings = Learning(steps=2)
        match(
            b,
            a,
            sym,
            method=method,
            model=model,
            batches=batches,
            loss=cross_entropy,
            learning=settings,
        )
    assert model.training == mode
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert all(
        torch.equal(w[n], t) for w, end in zip((a, b), ends, strict=True) for n, t in end.items()
    )
    assert not any(t.requires_grad and t.grad is not None for t in model.parameters())


# ------------------------------------------------------------ matrices
def test_matrices_are_doubly_stochastic_also_where_logits_are_large():
    logits = 100 * torch.randn(3, 5, 5, dtype=torch.float64)
    p = doubly_stochastic(logits, 2000)
    assert torch.allclose(p.sum(1), torch.ones(3, 5).double(), atol=1e-6)
    assert torch.allclose(p.sum(2), torch.ones(3, 5).double(), atol=1e-2)
    assert bool(p.isfinite().all())
    assert bool((p >= 0).all())
    plain = logits[0].div(100).exp()
    for _ in range(20):
        plain = plain / plain.sum(1, keepdim=True)
        plain = plain / plain.sum(0)
    assert torch.allclose(doubly_stochastic(logits[0] / 100, 20), plain)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("method", ["activations", "learned"])
def test_inputs_are_cast_to_the_precision_of_weights_and_half_is_learned_in_float32(method, dtype):
    sym, planted, params, data = pair("smooth optunet")
    one, other = ({n: t.to(dtype) for n, t in w.items()} for w in (planted, params))
    data["batches"] = [(x.float(), y.to(dtype)) for x, y in data["batches"]]
    learning = Learning(steps=3, every=1)
    if method == "activations":
        found = match(one, other, sym, method=method, model=data["model"], batches=data["batches"])
    else:
        found = match(one, other, sym, method=method, learning=learning, **data)
    moved = found.apply(one, sym)
    assert all(torch.equal(moved[n], other[n]) for n in other)


def test_matrices_by_activations_take_inputs_of_another_precision():
    model = nn.TransformerEncoderLayer(8, 2, 6, dropout=0.0, batch_first=True)
    x = torch.randn(4, 5, 8)
    sym, params = discover(model.eval(), x), P.of(model)
    double = {n: t.double() for n, t in params.items()}
    how = {"model": model, "by": "activations"}
    one, two = (match_all(double, double, sym, batches=[v], **how) for v in (x, x.double()))
    assert all(torch.equal(p, q) for p, q in zip(one.permutations, two.permutations, strict=True))


# ------------------------------------------------------------ weights and activations together
def test_ascent_from_activations_is_a_further_start_of_best():
    methods = set()
    for seed in range(8):
        torch.manual_seed(seed)
        nets = [models.mlp(6, [8, 8, 8], 3) for _ in range(2)]
        sym, (a, b) = discover(nets[0], torch.randn(1, 6)), map(P.of, nets)
        data = {"model": nets[0], "batches": [torch.randn(30, 6)]}
        plain, more = match(b, a, sym), match(b, a, sym, **data)
        assert more.objective >= plain.objective - 1e-6
        methods.add(more.method)
    assert "ascent from activations" in methods


# ------------------------------------------------------------ bad input
@pytest.mark.bad_input
def test_errors():
    model, a, b, sym, batches = learning_pair()
    both = {"model": model, "batches": batches}
    for method in ("activations", "learned"):
        with pytest.raises(ValueError, match="`model` and `batches` must both be given for meth"):
            match(b, a, sym, method=method, model=model)
        with pytest.raises(ValueError, match="`signs` must be False"):
            match(b, a, sym, method=method, signs=True, **both)
    with pytest.raises(ValueError, match="both be given for method 'best'"):
        match(b, a, sym, batches=batches)
    with pytest.raises(ValueError, match="`loss` must be given for method 'learned'"):
        match(b, a, sym, method="learned", **both)
    learn = {"method": "learned", "model": model, "loss": cross_entropy}
    for wrong in (batches[:1], iter(batches), torch.randn(4, 3)):
        with pytest.raises(ValueError, match="must be a list of at least two|put one tensor into"):
            match(b, a, sym, batches=wrong, **learn)
    with pytest.raises(ValueError, match=r"must hold \(input, target\) pairs"):
        match(b, a, sym, batches=[x for x, _ in batches], **learn)
    with pytest.raises(ValueError, match="`batches` lead to activations that are NaN"):
        match(b, a, sym, method="activations", model=model, batches=[batches[0][0] * torch.nan])
    with pytest.raises(ValueError, match="`batches` holds an empty batch"):
        match(b, a, sym, method="activations", model=model, batches=[batches[0][0][:0]])
    with pytest.raises(ValueError, match="`loss` is NaN or infinite at the midpoint"):
        match(b, a, sym, **{**learn, "loss": lambda o, y: o.sum() * torch.nan}, batches=batches)
    with pytest.raises(ValueError, match="`params` must hold all tensors of the network"):
        match(
            b,
            a,
            sym,
            method="activations",
            model=nn.Sequential(model, nn.Linear(2, 2)),
            batches=batches,
        )
    with pytest.raises(ValueError, match="must be one of best, ascent, frank-wolfe, activ"):
        match(b, a, sym, method="nearest")
    for options, message in (
        ({"steps": 0}, "`steps` must be at least 1, got 0"),
        ({"held_back": 1.0}, "`held_back` must be between 0 and 1, got 1.0"),
        ({"rate": float("nan")}, "`rate` must be positive, got nan"),
    ):
        with pytest.raises(ValueError, match=message):
            Learning(**options)

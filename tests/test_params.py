import logging

import pytest
import torch
from cases import Forward
from known_networks import NETWORKS
from refusals import refuses
from scipy.stats import ks_2samp
from torch import nn

from lightning_bnn import models
from weightsym import discover, permute, random_permutations
from weightsym import params as P


def conv_net():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3)
    )


SYM = discover(conv_net().eval(), torch.randn(4, 1, 8, 8))
NETS = {
    "mlp": (lambda: models.mlp(6, [5], 3), (8, 6)),
    "tanh mlp": (lambda: models.mlp(6, [5, 4], 3, nn.Tanh), (8, 6)),
    "batch norm": (conv_net, (8, 1, 8, 8)),
    "optunet": (models.optunet, (4, 1, 28, 28)),
}


def test_of_names_shared_tensors_once_and_copies_nothing():
    model = Forward(lambda s, x: x, a=nn.Linear(2, 2), b=nn.Linear(2, 2), n=nn.BatchNorm1d(2))
    model.b.weight = model.a.weight
    model.register_buffer("hidden", torch.ones(1), persistent=False)
    params = P.of(model)
    assert list(params) == [
        "a.weight", "a.bias", "b.bias", "n.weight", "n.bias",
        "n.running_mean", "n.running_var", "n.num_batches_tracked",
    ]  # fmt: skip
    assert params["a.weight"].data_ptr() == model.a.weight.data_ptr()
    assert not params["a.weight"].requires_grad


def test_stack_and_unstack_are_inverse():
    networks = [P.of(conv_net()) for _ in range(3)]
    stacked = P.stack(networks)
    assert P.stack_size(stacked) == 3
    assert P.is_stacked(stacked, networks[0])
    assert not P.is_stacked(networks[0], networks[0])
    for before, after in zip(networks, P.unstack(stacked), strict=True):
        assert all(torch.equal(before[n], after[n]) for n in before)


@pytest.mark.parametrize("stacked", [False, True])
def test_ravel_and_unravel_are_inverse_and_leave_statistics_out(stacked):
    params = P.populate(conv_net(), 4) if stacked else P.of(conv_net())
    vector, spec = P.ravel(params, stacked=stacked)
    weights = sum(p.numel() for p in conv_net().parameters())
    assert vector.shape == ((4, weights) if stacked else (weights,))
    back = P.unravel(vector, spec)
    assert not any("running" in n or "tracked" in n for n in back)
    assert all(torch.equal(back[n], params[n]) for n in back)


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("chunk_size", [None, 1, 2])
def test_apply_on_a_stack_is_apply_on_every_member(name, chunk_size):
    build, shape = NETS[name]
    model, x = build().double().eval(), torch.randn(shape).double()
    stack = P.populate(model, 5)
    out = P.apply(model, stack, x, chunk_size=chunk_size)
    for k, member in enumerate(P.unstack(stack)):
        alone = build().double().eval()
        alone.load_state_dict(member)
        torch.testing.assert_close(out[k], alone(x), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(P.apply(model, member, x), alone(x), rtol=0, atol=0)


@pytest.mark.parametrize("mode", ["all", "norm", "none"])
@pytest.mark.parametrize("kind", ["one", "stack", "each"])
def test_training_changes_statistics_of_these_networks_only(kind, mode):
    """Not those of the module, nor of networks that share tensors, as those of actions do."""
    model, x = conv_net().train(mode == "all"), torch.randn(3, 4, 1, 8, 8)
    model[1].train(mode != "none")
    params = P.of(model) if kind == "one" else P.populate(model, 3)
    other = permute(params, SYM, random_permutations(SYM))
    before = [{n: t.clone() for n, t in state.items()} for state in (model.state_dict(), other)]
    if kind == "each":
        P.apply_each(model, params, x)
    else:
        P.apply(model, params, x[0])
    for state, expected in zip((model.state_dict(), other), before, strict=True):
        assert all(torch.equal(expected[n], t) for n, t in state.items())
    assert bool((params["1.num_batches_tracked"] == int(mode != "none")).all())
    moved = (params["1.running_mean"] != before[0]["1.running_mean"]).any()
    assert bool(moved) == (mode != "none")


def data_dependent(s, x):
    return s.a(x) if bool(s.a.weight.sum() > 0) else -s.a(x)


@pytest.mark.parametrize("kind", ["lstm", "control flow"])
def test_apply_falls_back_where_vmap_cannot_go(kind, caplog):
    if kind == "lstm":
        model = Forward(
            lambda s, x: s.b(s.a(x)[0][:, -1]), a=nn.LSTM(3, 4, batch_first=True), b=nn.Linear(4, 2)
        )
        x = torch.randn(2, 5, 3)
    else:
        model, x = Forward(data_dependent, a=nn.Linear(3, 2)), torch.randn(2, 3)
    stack = P.populate(model, 4)
    with caplog.at_level(logging.INFO, logger="weightsym"):
        out = P.apply(model, stack, x)
        P.apply(model, stack, x)
    assert len([r for r in caplog.records if "cannot run under vmap" in r.message]) == 1
    for k, member in enumerate(P.unstack(stack)):
        torch.testing.assert_close(out[k], torch.func.functional_call(model, member, (x,)))


def test_stacked_copy_keeps_the_names():
    model = conv_net()
    stack = P.populate(model, 3)
    copy = P.stacked_copy(model, stack)
    assert list(copy.state_dict()) == list(model.state_dict())
    assert all(torch.equal(t, stack[n]) for n, t in P.of(copy).items())
    assert [n for n, _ in copy.named_parameters()] == [n for n, _ in model.named_parameters()]


# ------------------------------------------------------------ populate
def test_populate_draws_every_member_anew_and_repeats_with_its_generator():
    model = conv_net()
    before = {n: t.clone() for n, t in model.state_dict().items()}
    one = P.populate(model, 4, torch.Generator().manual_seed(3))
    state = torch.get_rng_state()
    two = P.populate(model, 4, torch.Generator().manual_seed(3))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(one[n], two[n]) for n in one)
    assert not torch.equal(one["0.weight"][0], one["0.weight"][1])
    bound = 1 / 3
    assert one["0.weight"].abs().max() <= bound
    assert one["0.weight"].std() == pytest.approx(bound / 3**0.5, rel=0.1)
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())


class ByHand(torch.nn.Module):
    """Draws with Python's numbers, which ``vmap`` cannot."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(4))

    def reset_parameters(self):
        with torch.no_grad():
            self.weight.copy_(torch.tensor([float(torch.rand(())) for _ in range(4)]))


SMALL = {
    "perceptron": lambda: models.mlp(2, [2], 1),
    "optunet": models.optunet,
    "normalised": lambda: torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3)),
    "by hand": ByHand,
    "large": lambda: torch.nn.Linear(300, 300),
}


@pytest.mark.parametrize("name", SMALL)
def test_a_member_is_the_same_whatever_else_is_drawn(name):
    model = SMALL[name]()
    whole = P.populate(model, 300 if name != "large" else 5, torch.Generator().manual_seed(0))
    for first, last in ((0, 1), (2, 5), (1, 4), (250, 300)):
        if last <= P.stack_size(whole):
            part = P.populate(model, last - first, torch.Generator().manual_seed(0), first)
            assert all(torch.equal(t, whole[n][first:last]) for n, t in part.items())


@pytest.mark.parametrize("name", [n for n in SMALL if n != "large"])
def test_drawing_many_at_once_has_the_distribution_of_one_by_one(name):
    torch.manual_seed(0)
    model, alone = SMALL[name](), []
    together = P.populate(model, 600, torch.Generator().manual_seed(0))
    for _ in range(600):
        for child in model.modules():
            if hasattr(child, "reset_parameters"):
                child.reset_parameters()
        alone.append({n: t.clone() for n, t in P.of(model).items()})
    for key, tensor in P.stack(alone).items():
        ours, theirs = (t.reshape(600, -1).double() for t in (together[key], tensor))
        if theirs.unique().numel() == 1:
            assert torch.equal(ours, theirs)
            continue
        assert ks_2samp(ours[:, 0], theirs[:, 0]).pvalue > 1e-4
        assert ours[:, 0].unique().numel() > 595  # single numbers of 24 bits may coincide
        if ours.shape[1] > 1:  # weights of one member do not go together
            assert abs(torch.corrcoef(ours[:, :2].T)[0, 1]) < 0.2


@pytest.mark.parametrize("name", ["tied transformer", "recurrent"])
def test_populate_reaches_every_weight_or_warns(name, caplog):
    stack = P.populate(NETWORKS[name].build(), 2)
    constant = [n for n, t in stack.items() if t.is_floating_point() and torch.equal(t[0], t[1])]
    known = [n for n in constant if n.endswith("bias") or stack[n].eq(1).all()]
    warned = caplog.records[0].args[0].split(", ") if caplog.records else []
    assert sorted(set(constant) - set(known)) == sorted(warned)


# ------------------------------------------------------------ errors
MODEL = models.mlp(6, [5], 3)
PARAMS, INPUT = P.of(MODEL), torch.randn(2, 6)
WITHOUT = {n: t for n, t in PARAMS.items() if n != "1.bias"}
ARRAYS = {n: t.numpy() for n, t in PARAMS.items()}
TURNED = PARAMS | {"1.weight": PARAMS["1.weight"].T}
ONE_STACKED = PARAMS | {"1.weight": PARAMS["1.weight"][None]}
test_errors_say_what_is_wrong = refuses(
    (lambda: P.stack([]), "at least one network"),
    (lambda: P.stack([PARAMS, WITHOUT]), r"`networks\[1\]` has different names.*: '1.bias'"),
    (lambda: P.stack([PARAMS, ARRAYS]), r"`networks\[1\]` must be a .*, got a dict of ndarray"),
    (lambda: P.stack_size(PARAMS), "not a stack"),
    (lambda: P.apply(MODEL, WITHOUT, INPUT), r"lacks '1.bias' \(and 0 more\) of Sequential"),
    (lambda: P.apply(MODEL, TURNED, INPUT), r"has shape \(6, 5\), but the network has \(5, 6\)"),
    (lambda: P.apply(MODEL, ONE_STACKED, INPUT), "Some tensors of `params` are stacked"),
    (lambda: P.apply(MODEL, PARAMS, INPUT, chunk_size=0), "`chunk_size` must be at least 1, got 0"),
    (lambda: P.populate(MODEL, 0), "`members` must be at least 1, got 0"),
)

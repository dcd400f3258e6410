"""The relation of two networks: verdicts for all known networks, and laws of the probabilities."""

import copy
import itertools
import math
import os
from pathlib import Path

import pytest
import scipy.stats
import torch
from checked_symmetries import furthest, seeded
from known_networks import NETWORKS, ORDERED, REPEATED
from test_likeness import marked, narrow, no_symmetry_changes_it
from test_matching import noisy
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from lightning_bnn import models
from lightning_bnn.datamodules import Digits
from weightsym import (
    Element,
    SharedUnits,
    discover,
    kinship,
    likeness,
    match,
    parents_of,
    permute,
    random_permutations,
    relation,
)
from weightsym import params as P
from weightsym.discovery.folding import fold_networks
from weightsym.matching.relation import (
    EXCESS,
    bounds_of_runs,
    law_of_fixed_points,
    p_agreeing,
    p_in_place,
)
from weightsym.matching.shapes import longest_run


def verdicts(networks, goal, sym):
    return [relation(network, goal, sym).verdict for network in networks]


# ------------------------------------------------------------ all known networks
STUCK, FREE = "matching ends in another order", "the size of a whole tensor is free"
LIMITS = {
    "experts with a norm inside": STUCK,
    "addbmm": STUCK,
    "complex numbers turned by learned angles": STUCK,
    "a weight made by the input": FREE,
    "unit rows of a product": FREE,
    "normalised tensor": FREE,
    "soft experts": FREE,
}
"""Networks whose copies are not brought back exactly, and why; none is called independent."""


@pytest.mark.parametrize("name", map(marked, ORDERED))
def test_copies_are_related_and_independent_networks_are_not(name):
    """Copies that are moved, and of every third network those with noise, and independent ones.

    Of repeated networks only the likeness is looked at.
    """
    model, _, sym = NETWORKS[name].known()
    params = P.of(model)
    with pytest.MonkeyPatch.context() as patch:
        narrow(patch)
        no_symmetry_changes_it({n: t.double() for n, t in params.items()}, sym)
    if name in REPEATED or not any(group.units > 1 for group in sym.permutations):
        return
    copy = Element.random(sym, seeded(3))(params)
    moved = relation(copy, params, sym).verdict
    assert moved in (("made from it", "cannot be told") if name in LIMITS else ("same function",))
    if ORDERED.index(name) % 3:
        return
    other = P.of(NETWORKS[name].made(11)[0]) | sym.constants
    rough, apart = verdicts((noisy(copy, 0.05) | sym.constants, other), params, sym)
    assert rough in ("made from it", "cannot be told")
    assert apart in ("independent", "cannot be told")


# ------------------------------------------------------------ trained networks
def trained(network, data, seed=0, epochs=12, rate=3e-3, loss=cross_entropy):
    """Train a copy, in batches whose order the seed decides."""
    inputs, targets = data
    optimizer, generator = torch.optim.Adam(network.parameters(), rate), seeded(seed)
    for _ in range(epochs):
        for k in torch.randperm(len(inputs), generator=generator).split(64):
            optimizer.zero_grad()
            loss(network(inputs[k]), targets[k]).backward()
            optimizer.step()
    return P.of(network)


def started(seed):
    torch.manual_seed(seed)
    return models.mlp(64, [64, 64], 10)


def continued(params, data, **more):
    network = started(0)
    network.load_state_dict(params)
    return trained(network, data, **more)


@pytest.fixture(scope="module")
def digits():
    source = Digits()
    inputs, labels = source.load().train
    return source.normalise(inputs).flatten(1), labels


@pytest.fixture(scope="module")
def siblings(digits):
    """Eight networks of one recipe and the same data, and their symmetries."""
    networks = [{n: t.clone() for n, t in trained(started(s), digits, s).items()} for s in range(8)]
    return networks, discover(started(0), digits[0][:2])


@pytest.fixture(scope="module")
def pairs(siblings):
    networks, sym = siblings
    return [relation(a, b, sym) for a, b in itertools.combinations(networks, 2)]


def pruned(w, share=0.8):
    least = w.abs().flatten().kthvalue(int(share * w.numel())).values
    return torch.where(w.abs() > least, w, 0.0)


def rounded(w, levels=7):
    step = w.abs().max() / levels
    return (w / step).round() * step


def of_matrices(change, params):
    return {n: change(t) if t.ndim > 1 else t for n, t in params.items()}


CHILDREN = {
    "tuned": lambda a, b, data: continued(a, (data[0], (data[1] + 3) % 10)),
    "continued": lambda a, b, data: continued(a, data, seed=1),
    "pruned": lambda a, b, data: of_matrices(pruned, a),
    "rounded": lambda a, b, data: of_matrices(rounded, a),
    "merged": lambda a, b, data: {n: (t + b[n]) / 2 for n, t in a.items()},
}


def uniform(found, generator):
    """By group the probability of as many fixed points, made continuous by a random share."""
    for group in found.groups:
        law = law_of_fixed_points(group.units)
        share = float(torch.rand((), generator=generator))
        yield law[group.in_place + 1 :].sum() + share * law[group.in_place]


def test_places_of_independent_networks_are_uniform(pairs, siblings):
    generator = seeded()
    values = [u for found in pairs for u in uniform(found, generator)]
    assert scipy.stats.kstest(values, "uniform").pvalue > 0.05
    counts = torch.tensor([g.in_place for found in pairs for g in found.groups]).double()
    assert float(counts.mean()) == pytest.approx(1, abs=0.35)
    assert float(counts.var()) == pytest.approx(1, abs=0.6)
    networks, sym = siblings
    same = [relation(noisy(w, 0.5), w, sym) for w in networks[:4]]  # units keep their places
    values = [u for found in same for u in uniform(found, generator)]
    assert scipy.stats.kstest(values, "uniform").pvalue < 1e-6


def test_independent_networks_agree_in_fewer_units_than_the_calibration_allows(pairs):
    shares = [g.agreeing / g.units for found in pairs for g in found.groups]
    assert sum(shares) / len(shares) < 3 / 64
    assert max(shares) < 0.6 * EXCESS
    assert {found.verdict for found in pairs} == {"independent"}
    assert min(min(found.p_robust, found.p_close) for found in pairs) == 1


@pytest.mark.parametrize("name", CHILDREN)
def test_children_are_told_and_no_symmetry_hides_them(name, siblings, digits):
    (a, b, *_), sym = siblings
    child = CHILDREN[name](a, b, digits)
    found = relation(child, a, sym)
    assert found.verdict == "made from it"
    assert max(found.p_exact, found.p_robust) < 1e-8
    assert min(found.p_exact, found.p_robust, found.p_close) > 0
    attacked = relation(Element.random(sym, seeded(4))(child), a, sym)
    assert attacked.verdict == "made from it"
    assert attacked.p_exact > 1e-3  # no unit is in its place
    assert [g.agreeing for g in attacked.groups] == pytest.approx(
        [g.agreeing for g in found.groups], abs=1
    )
    assert attacked.difference.rest == pytest.approx(found.difference.rest, rel=1e-3)


def test_a_network_that_learnt_from_outputs_is_not_made_from_another(siblings, digits):
    (a, *_), sym = siblings
    inputs, _ = digits
    taught = continued(a, digits, epochs=0), started(9)
    outputs = P.apply(taught[1], taught[0], inputs).detach()
    student = trained(taught[1], (inputs, outputs), epochs=30, loss=mse_loss)
    found = relation(student, a, sym)
    assert found.verdict == "independent"
    assert found.p_robust == 1
    assert found.p_exact > 1e-3


# ------------------------------------------------------------ weights of parents
def test_a_merged_network_has_the_weights_of_its_parents(siblings, digits):
    (a, b, c, *_), sym = siblings
    beside = match(b, a, sym, signs=True).element(b)
    other = (digits[0], (digits[1] + 3) % 10)
    tuned = [continued(a, data, seed=seed, epochs=4) for seed, data in ((1, digits), (2, other))]
    for parents in ((a, beside), tuned):
        child = {n: 0.3 * x + 0.7 * parents[1][n] for n, x in parents[0].items()}
        order = random_permutations(sym, seeded(1))
        for moved, error in ((permute(child, sym, order), 1e-4),
                             (Element.random(sym, seeded(2))(child), 0.02)):  # fmt: skip
            found = parents_of(moved, [*parents, c], sym)
            assert found.weights == pytest.approx((0.3, 0.7, 0), abs=error)
            assert found.rest < 0.06
            assert all(w == pytest.approx((0.3, 0.7, 0), abs=0.1) for w in found.by_layer.values())
    alone = parents_of(c, [a, b], sym)
    assert alone.rest > 0.5
    assert max(alone.weights) < 0.5


@pytest.mark.bad_input
def test_parents_are_needed(siblings):
    (a, *_), sym = siblings
    with pytest.raises(ValueError, match="`candidates` must hold at least one network"):
        parents_of(a, [], sym)


# ------------------------------------------------------------ probabilities
@pytest.mark.parametrize("units", range(1, 7))
def test_fixed_points_are_those_of_all_permutations(units):
    every = list(itertools.permutations(range(units)))
    fixed = [sum(i == k for i, k in enumerate(order)) for order in every]
    law = law_of_fixed_points(units)
    assert law == pytest.approx([fixed.count(k) / len(every) for k in range(units + 1)])
    assert all(law[k:].sum() <= 1 / math.factorial(k) + 1e-12 for k in range(units + 1))


def test_many_units_have_the_law_of_poisson():
    law = law_of_fixed_points(4096)
    assert law[:20] == pytest.approx(scipy.stats.poisson.pmf(range(20), 1))
    assert law.sum() == pytest.approx(1)


def places(*counts, among=None):
    return [SharedUnits("w", units, fixed, None, among) for units, fixed in counts]


def test_places_count_in_one_group_and_in_all():
    mixed = places((8, 8), *[(8, 1)] * 60)
    assert p_in_place(mixed) == pytest.approx(2 * 61 / math.factorial(8))
    assert p_in_place(places(*[(8, 3)] * 20)) < 1e-9 < p_in_place(places((8, 3)))
    assert p_in_place(places(*[(8, 1)] * 20)) == p_in_place([]) == 1
    assert p_in_place(places((2000, 1500))) == pytest.approx(0, abs=1e-300)


@pytest.mark.parametrize("units", range(2, 7))
def test_runs_in_order_are_bounded_by_those_of_all_permutations(units):
    every = [torch.tensor(order) for order in itertools.permutations(range(units))]
    runs = [longest_run(order) for order in every]
    brute = [
        max(k for k in range(units + 1) for some in itertools.combinations(order.tolist(), k)
            if list(some) == sorted(some)) for order in every[::7]
    ]  # fmt: skip
    assert runs[::7] == brute
    for k, bound in enumerate(bounds_of_runs(units)):
        assert sum(run >= k for run in runs) / len(every) <= bound + 1e-12
    assert bounds_of_runs(units)[units] == pytest.approx(1 / math.factorial(units))
    assert (
        p_in_place(places((40, 40), among=64)) < 1e-47 < 1 == p_in_place(places((40, 13), among=64))
    )


def test_agreements_are_bounded_by_binomial_tails():
    """A group of many units, of which each agrees with the probability that is allowed."""
    units = 400
    rate = EXCESS + 1 / units
    for agreeing in range(0, units + 1, 20):
        exact = float(scipy.stats.binom.sf(agreeing - 1, units, rate))
        assert p_agreeing([(units, agreeing)]) >= min(1, exact)
    assert p_agreeing([(units, 300)]) < 1e-20
    assert p_agreeing([]) == 1


class States(nn.Module):
    """Decaying sums with rates that all networks begin with, one for each state, as in Mamba."""

    def __init__(self, states=16):
        super().__init__()
        self.read, self.write = nn.Linear(12, states), nn.Linear(states, 12)
        self.rates = nn.Parameter(torch.arange(1.0, states + 1).log())

    def forward(self, x):
        decay = (-self.rates.exp()[:, None] * torch.arange(x.shape[1]) / 8).exp()
        return self.write(torch.einsum("btn,nt->bn", self.read(x), decay))


def test_units_that_all_networks_sort_alike_are_not_counted_in_their_places():
    """Rates in a common order say nothing; without it, units in their places tell."""
    torch.manual_seed(0)
    x, nets = torch.randn(3, 5, 12), [States(), States()]
    for net in nets:
        net.rates.data += 0.02 * torch.randn(16)
    sym, (a, b) = discover(nets[0], x), map(P.of, nets)
    found = relation(a, b, sym)
    assert [(g.units, g.in_place) for g in found.groups] == [(16, None)]
    assert found.p_exact == 1
    assert found.verdict != "made from it"
    mixed = Element.random(sym, seeded(1))
    same_order = [mixed(w) for w in (noisy(a, 0.05), a)]
    assert relation(*same_order, sym).p_exact < 1e-10


class NormAfter(nn.Module):
    """Norms behind the sums of a stream, as in BERT: they turn the sign of a whole stream."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(3))
        self.ups, self.downs = (
            nn.ModuleList(nn.Linear(*size) for _ in range(2)) for size in ((16, 32), (32, 16))
        )

    def forward(self, x):
        x = self.norms[0](x)
        for up, down, norm in zip(self.ups, self.downs, self.norms[1:], strict=True):
            x = norm(x + down(up(x).relu()))
        return x


def test_units_are_found_that_read_a_stream_of_unknown_sign():
    torch.manual_seed(0)
    net = NormAfter()
    for p in net.parameters():
        p.data += 0.1 * torch.randn_like(p)
    sym, w = discover(net, torch.randn(4, 16)), P.of(net)
    assert any(group.units == 1 for group in sym.signs)
    child = noisy(w, 0.05)
    for seed in range(4):
        found = relation(Element.random(sym, seeded(seed))(child), w, sym)
        assert [(g.units, g.agreeing) for g in found.groups] == [(32, 32)] * 2


def test_small_networks_cannot_be_told():
    torch.manual_seed(0)
    nets = [nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double() for _ in range(2)]
    sym = discover(nets[0], torch.randn(4, 2).double())
    a, b = map(P.of, nets)
    moved = Element.random(sym, seeded())(a)
    assert verdicts((a, moved, b), a, sym) == ["same function"] * 2 + ["cannot be told"]


# ------------------------------------------------------------ a real language model
def llamas():
    """A trained Llama, a copy that was trained on, and an untrained one, with folded norms."""
    transformers = pytest.importorskip("transformers")
    folder = Path(os.environ.get("LIGHTNING_BNN_DATA", "data")) / "llama2c"
    if not folder.exists():
        pytest.skip(f"{folder} is not there")
    torch.manual_seed(0)
    make = transformers.LlamaForCausalLM
    config = transformers.LlamaConfig.from_pretrained(folder, tie_word_embeddings=False)
    first = make.from_pretrained(folder, config=config)
    with torch.no_grad():
        first.lm_head.weight.copy_(first.model.embed_tokens.weight)
    tuned = copy.deepcopy(first)
    optimizer = torch.optim.AdamW(tuned.parameters(), lr=1e-3)
    for _ in range(20):
        tokens = torch.randint(config.vocab_size, (4, 32))
        optimizer.zero_grad()
        tuned(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
    networks = [Logits(m).eval() for m in (first, tuned, make(config))]
    example = torch.randint(config.vocab_size, (1, 8))
    model, params = fold_networks(networks[0], [P.of(m) for m in networks], example)
    return discover(model, example), params


class Logits(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens):
        return self.model(input_ids=tokens, use_cache=False).logits


@pytest.mark.e2e
def test_no_symmetry_hides_what_a_llama_was_made_from():
    sym, (first, tuned, other) = llamas()
    attack = Element.random(sym, seeded(3))
    assert furthest(attack(first), first) > 0.1
    assert relation(attack(first), first, sym).verdict == "same function"
    found = [relation(network, first, sym) for network in (tuned, attack(tuned))]
    assert [r.verdict for r in found] == ["made from it"] * 2
    plain, attacked = (r.difference.rest for r in found)
    assert 0.01 < plain < 0.1
    assert attacked == pytest.approx(plain, rel=0.02)
    assert relation(attack(other), first, sym).verdict == "independent"
    kin = kinship([likeness(w, sym) for w in (first, attack(tuned), attack(other))])
    assert kin[0, 1] > 0.99
    assert kin[:2, 2].abs().max() < 0.1


# ------------------------------------------------------------ large groups
def test_a_child_with_much_noise_keeps_the_places_of_many_units():
    """Hardly any are found twice; large groups are then matched in part, which is enough."""
    net = nn.Sequential(nn.Linear(64, 1100), nn.ReLU(), nn.Linear(1100, 64))
    sym = discover(net, torch.randn(8, 64, generator=seeded()))
    parent, stranger = P.unstack(P.populate(net, 2))
    found, other = (relation(w, parent, sym) for w in (noisy(parent, 3.0), stranger))
    (units,) = found.groups
    assert units.agreeing < 26
    assert 100 < units.in_place < 520
    assert found.p_exact < 1e-9
    assert [found.verdict, other.verdict] == ["made from it", "independent"]

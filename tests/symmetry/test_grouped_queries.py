"""Heads that share keys: every way of matching finds a planted element."""

import pytest
import torch
from checked_symmetries import furthest
from mixing_networks import Decoder

from weightsym import (
    average,
    discover,
    match,
    match_activations,
    match_all,
    mix,
    permute,
    random_mixings,
    random_permutations,
)
from weightsym import params as P

TOKENS = torch.randint(0, 20, (6, 10), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module", params=[0, 4], ids=["plain", "rotary"])
def grouped(request):
    """A network whose eight heads share two pairs of keys and values, and its symmetries."""
    torch.manual_seed(0)
    model = Decoder(d=32, heads=8, groups=2, rotary=request.param, vocab=20).double().eval()
    params = {n: t + 0.1 * torch.randn_like(t) for n, t in P.of(model).items()}
    return model, discover(model, TOKENS), params


def planted(sym, params, seed, mixing):
    generator = torch.Generator().manual_seed(seed)
    moved = permute(params, sym, random_permutations(sym, generator))
    return mix(moved, sym, random_mixings(sym, generator)) if mixing else moved


WAYS = {
    "weights": (False, lambda m, w, goal, s: permute(w, s, match(w, goal, s))),
    "activations": (
        False,
        lambda m, w, goal, s: permute(w, s, match_activations(m, w, goal, s, [TOKENS])),
    ),
    "matrices": (True, lambda m, w, goal, s: match_all(w, goal, s).apply(w, s)),
    "matrices by activations": (
        True,
        lambda m, w, goal, s: match_all(
            w, goal, s, model=m, batches=[TOKENS], by="activations"
        ).apply(w, s),
    ),
    "average": (True, lambda m, w, goal, s: average(P.stack([goal, w]), s, mixing=True)),
}


@pytest.mark.parametrize("way", WAYS)
def test_planted_elements_are_found(grouped, way):
    model, sym, params = grouped
    mixing, found = WAYS[way]
    for seed in range(2):
        moved = planted(sym, params, seed, mixing)
        assert furthest(moved, params) > 0.5
        assert furthest(found(model, moved, params, sym), params) < 1e-9


def test_a_stack_is_matched_member_by_member(grouped, caplog):
    model, sym, params = grouped
    stack = P.stack([planted(sym, params, seed, False) for seed in range(2)])
    found = match(stack, params, sym, method="activations", model=model, batches=[TOKENS])
    back = permute(stack, sym, found)
    assert furthest(back, P.stack([params, params])) < 1e-9
    assert "heads that share keys" in caplog.text

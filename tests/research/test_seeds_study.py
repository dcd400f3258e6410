"""Barriers between transformers of other seeds: ways that keep functions, and a planted pair."""

from dataclasses import replace

import pytest
import torch
from shell import failure
from small_runs import called, numbers

from bnn_research.cli import main
from bnn_research.families import Transformer
from bnn_research.seeds import WAYS, Pair, Scale, Trained, widened
from weightsym import (
    Learning,
    discover,
    fold_norms,
    in_one_shape,
    permute,
    random_permutations,
)
from weightsym import params as P

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def pair():
    """A network whose outputs are sure, and the same one with its units in other places."""
    torch.manual_seed(0)
    x = torch.randint(7, (64, 32))
    net = fold_norms(Transformer(8, 12, outputs=7).eval(), x[:2])
    sym, a = discover(net, x[:2]), P.of(net)
    a = {n: 20 * t if n.startswith("head") else t for n, t in a.items()}
    batches = [(part, P.apply(net, a, part).argmax(-1)) for part in x.split(16)]
    b = permute(a, sym, random_permutations(sym, torch.Generator().manual_seed(1)))
    return Pair(net, a, b, sym, batches, batches, Learning(steps=4, every=2))


@pytest.mark.e2e
@pytest.mark.parametrize("name", WAYS)
def test_every_way_keeps_the_function_and_finds_what_was_planted(name, pair):
    moved = WAYS[name](pair)(pair.a)
    x = pair.batches[0][0]
    before, after = (P.apply(pair.module, w, x) for w in (pair.a, moved))
    torch.testing.assert_close(after, before, rtol=1e-3, atol=1e-2)
    height, seconds = pair.measured(WAYS[name])
    assert (height > 0.1) == (name == "nothing")
    assert seconds >= 0


@pytest.mark.parametrize("name", ["GPT-2", "ViT"])
def test_a_narrow_network_among_zeros_is_the_same_function(name, data):
    settings = Scale(1, 16, 32, 3, 40, 2, start=1.0)  # beside which eps of norms is nothing
    wide = Trained.of(name, settings, [0])
    narrow = Trained.of(name, replace(settings, width=12, hidden=24), [1])
    x, (w,) = wide.family.held[0][:4], narrow.networks
    goal = P.apply(narrow.module, w, x)
    found = widened(w, narrow, wide)
    assert {n: t.shape for n, t in found.items()} == wide.sym.shapes
    torch.testing.assert_close(P.apply(wide.module, found, x), goal, rtol=2e-3, atol=2e-3)
    plain, _, _ = in_one_shape(w, wide.networks[0], narrow.sym, wide.sym)
    assert (P.apply(wide.module, dict(plain), x) - goal).abs().max() > 0.1


@pytest.mark.e2e
@pytest.mark.parametrize("more", [[], ["--narrow", "4"]])
def test_a_table_is_written(more, data, tmp_path):
    (tmp_path / "here").mkdir()
    line = ["seeds", "--networks", "2", "--width", "8", "--hidden", "8", "--steps", "2"]
    text = called(main, tmp_path / "here", [*line, *more, "--learning", "2", "--out", "out"])
    assert "Barriers between GPT-2 of other seeds" in text
    rows = numbers(tmp_path / "here" / "out", "barriers")
    assert [row["what is removed"] for row in rows] == [*WAYS]


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["--networks", "1"], "`networks` must be at least 2, got 1"),
        (["--narrow", "64"], "`narrow` must be below the width of 64, got 64"),
    ],
)
def test_mistakes_are_refused(args, sentence, capsys, tmp_path):
    assert sentence in failure(capsys, "seeds", *args, "--out", str(tmp_path), script=main)

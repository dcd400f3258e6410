"""Barriers between transformers of other seeds: ways that keep functions, and a planted pair."""

import pytest
import torch
from shell import failure
from small_runs import called, numbers

from bnn_research.cli import main
from bnn_research.families import Transformer
from bnn_research.seeds import WAYS, Pair
from weightsym import Learning, discover, fold_norms, permute, random_permutations
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


@pytest.mark.e2e
def test_a_table_is_written(tmp_path, monkeypatch):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "tinyshakespeare.txt").write_text("to be, or not to be: that is " * 40)
    monkeypatch.setenv("LIGHTNING_BNN_DATA", str(tmp_path))
    (tmp_path / "here").mkdir()
    line = ["seeds", "--networks", "2", "--width", "8", "--hidden", "8", "--steps", "2"]
    text = called(main, tmp_path / "here", [*line, "--learning", "2", "--out", "out"])
    assert "Barriers between GPT-2 of other seeds" in text
    rows = numbers(tmp_path / "here" / "out", "barriers")
    assert [row["what is removed"] for row in rows] == [*WAYS]


@pytest.mark.bad_input
def test_one_network_is_refused(capsys, tmp_path):
    line = ["seeds", "--networks", "1", "--out", str(tmp_path)]
    assert "`networks` must be at least 2, got 1" in failure(capsys, *line, script=main)

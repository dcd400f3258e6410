"""The study of fine-tuning on another base: where all ways agree, and what it writes."""

import fake_files
import pytest
import torch
from small_runs import called, numbers

from bnn_research import rebase as study
from bnn_research.cli import main
from bnn_research.families import Transformer
from weightsym import discover, fold_norms, permute, random_permutations
from weightsym import params as P

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.e2e
def test_tables_are_written(tmp_path, monkeypatch):
    fake_files.mnist(tmp_path)
    monkeypatch.setenv("LIGHTNING_BNN_DATA", str(tmp_path))
    monkeypatch.setattr(study, "_HELD", 8)
    monkeypatch.setattr(study, "_BATCH", 4)
    (tmp_path / "here").mkdir()
    line = ["rebase", "--seeds", "1", "--width", "8", "--hidden", "8", "--steps", "2"]
    line += ["--tuning", "2", "--images", "16", "--out", "out"]
    text = called(main, tmp_path / "here", line)
    assert "Accuracy on test images" in text
    rows = numbers(tmp_path / "here" / "out", "accuracy")
    assert [row["task"] for row in rows] == ["digits, 45 degrees", "digits, 90 degrees", "Fashion"]


@pytest.mark.e2e
def test_a_base_in_another_frame_is_found_by_every_way_but_the_plain_one():
    torch.manual_seed(0)
    x, y = torch.randn(1024, 1, 28, 28), torch.randint(10, (1024,))
    net = fold_norms(Transformer(8, 8, outputs=10, images=True), x[:2])
    sym, old = discover(net, x[:2]), P.of(net)
    new = permute(old, sym, random_permutations(sym, torch.Generator().manual_seed(1)))
    task = study.Task((x, y), (x[:200], y[:200]), (x[200:], y[200:]))
    for way, element in study.frames(net, old, new, task).items():
        moved = element(old)
        apart = max(float((moved[n] - new[n]).abs().max()) for n in sym.compared)
        assert (apart > 0.1) == (way == "added as it is") or way == "moved, learnt", way

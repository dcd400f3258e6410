"""`lightning-bnn symmetries` as a user calls it."""

import re

import pytest
import torch
from safetensors.torch import save_file
from shell import failure

from lightning_bnn import models
from lightning_bnn.cli import main

OPTUNET = ["symmetries", "lightning_bnn.models.optunet", "--input", "1,1,28,28"]
OWN = '''"""Networks of a user, one line for each."""
from torch import nn


class Net(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.a, self.b = nn.Linear(4, width), nn.Linear(width, 2)

    def forward(self, x):
        return self.b(self.a(x).relu().cumsum(-1))


class Raises(nn.Module):
    def __init__(self):
        raise KeyError("width")


class Wrong(nn.Module):
    def forward(self, x):
        return x.key


class Branches(nn.Linear):
    def __init__(self):
        super().__init__(3, 2)

    def forward(self, x):
        return super().forward(x) if x.sum() > 0 else -super().forward(x)


net = nn.Linear(3, 2)
'''


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A folder with files of a user, in which the command is called."""
    (tmp_path / "own_nets.py").write_text(OWN)
    (tmp_path / "own_broken.py").write_text("def broken(:\n")
    (tmp_path / "own_exit.py").write_text("import sys\nsys.exit(3)\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_report(capsys):
    main(OPTUNET)
    text = capsys.readouterr().out
    assert "392 weights" in text
    assert re.search(r"permutation +5 +2 +3\.weight", text)
    assert "permutations: 10^4.5   free scales: 12" in text
    assert "frozen:               nothing" in text
    error = float(re.search(r"whole group: (\S+)", text)[1])
    assert error < 1e-12
    mass, minimum = (
        float(re.search(rf"^{name}: +(\S+)", text, re.M)[1]) for name in ("mass", "minimum mass")
    )
    assert mass > minimum > 0


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ([*OPTUNET, "--explain", "7.weight"],
         "7.weight, axis 0: units, scales and signs go with 7.bias"),
        (["symmetries", "own_nets.Net", "--input", "3,4", "--init.width", "7"],
         "frozen: cumsum at own_nets.py:11: it mixes entries along dimension"),
        (["symmetries", "own_nets.py:net", "--input", "2,3"], "8 weights"),
        (["symmetries", "torch.nn.Embedding", "--input", "2,5:int64", "--init",
          '{"num_embeddings": 3, "embedding_dim": 4}'], "12 weights"),
    ],
)  # fmt: skip
def test_other_networks_and_questions(line, shown, own, capsys):
    main(line)
    assert shown in re.sub(r" +", " ", capsys.readouterr().out)


STATE = {n: t.clone() for n, t in models.optunet().state_dict().items()}


def behind(prefix, more=()):
    return {f"{prefix}{n}": t for n, t in STATE.items()} | dict(more)


CHECKPOINTS = {
    "plain.pt": (STATE, [], ""),
    "model.ckpt": ({"state_dict": behind("model."), "epoch": 3}, [], "model."),
    "net.safetensors": (behind("net."), [], "net."),
    "two.ckpt": ({"state_dict": behind("net.") | behind("ema.")}, ["--prefix", "ema."], "ema."),
    "more.ckpt": ({"model": behind("backbone.", {"head.weight": torch.zeros(2, 2)})}, [],
                  "backbone."),
}  # fmt: skip


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_checkpoints_are_read_behind_a_prefix(name, tmp_path, capsys):
    content, options, prefix = CHECKPOINTS[name]
    path = tmp_path / name
    save_file(content, path) if name.endswith("safetensors") else torch.save(content, path)
    main([*OPTUNET, "--checkpoint", str(path), *options])
    text = capsys.readouterr().out
    mass = sum(float(t.double().square().sum()) for n, t in STATE.items() if "bias" not in n)
    assert float(re.search(r"^mass: +(\S+)", text, re.M)[1]) == pytest.approx(mass, rel=1e-4)
    assert f"names behind '{prefix}'" in text or not prefix


LINEAR = ["torch.nn.Linear", "--input", "1,3"]
OPTUNETS, CHECKPOINT = OPTUNET[1:], [*OPTUNET[1:], "--checkpoint"]
REFUSED = [
    (["nowhere.Net", "--input", "1"], "`nowhere.Net` cannot be imported"),
    (["torch.nn.Nothing", "--input", "1"], "There is no 'Nothing' in `torch.nn`"),
    (["resnet18", "--input", "1"], "not an import path"),
    (OPTUNETS[:1], "`--input` is missing"),
    ([*OPTUNETS[:2], "1,x"], "must be positive sizes"),
    ([*OPTUNETS[:2], "1,3:floaty"], "must be positive sizes"),
    ([*OPTUNETS[:2], "1,3,8,8"], "does not accept an input of shape (1, 3, 8, 8)"),
    (LINEAR, "cannot be called"),
    (["torch.zeros", *LINEAR[1:], "--init", '{"size": [2]}'], "returned a Tensor"),
    ([*CHECKPOINT, "none.pt"], "There is no file"),
    ([*CHECKPOINT, "."], "it has no config.json"),
    (["own_nets.Raises", *LINEAR[1:]], "raised KeyError: 'width'"),
    (["own_broken.Net", *LINEAR[1:]], "SyntaxError"),
    (["own_exit.Net", *LINEAR[1:]], "SystemExit"),
    (["own_nets.Wrong", *LINEAR[1:]], "does not accept an input"),
    *((["own_nets.Branches", "--input", shape], "") for shape in
      ("2,5", "2,3", "2,3:int64", "99999999999,3", "2,3:complex64")),
]  # fmt: skip


@pytest.mark.parametrize(("line", "message"), REFUSED)
def test_bad_input_is_one_sentence(line, message, own, capfd):
    assert message in failure(capfd, "symmetries", *line)


BAD = {
    "is not a state dict": {"weights": [1, 2, 3]},
    "lacks '3.weight' and 2 more names": {"0.weight": torch.zeros(2, 1, 4, 4)},
    "not a state dict": {0: torch.zeros(2)},
    "no plain tensors that torch can read": b"not a checkpoint",
}


@pytest.mark.parametrize("message", BAD)
def test_bad_checkpoints_are_one_sentence(message, tmp_path, capsys):
    path, content = tmp_path / "bad.pt", BAD[message]
    path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)
    assert message in failure(capsys, *OPTUNET, "--checkpoint", path)

import re

import pytest
import torch
from safetensors.torch import save_file
from shell import failure

from lightning_bnn import models
from lightning_bnn.cli import main

OPTUNET = ["symmetries", "lightning_bnn.models.optunet", "--input", "1,1,28,28"]


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


def test_explain_names_what_ties_and_holds_a_tensor(capsys):
    main([*OPTUNET, "--explain", "7.weight"])
    assert "7.weight, axis 0: units, scales and signs go with 7.bias" in capsys.readouterr().out


def test_own_module_in_the_current_folder(tmp_path, monkeypatch, capsys):
    (tmp_path / "my_net_for_symmetries.py").write_text(
        "from torch import nn\n\n\nclass Net(nn.Module):\n"
        "    def __init__(self, width: int):\n        super().__init__()\n"
        "        self.a, self.b = nn.Linear(4, width), nn.Linear(width, 2)\n\n"
        "    def forward(self, x):\n        return self.b(self.a(x).relu().cumsum(-1))\n"
    )
    monkeypatch.chdir(tmp_path)
    main(["symmetries", "my_net_for_symmetries.Net", "--input", "3,4", "--init.width", "7"])
    text = capsys.readouterr().out
    assert re.search(
        r"frozen: cumsum at my_net_for_symmetries.py:10: it mixes entries along dimension", text
    )


def test_tokens_as_input(capsys):
    main(
        [
            "symmetries",
            "torch.nn.Embedding",
            "--input",
            "2,5:int64",
            "--init",
            '{"num_embeddings": 3, "embedding_dim": 4}',
        ]
    )
    assert "12 weights" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["pt", "ckpt", "safetensors"])
def test_checkpoints_are_read_behind_a_prefix(kind, tmp_path, capsys):
    torch.manual_seed(3)
    net = models.optunet()
    path = tmp_path / f"net.{kind}"
    if kind == "pt":
        torch.save(net.state_dict(), path)
    elif kind == "ckpt":
        torch.save(
            {"state_dict": {f"model.{n}": t for n, t in net.state_dict().items()}, "epoch": 3}, path
        )
    else:
        save_file({f"net.{n}": t.contiguous() for n, t in net.state_dict().items()}, path)
    main([*OPTUNET, "--checkpoint", str(path)])
    mass = sum(
        p.double().square().sum() for n, p in net.named_parameters() if not n.endswith("bias")
    )
    shown = float(re.search(r"^mass: +(\S+)", capsys.readouterr().out, re.M)[1])
    assert shown == pytest.approx(float(mass), rel=1e-4)


LINEAR = ["symmetries", "torch.nn.Linear", "--input", "1,3"]
REFUSED = [
    (["symmetries", "nowhere.Net", "--input", "1"], "`nowhere.Net` cannot be imported"),
    (["symmetries", "torch.nn.Nothing", "--input", "1"], "There is no 'Nothing' in `torch.nn`"),
    (["symmetries", "resnet18", "--input", "1"], "no import path"),
    (OPTUNET[:2], "`--input` is missing"),
    ([*OPTUNET[:3], "1,x"], "must be positive sizes"),
    ([*OPTUNET[:3], "1,3:floaty"], "must be positive sizes"),
    ([*OPTUNET[:3], "1,3,8,8"], "does not accept an input of shape (1, 3, 8, 8)"),
    (LINEAR, "cannot be called"),
    ([LINEAR[0], "torch.zeros", *LINEAR[2:], "--init", '{"size": [2]}'], "returned a Tensor"),
    ([*OPTUNET, "--checkpoint", "none.pt"], "there is no file"),
    ([*OPTUNET, "--checkpoint", "."], "there is no file"),
]


@pytest.mark.parametrize(("line", "message"), REFUSED)
def test_bad_input_is_one_sentence(line, message, capsys):
    assert message in failure(capsys, *line)


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


def own_file(folder, monkeypatch, name, text):
    (folder / f"{name}.py").write_text("import sys\nfrom torch import nn\n\n\n" + text)
    monkeypatch.chdir(folder)


def test_mistakes_in_the_users_own_file(tmp_path, monkeypatch, capsys):
    text = (
        "class Raises(nn.Module):\n    def __init__(self):\n        raise KeyError('width')\n\n\n"
    )
    text += "net = nn.Linear(3, 2)\n\n\n"
    text += "class Wrong(nn.Module):\n    def forward(self, x):\n        return x['key']\n"
    own_file(tmp_path, monkeypatch, "own_nets_a", text)
    own_file(tmp_path, monkeypatch, "own_nets_b", "def broken(:\n")
    own_file(tmp_path, monkeypatch, "own_nets_c", "sys.exit(3)\n")
    shape = ("--input", "2,3")
    assert "raised KeyError: 'width'" in failure(capsys, "symmetries", "own_nets_a.Raises", *shape)
    assert "SyntaxError" in failure(capsys, "symmetries", "own_nets_b.Net", *shape)
    assert "SystemExit" in failure(capsys, "symmetries", "own_nets_c.Net", *shape)
    assert "does not accept an input" in failure(capsys, "symmetries", "own_nets_a.Wrong", *shape)
    main(["symmetries", "own_nets_a.py:net", *shape])
    assert "8 weights" in capsys.readouterr().out


def test_one_sentence_means_one_line(tmp_path, monkeypatch, capfd):
    text = "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    text += "        self.a = nn.Linear(3, 2)\n\n    def forward(self, x):\n"
    text += "        return self.a(x) if x.sum() > 0 else -self.a(x)\n"
    own_file(tmp_path, monkeypatch, "own_nets_d", text)
    for shape in ("2,5", "2,3", "2,3:int64", "99999999999,3", "2,3:complex64"):
        failure(capfd, "symmetries", "own_nets_d.Net", "--input", shape)


def test_prefixes_of_checkpoints(tmp_path, capsys):
    state, path = models.optunet().state_dict(), tmp_path / "run.ckpt"
    two = {f"{p}.{n}": t for p in ("net", "ema") for n, t in state.items()}
    torch.save({"state_dict": two}, path)
    main([*OPTUNET, "--checkpoint", str(path), "--prefix", "ema."])
    assert "names behind 'ema.'" in capsys.readouterr().out
    other = {f"backbone.{n}": t for n, t in state.items()} | {"head.0.weight": torch.zeros(2, 2)}
    torch.save({"model": other, "epoch": 2}, path)
    main([*OPTUNET, "--checkpoint", str(path)])
    assert "names behind 'backbone.'" in capsys.readouterr().out

import re

import pytest
import torch
from safetensors.torch import save_file

from lightning_bnn import models
from lightning_bnn.cli import main

OPTUNET = ["symmetries", "lightning_bnn.models.optunet", "--input", "1,1,28,28"]


def failure(capsys, *args):
    with pytest.raises(SystemExit) as stopped:
        main(args)
    assert stopped.value.code == 2
    message = capsys.readouterr().err.strip()
    assert "Traceback" not in message
    return message


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


def test_bad_input_is_one_sentence(capsys, tmp_path):
    optunet = OPTUNET[:2]
    assert "`nowhere.Net` cannot be imported" in failure(
        capsys, "symmetries", "nowhere.Net", "--input", "1"
    )
    assert "There is no 'Nothing' in `torch.nn`" in failure(
        capsys, "symmetries", "torch.nn.Nothing", "--input", "1"
    )
    assert "no import path" in failure(capsys, "symmetries", "resnet18", "--input", "1")
    assert "`--input` is missing" in failure(capsys, *optunet)
    assert "must be positive sizes" in failure(capsys, *optunet, "--input", "1,x")
    assert "must be positive sizes" in failure(capsys, *optunet, "--input", "1,3:floaty")
    assert "does not accept an input of shape (1, 3, 8, 8)" in failure(
        capsys, *optunet, "--input", "1,3,8,8"
    )
    assert "cannot be called" in failure(capsys, "symmetries", "torch.nn.Linear", "--input", "1,3")
    assert "returned a Tensor" in failure(
        capsys, "symmetries", "torch.zeros", "--input", "1,3", "--init", '{"size": [2]}'
    )
    assert "there is no file" in failure(
        capsys, *OPTUNET, "--checkpoint", str(tmp_path / "none.pt")
    )


def test_bad_checkpoints_are_one_sentence(capsys, tmp_path):
    path = tmp_path / "bad.pt"
    torch.save({"weights": [1, 2, 3]}, path)
    assert "is not a state dict" in failure(capsys, *OPTUNET, "--checkpoint", str(path))
    torch.save({"0.weight": torch.zeros(2, 1, 4, 4)}, path)
    assert "lacks '3.weight' and 2 more names" in failure(
        capsys, *OPTUNET, "--checkpoint", str(path)
    )
    state = models.optunet().state_dict()
    torch.save(state | {"0.weight": torch.zeros(3, 1, 4, 4)}, path)
    assert "'0.weight' has shape (3, 1, 4, 4)" in failure(
        capsys, *OPTUNET, "--checkpoint", str(path)
    )
    path.write_bytes(b"not a checkpoint")
    assert "no plain tensors that torch can read" in failure(
        capsys, *OPTUNET, "--checkpoint", str(path)
    )
    path = tmp_path / "bad.safetensors"
    path.write_bytes(b"not a checkpoint")
    assert "no safetensors file" in failure(capsys, *OPTUNET, "--checkpoint", str(path))


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
        assert (
            len(failure(capfd, "symmetries", "own_nets_d.Net", "--input", shape).splitlines()) == 1
        )


def test_prefixes_of_checkpoints(tmp_path, capsys):
    state, path = models.optunet().state_dict(), tmp_path / "run.ckpt"
    two = {f"{p}.{n}": t for p in ("net", "ema") for n, t in state.items()}
    torch.save({"state_dict": two}, path)
    assert "Several networks" in failure(capsys, *OPTUNET, "--checkpoint", str(path))
    main([*OPTUNET, "--checkpoint", str(path), "--prefix", "ema."])
    assert "names behind 'ema.'" in capsys.readouterr().out
    other = {f"backbone.{n}": t for n, t in state.items()} | {"head.0.weight": torch.zeros(2, 2)}
    torch.save({"model": other, "epoch": 2}, path)
    main([*OPTUNET, "--checkpoint", str(path)])
    assert "names behind 'backbone.'" in capsys.readouterr().out
    torch.save({0: torch.zeros(2)}, path)
    assert "is not a state dict" in failure(capsys, *OPTUNET, "--checkpoint", str(path))
    torch.save(state | {"7.bias": torch.full((10,), torch.nan)}, path)
    assert "'7.bias' holds NaN" in failure(capsys, *OPTUNET, "--checkpoint", str(path))
    assert "there is no file" in failure(capsys, *OPTUNET, "--checkpoint", str(tmp_path))

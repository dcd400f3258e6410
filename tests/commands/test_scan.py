"""`weightsym scan` as a user calls it."""

import json
import shutil

import lightning as L
import pytest
import torch
from disk_networks import drawn, write
from PIL import Image
from shell import code_of, failure

from lightning_bnn import models
from lightning_bnn.bank import CheckpointBank
from weightsym import Element, discover, likeness
from weightsym import params as P
from weightsym.cli import main
from weightsym.commands import scan

SIZES = 20, [48, 48], 12
OPTIONS = ["--network", "lightning_bnn.models.mlp", "--input", "2,20", "--init.inputs", "20"]
OPTIONS += ["--init.hidden", "[48, 48]", "--init.outputs", "12"]


def perceptron():
    return models.mlp(*SIZES)


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    """Two parents, their children in disguise, three strangers, and files that do not belong."""
    folder = tmp_path_factory.mktemp("shelf")
    nets = {name: P.of(drawn(perceptron, seed)) for seed, name in enumerate("abcde")}
    sym = discover(perceptron(), torch.randn(4, 20))
    generator = torch.Generator().manual_seed(0)
    for parent, child in (("a", "a1"), ("a", "a2"), ("b", "b1")):
        moved = Element.random(sym, generator)(nets[parent])
        nets[child] = {n: t + 0.1 * t.std() * torch.randn_like(t) for n, t in moved.items()}
    for name, params in nets.items():
        write(folder / f"{name}.safetensors", params)
    write(folder / "wide.safetensors", P.of(models.mlp(20, [9], 12)))
    (folder / "broken.safetensors").write_bytes(b"no header")
    (folder / "notes.txt").write_text("not a network")
    return folder


def stems(names):
    return sorted(name.partition(".")[0] for name in names)


def test_children_in_disguise_are_in_the_family_of_their_parent(shelf, tmp_path, capsys):
    main(["scan", str(shelf), *OPTIONS, "--out", str(tmp_path / "family.json")])
    said = capsys.readouterr().out
    content = json.loads((tmp_path / "family.json").read_text())
    assert [stems(f) for f in content["families"]][:2] == [["a", "a1", "a2"], ["b", "b1"]]
    assert "no relatives: c.safetensors, d.safetensors, e.safetensors" in said
    assert "left out: broken.safetensors: " in said
    assert "left out: wide.safetensors: " in said
    assert "notes.txt" not in said
    with Image.open(tmp_path / "family.png") as picture:
        assert min(picture.size) > 300


def test_the_parent_of_a_suspect_is_named_alone(shelf, capsys):
    main(["scan", str(shelf), *OPTIONS, "--suspect", str(shelf / "b1.safetensors")])
    pairs = [line.split() for line in capsys.readouterr().out.splitlines()[1:4]]
    assert [stems(pair[:1]) for pair in pairs][0] == ["b"]
    assert [" ".join(pair[2:5]) == "made from it" for pair in pairs] == [True, False, False]


def test_a_known_shelf_is_read_from_its_sketches(shelf, tmp_path, monkeypatch, capsys):
    folder, kept = (
        shutil.copytree(shelf, tmp_path / "shelf"),
        tmp_path / "shelf" / "kept.safetensors",
    )
    line = ["scan", str(folder), *OPTIONS, "--sketches", str(kept)]
    made = []
    monkeypatch.setattr(scan, "likeness", lambda *args: made.append(1) or likeness(*args))
    main(line)
    first = capsys.readouterr().out
    assert len(made) == 8
    main(line)
    assert capsys.readouterr().out == first
    assert len(made) == 8
    write(folder / "c.safetensors", P.of(drawn(perceptron, 9)))  # a changed file
    shutil.copy(folder / "a.safetensors", folder / "f.safetensors")
    main(line)
    assert len(made) == 9  # a copy of a known file is known
    assert "f.safetensors" in capsys.readouterr().out
    main([*line, "--batch_norm", "eval"])  # other settings
    assert len(made) == 18


def test_the_checkpoints_of_a_run_are_one_family(tmp_path, capsys):
    """Files of Lightning, with the network behind a prefix and an optimizer beside it."""
    module = L.LightningModule()
    module.net = drawn(perceptron, 0)
    for epoch in range(3):
        for w in module.parameters():
            w.data.add_(0.05 * w.std() * torch.randn_like(w))
        content = {"state_dict": module.state_dict(), "epoch": epoch, "optimizer_states": [{}]}
        torch.save(content, tmp_path / f"epoch={epoch}.ckpt")
    write(tmp_path / "other.safetensors", P.of(drawn(perceptron, 1)))
    main(["scan", str(tmp_path), *OPTIONS])
    said = capsys.readouterr().out
    assert "family: epoch=0.ckpt, epoch=1.ckpt, epoch=2.ckpt" in said
    assert "no relatives: other.safetensors" in said


def test_a_bank_is_scanned_as_it_is(tmp_path, capsys):
    nets = [P.of(drawn(perceptron, seed)) for seed in range(3)]
    nets.append({n: t + 0.1 * t.std() * torch.randn_like(t) for n, t in nets[1].items()})
    with CheckpointBank(tmp_path / "bank") as bank:
        for net in nets:
            bank.append(net)
    main(["scan", str(tmp_path / "bank"), *OPTIONS])
    said = capsys.readouterr().out
    assert "family: network-1.safetensors, network-3.safetensors" in said
    assert "no relatives: network-0.safetensors, network-2.safetensors" in said


REFUSED = [
    (["scan", "SHELF", *OPTIONS, "--sketches", "a.txt"], "must be a .safetensors file"),
    (["scan", "SHELF", *OPTIONS, "--sketches", "SHELF/a.safetensors"], "holds other tensors"),
    (["scan", "no_folder", *OPTIONS], "`folder` must be a folder"),
    (["scan", ".", *OPTIONS], "must hold at least two networks of one architecture, got 0"),
    (["scan", "SHELF", *OPTIONS, "--nearest", "0"], "`--nearest` must be at least 1"),
    (["scan", "SHELF", *OPTIONS, "--out", "family.txt"], "must be a .json file"),
    (["scan", "SHELF"], "`--network` is missing"),
    (["scan", "SHELF", *OPTIONS, "--suspect", "SHELF/wide.safetensors"], "wide.safetensors"),
]


@pytest.mark.bad_input
@pytest.mark.parametrize(("line", "words"), REFUSED)
def test_mistakes_are_refused_in_one_sentence(line, words, shelf, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert words in failure(capsys, *(word.replace("SHELF", str(shelf)) for word in line))


def test_unrelated_networks_are_no_failure(tmp_path):
    for seed in range(3):
        write(tmp_path / f"{seed}.safetensors", P.of(drawn(perceptron, seed)))
    assert code_of("scan", tmp_path, *OPTIONS) == 0

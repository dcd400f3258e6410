"""`weightsym scan` as a user calls it."""

import json

import pytest
import torch
from disk_networks import drawn, write
from PIL import Image
from shell import code_of, failure

from lightning_bnn import models
from weightsym import Element, discover
from weightsym import params as P
from weightsym.cli import main

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


REFUSED = [
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

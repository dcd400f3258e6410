"""The core is a distribution of its own: it does without Lightning and `lightning_bnn`."""

import json
import sys

import lightning as L
import pytest
import torch
from processes import fresh
from torch import nn

import lightning_bnn
import weightsym
from lightning_bnn import params, symmetry
from weightsym.cli import main

FOREIGN = {"lightning", "lightning_bnn", "matplotlib", "pytorch_lightning", "torchmetrics"}
NETWORK = """
from torch import nn


def network():
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
"""
OPTIONS = ["--network", "network.network", "--input", "2,4"]
COMMANDS = [
    ["symmetries", "network.network", "--input", "2,4", "--checkpoint", "a.pt"],
    ["match", "a.safetensors", "b.pt", *OPTIONS],
    ["merge", "a.pt", "b.pt", "runs", "--out", "c.pt", "--data", "data.pt", *OPTIONS],
    ["diff", "a.pt", "b.pt", *OPTIONS],
]
EVERYTHING = """
import importlib, pkgutil, weightsym
print(weightsym.params.of, weightsym.files.open_network, weightsym.params.key_of)
for found in pkgutil.walk_packages(weightsym.__path__, "weightsym."):
    importlib.import_module(found.name)
"""
CALLED = """
import os, sys
os.chdir({folder!r})
from weightsym.cli import main
for command in {commands}:
    try:
        main(command)
    except SystemExit as end:
        assert end.code in (0, 3, 4, 5), end.code  # verdicts of diff
"""
PRINTED = "import sys; print('IMPORTED', *sys.modules)\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, with two networks, data, and a file that says what they are."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "network.py").write_text(NETWORK)
    for name in "ab":
        net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
        torch.save(net.state_dict(), f"{name}.pt")
    stored = weightsym.networks.files.checkpoints.read_state(tmp_path / "a.pt")[0]
    weightsym.networks.files.safetensors_format.save_tensors(tmp_path / "a.safetensors", stored)
    (tmp_path / "runs").mkdir()
    torch.save({"state_dict": stored, "global_step": 3}, "runs/step.ckpt")
    torch.save({"inputs": torch.randn(8, 4), "targets": torch.arange(8) % 3}, "data.pt")
    yield tmp_path
    sys.modules.pop("network", None)


def foreign(code):
    """What a program has imported that is none of the core."""
    ((ended, text),) = fresh(torch=[code + PRINTED])
    assert ended == 0, text
    modules = text.rpartition("IMPORTED")[2].split()
    assert "weightsym" in modules
    return FOREIGN & {name.partition(".")[0] for name in modules}


@pytest.mark.e2e
def test_neither_its_files_nor_its_commands_import_lightning(folder):
    assert foreign(EVERYTHING) == set()
    assert foreign(CALLED.format(folder=str(folder), commands=COMMANDS)) == set()
    assert (folder / "c.pt").is_file()


@pytest.mark.e2e
def test_a_datamodule_imports_it(folder):
    """What the law above looks for is found, where a command is asked for it."""
    data = ["--data", "lightning_bnn.datamodules.TwoGaussians"]  # which does not fit
    commands = [["merge", "a.pt", "b.pt", *OPTIONS, *data]]
    code = CALLED.format(folder=str(folder), commands=commands).replace("(0, 3, 4, 5)", "(2,)")
    assert {"lightning", "lightning_bnn"} <= foreign(code)


# ------------------------------------------------------------ names
def test_the_plug_in_has_the_same_objects_under_its_own_names():
    assert lightning_bnn.__version__ == weightsym.__version__
    for ours, theirs in ((symmetry, weightsym), (params, weightsym.params)):
        assert sorted(ours.__all__) == sorted(theirs.__all__)
        assert set(ours.__all__) <= set(dir(ours))
        assert all(getattr(ours, name) is getattr(theirs, name) for name in theirs.__all__)
    with pytest.raises(AttributeError, match="discovr"):
        symmetry.discovr  # noqa: B018


# ------------------------------------------------------------ what only the plug-in has
class Data(L.LightningDataModule):
    """Stands for data of a user."""


REFUSED = {
    "The bank bank": ["merge", "a.pt", "bank", *OPTIONS],
    "`--network run.yaml`": ["diff", "a.pt", "b.pt", "--network", "run.yaml"],
    "`--data run.yaml`": ["merge", "a.pt", "b.pt", *OPTIONS, "--data", "run.yaml"],
    f"`--data {__name__}.Data`": ["diff", "a.pt", "b.pt", *OPTIONS, "--data", f"{__name__}.Data"],
}
INSTALL = "needs lightning_bnn: pip install lightning_bnn"


@pytest.fixture
def alone(monkeypatch):
    """Makes the plug-in one that is not installed."""
    for name in [n for n in sys.modules if n.partition(".")[0] == "lightning_bnn"]:
        monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.bad_input
@pytest.mark.parametrize("what", REFUSED)
def test_what_needs_the_plug_in_is_refused_in_one_sentence(what, folder, alone, capsys):
    (folder / "bank").mkdir()
    (folder / "bank/manifest.jsonl").write_text("{}\n")
    (folder / "run.yaml").write_text("model: {class_path: MFVI}\n")
    with pytest.raises(SystemExit) as end:
        main(REFUSED[what])
    assert end.value.code == 2
    assert capsys.readouterr().err == f"weightsym: {what} {INSTALL}\n"


def test_numbers_of_diff_are_written_without_their_figure(folder, alone, capsys):
    with pytest.raises(SystemExit) as end:
        main(["diff", "a.pt", "b.pt", *OPTIONS, "--out", "diff.json"])
    assert end.value.code == 5  # too few units
    assert f"wrote diff.json. The figure beside it {INSTALL}" in capsys.readouterr().out
    assert json.loads((folder / "diff.json").read_text())["version"] == weightsym.__version__
    assert not (folder / "diff.png").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["merge", "--help"], "usage: weightsym merge"),
        (["merge", "a.pt", "--netwrk", "x"], "weightsym: there is no option `--netwrk`; did you"),
        (["fit"], "weightsym: there is no command 'fit'"),
    ],
)
def test_mistakes_and_help_have_the_name_of_the_script(words, said, capsys):
    with pytest.raises(SystemExit):
        main(words)
    assert said in "".join(capsys.readouterr())

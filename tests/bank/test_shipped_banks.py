"""Banks of the distribution of data are what their cards say, and are found by their names."""

import pytest
import torch

from lightning_bnn.bank import CheckpointBank, shipped_bank, shipped_banks
from lightning_bnn.bank.shipped import bank_card, digest_of_networks, shipped_path
from lightning_bnn.cli import main
from lightning_bnn.evaluation.stored_posteriors import Location
from lightning_bnn.models import optunet
from weightsym import params as P
from weightsym.networks.files.settings import read_settings

ASKED = "what data network training result cost versions licence intended_use limits sha256".split()


@pytest.mark.parametrize("name", shipped_banks())
def test_a_card_tells_its_own_story(name):
    bank = shipped_bank(name)
    card = bank_card(bank.path)
    assert set(card) == set(ASKED)
    assert all(isinstance(text, str) and text for text in card.values())
    assert digest_of_networks(bank.path) in card["sha256"]
    assert f"{len(bank)} " in card["what"]
    bank.verify()


def test_the_networks_are_those_of_the_configuration():
    bank = shipped_bank("mnist_optunets")
    settings = read_settings(bank.path / "config.yaml")
    assert settings["model"]["init_args"]["network"]["class_path"].endswith(".optunet")
    stack = bank[:]
    outputs = P.apply(optunet().eval(), stack, torch.rand(2, 1, 28, 28))
    assert outputs.shape == (1000, 2, 10)
    assert outputs.isfinite().all()
    rows = torch.cat([t.flatten(1) for t in stack.values()], 1)
    assert rows.shape == (1000, 392)
    assert rows.unique(dim=0).shape == rows.shape  # no network twice


def test_a_name_is_a_place_unless_something_else_is_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    inside = shipped_path("mnist_optunets")
    assert Location.of("mnist_optunets[10:]") == Location(inside, slice(10, None))
    assert Location.of("mnist_optunets").config() == inside / "config.yaml"
    (tmp_path / "mnist_optunets").mkdir()
    assert Location.of("mnist_optunets").path.resolve() == tmp_path / "mnist_optunets"
    assert not Location.of("mnist_optunet").path.exists()
    with pytest.raises(ValueError, match="no bank 'mnist'.* choose from: mnist_optunets"):
        shipped_bank("mnist")
    assert bank_card(CheckpointBank(tmp_path / "own").path) == {}


def test_reading_leaves_nothing_behind(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    folder = shipped_path("mnist_optunets")
    before = sorted(folder.iterdir())
    main(["bank", "mnist_optunets", "--verify", "true"])
    said = capsys.readouterr().out
    assert "1000 networks of 392 weights" in said
    assert "licence:" in said
    assert sorted(folder.iterdir()) == before
    assert not [*tmp_path.iterdir()]

"""The examples of the README run as they stand."""

import re
from pathlib import Path

import lightning as L
import torch
from torch import nn

from lightning_bnn import models
from lightning_bnn.cli import main

README = (Path(__file__).parents[1] / "README.md").read_text()
CALLBACKS, MODULES, TOUR, METRICS, BANK = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


class Regression(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = models.mlp(4, [8], 1)

    def training_step(self, batch, _):
        x, y = batch
        return (self.net(x) - y).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_callbacks_and_bank(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(CALLBACKS, names)
    data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
    module, trainer = Regression(), names["trainer"]
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=8))
    assert {"tau", "mass_excess"} <= set(trainer.callback_metrics)
    monkeypatch.chdir(trainer.log_dir)
    names["net"] = module.net
    exec(BANK, names)
    assert len(names["bank"]) == 20


def test_a_posterior_is_trained(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(MODULES, names)
    assert names["networks"]["1.weight"].shape == (100, 32, 64)
    assert names["trainer"].callback_metrics["test/acc"] > 0.8


def test_the_tour_runs():
    names = {}
    exec(TOUR, names)
    assert names["symmetries"].log10_permutations > 5934
    assert names["moved"]["conv1.weight"].shape == (3, 64, 3, 7, 7)
    assert isinstance(names["net"], nn.Module)


def test_the_metrics_example_runs(capsys):
    names = {"net": models.mlp(4, [8], 3), "example": torch.randn(1, 4)}
    g = torch.Generator().manual_seed(0)
    names["logits"] = torch.randn(50, 3, generator=g)
    names["labels"] = torch.randint(3, (50,), generator=g)
    names["ood_logits"] = torch.randn(20, 3, generator=g) / 3
    exec(METRICS, names)
    printed = capsys.readouterr().out
    assert "FPR95" in printed
    assert "1.weight" in printed


def test_the_shell_example_is_what_the_command_prints(capsys):
    command, expected = re.search(
        r"```\n\$ lightning-bnn (symmetries.*?)\n(.*?)```", README, re.DOTALL
    ).groups()
    main(command.split())
    printed = capsys.readouterr().out
    known = re.compile(r"\d+\.\d s|\d+e-\d+|\d\.\de-\d+|certified.*")
    assert [known.sub("", r).rstrip() for r in printed.strip().splitlines()] == [
        known.sub("", r).rstrip() for r in expected.strip().splitlines()
    ]

"""The examples of the README run as they stand."""

import re
from pathlib import Path

import lightning as L
import torch
from torch import nn

from lightning_bnn import models
from lightning_bnn.cli import main

README = (Path(__file__).parents[1] / "README.md").read_text()
CALLBACK, TOUR, METRICS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


class Regression(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = models.mlp(4, [8], 1)
        self.example_input_array = torch.randn(1, 4)

    def training_step(self, batch, _):
        x, y = batch
        return (self.net(x) - y).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_the_callback_example_logs_in_a_plain_trainer(tmp_path):
    names = {}
    exec(CALLBACK, names)
    data = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
    trainer = L.Trainer(
        max_epochs=2,
        callbacks=[names["ExcessMass"]()],
        default_root_dir=tmp_path,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    trainer.fit(Regression(), torch.utils.data.DataLoader(data, batch_size=8))
    assert trainer.callback_metrics["excess mass in percent"] > 0
    body = [line for line in CALLBACK.splitlines() if line.strip() and "import" not in line]
    assert len(body) <= 10


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
        r"```\n\$ lightning-bnn (.*?)\n(.*?)```", README, re.DOTALL
    ).groups()
    main(command.split())
    printed = capsys.readouterr().out
    known = re.compile(r"\d+\.\d s|\d+e-\d+|\d\.\de-\d+|certified.*")
    assert [known.sub("", r).rstrip() for r in printed.strip().splitlines()] == [
        known.sub("", r).rstrip() for r in expected.strip().splitlines()
    ]

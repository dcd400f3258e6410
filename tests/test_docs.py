"""The examples of docs/metrics.md run as they stand."""

import re
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger

from lightning_bnn import models

NUMBERS = ("AUROC", "AUPR_out", "AUPR_in", "FPR95")
TEXT = (Path(__file__).parents[1] / "docs" / "metrics.md").read_text()
MODULE, COMPARISON, REMOVAL = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


@pytest.mark.filterwarnings("ignore")
def test_a_module_with_metrics(tmp_path):
    names = {}
    exec(MODULE, names)
    g = torch.Generator().manual_seed(0)

    def loader(scale):
        x, y = scale * torch.randn(40, 6, generator=g), torch.randint(3, (40,), generator=g)
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=8)

    logger = TensorBoardLogger(tmp_path)
    trainer = L.Trainer(
        accelerator="cpu", logger=logger, enable_progress_bar=False, enable_model_summary=False
    )
    module = names["Classifier"](torch.nn.Linear(6, 3))
    trainer.test(module, [loader(1), loader(0.2), loader(0.5)], verbose=False)
    assert set(trainer.callback_metrics) == {
        *("ece", "nll"),
        *(
            f"{n}/{s}"
            for n in ("AUROC", "AUPR_out", "AUPR_in", "FPR95")
            for s in ("svhn", "textures")
        ),
    }
    assert trainer.callback_metrics["AUROC/svhn"] > 0.5


def test_comparisons():
    net = models.mlp(4, [6], 3)
    names = {"net": net, "example": torch.randn(1, 4)}
    exec(COMPARISON + REMOVAL, names)
    assert names["free"][0].rows == 100

"""Pictures of a run that goes well beside those of one that does not, as `docs/pictures.md` shows.

python benchmarks/good_and_bad.py FOLDER    writes read_tau.png and so on into a folder

Both train a perceptron on the digits: one by SGD with a rate that falls to zero, the other by Adam
at a high rate that stays, from a first layer of five times the usual size, with a third of the
labels drawn at random in every step.
"""

import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger
from PIL import Image

from lightning_bnn.callbacks import MassGap, PermutationTau, PosteriorFigures
from lightning_bnn.datamodules import Digits
from lightning_bnn.models import mlp

EPOCHS = 40
TAGS = {
    "read_tau": "posterior/tau",
    "read_mass": "posterior/mass",
    "read_trajectories": "posterior/trajectories/raw",
    "read_pair": "posterior/pair/raw",
    "read_marginals": "posterior/marginals/1.weight",
}


class Pictures(CSVLogger):
    """Keeps the last figure of every tag as a file."""

    def log_image(self, key: str, images: list[Any], **_: Any) -> None:
        path = Path(self.log_dir) / f"{key.replace('/', '-')}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        images[0].savefig(path, dpi=100)


class Classifier(L.LightningModule):
    """A perceptron that is trained well or badly."""

    def __init__(self, good: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.good = mlp(64, [16, 16], 10), good
        if not good:
            self.net[1].weight.data *= 5

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        images, labels = batch
        if not self.good:
            random = torch.rand(len(labels)) < 1 / 3
            labels = torch.where(random, torch.randint(10, labels.shape), labels)
        return torch.nn.functional.cross_entropy(self.net(images), labels)

    def configure_optimizers(self) -> Any:
        if not self.good:
            return torch.optim.Adam(self.parameters(), 0.02)
        optimizer = torch.optim.SGD(self.parameters(), 0.2, weight_decay=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)]


def train(good: bool, folder: Path) -> Path:
    """Train, and return the folder of the pictures."""
    logger = Pictures(folder, "good" if good else "bad", "")
    looks = [PermutationTau(), MassGap(10), PosteriorFigures(10, 1000)]
    trainer = L.Trainer(
        max_epochs=EPOCHS, logger=logger, callbacks=looks, log_every_n_steps=10,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        accelerator="cpu",
    )  # fmt: skip
    trainer.fit(Classifier(good), Digits())
    return Path(logger.log_dir)


def main(folder: Path) -> None:
    runs = [train(good, folder) for good in (True, False)]
    for name, tag in TAGS.items():
        pair = [Image.open(run / f"{tag.replace('/', '-')}.png").convert("RGB") for run in runs]
        sheet = Image.new("RGB", (sum(p.width for p in pair) + 20, pair[0].height), "white")
        for k, picture in enumerate(pair):
            sheet.paste(picture, (k * (pair[0].width + 20), 0))
        sheet.quantize(64).save(folder / f"{name}.png", optimize=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

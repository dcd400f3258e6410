"""Four callbacks, added to a LightningModule that knows nothing of them.

    python examples/add_to_existing_run.py
    tensorboard --logdir runs

TensorBoard then shows the scalars `tau`, `mass` and `mass_excess`, and pictures under `posterior/`.
The weights of every epoch are in the bank that the last line prints.
"""

import argparse

import lightning as L
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

from lightning_bnn.bank import CheckpointBank
from lightning_bnn.callbacks import CheckpointHarvester, MassGap, PermutationTau, PosteriorFigures


class MyModule(L.LightningModule):
    """An ordinary module: nothing in it comes from lightning_bnn."""

    def __init__(self, hidden: int = 32, lr: float = 0.1):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
            nn.Linear(72, hidden), nn.ReLU(), nn.Linear(hidden, 10),
        )  # fmt: skip

    def training_step(self, batch, _):
        loss = cross_entropy(self.net(batch["image"]), batch["label"])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, _):
        hits = self.net(batch["image"]).argmax(-1) == batch["label"]
        self.log("accuracy", hits.float().mean())

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), self.hparams.lr, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)]


def loaders():
    images, labels = load_digits(return_X_y=True)
    rows = [
        {"image": torch.tensor(x, dtype=torch.float32).reshape(1, 8, 8) / 16, "label": int(y)}
        for x, y in zip(images, labels, strict=True)
    ]
    train = torch.utils.data.DataLoader(rows[:1500], batch_size=64, shuffle=True)
    return train, torch.utils.data.DataLoader(rows[1500:], batch_size=64)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--folder", default="runs")
    options = parser.parse_args()
    L.seed_everything(0)
    trainer = L.Trainer(
        max_epochs=options.epochs,
        accelerator="cpu",
        logger=TensorBoardLogger(options.folder, name="digits"),
        log_every_n_steps=5,
        callbacks=[PermutationTau(), MassGap(10), CheckpointHarvester(), PosteriorFigures(5, 20)],
    )
    trainer.fit(MyModule(), *loaders())
    print(CheckpointBank(f"{trainer.log_dir}/bank", "r"))


if __name__ == "__main__":
    main()

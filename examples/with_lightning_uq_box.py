"""Three callbacks on a method of Lightning-UQ-Box, which stays as it is.

    pip install lightning-uq-box
    python examples/with_lightning_uq_box.py

MC dropout of the box trains and would predict; the callbacks see the weights: whether their order
still changes, how much of their mass is for nothing. The weights of every epoch are in a bank.
"""

import argparse

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import nn

from lightning_bnn.bank import CheckpointBank
from lightning_bnn.callbacks import CheckpointHarvester, MassGap, PermutationTau


class DictDigits(L.LightningDataModule):
    """Batches as the box wants them."""

    def train_dataloader(self):
        images, labels = load_digits(return_X_y=True)
        rows = [
            {"input": torch.tensor(x, dtype=torch.float32) / 16, "target": int(y)}
            for x, y in zip(images[:1500], labels[:1500], strict=True)
        ]
        return torch.utils.data.DataLoader(rows, batch_size=100, shuffle=True)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--folder", default="runs")
    options = parser.parse_args()
    from lightning_uq_box.uq_methods import MCDropoutClassification  # the options need it not

    L.seed_everything(0)
    network = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 10))
    method = MCDropoutClassification(network, num_mc_samples=8, loss_fn=nn.CrossEntropyLoss())
    watched, bank = "model", f"{options.folder}/bank"
    trainer = L.Trainer(
        max_epochs=options.epochs,
        accelerator="cpu",
        default_root_dir=options.folder,
        log_every_n_steps=1,
        callbacks=[
            PermutationTau(module=watched),
            MassGap(5, module=watched),
            CheckpointHarvester(bank, every_n_epochs=1, module=watched),
        ],
    )
    trainer.fit(method, DictDigits())
    seen = trainer.callback_metrics
    print("tau", float(seen["tau"]), "mass_excess", float(seen["mass_excess"]))
    print(CheckpointBank(bank, "r"))


if __name__ == "__main__":
    main()

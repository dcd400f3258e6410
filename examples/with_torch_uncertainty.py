"""Three callbacks on a routine of TorchUncertainty, which stays as it is.

    pip install "torch-uncertainty[cpu]"
    python examples/with_torch_uncertainty.py

The routine trains, evaluates MC dropout and detects what is out of distribution; the callbacks see
the weights: whether their order still changes, how much of their mass is for nothing. The weights
of every epoch are in a bank, which methods of lightning_bnn read.
"""

import argparse

import torch
from torch import nn

from lightning_bnn.bank import CheckpointBank
from lightning_bnn.callbacks import CheckpointHarvester, MassGap, PermutationTau
from lightning_bnn.datamodules import Digits


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--folder", default="runs")
    options = parser.parse_args()
    from torch_uncertainty import TUTrainer  # after the options, which are told without it
    from torch_uncertainty.methods import mc_dropout
    from torch_uncertainty.routines import ClassificationRoutine

    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 10)
    )
    routine = ClassificationRoutine(
        model=mc_dropout(network, num_estimators=8),
        num_classes=10,
        loss=nn.CrossEntropyLoss(),
        optim_recipe=torch.optim.Adam(network.parameters(), lr=0.01),
        is_ensemble=True,
        eval_ood=True,
    )
    bank = f"{options.folder}/bank"
    watched = "model.core_model"  # without the passes that the wrapper adds
    trainer = TUTrainer(
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
    data = Digits()
    trainer.fit(routine, data)
    seen = dict(trainer.callback_metrics)
    trainer.test(routine, data)
    print("tau", float(seen["tau"]), "mass_excess", float(seen["mass_excess"]))
    print(CheckpointBank(bank, "r"))


if __name__ == "__main__":
    main()

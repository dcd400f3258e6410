"""Write the files of this folder anew; only to be run by the version whose files they are.

python tests/written_before/make.py FOLDER
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from module_cases import Blobs, made, trainer

from lightning_bnn.bank import CheckpointBank
from lightning_bnn.callbacks import CheckpointHarvester

KINDS = {
    "population": {}, "multi-mfvi": {}, "mfvi": {"batch_norm": True}, "bethe": {},
    "multi-swag": {"batch_norm": True},
    "multi-dropout": {"dropout": 0.2}, "multi-laplace": {}, "sghmc": {}, "hmc": {},
    "mile": {},
}  # fmt: skip


def main(folder):
    """One checkpoint of every kind of module with what it predicts, and two banks."""
    folder.mkdir(parents=True, exist_ok=True)
    inputs = torch.randn(5, 6, generator=torch.Generator().manual_seed(4))
    predicted = {"inputs": inputs}
    for name, options in KINDS.items():
        module = made(name, width=4, **options)
        data = Blobs()
        callbacks = []
        if name == "multi-mfvi":
            callbacks.append(CheckpointHarvester(str(folder / "harvested"), every_n_epochs=1))
        run = trainer(*callbacks)
        run.fit(module, data)
        run.save_checkpoint(folder / f"{name}.ckpt")
        predicted[name] = module(inputs)
    chains = made("sghmc", width=4, bank=str(folder / "chains"))
    run = trainer()
    run.fit(chains, Blobs())
    run.save_checkpoint(folder / "in a bank.ckpt")
    predicted["in a bank"] = chains(inputs)
    for name in ("harvested", "chains"):
        bank = CheckpointBank(folder / name, "r")
        predicted[f"{name}/networks"] = bank[list(range(len(bank)))]
        predicted[f"{name}/records"] = [dict(r) for r in bank.records]
    torch.save(predicted, folder / "predicted.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

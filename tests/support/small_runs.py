"""A tiny bank, a run beside it, and configurations for both."""

import json
from pathlib import Path

import torch
import yaml

from lightning_bnn.bank import CheckpointBank
from lightning_bnn.models import mlp
from weightsym import params as P

HIDDEN = 4
NET = mlp(64, [HIDDEN], 10).eval()
NET.load_state_dict(P.unstack(P.populate(NET, 1, torch.Generator().manual_seed(77)))[0])
CONFIG = {
    "model": {
        "class_path": "DeepEnsemble",
        "init_args": {
            "network": {
                "class_path": "lightning_bnn.models.mlp",
                "init_args": {"inputs": 64, "hidden": [HIDDEN], "outputs": 10},
            }
        },
    },
    "data": {"class_path": "Digits"},
}


def config(folder):
    path = Path(folder) / "like.yaml"
    path.write_text(yaml.safe_dump(CONFIG))
    return path


def bank(path, count, seed=0, **records):
    """Freshly initialised networks; ``records`` are lists, one value for each."""
    networks = P.populate(NET, count, torch.Generator().manual_seed(seed))
    rows = [{name: values[k] for name, values in records.items()} for k in range(count)]
    with CheckpointBank(path) as bank:
        bank.extend(networks, rows)
    return networks


def results(folder):
    return json.loads((Path(folder) / "results.json").read_text())


def numbers(folder, table):
    """Rows of a table as numbers by column."""
    stored = results(folder)["tables"][table]

    def plain(cell):
        return cell["value"] if isinstance(cell, dict) else cell

    return [dict(zip(stored["header"], map(plain, row), strict=True)) for row in stored["rows"]]

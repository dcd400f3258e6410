"""A tiny bank, a run beside it, and configurations for both."""

import contextlib
import io
import json
from pathlib import Path

import pytest
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


def filled(folder):
    """A folder with a configuration and two banks."""
    config(folder)
    bank(folder / "three", 3, seed=1)
    bank(folder / "other", 3, seed=2)
    return folder


def called(main, folder, args):
    """What a command prints that is called in a folder."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as text:
        patch.chdir(folder)
        main(args)
    return text.getvalue()


def assert_published(out, name, text):
    """Tables and figures of a command are written, and the tables printed."""
    held = results(out)
    assert held["study"] == name
    assert held["settings"]
    figures = sorted(out.glob("*.png"))
    assert figures
    for figure in figures:
        assert figure.with_suffix(".svg").exists()
        assert figure.stat().st_size > 5_000
    for table, content in held["tables"].items():
        assert (out / f"{table}.csv").exists()
        assert content["title"] in text
        assert len(content["rows"]) >= 1
    assert (out / "README.md").exists()
    assert str(out.resolve()) in text

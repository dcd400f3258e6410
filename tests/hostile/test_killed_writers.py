"""Whatever writes a file, and is killed, leaves it as it was before or as it is to be."""

import itertools

import matplotlib
import pytest
import torch
from kills import kills
from matplotlib.figure import Figure

from lightning_bnn.bank import CheckpointBank, export_files
from lightning_bnn.callbacks.figure_logging import log_panels
from lightning_bnn.doctor.findings import Report
from lightning_bnn.findings import Findings, write_findings
from lightning_bnn.tables import Table
from weightsym.files import draft_of, open_network, save_tensors, write_like, write_whole

pytestmark = pytest.mark.e2e


def figure(version):
    drawn = Figure(figsize=(1, 1))
    drawn.text(0.5, 0.5, str(version))
    return drawn


def findings(folder, version):
    table = Table("a table", ["name", "number"], [["x", float(version)]] * 50)
    write_findings(Findings("it", "", {"a": table, "b": table}, {"c": figure(version)}), folder)


def report(folder, version):
    Report([], ["fine"] * 50, facts={"version": version}).write(folder)


def panels(folder, version):
    trainer = type("Trainer", (), {"loggers": ()})()
    log_panels(trainer, folder, "it", {"a": version}, lambda p: figure(p["a"]), 1)


def network(folder, version):
    state = {"w": torch.full((50,), float(version))}
    if not (folder / "like.safetensors").exists():
        save_tensors(folder / "like.safetensors", {"w": torch.zeros(50)})
    like = open_network(folder / "like.safetensors")
    write_like(like, folder / "it.safetensors", state.__getitem__, overwrite=True)


def exported(folder, version):
    with CheckpointBank(folder.parent / f"bank {version}") as bank:
        if not len(bank):
            bank.extend({"w": torch.full((3, 50), float(version))})
    export_files(bank, folder)


def text(folder, version):
    write_whole(folder / "it", str(version) * 50)


def tensors(folder, version):
    with draft_of(folder / "it.pt") as draft:
        torch.save({"w": torch.full((50,), float(version))}, draft)


def half_written(folder, version):
    """The negative control."""
    (folder / "it").write_text(str(version) * 50)


def files(folder):
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name[0] != "."}


WRITERS = [findings, report, panels, network, exported, text, tensors, half_written]


@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__)
def test_a_file_is_the_old_or_the_new_one(write, tmp_path, monkeypatch):
    folder = tmp_path / "it"
    folder.mkdir()
    monkeypatch.setitem(matplotlib.rcParams, "svg.hashsalt", "the same names")
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "0")
    write(folder, 2)
    new = files(folder)

    def first():
        write(folder, 1)

    first()
    old, torn = files(folder), 0
    for _ in itertools.islice(kills(lambda: write(folder, 2), folder, first), 60):
        found = files(folder)
        assert found.keys() >= old.keys()
        torn += any(content not in (old[path], new[path]) for path, content in found.items())
    assert (torn > 0) == (write is half_written)

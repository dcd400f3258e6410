"""The examples run as a user would run them."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_bnn.bank import CheckpointBank

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_a_method_in_a_plain_loop(capsys):
    runpy.run_path(str(EXAMPLES / "plain_loop.py"))
    assert float(capsys.readouterr().out.split()[-1]) > 0.9
    assert len((EXAMPLES / "plain_loop.py").read_text().splitlines()) <= 25


@pytest.mark.e2e
def test_add_to_existing_run(tmp_path):
    call = [
        sys.executable,
        EXAMPLES / "add_to_existing_run.py",
        "--epochs",
        "3",
        "--folder",
        "runs",
    ]
    done = subprocess.run(call, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    folder = tmp_path / "runs" / "digits" / "version_0"
    assert len(CheckpointBank(folder / "bank", "r")) == 3
    tags = EventAccumulator(str(folder)).Reload().Tags()
    assert {"tau", "mass", "mass_excess", "loss", "accuracy"} <= set(tags["scalars"])
    assert "posterior/trajectories/raw" in tags["images"]

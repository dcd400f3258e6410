"""Our callbacks on the LightningModules of other packages, which are installed by hand."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_bnn.bank import CheckpointBank

pytestmark = pytest.mark.slow
EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.parametrize("peer", ["torch_uncertainty", "lightning_uq_box"])
def test_callbacks_on_modules_of_others(peer, tmp_path):
    if importlib.util.find_spec(peer) is None:
        pytest.skip(f"{peer} is not installed.")
    call = [sys.executable, str(EXAMPLES / f"with_{peer}.py"), "--epochs", "2"]
    done = subprocess.run(call, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "switched off" not in done.stderr
    (line,) = [row.split() for row in done.stdout.splitlines() if row.startswith("tau ")]
    assert -1 <= float(line[1]) <= 1
    assert float(line[3]) > 0
    assert len(CheckpointBank(tmp_path / "runs" / "bank", "r")) == 2

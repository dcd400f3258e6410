"""The examples run as a user would run them."""

import ast
import json
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


def displayed(source, space):
    """Run a cell, and return what a notebook would show of its last expression, by kind."""
    *statements, last = ast.parse(source).body
    run = ast.Module(statements if isinstance(last, ast.Expr) else [*statements, last], [])
    exec(compile(run, "cell", "exec"), space)
    if not isinstance(last, ast.Expr):
        return {}
    value = eval(compile(ast.Expression(last.value), "cell", "eval"), space)
    kinds = {kind: getattr(value, f"_repr_{kind}_", None) for kind in ("html", "png")}
    shown = {kind: show() for kind, show in kinds.items() if show is not None}
    return {} if value is None else {"text": repr(value), **shown}


@pytest.mark.e2e
@pytest.mark.filterwarnings("ignore")
def test_the_notebook_shows_what_its_cells_end_with(tmp_path, monkeypatch, capsys):
    """As a kernel does, which is not among the packages that tests need."""
    monkeypatch.chdir(tmp_path)
    notebook = json.loads((EXAMPLES / "notebook.ipynb").read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 4)
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] for cell in cells)
    space = {"__name__": "__main__"}
    first, ensemble, networks, draws, result, figure, table = (
        displayed("".join(cell["source"]), space) for cell in cells
    )
    out = capsys.readouterr()
    (accuracy,) = (line for line in out.out.splitlines() if "test/acc" in line)
    assert accuracy.count("0.") == 1  # in one column of two test sets
    assert "posteriors: 100%" in out.err.replace("\r", "\n")
    assert not first
    network = "Sequential of 1210 weights"
    assert ensemble["text"] == f"DeepEnsemble(5 members, {network}, Categorical(), no prior)"
    prior = "prior IsotropicGaussianPrior(std=1)"
    about = f"MFVI(1 member, {network}, Categorical(), {prior}, 1078 training examples)"
    assert repr(space["vi"]) == about
    assert networks["text"] == "Empirical(8 networks of 1210 weights, each a mode)"
    assert draws["text"] == "Empirical(20 networks of 1210 weights, one mode)"
    assert "<summary>Predictions</summary>" in result["html"]
    assert "VI: one mode: its law is not known" in result["html"]
    assert figure["png"].startswith(b"\x89PNG")
    assert "<caption>Distance to the reference</caption>" in table["html"]

"""The examples run as a user would run them."""

import ast
import json
import runpy
import sys
from pathlib import Path

import pytest
from processes import result
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_bnn.bank import CheckpointBank

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_a_method_in_a_plain_loop(capsys):
    runpy.run_path(str(EXAMPLES / "plain_loop.py"))
    assert float(capsys.readouterr().out.split()[-1]) > 0.9
    assert len((EXAMPLES / "plain_loop.py").read_text().splitlines()) <= 25


def called(name, *words):
    sys.argv = [name, *words]
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


@pytest.mark.e2e
def test_add_to_existing_run(tmp_path):
    words = "--epochs 3 --folder runs".split()
    result(called, "add_to_existing_run.py", *words, folder=tmp_path)
    folder = tmp_path / "runs" / "digits" / "version_0"
    assert len(CheckpointBank(folder / "bank", "r")) == 3
    tags = EventAccumulator(str(folder)).Reload().Tags()
    assert {"tau", "mass", "mass_excess", "loss", "accuracy"} <= set(tags["scalars"])
    assert "posterior/trajectories/raw" in tags["images"]


def displayed(source, space):
    """Run a cell, and return its last expression, which a notebook would show."""
    *statements, last = ast.parse(source).body
    exec(compile(ast.Module(statements, []), "cell", "exec"), space)
    if isinstance(last, ast.Expr):
        return eval(compile(ast.Expression(last.value), "cell", "eval"), space)
    return exec(compile(ast.Module([last], []), "cell", "exec"), space)


@pytest.mark.e2e
@pytest.mark.filterwarnings("ignore")
def test_the_notebook_shows_what_its_cells_end_with(tmp_path, monkeypatch, capsys):
    """As a kernel does, which is not among the packages that tests need."""
    monkeypatch.chdir(tmp_path)
    notebook = json.loads((EXAMPLES / "notebook.ipynb").read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] for cell in cells)
    space = {"__name__": "__main__"}
    first, ensemble, networks, draws, result, figure, table = (
        displayed("".join(cell["source"]), space) for cell in cells
    )
    assert first is None
    assert (networks.size, draws.size) == (8, 20)
    assert repr(ensemble).startswith("DeepEnsemble(5 members, Sequential of 1210 weights")
    assert "VI: one mode: its law is not known" in result._repr_html_()
    assert figure._repr_png_().startswith(b"\x89PNG")
    assert "<caption>Distance to the reference</caption>" in table._repr_html_()
    out = capsys.readouterr()
    (accuracy,) = (line for line in out.out.splitlines() if "test/acc" in line)
    assert accuracy.count("0.") == 1  # in one column of two test sets

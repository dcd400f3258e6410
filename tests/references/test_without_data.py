"""Without the distribution of data, one sentence says how to get it, and all else works."""

import pytest
import torch
from shell import failure
from small_runs import bank, config

from lightning_bnn.bank import CheckpointBank, shipped, shipped_bank, shipped_banks
from lightning_bnn.cli import main
from lightning_bnn.evaluation.stored_posteriors import Location
from lightning_bnn.hub import write_folder
from lightning_bnn.posteriors import Posterior
from lightning_bnn.references import read_reference, reference_names
from lightning_bnn.references.shipped import reference_location
from weightsym.extras import MissingPackage

pytestmark = pytest.mark.filterwarnings("ignore")
SENTENCE = " needs lightning-bnn-data: pip install lightning-bnn-data (in a clone: "


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty folder, where the distribution is not installed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(shipped, "find_spec", lambda name: None)
    return tmp_path


CALLS = {
    "reference": lambda: read_reference("sine"),
    "location": lambda: reference_location("sine"),
    "bank": lambda: shipped_bank("mnist_optunets"),
    "rows of a bank": lambda: Location.of("mnist_optunets[:3]"),
    "posterior": lambda: Posterior.of("mnist_optunets"),
    "upload": lambda: write_folder("sine", "upload"),
}


@pytest.mark.bad_input
@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_what_needs_the_data_says_so(call):
    with pytest.raises(MissingPackage) as caught:
        call()
    assert SENTENCE in str(caught.value)


COMMANDS = (
    "references",
    "references sine",
    "fidelity sine --posteriors.A own",
    "bank mnist_optunets",
    "compare mnist_optunets --posteriors.A own --data my.yaml",
    "doctor mnist_optunets",
)


@pytest.mark.bad_input
@pytest.mark.parametrize("command", COMMANDS)
def test_commands_end_in_the_sentence(command, here, capsys):
    config(here)
    bank(here / "own", 3, seed=1)
    assert SENTENCE in failure(capsys, *command.split())


def test_what_needs_no_data_works(here, capsys):
    assert (reference_names(), shipped_banks()) == ([], [])
    with CheckpointBank("mnist_optunets") as own:  # a place of the user's own has that name
        own.append({"w": torch.ones(2)})
    assert Location.of("mnist_optunets").path.resolve() == here / "mnist_optunets"
    assert reference_location("mnist_optunets").path.exists()
    main(["bank", "mnist_optunets"])
    assert "1 networks of 2 weights" in capsys.readouterr().out

"""Posteriors that were sampled: what ships is what its card says."""

import json
import shutil

import pytest
import torch
from card_numbers import as_on_the_card
from shell import failure
from small_runs import bank, config

from lightning_bnn.bank import CheckpointBank, shipped, shipped_bank, shipped_banks
from lightning_bnn.bank.shipped import digest_of_networks
from lightning_bnn.cli import main
from lightning_bnn.evaluation.stored_posteriors import Location
from lightning_bnn.hub import write_folder
from lightning_bnn.posteriors import Posterior
from lightning_bnn.references import Card, diagnose, read_reference, reference_names
from lightning_bnn.references import shipped as shipped_references
from lightning_bnn.references.shipped import reference_folder, reference_location
from weightsym.extras import MissingPackage

GOLD = ("digits", "digits_wide", "energy", "sine", "two_gaussians", "yacht")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("name", reference_names())
def test_the_draws_are_those_of_the_card(name):
    stored, problem, card = read_reference(name)
    assert digest_of_networks(reference_folder(name) / "bank") == card.sha256
    assert len(stored.modes) == card.diagnosis.chains
    assert {mode.size for mode in stored.modes} == {card.diagnosis.draws}
    assert problem.network is not None
    assert "not known" not in card.licence
    assert name not in GOLD or card.failures == []


LONG = "digits_wide", "airfoil", "concrete", "energy"
"""References of which each takes seconds; the others are of the same kinds."""
EACH = [pytest.param(n, marks=pytest.mark.slow) if n in LONG else n for n in reference_names()]


@pytest.mark.e2e
@pytest.mark.parametrize("name", EACH)
def test_the_numbers_of_every_card_can_be_computed_again(name, capsys):
    """Six seconds for the digits, whose draws are stored with half of the digits."""
    stored, problem, card = read_reference(name)
    as_on_the_card(card, diagnose(stored, problem))
    main(["references", name])
    printed = capsys.readouterr().out
    assert "those of the card" in printed
    assert printed.rstrip().endswith(card.verdict)


@pytest.fixture
def copied(tmp_path, monkeypatch):
    """The only reference that there is: its folder, which may be changed."""
    shutil.copytree(reference_folder("two_gaussians"), tmp_path / "two_gaussians")
    monkeypatch.setattr(shipped_references, "_root", lambda: tmp_path)
    return tmp_path / "two_gaussians"


def other_draws(folder, change):
    with CheckpointBank(folder / "bank", "r") as bank:
        networks, records = bank[:], bank.records
    shutil.rmtree(folder / "bank")
    change(next(iter(networks.values())), torch.tensor([r["member"] for r in records]))
    with CheckpointBank(folder / "bank") as bank:
        bank.extend(networks, records)


def test_other_draws_are_noticed_and_what_fails_now_counts(copied, capsys):
    """One chain is moved, and then the digest of the card with it."""
    other_draws(copied, lambda weights, chains: weights.add_(3.0 * (chains == 0)[:, None, None]))
    main(["references"])
    assert "OTHER DRAWS THAN THE CARD'S" in capsys.readouterr().out
    file = copied / "card.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps({**content, "sha256": digest_of_networks(copied / "bank")}))
    assert Card.read(file).verdict == "gold"
    main(["references", "two_gaussians"])
    assert capsys.readouterr().out.split("Verdicts")[1].count("long run") == 1


@pytest.mark.parametrize("command", ["references", "fidelity two_gaussians --posteriors.A a"])
def test_a_damaged_card_is_refused_in_one_sentence(command, copied, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (copied / "card.json").write_text("{}")
    message = failure(capsys, *command.split())
    assert "card.json is not a card of a reference, or it is damaged" in message


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("references moon", "There is no reference 'moon'; choose from: airfoil"),
        ("references --name moon", "There is no reference 'moon'; choose from: airfoil"),
        ("fidelity digits", "`--posteriors` is missing"),
        ("fidelity moon --posteriors.A a",
         "There is no reference 'moon', and nothing at moon; choose a bank, or from: airfoil"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_refused_in_one_sentence(
    command, message, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert message in failure(capsys, *command.split())


# ------------------------------------------------------------ without the package of data
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

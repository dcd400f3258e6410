"""Posteriors that were sampled: what ships is what its card says, and what is scored against it."""

import json
import math
import os
import shutil
import signal

import pytest
import torch
from processes import start
from shell import failure
from small_runs import numbers, results

from lightning_bnn.bank import CheckpointBank
from lightning_bnn.bank.shipped import digest_of_networks
from lightning_bnn.cli import main
from lightning_bnn.commands.presets import preset_text
from lightning_bnn.evaluation.problem import read_problem
from lightning_bnn.evaluation.stored_posteriors import Location, read_posterior
from lightning_bnn.references import Card, diagnose, read_reference, reference_names, shipped
from lightning_bnn.references.shipped import reference_folder
from lightning_bnn.studies import reference, runs
from lightning_bnn.studies.fidelity import HALVES

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


def as_on_the_card(card, diagnosis):
    """Numbers up to the rounding of another processor."""
    for space, values in card.diagnosis.spaces.items():
        for number, value in values.items():
            close = 3e-4 if number.startswith("rhat") else 0.01
            assert diagnosis.spaces[space][number] == pytest.approx(value, rel=close, nan_ok=True)
    for name, (value, error) in card.diagnosis.halves.items():
        tolerance = max(0.01 * abs(value), 0.1 * error if math.isfinite(error) else 0.0)
        assert diagnosis.halves[name].value == pytest.approx(value, abs=tolerance)


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
    monkeypatch.setattr(shipped, "_root", lambda: tmp_path)
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
    assert "card.json is no card of a reference, or it is damaged" in message


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("reference digit", "did you mean 'digits'"),
        ("reference digits --repeats=-1", "`repeats` must not be negative"),
        ("reference digits --transitions=100", "must be at least 183, got 100"),
        ("references moon", "There is no reference 'moon'; choose from: airfoil"),
        ("references --name moon", "There is no reference 'moon'; choose from: airfoil"),
        ("fidelity digits", "`--posteriors` is missing"),
        ("fidelity moon --posteriors.A a",
         "There is no reference 'moon', and nothing at moon; choose a bank, or from: airfoil"),
        ("leaderboard --methods [vi]", "`methods` must be among"),
        ("leaderboard --budgets [0]", "`budgets` must be positive"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_refused_in_one_sentence(
    command, message, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert message in failure(capsys, *command.split())


def sample(folder):
    """By the preset with few transitions, whose draws are stored as those of a large one."""
    text = preset_text("reference_two_gaussians").replace("burn_in: 200", "burn_in: 8")
    text = text.replace("adapt_steps: 150", "adapt_steps: 6").replace("every_n_steps: 4", "")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "_LARGE", 0)
        for module in (runs, reference):
            patch.setattr(module, "preset_text", lambda name: text)
        options = ["--out", str(folder), "--transitions", "20", "--repeats", "0"]
        main(["reference", "two_gaussians", *options])


@pytest.fixture(scope="module")
def sampled(tmp_path_factory):
    """A reference of few draws, twice."""
    folders = [tmp_path_factory.mktemp(name) / "two_gaussians" for name in "ab"]
    for folder in folders:
        sample(folder)
    return folders


@pytest.mark.e2e
def test_a_reference_is_sampled_again_to_the_last_bit(sampled):
    one, two = (folder / "two_gaussians" for folder in sampled)
    assert digest_of_networks(one / "bank") == digest_of_networks(two / "bank")
    card = json.loads((one / "card.json").read_text())
    assert any("effective draws at the worst point" in text for text in card["failures"])
    assert "sampled from 0 other seeds, not 3" in card["failures"]
    assert card["made"]["gradients"] == 8 * 20 * 21
    assert read_problem(one / "config.yaml").source.num_data == 60


def killed_in_transition(number, folder, seconds):
    """The command, which ends without a word: draws are written, the checkpoint is one before."""

    def kill(self, trainer, pl_module):
        if trainer.current_epoch == number:
            os.kill(os.getpid(), signal.SIGKILL)

    runs._Epochs.on_train_epoch_end = kill
    runs._BETWEEN_CHECKPOINTS = seconds
    sample(folder)


@pytest.mark.e2e
@pytest.mark.parametrize("seconds", [0.0, 1e6], ids=["the last", "none"])
def test_a_reference_that_was_killed_goes_on_to_the_same_draws(sampled, tmp_path, seconds):
    """From the checkpoint of the transition before, or from the beginning."""
    folder = tmp_path / "two_gaussians"
    run = start(killed_in_transition, 12, folder, seconds)
    run.process.join(120)
    assert run.process.exitcode == -signal.SIGKILL
    with CheckpointBank(folder / "runs" / "seed_0" / "bank", "r") as bank:
        assert 0 < len(bank) < 8 * 12
    assert not (folder / "two_gaussians").exists()
    sample(folder)
    one, two = (Card.read(each / "two_gaussians" / "card.json") for each in (sampled[0], folder))
    assert one.sha256 == two.sha256
    assert one.diagnosis.spaces == two.diagnosis.spaces
    assert one.made["gradients"] == two.made["gradients"]


@pytest.mark.e2e
def test_a_card_is_about_the_draws_that_are_stored(sampled):
    """In sixteen bits here, which is not what was sampled."""
    folder = sampled[0]
    problem = read_problem(folder / "two_gaussians" / "config.yaml")
    card = Card.read(folder / "two_gaussians" / "card.json")
    found = {
        where: diagnose(read_posterior("x", Location(folder / where / "bank"), problem), problem)
        for where in ("two_gaussians", "runs/seed_0")
    }
    assert card.diagnosis.spaces == found["two_gaussians"].spaces
    assert card.diagnosis.halves["law"] == found["two_gaussians"].halves["law"]
    assert card.diagnosis.spaces != found["runs/seed_0"].spaces
    as_on_the_card(card, found["two_gaussians"])


@pytest.mark.e2e
def test_a_method_is_scored_within_its_budget_and_by_hand_alike(tmp_path):
    out, one = tmp_path / "board", tmp_path / "one"
    line = "leaderboard --references [two_gaussians] --budgets [248] --seeds 1 --samples 4"
    main([*line.split(), "--methods", "[ensemble]", "--out", str(out)])
    (found,) = numbers(out, "two_gaussians-248")
    assert found["gradients"] == pytest.approx(250)
    runs = str(out / "runs" / "two_gaussians-248-0" / "ensemble")
    line = "fidelity two_gaussians --samples 4 --posteriors.E"
    main([*line.split(), runs, "--out", str(one)])
    row, half = numbers(one, "fidelity")
    assert half["posterior"] == HALVES
    assert not results(one)["cautions"]
    for column in ("gradients", "function law", "NS law", "TV", "NLL"):
        assert row[column] == pytest.approx(found[column], rel=1e-4), column
    assert results(out)["study"] == "leaderboard"

"""References are sampled again to the last bit, and scored within their budgets."""

import inspect
import json
import os
import re
import signal

import pytest
import yaml
from card_numbers import as_on_the_card
from processes import start
from shell import failure
from small_runs import numbers, results

from bnn_research.cli import main
from bnn_research.presets import OWN
from bnn_research.references import sampling
from bnn_research.references.sampling import licence_of
from lightning_bnn import cli, datamodules
from lightning_bnn.bank import CheckpointBank
from lightning_bnn.bank.shipped import digest_of_networks
from lightning_bnn.commands import runs
from lightning_bnn.commands.fidelity import HALVES
from lightning_bnn.commands.presets import preset_names, preset_text
from lightning_bnn.evaluation.problem import read_problem
from lightning_bnn.evaluation.stored_posteriors import Location, read_posterior
from lightning_bnn.references import Card, diagnose

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("reference digit", "did you mean 'digits'"),
        ("reference digits --repeats=-1", "`repeats` must not be negative"),
        ("reference digits --transitions=100", "must be at least 183, got 100"),
        ("posteriordb moon db", "There is no reference 'moon'; choose from: airfoil"),
        ("leaderboard --methods [vi]", "`methods` must be among"),
        ("leaderboard --budgets [0]", "`budgets` must be positive"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_refused_in_one_sentence(
    command, message, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert message in failure(capsys, *command.split(), script=main)


def sample(folder):
    """By the preset with few transitions, whose draws are stored as those of a large one."""
    text = preset_text("reference_two_gaussians", OWN).replace("burn_in: 200", "burn_in: 8")
    text = text.replace("adapt_steps: 150", "adapt_steps: 6").replace("every_n_steps: 4", "")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "_LARGE", 0)
        for module in (runs, sampling):
            patch.setattr(module, "preset_text", lambda name, package: text)
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
    cli.main([*line.split(), runs, "--out", str(one)])
    row, half = numbers(one, "fidelity")
    assert half["posterior"] == HALVES
    assert not results(one)["cautions"]
    for column in ("gradients", "function law", "NS law", "TV", "NLL"):
        assert row[column] == pytest.approx(found[column], rel=1e-4), column
    assert results(out)["study"] == "leaderboard"


@pytest.mark.parametrize(
    ("data", "licence"),
    [
        *((data, "CC BY 4.0, {source}") for data in
          (["{name}"], ["UCI", "{lower}"], ["lightning_bnn.datamodules.UCI", "{lower}"])),
        *(([data], "not known") for data in ("CIFAR10", "my.own.Table", "")),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["Airfoil", "Concrete", "Energy", "Yacht"])
def test_tables_are_under_the_licence_that_their_class_names(name, data, licence):
    document = inspect.getdoc(getattr(datamodules, name))
    (source,) = re.findall(r"https://doi\.org/\S+", document)
    assert "CC BY 4.0" in document
    found = licence_of(*(text.format(name=name, lower=name.lower()) for text in data))
    assert found == f"data: {licence.format(source=source)}; draws: Apache 2.0"


@pytest.mark.parametrize("preset", [n for n in preset_names(OWN) if n.startswith("reference_")])
def test_the_data_of_every_reference_have_a_licence(preset):
    data = yaml.safe_load(preset_text(preset, OWN))["data"]["class_path"]
    assert "not known" not in licence_of(data)

"""Rows of the leaderboard: what they make of a reference and a budget."""

import pytest
import yaml
from jsonargparse import ArgumentParser

from bnn_research.entries import Entry, read_entries
from bnn_research.scales import settings_of
from bnn_research.width import SCALES
from lightning_bnn import modules

ROWS = read_entries()
REFERENCE = {
    "model": {"init_args": {"network": {"class_path": "net"}, "prior_std": 0.5, "burn_in": 7}},
    "data": {"class_path": "Digits", "init_args": {"batch_size": 2048, "seed": 3}},
}


def test_a_budget_is_shared_by_the_members_and_shares_become_epochs():
    entry = Entry("X", "SWAG", {"members": 5, "start": "50%", "optimizer": {"T": "10%"}}, "25%")
    settings = yaml.safe_load(entry.configuration(REFERENCE, 1000, 1078))
    assert settings["trainer"]["max_epochs"] == 200
    assert settings["model"]["init_args"]["start"] == 100
    assert settings["model"]["init_args"]["optimizer"] == {"T": 20}
    assert settings["data"]["init_args"] == {"batch_size": 270, "seed": 3}
    settings = yaml.safe_load(Entry("X", "MFVI").configuration(REFERENCE, 10, 40))
    arguments = settings["model"]["init_args"]  # network and prior of the reference, no more
    assert arguments == {"network": {"class_path": "net"}, "prior_std": 0.5, "seed": 1}
    assert settings["data"]["init_args"]["batch_size"] == 40
    samplers_pay_for_every_step = Entry("HMC", "HMC", {"members": 4}, gradients_per_epoch=31)
    assert samplers_pay_for_every_step.epochs(12_400) == 100


def test_candidates_change_what_they_name_and_nothing_else():
    given = {"optimizer": {"class_path": "SGD", "init_args": {"lr": 0.1, "momentum": 0.9}}}
    other = {"settings": {"optimizer": {"init_args": {"lr": 0.01}}}, "gradients_per_epoch": 9}
    row, candidate = Entry("X", "SWAG", given, "25%", candidates=[other]).alternatives()
    assert row == Entry("X", "SWAG", given, "25%")
    chosen = {"lr": 0.01, "momentum": 0.9}
    settings = {"optimizer": {"class_path": "SGD", "init_args": chosen}}
    assert candidate == Entry("X", "SWAG", settings, "25%", 9)


@pytest.mark.parametrize("name", ROWS)
def test_every_row_of_the_package_is_a_module_with_arguments_that_it_takes(name):
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(getattr(modules, ROWS[name].method), "model")
    given = {"network": {"class_path": "lightning_bnn.models.mlp",
                         "init_args": {"inputs": 64, "hidden": [3], "outputs": 10}}}  # fmt: skip
    for entry in ROWS[name].alternatives():
        text = entry.configuration({**REFERENCE, "model": {"init_args": given}}, 1000, 1078)
        parser.parse_object({"model": yaml.safe_load(text)["model"]})


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("# A\nsettings: {}\n", "missing .* 'method'"),
        ("# A\nmethod: MFVI\nbatches: 3\n", "unexpected .* 'batches'"),
        ("# A\nmethod: MFVI\nbatch: 64\n", "`batch` of .* cannot be 64"),
        ("# A\nmethod: [1]\n", r"`method` of .* cannot be \[1\]"),
        ("# A\nmethod: A\nsettings: [1]\n", "must be groups"),
        ("# A\nmethod: A\nsettings:\n", "must be groups"),
        ("# A\nmethod: A\nsettings: {members: 0}\n", "`members` of .* cannot be 0"),
        ("# A\nmethod: A\nsettings: {members: x}\n", "`members` of .* cannot be 'x'"),
        ("# A\nmethod: A\ngradients_per_epoch: 0\n", "cannot be 0"),
        ("# A\nmethod: A\ncandidates: 3\n", "is not a row"),
        ("# A\nmethod: A\ncandidates: [3]\n", "must be groups"),
        ("# A\nmethod: A\ncandidates: [{rate: 3}]\n", "unexpected .* 'rate'"),
        ("# A\nmethod: A\ncandidates: [{settings: {members: 0}}]\n", "`members` of .* be 0"),
        ("# A\n1: A\nmethod: A\n", "is not a row"),
    ],
)
def test_what_is_no_row_is_refused(tmp_path, text, message):
    path = tmp_path / "a.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        Entry.read(path)


@pytest.mark.bad_input
def test_rows_of_one_title_are_refused(tmp_path):
    """One of them would be lost."""
    with pytest.raises(ValueError, match="no YAML files"):
        read_entries(tmp_path)
    for name, title in zip("abc", "AAC", strict=True):
        (tmp_path / f"{name}.yaml").write_text(f"# {title}\nmethod: MFVI\n")
    with pytest.raises(ValueError, match="must have a unique title .* several have 'A'"):
        read_entries(tmp_path)


# ------------------------------------------------------------ scales
@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: settings_of(SCALES, "huge"), "`scale` must be one of small, paper"),
        (lambda: settings_of(SCALES, "small", members=0), "`members` must be positive"),
        (lambda: settings_of(SCALES, "small", widths=[5, -1]), "`widths` must be positive"),
    ],
)
def test_bad_settings(call, sentence):
    assert settings_of(SCALES, "small", members=None) == SCALES["small"]  # the controls
    assert settings_of(SCALES, "small", members=2).members == 2
    with pytest.raises(ValueError, match=sentence):
        call()

"""Rows of the leaderboard: what they make of a reference and a budget."""

import pytest
import yaml

from lightning_bnn.references.entries import Entry, read_entries

REFERENCE = {
    "model": {"init_args": {"network": {"class_path": "net"}, "prior_std": 0.5, "burn_in": 7}},
    "data": {"class_path": "Digits", "init_args": {"batch_size": 2048, "seed": 3}},
}


def test_a_budget_is_shared_by_the_members_and_shares_become_epochs():
    entry = Entry("X", "SWAG", {"members": 5, "start": "50%", "optimizer": {"T": "10%"}}, "25%")
    settings = yaml.safe_load(entry.configuration("digits", REFERENCE, 1000, 1078))
    assert settings["trainer"]["max_epochs"] == 200
    assert settings["model"]["init_args"]["start"] == 100
    assert settings["model"]["init_args"]["optimizer"] == {"T": 20}
    assert settings["data"]["init_args"] == {"batch_size": 270, "seed": 3}


def test_network_and_prior_are_those_of_the_reference_and_nothing_else():
    settings = yaml.safe_load(Entry("X", "MFVI").configuration("digits", REFERENCE, 10, 40))
    arguments = settings["model"]["init_args"]
    assert arguments == {"network": {"class_path": "net"}, "prior_std": 0.5, "seed": 1}
    assert settings["data"]["init_args"]["batch_size"] == 40


def test_a_reference_may_have_settings_of_its_own():
    given = {"optimizer": {"class_path": "SGD", "init_args": {"lr": 0.1, "momentum": 0.9}}}
    other = {"optimizer": {"init_args": {"lr": 0.01}}}
    entry = Entry("X", "SWAG", given, per_reference={"sine": other})
    assert entry.settings_for("digits") == given
    chosen = {"lr": 0.01, "momentum": 0.9}
    assert entry.settings_for("sine") == {"optimizer": {"class_path": "SGD", "init_args": chosen}}


def test_samplers_pay_for_every_step_of_a_transition():
    entry = Entry("HMC", "HMC", {"members": 4}, gradients_per_epoch=31)
    assert entry.epochs(12_400) == 100


@pytest.mark.parametrize("name", sorted(read_entries()))
def test_every_row_of_the_package_is_a_module_with_arguments_that_it_takes(name):
    from jsonargparse import ArgumentParser

    from lightning_bnn import modules

    entry = read_entries()[name]
    given = {"network": {"class_path": "lightning_bnn.models.mlp",
                         "init_args": {"inputs": 64, "hidden": [3], "outputs": 10}}}  # fmt: skip
    text = entry.configuration("digits", {**REFERENCE, "model": {"init_args": given}}, 1000, 1078)
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(getattr(modules, entry.method), "model")
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
        ("# A\nmethod: A\nper_reference: 3\n", "must be groups"),
        ("# A\n1: A\nmethod: A\n", "is no row"),
    ],
)
def test_what_is_no_row_is_refused(tmp_path, text, message):
    path = tmp_path / "a.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        Entry.read(path)


def test_a_reference_may_have_settings_that_others_have_not():
    entry = Entry("X", "SWAG", {"a": 1}, per_reference={"sine": {"b": {"c": 2}, "a": {"d": 3}}})
    assert entry.settings_for("sine") == {"a": {"d": 3}, "b": {"c": 2}}


@pytest.mark.bad_input
def test_rows_of_one_title_are_refused(tmp_path):
    """One of them would be lost."""
    for name in "abc":
        (tmp_path / f"{name}.yaml").write_text(f"# {'C' if name == 'c' else 'A'}\nmethod: MFVI\n")
    with pytest.raises(ValueError, match="must have a title of its own .* several have 'A'"):
        read_entries(tmp_path)


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no YAML files"):
        read_entries(tmp_path)

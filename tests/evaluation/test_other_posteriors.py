"""A method with other data, another prior or likelihood is of another posterior, and is named."""

import pytest
import yaml

from lightning_bnn.commands.presets import preset_text
from lightning_bnn.evaluation.run_settings import other_posterior
from lightning_bnn.evaluation.stored_posteriors import Location
from lightning_bnn.references.shipped import reference_folder

REFERENCES = ("digits", "sine")


def run(folder, name, change):
    """What a run of a reference's preset with other settings would leave behind."""
    settings = yaml.safe_load(preset_text(f"reference_{name}"))
    change(settings["model"]["init_args"], settings["data"])
    (folder / "bank").mkdir(parents=True)
    (folder / "bank" / "manifest.jsonl").touch()
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    return Location(folder / "bank")


def found(place, name):
    return other_posterior(place, reference_folder(name) / "config.yaml")


@pytest.mark.parametrize("name", REFERENCES)
@pytest.mark.parametrize(
    "change",
    [
        lambda model, data: None,
        lambda model, data: model.update(members=3, burn_in=1, optimizer="torch.optim.Adam"),
        lambda model, data: data.setdefault("init_args", {}).update(batch_size=7),
        lambda model, data: data.update(
            class_path=f"lightning_bnn.datamodules.{data['class_path']}"
        ),
        lambda model, data: model.pop("prior_std"),
    ],
)
def test_the_same_posterior_by_another_method_is_the_same(tmp_path, name, change):
    assert found(run(tmp_path / "a", name, change), name) == []


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        (
            "digits",
            lambda model, data: model.update(prior_std=0.5),
            ("prior_std", "0.5", "1.0"),
        ),
        (
            "sine",
            lambda model, data: model["likelihood"]["init_args"].update(std=0.6),
            ("likelihood", "Gaussian(std=0.6)", "Gaussian(std=0.3)"),
        ),
        (
            "sine",
            lambda model, data: model["likelihood"]["init_args"].update(noise="learned"),
            ("likelihood", "Gaussian(noise=learned)", "Gaussian(noise=fixed)"),
        ),
        (
            "digits",
            lambda model, data: model.update(likelihood={"class_path": "Bernoulli"}),
            ("likelihood", "Bernoulli", "Categorical"),
        ),
        (
            "sine",
            lambda model, data: data["init_args"].update(seed=5),
            ("data", "NoisySine(seed=5)", "NoisySine(seed=0)"),
        ),
        (
            "digits",
            lambda model, data: data.update(class_path="MNIST"),
            ("data", "MNIST", "Digits"),
        ),
    ],
)
def test_what_makes_it_another_posterior_is_named(tmp_path, name, change, words):
    assert found(run(tmp_path / "a", name, change), name) == [words]


def test_a_place_without_a_configuration_says_nothing(tmp_path):
    (tmp_path / "loose").mkdir()
    assert found(Location(tmp_path / "loose"), "digits") == []
    (tmp_path / "loose" / "manifest.jsonl").touch()
    (tmp_path / "loose" / "config.yaml").write_text("colour: 1\n")
    assert found(Location(tmp_path / "loose"), "digits") == []

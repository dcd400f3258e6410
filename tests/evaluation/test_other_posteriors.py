"""A method with other data, another prior or likelihood is of another posterior, and is named."""

import pytest
import yaml

from lightning_bnn.evaluation.run_settings import has_other_data, other_posterior
from lightning_bnn.evaluation.stored_posteriors import Location
from lightning_bnn.references.shipped import reference_folder


def run(folder, settings):
    """What a run with a configuration leaves behind."""
    (folder / "bank").mkdir(parents=True)
    (folder / "bank" / "manifest.jsonl").touch()
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    return Location(folder / "bank")


SAME = {
    "as it is": lambda model, data: None,
    "another method": lambda model, data: model.update(members=3, optimizer="torch.optim.Adam"),
    "other batches": lambda model, data: data.setdefault("init_args", {}).update(batch_size=7),
    "a whole path": lambda model, data: data.update(
        class_path=f"lightning_bnn.datamodules.{data['class_path']}"
    ),
    "no prior": lambda model, data: model.pop("prior_std"),
}
OTHER = [
    ("digits", lambda model, data: model.update(prior_std=0.5), ("prior_std", "0.5", "1.0")),
    ("sine", lambda model, data: model["likelihood"]["init_args"].update(std=0.6),
     ("likelihood", "Gaussian(std=0.6)", "Gaussian(std=0.3)")),
    ("sine", lambda model, data: model["likelihood"]["init_args"].update(noise="learned"),
     ("likelihood", "Gaussian(noise=learned)", "Gaussian(noise=fixed)")),
    ("digits", lambda model, data: model.update(likelihood={"class_path": "Bernoulli"}),
     ("likelihood", "Bernoulli", "Categorical")),
    ("sine", lambda model, data: data["init_args"].update(seed=5),
     ("data", "NoisySine(seed=5)", "NoisySine(seed=0)")),
    ("digits", lambda model, data: data.update(class_path="MNIST"), ("data", "MNIST", "Digits")),
]  # fmt: skip
CASES = [(name, change, None) for name in ("digits", "sine") for change in SAME.values()] + OTHER


@pytest.mark.parametrize(("name", "change", "words"), CASES)
def test_what_makes_it_another_posterior_is_named(tmp_path, name, change, words):
    settings = yaml.safe_load((reference_folder(name) / "config.yaml").read_text())
    change(settings["model"]["init_args"], settings["data"])
    place, config = run(tmp_path / "a", settings), reference_folder(name) / "config.yaml"
    assert other_posterior(place, config) == ([] if words is None else [words])


@pytest.mark.parametrize(
    ("data", "other"),
    [
        ("Digits", False),
        ({"class_path": "Digits", "init_args": {"batch_size": 7, "orders": 3}}, False),
        ({"class_path": "Digits", "init_args": {"seed": 0}}, False),
        ("MNIST", True),
        ({"class_path": "Digits", "init_args": {"seed": 1}}, True),
        ({"class_path": "Digits", "init_args": {"val_share": 0.3}}, True),
    ],
)
def test_settings_that_decide_the_examples(tmp_path, data, other):
    like = run(tmp_path / "like", {"data": {"class_path": "Digits"}}).config()
    assert has_other_data(run(tmp_path / "run", {"data": data}), like) is other


@pytest.mark.parametrize("text", [None, "colour: 1\n"])
def test_a_place_without_a_configuration_says_nothing(tmp_path, text):
    (tmp_path / "bank").mkdir()
    if text is not None:
        (tmp_path / "bank" / "manifest.jsonl").touch()
        (tmp_path / "bank" / "config.yaml").write_text(text)
    config = reference_folder("digits") / "config.yaml"
    assert other_posterior(Location(tmp_path / "bank"), config) == []
    assert not has_other_data(Location(tmp_path / "bank"), config)

"""Licences are those of the sources: what is not known is not made up."""

import inspect
import re

import pytest
import yaml

from lightning_bnn import datamodules
from lightning_bnn.commands.presets import preset_names, preset_text
from lightning_bnn.references.cards import licence_of

PRESETS = [name for name in preset_names() if name.startswith("reference_")]


@pytest.mark.parametrize("preset", PRESETS)
def test_the_data_of_every_reference_have_a_licence(preset):
    data = yaml.safe_load(preset_text(preset))["data"]["class_path"]
    assert "not known" not in licence_of(data)


@pytest.mark.parametrize("name", ["Airfoil", "Concrete", "Energy", "Yacht"])
def test_tables_are_under_the_licence_that_their_class_names(name):
    document = inspect.getdoc(getattr(datamodules, name))
    (source,) = re.findall(r"https://doi\.org/\S+", document)
    assert "CC BY 4.0" in document
    for data in ([name], ["UCI", name.lower()], ["lightning_bnn.datamodules.UCI", name.lower()]):
        assert licence_of(*data) == f"data: CC BY 4.0, {source}; draws: Apache 2.0"


@pytest.mark.parametrize("data", ["CIFAR10", "my.own.Table", ""])
def test_a_licence_that_is_not_known_is_not_made_up(data):
    assert licence_of(data) == "data: not known; draws: Apache 2.0"

"""Every posterior that ships has a card that a person can read, and that tells its own story."""

import pytest

from lightning_bnn.references import reference_names
from lightning_bnn.references.cards import Card
from lightning_bnn.references.shipped import readable_card, reference_folder
from weightsym.settings_files import read_settings

ASKED = (
    "what verdict data network prior likelihood sampler draws diagnostics cost versions licence "
    "limits sha256"
).split()


@pytest.mark.parametrize("name", reference_names())
def test_a_card_says_what_a_reader_asks(name):
    folder = reference_folder(name)
    card = Card.read(folder / "card.json")
    lines = readable_card(name, card).splitlines()
    said = dict(line.split(":", 1) for line in lines)
    assert set(ASKED) | {"intended use", "other seeds"} == set(said)
    assert all(text.strip() for text in said.values())
    model = read_settings(folder / "config.yaml")["model"]["init_args"]
    assert str(model["prior_std"]) in said["prior"]
    assert str(model["network"]["init_args"]["hidden"]) in said["network"]
    assert card.sha256 in said["sha256"]
    assert f"{card.diagnosis.spaces['function']['rhat_max']:.3f}" in said["diagnostics"]

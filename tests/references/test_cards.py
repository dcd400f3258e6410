"""A card is what its numbers say: read as it was written, refused where it is damaged."""

import copy
import json
import math
from dataclasses import replace

import pytest

from lightning_bnn.references import reference_names
from lightning_bnn.references.cards import Card
from lightning_bnn.references.diagnosis import Diagnosis
from lightning_bnn.references.shipped import readable_card, reference_folder
from lightning_bnn.tables import Measured
from weightsym.networks.files.settings import read_settings

FILE = reference_folder("two_gaussians") / "card.json"
CONTENT = json.loads(FILE.read_text())
NUMBERS = {"rhat_max": 1.01, "rhat_median": 1.0, "ess_min": 900.0, "ess_tail_min": 900.0}
SPACES = dict.fromkeys(("function", "canonical", "weights"), NUMBERS)
SHIPPED = Card.read(FILE)


def refused_constant(name):
    raise AssertionError(f"{name} is no JSON")


ASKED = (
    "what verdict level data network prior likelihood sampler draws diagnostics cost versions "
    "licence limits sha256"
).split()


@pytest.mark.parametrize("name", reference_names())
def test_every_card_is_json_and_says_what_a_reader_asks(name, tmp_path):
    folder = reference_folder(name)
    text = (folder / "card.json").read_text()
    json.loads(text, parse_constant=refused_constant)
    card = Card.read(folder / "card.json")
    card.write(tmp_path / "card.json")
    assert (tmp_path / "card.json").read_text() == text
    said = dict(line.split(":", 1) for line in readable_card(name, card).splitlines())
    assert said.keys() == {*ASKED, "intended use", "other seeds", "folder"}
    assert str(folder) in said["folder"]
    assert all(text.strip() for text in said.values())
    model = read_settings(folder / "config.yaml")["model"]["init_args"]
    assert str(model["prior_std"]) in said["prior"]
    assert str(model["network"]["init_args"]["hidden"]) in said["network"]
    assert card.sha256 in said["sha256"]
    assert f"{card.diagnosis.spaces['function']['rhat_max']:.3f}" in said["diagnostics"]


def test_the_level_of_a_card_is_that_of_its_ranks():
    assert replace(SHIPPED, calibration={}).level == "diagnosed"
    assert replace(SHIPPED, calibration={"a": 0.2, "b": 0.9}).level == "calibrated, p = 0.4"
    assert replace(SHIPPED, calibration={"a": 0.004, "b": 0.9}).level == "not calibrated, p = 0.008"


def test_numbers_that_json_does_not_know_come_back_as_nan(tmp_path):
    halves = {"law": Measured(math.nan, math.inf), "tv": Measured(0.1)}
    spaces = {**SPACES, "weights": {**NUMBERS, "rhat_max": math.inf}}
    card = replace(SHIPPED, diagnosis=Diagnosis(4, 9, spaces, halves))
    card.write(tmp_path / "card.json")
    text = (tmp_path / "card.json").read_text()
    json.loads(text, parse_constant=refused_constant)
    read = Card.read(tmp_path / "card.json").diagnosis
    assert math.isnan(read.spaces["weights"]["rhat_max"])
    assert all(math.isnan(number) for number in read.halves["law"])
    assert read.halves["tv"].value == 0.1
    assert math.isnan(read.halves["tv"].error)


@pytest.mark.parametrize(("seeds", "verdict"), [(0, "long run"), (2, "long run"), (3, "gold")])
def test_gold_needs_three_other_seeds(seeds, verdict):
    card = replace(SHIPPED, again=SHIPPED.again[:seeds])
    assert card.verdict == verdict
    assert (f"sampled from {seeds} other seeds, not 3" in card.failures) is (verdict != "gold")


def test_the_verdict_is_that_of_the_numbers_whatever_the_file_says(tmp_path):
    content = copy.deepcopy(CONTENT)
    assert content["failures"] == []
    content["diagnosis"]["spaces"]["function"]["ess_min"] = 100.0
    content["again"][1]["failures"] = ["3 chains, not 4"]
    (tmp_path / "card.json").write_text(json.dumps(content))
    card = Card.read(tmp_path / "card.json")
    assert card.verdict == "long run"
    few, of_seed = card.failures
    assert few.startswith("100 effective draws")
    assert of_seed == "seed 2: 3 chains, not 4"


# ------------------------------------------------------------ damage
@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (FILE.read_text()[:500], "or it is damaged"),
        ("{}", "failures"),
        ("[]", "list"),
        (json.dumps({**CONTENT, "colour": 1}), "colour"),
        (json.dumps({**CONTENT, "diagnosis": 1}), "int"),
        (json.dumps({**CONTENT, "again": [{}]}), "distances"),
    ],
)
def test_a_damaged_card_is_refused_with_the_reason(tmp_path, text, message):
    (tmp_path / "card.json").write_text(text)
    with pytest.raises(ValueError, match=f"card.json is not a card of a reference.*{message}"):
        Card.read(tmp_path / "card.json")

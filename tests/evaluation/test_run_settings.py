"""Whether a run saw other data than it is judged by."""

import pytest
import yaml

from lightning_bnn.evaluation.run_settings import has_other_data
from lightning_bnn.evaluation.stored_posteriors import Location

SAME = [
    "Digits",
    {"class_path": "lightning_bnn.datamodules.Digits"},
    {"class_path": "Digits", "init_args": {"batch_size": 7, "orders": 3}},
    {"class_path": "Digits", "init_args": {"seed": 0}},
]
OTHER = [
    "MNIST",
    {"class_path": "Digits", "init_args": {"seed": 1}},
    {"class_path": "Digits", "init_args": {"val_share": 0.3}},
]


@pytest.mark.parametrize(("data", "other"), [(d, d in OTHER) for d in SAME + OTHER])
def test_settings_that_decide_the_examples(tmp_path, data, other):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump({"data": data}))
    (tmp_path / "run" / "x.pt").write_bytes(b"")
    like = tmp_path / "like.yaml"
    like.write_text(yaml.safe_dump({"data": {"class_path": "Digits"}}))
    assert has_other_data(Location(tmp_path / "run" / "x.pt"), like) is other


def test_a_place_without_a_configuration_says_nothing(tmp_path):
    (tmp_path / "like.yaml").write_text("data: Digits")
    (tmp_path / "x.pt").write_bytes(b"")
    assert not has_other_data(Location(tmp_path / "x.pt"), tmp_path / "like.yaml")

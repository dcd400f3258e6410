"""`lightning-bnn compare` and `calibrate` at their smallest: what they print and write."""

import pytest
from small_runs import assert_published, called, filled

from lightning_bnn.cli import main

pytestmark = pytest.mark.filterwarnings("ignore")
SMALLEST = {
    "compare": ["--data", "like.yaml", "three", "--posteriors.A", "other"],
    "calibrate": ["three", "--data", "like.yaml"],
}


@pytest.mark.parametrize("name", SMALLEST)
def test_tables_and_figures_are_printed_and_written(name, tmp_path):
    text = called(main, filled(tmp_path), [name, *SMALLEST[name], "--out", "out"])
    assert_published(tmp_path / "out", name, text)

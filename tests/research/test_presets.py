"""`bnn-research presets`, and every preset of the papers and of the references."""

import pytest
from preset_runs import assert_fits_together, assert_trains, printed, work_folder

from bnn_research.cli import main
from bnn_research.populations import study_job
from bnn_research.presets import OWN
from lightning_bnn.commands.presets import preset_names

pytestmark = pytest.mark.filterwarnings("ignore")
folder = pytest.fixture(work_folder)
NAMES = preset_names(OWN)


def test_all_are_listed_and_none_has_a_name_of_the_plug_in():
    text = printed(main, ["presets"])
    assert all(name in text for name in NAMES)
    assert not {*NAMES} & {*preset_names()}
    *_, last = text.splitlines()
    assert last == "bnn-research presets NAME > my.yaml; lightning-bnn fit -c my.yaml"


@pytest.mark.parametrize("preset", ["mnist_p1_mfvi", "digits_mfvi"])
def test_a_job_of_a_study_names_the_commands_that_do_the_same(preset):
    program = "bnn-research" if preset in NAMES else "lightning-bnn"
    job = study_job("a", preset, {"trainer.max_epochs": 3})
    first = f"{program} presets {preset} > {preset}.yaml"
    assert job.command == f"{first}; lightning-bnn fit -c {preset}.yaml --trainer.max_epochs 3"
    assert job.epochs == 3


@pytest.mark.e2e
@pytest.mark.parametrize("name", ["cifar100_p1_swag"])
def test_a_preset_fits_and_tests(name, folder):
    assert_trains(main, name, folder)


@pytest.mark.e2e
@pytest.mark.parametrize("name", NAMES)
def test_what_every_preset_names_fits_together(name, folder, monkeypatch):
    assert_fits_together(main, name, folder, monkeypatch)

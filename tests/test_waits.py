"""The host waits for a device where that is needed, and nowhere else: every place has a reason."""

import device_cases as D
import pytest
import waits as W
from processes import serving
from test_another_device import pytestmark  # noqa: F401

ASKED_FOR = "what is given is checked, once"
KEPT = "a network that is kept is looked at"
LOOK = "a look at weights is logged at once"
TRANSITION = "a transition, with passes through all data, has one answer for the host"
REASONS = {
    "lightning_bnn/_compat.py log": "looks at weights and transitions give numbers of the host",
    "lightning_bnn/callbacks/mass_gap.py _log": LOOK,
    "lightning_bnn/callbacks/mass_gap.py look": LOOK,
    "lightning_bnn/methods/all_data.py _check": TRANSITION,
    "lightning_bnn/metrics/gaussian_mixture.py components": ASKED_FOR,
    "lightning_bnn/metrics/gaussian_mixture.py values_for": ASKED_FOR,
    "lightning_bnn/metrics/kernels.py bandwidths": "few distances need sorting",
    "lightning_bnn/metrics/mmd.py update": "results are on the CPU, states on the device",
    "lightning_bnn/metrics/mmd.py mmd_table": "results are on the CPU",
    "lightning_bnn/metrics/remembered_mmd.py blocks": ASKED_FOR,
    "lightning_bnn/metrics/remembered_mmd.py _warn_about_duplicates": ASKED_FOR,
    "lightning_bnn/metrics/regression.py update": ASKED_FOR,
    "lightning_bnn/metrics/validation.py _numbers": ASKED_FOR,
    "lightning_bnn/metrics/validation.py check_scores": ASKED_FOR,
    "lightning_bnn/modules/fitting.py look_for_divergence": KEPT,
    "lightning_bnn/posteriors/mutual_information.py _near": "most layers need no further product",
    "lightning_bnn/samplers/hmc.py _jitter": TRANSITION,
    "lightning_bnn/samplers/hmc.py step": TRANSITION,
    "lightning_bnn/samplers/smile.py _warn_of_silence": "once, where the tuning ends",
    "weightsym/forms/balancing.py balance": "iterations end where nothing is left to gain",
    "weightsym/forms/mass_problem.py _places": "once a problem, for tables of the right size",
    "weightsym/forms/mass_problem.py mass_problem": ASKED_FOR,
    "weightsym/forms/min_mass.py _over_scales": "iterations end where nothing is left to gain",
    "weightsym/forms/balancing.py minimise": "a linear program is solved on the CPU",
    "weightsym/forms/balancing.py no_worse": "a linear program is solved on the CPU",
    "weightsym/forms/balancing.py one_sided": "a linear program is solved on the CPU",
    "weightsym/groups/element.py _acting": "tensors that stay as they are are not copied",
    "weightsym/groups/validation.py _scale_problem": ASKED_FOR,
}
"""Places that wait, each for a reason that is not laziness."""
READING = "lightning_bnn/methods/health.py take"


@pytest.fixture(scope="module")
def found():
    """What is found on each path, which is run once."""
    with W.ready() if D.REAL else serving(W.waits_of, W.ready) as ask:
        known = {}
        yield lambda name: known.setdefault(name, (ask or W.waits_of)(name))


@pytest.mark.parametrize("name", sorted(W.PATHS.keys() - {"reading"}))
def test_the_host_waits_only_where_it_must(found, name):
    assert set(found(name)) <= REASONS.keys()


def test_a_wait_is_found(found):
    assert found("reading") == [READING]


@pytest.mark.skipif(D.REAL, reason="a GPU does without some of them")
def test_every_reason_is_needed(found):
    assert REASONS.keys() == {place for name in W.PATHS for place in found(name)} - {READING}

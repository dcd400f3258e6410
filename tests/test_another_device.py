"""Modules, metrics, callbacks and symmetries on a device that is not the CPU."""

import device_cases as D
import pytest
from module_cases import PER_INPUT
from processes import serving
from torch.utils import backend_registration

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(
        not D.REAL and not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
        reason="this torch has no devices written in Python",
    ),
]
ROUNDED = {
    "actions": 1e-12, "callbacks": 1e-6, "symmetries": 1e-6, "predictions": 1e-12,
    "single precision": 1e-3, "autocast": 1e-2, "samplers": 1e-6, "mile": 1e-6, "smile": 1e-6,
    "laplace full": 1e-6, "multi-laplace": 1e-6, "distilled": 0.1,
}  # fmt: skip
"""Where sums have another order there, precision is low, or numpy computes on the CPU; or where
Adam moves biases that a BatchNorm ignores by rounding alone."""
EXACT = sorted(D.computations().keys() - PER_INPUT - ROUNDED.keys() - {"lost", "images"})


def asked(function, around):
    """Computes there; a pretended device has a process of its own."""
    if not D.REAL:
        with serving(function, around) as ask:
            yield ask
    else:
        with around():
            yield function


SCOPE = "function" if D.REAL else "module"
"""In one process, what draws as the CPU does may not meet what draws for itself."""


@pytest.fixture(scope=SCOPE)
def compared():
    yield from asked(D.compared, D.ready)


@pytest.fixture(scope=SCOPE)
def kept():
    yield from asked(D.kept, D.ready_with_own_draws)


def distance(ask, name):
    found = ask(name)
    return pytest.fail(found) if isinstance(found, str) else found


@pytest.mark.parametrize("name", EXACT)
def test_a_device_computes_what_the_cpu_does(compared, name):
    assert distance(compared, name) <= D.TOLERANCE


@pytest.mark.parametrize("name", ROUNDED)
def test_other_sums_are_nearly_the_same(compared, name):
    assert distance(compared, name) <= max(ROUNDED[name], D.TOLERANCE)


def test_convolutions_there_are_those_of_our_kernels(compared):
    assert 0 < distance(compared, "images") < 1e-5


@pytest.mark.parametrize("name", sorted(PER_INPUT))
def test_dropout_runs_there(compared, name):
    """Masks are drawn in another way on devices."""
    assert distance(compared, name) < 0.5


def test_a_tensor_that_was_left_behind_is_found(compared):
    found = "tensors to be on the same device" if D.REAL else "tensors on pretended:0 and cpu"
    assert found in compared("lost")


# ------------------------------------------------------------ with its own random numbers
@pytest.mark.parametrize("name", D.LAWS)
def test_random_numbers_of_a_device_have_their_keys(kept, name):
    """Resumed runs go on as if uninterrupted, and what draws for itself leaves no mark."""
    assert distance(kept, name) <= D.TOLERANCE


@pytest.mark.parametrize("name", D.CONTROLS)
def test_without_keys_they_differ(kept, name):
    assert distance(kept, name) > 0.1

"""Modules, metrics, callbacks and symmetries on a device that is not the CPU."""

import pytest
from module_cases import PER_INPUT
from on_pretended import computations, differences
from processes import result
from torch.utils import backend_registration

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(
        not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
        reason="this torch has no devices that are written in Python",
    ),
]
EXACT = sorted(computations().keys() - PER_INPUT - {"lost", "images"})


@pytest.fixture(scope="module")
def found():
    """What a process with such a device has computed on it and on the CPU."""
    return result(differences)


@pytest.mark.parametrize("name", EXACT)
def test_a_device_computes_what_the_cpu_does(name, found):
    assert found[name] == {"difference": 0.0}


def test_convolutions_there_are_those_of_our_kernels(found):
    assert 0 < found["images"]["difference"] < 1e-5


@pytest.mark.parametrize("name", sorted(PER_INPUT))
def test_dropout_runs_there(name, found):
    """Masks are drawn in another way on devices."""
    assert found[name]["difference"] < 0.5


def test_a_tensor_that_was_left_behind_is_found(found):
    assert "tensors on the CPU and on pretended" in found["lost"]["error"]

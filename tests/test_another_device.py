"""Modules, metrics, callbacks and symmetries on a device that is not the CPU."""

import pytest
from module_cases import PER_INPUT
from on_pretended import compared, computations
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


@pytest.mark.parametrize("name", EXACT)
def test_a_device_computes_what_the_cpu_does(name):
    assert result(compared, name) == 0.0


def test_convolutions_there_are_those_of_our_kernels():
    assert 0 < result(compared, "images") < 1e-5


@pytest.mark.parametrize("name", sorted(PER_INPUT))
def test_dropout_runs_there(name):
    """Masks are drawn in another way on devices."""
    assert result(compared, name) < 0.5


def test_a_tensor_that_was_left_behind_is_found():
    assert "tensors on the CPU and on pretended" in result(compared, "lost")

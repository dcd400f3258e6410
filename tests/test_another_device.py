"""Modules, metrics, callbacks and symmetries on a device that is not the CPU."""

import device_cases as D
import pytest
import torch
from module_cases import PER_INPUT
from processes import serving
from torch.utils import backend_registration

from lightning_bnn.methods.recording import Recorded

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(
        not D.REAL and not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
        reason="this torch has no devices that are written in Python",
    ),
]
ROUNDED = {"images": 1e-5, "predictions": 1e-12, "single precision": 1e-3, "autocast": 1e-2}
"""Where the CPU has kernels of our own, or precision is low."""
EXACT = sorted(D.computations().keys() - PER_INPUT - ROUNDED.keys() - {"lost"})


def distance(compared, name):
    if "laplace" in name:
        pytest.importorskip("curvlinops")
    found = compared(name)
    return pytest.fail(found) if isinstance(found, str) else found


@pytest.fixture(scope="module")
def compared():
    """Compares a computation on the device with the CPU; a pretended one has its own process."""
    if D.REAL:
        with D.ready():
            yield D.compared
    else:
        with serving(D.compared, D.ready) as ask:
            yield ask


@pytest.mark.parametrize("name", EXACT)
def test_a_device_computes_what_the_cpu_does(compared, name):
    assert distance(compared, name) <= D.TOLERANCE


@pytest.mark.parametrize("name", ROUNDED)
def test_other_kernels_there_compute_nearly_the_same(compared, name):
    assert 0 < distance(compared, name) < ROUNDED[name]


@pytest.mark.parametrize("name", sorted(PER_INPUT))
def test_dropout_runs_there(compared, name):
    """Masks are drawn in another way on devices."""
    assert distance(compared, name) < 0.5


def test_a_tensor_that_was_left_behind_is_found(compared):
    found = "tensors to be on the same device" if D.REAL else "tensors on pretended:0 and cpu"
    assert found in compared("lost")


@pytest.mark.skipif(not D.DEVICE.startswith("cuda"), reason="recordings are CUDA's")
@pytest.mark.parametrize("possible", [True, False])
def test_what_is_recorded_is_what_is_computed(possible):
    """What asks for a number cannot be recorded, and is computed all the same."""
    x = torch.randn(3, 5, device=D.DEVICE)

    def compute():
        return [x.square().sum(1), x.exp() * (1.0 if possible else 1 + 0 * x.sum().item())]

    recorded = Recorded(compute, [x])
    for _ in range(4):
        x.add_(1)
        assert all(map(torch.equal, [t.clone() for t in recorded()], compute()))
    assert (recorded._graph is not None) == possible
    if possible:
        x.set_(torch.zeros(3, 5, device=D.DEVICE))  # it is recorded anew
        assert recorded()[0].eq(0).all()

"""The pretended device is as strict as a GPU, and draws and computes as one."""

import contextlib
import doctest

import pytest
import torch
from processes import result, serving
from torch import nn
from torch.utils import backend_registration

from lightning_bnn import testing

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(
        not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
        reason="this torch has no devices written in Python",
    ),
]
ONE, TWO = "pretended:0", "pretended:1"


def ones(device="cpu", *shape):
    return torch.ones(shape or 3, device=device)


def generator(device):
    return torch.Generator(device).manual_seed(0)


REFUSED = {
    "the CPU": (lambda: ones(ONE) + ones(), "tensors on pretended:0 and cpu"),
    "another index": (lambda: ones(ONE) * ones(TWO), "tensors on pretended:0 and pretended:1"),
    "indices": (lambda: ones(ONE)[torch.tensor([0], device=TWO)], "pretended:0 and pretended:1"),
    "draws of the CPU": (
        lambda: torch.rand(3, device=ONE, generator=generator("cpu")),
        "generator",
    ),
    "draws of another": (lambda: torch.rand(3, device=ONE, generator=generator(TWO)), "generator"),
    "numpy": (lambda: ones(ONE).numpy(), "numpy|storage"),
}
"""What a GPU refuses, and a part of what is said."""


def refusal(name):
    """What was said, or "" if nothing was refused."""
    try:
        REFUSED[name][0]()
    except (RuntimeError, TypeError) as error:
        return str(error)
    return ""


def drawn():
    """Every device has numbers of its own, which one seed starts and a state brings back."""

    def several():
        x = ones(ONE, 9)
        every = nn.functional.dropout(x), torch.rand_like(x), torch.randperm(9, device=ONE)
        return [t.tolist() for t in every]

    torch.manual_seed(3)
    before, backend = torch.get_rng_state(), torch.get_device_module("pretended")
    first, other = (torch.randn(9, device=place).tolist() for place in (ONE, TWO))
    state = backend.get_rng_state(ONE)
    second = several()
    backend.set_rng_state(state, ONE)
    again, untouched = several(), torch.equal(before, torch.get_rng_state())
    torch.randn(9)
    torch.manual_seed(3)
    return (
        untouched
        and first == other == torch.randn(9, device=ONE).tolist()
        and second == again
        and first != torch.randn(9, device=ONE).tolist()
    )


def answer(name):
    return refusal(name) if name in REFUSED else drawn()


@contextlib.contextmanager
def registered():
    testing.register()
    yield


@pytest.fixture(scope="module")
def ask():
    with serving(answer, registered) as asked:
        yield asked


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_gpu_refuses_is_refused(ask, name):
    found = ask(name)
    assert any(part in found for part in REFUSED[name][1].split("|"))


def test_every_device_has_numbers_of_its_own(ask):
    """What else it computes as a GPU does, `test_another_device` asks of every module."""
    assert ask("drawn") is True


def test_a_torch_that_is_too_old(monkeypatch):
    monkeypatch.delattr(backend_registration, "_setup_privateuseone_for_python_backend")
    with pytest.raises(ImportError, match="use a newer one"):
        testing.register()


def examples():
    found = doctest.testmod(testing)
    return found.attempted, found.failed


def test_examples_in_docstrings():
    attempted, failed = result(examples)
    assert attempted > failed == 0

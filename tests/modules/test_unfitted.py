"""A module that was neither fitted nor loaded says so before its numbers count."""

import warnings

import pytest
import torch
from module_cases import OF_EACH_CLASS, Blobs, made, network, trainer

from lightning_bnn.modules import SWAG

GIVEN_AS_IT_IS = {"map", "dropout"}
"""One network, which the user may have trained."""


def told(run, module):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(module, Blobs(n=20))
    return [str(w.message) for w in caught if "has not been fitted" in str(w.message)]


@pytest.mark.parametrize("name", [*OF_EACH_CLASS, "map", "dropout"])
def test_an_unfitted_module_says_so(name):
    run = trainer(max_epochs=1, limit_test_batches=1)
    module = made(name)
    found = told(lambda *a: run.test(*a, verbose=False), module)
    assert len(found) == (name not in GIVEN_AS_IT_IS)
    assert all(text.startswith(f"{type(module).__name__} has not been fitted: ") for text in found)
    assert all(text.count(". ") == 0 for text in found)
    other = made(name)
    other.load_state_dict(module.state_dict(), strict=False)
    assert not told(lambda *a: run.test(*a, verbose=False), other)


@pytest.mark.frames
@pytest.mark.parametrize("name", ["mfvi", "sghmc", "multi-laplace"])
def test_after_a_fit_it_is_quiet(name, tmp_path):
    run, module = trainer(max_epochs=1), made(name)
    assert not told(run.fit, module)
    assert not told(lambda *a: run.test(*a, verbose=False), module)
    assert told(run.validate, made(name))
    run.save_checkpoint(tmp_path / "it.ckpt")
    loaded = type(module).load_from_checkpoint(
        tmp_path / "it.ckpt", network=network(), weights_only=True
    )
    assert not told(run.predict, loaded)
    torch.save(network().state_dict(), tmp_path / "start.pt")
    start = SWAG(network(), start=0, start_from=str(tmp_path / "start.pt"))
    assert not told(lambda *a: run.test(*a, verbose=False), start)

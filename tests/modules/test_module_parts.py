"""What modules owe their users beside training: freedom to override, to ask, and to be let go."""

import gc
import weakref

import pytest
import torch
from module_cases import Blobs, fitted, made, network, trainer
from torch.utils.data import DataLoader

from lightning_bnn.methods import MFVI
from lightning_bnn.modules import Bayesian, DeepEnsemble


def test_a_module_that_nobody_uses_is_freed_at_once():
    module = made("mfvi")
    seen = weakref.ref(module)
    gc.collect()
    gc.disable()
    try:
        del module
        assert seen() is None
    finally:
        gc.enable()


def test_what_is_not_there_is_missed_in_the_module_and_not_in_its_state():
    with pytest.raises(AttributeError, match="'DeepEnsemble' object has no attribute 'modez'"):
        _ = made("ensemble").modez


def test_losses_and_posterior_of_a_subclass_are_those_that_train_and_predict():
    asked = set()

    class Own(DeepEnsemble):
        def losses(self, inputs, targets, *more):
            asked.add("losses")
            return super().losses(inputs, targets, *more)

        def posterior(self):
            asked.add("posterior")
            return super().posterior()

    trainer(fast_dev_run=1).fit(Own(network(), members=2), Blobs())
    assert asked == {"losses", "posterior"}


def test_data_are_read_by_the_loader_alone():
    keyed = {key: (torch.ones(6), torch.tensor(1)) for key in "abcd"}
    fitted(made("ensemble"), DataLoader(keyed, batch_size=2, sampler=list("abcd")), max_epochs=1)


@pytest.mark.bad_input
@pytest.mark.parametrize("method", ["MFVI", MFVI, None])
def test_what_is_no_method_is_refused(method):
    with pytest.raises(ValueError, match="`method` must be one of lightning_bnn.methods"):
        Bayesian(network(), method)

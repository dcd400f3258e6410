"""What modules owe their users beside training: freedom to override, to ask, and to be let go."""

import gc
import weakref

import pytest
import torch
from module_cases import Blobs, made, network, trainer
from torch.utils.data import DataLoader, Dataset

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
    class Keyed(Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, key):
            assert isinstance(key, str)
            return torch.ones(6), torch.tensor(1)

    loader = DataLoader(Keyed(), batch_size=2, sampler=list("abcd"))
    trainer(max_epochs=1, limit_val_batches=0).fit(made("ensemble"), loader)


@pytest.mark.parametrize("name", ["mfvi", "bethe"])
def test_settings_of_a_method_can_be_changed_while_it_trains(name):
    """As by a callback that raises ``kl_weight`` from zero."""
    x, y = Blobs().load().train
    module = made(name, num_data=60)
    terms = []
    for weight in (0.0, 1.0):
        getattr(module.method, "gaussian", module.method).kl_weight = weight
        torch.manual_seed(0)
        terms.append(module.losses((x,), y))
    assert torch.equal(terms[0]["loss"], terms[0]["nll"])
    assert terms[1]["loss"] > terms[0]["loss"] + 0.01
    with pytest.raises(AttributeError, match="no attribute 'kl_wait'"):
        _ = module.kl_wait


@pytest.mark.bad_input
@pytest.mark.parametrize("method", ["MFVI", MFVI, None])
def test_what_is_no_method_is_refused(method):
    with pytest.raises(ValueError, match="`method` must be one of lightning_bnn.methods"):
        Bayesian(network(), method)

"""What a first batch says about a network: probabilities for logits, inputs of the wrong type."""

import warnings

import pytest
import torch
from module_cases import MODULES, Blobs, made, network, trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bnn.likelihoods import Gaussian
from lightning_bnn.modules import DeepEnsemble

pytestmark = pytest.mark.filterwarnings("ignore")


def told(module, stage="fit"):
    run = trainer(max_epochs=1, limit_train_batches=2, limit_val_batches=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        getattr(run, stage)(module, Blobs())
    return [str(w.message) for w in caught if "returns probabilities" in str(w.message)]


@pytest.mark.parametrize("name", ["ensemble", "mfvi", "sghmc", "dropout", "laplace", "hmc"])
def test_a_softmax_at_the_end_is_said_once(name):
    found = told(MODULES[name](nn.Sequential(*network(), nn.Softmax(-1))))
    assert len(found) == 1
    assert "Sequential" in found[0]
    assert "leave out the softmax" in found[0]


@pytest.mark.bad_input
def test_a_last_layer_that_is_not_the_last_is_refused():
    with pytest.raises(ValueError, match="'4' is not the last"):
        told(MODULES["multi-laplace"](nn.Sequential(*network(), nn.Linear(3, 3), nn.Softmax(-1))))


@pytest.mark.parametrize("last", [nn.Identity(), nn.LogSoftmax(-1), nn.Sigmoid(), nn.Softplus()])
def test_other_ends_are_not_probabilities(last):
    assert not told(DeepEnsemble(nn.Sequential(*network(), last), members=2))


def test_what_was_trained_elsewhere_is_looked_at_in_a_test():
    assert (
        len(told(DeepEnsemble(nn.Sequential(*network(), nn.Softmax(-1)), members=1), "test")) == 1
    )
    assert not told(made("ensemble"), "test")


def test_targets_of_a_regression_may_sum_to_one():
    net = nn.Sequential(*network(), nn.Softmax(-1))
    module = DeepEnsemble(net, members=2, likelihood=Gaussian())
    assert module.run.nll(torch.eye(3)[None], torch.eye(3)).isfinite().all()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module.run.nll(net(torch.randn(5, 6))[None], torch.zeros(5, 3))


# ------------------------------------------------------------ types
WHOLE = TensorDataset(torch.randint(5, (20, 6)), torch.randint(3, (20,)))


@pytest.mark.bad_input
@pytest.mark.parametrize("name", ["ensemble", "mfvi", "mfvi local", "hmc"])
@pytest.mark.parametrize("kind", [torch.int64, torch.bool])
def test_inputs_of_whole_numbers_are_refused_in_one_sentence(name, kind):
    x, y = WHOLE.tensors
    data = DataLoader(TensorDataset(x.to(kind), y), batch_size=10)
    message = f"Sequential does not take inputs of type {kind}: [^.]*; pass `x.float\\(\\)`.$"
    with pytest.raises(ValueError, match=message):
        trainer(max_epochs=1).fit(made(name), data)
    with pytest.raises(ValueError, match=message):
        made(name)(x.to(kind))


@pytest.mark.bad_input
def test_convolutions_say_so_too():
    net = nn.Sequential(nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 2, 2), nn.Flatten(), nn.Linear(10, 3))
    with pytest.raises(ValueError, match="does not take inputs of type torch.int64"):
        DeepEnsemble(net, members=2)(WHOLE.tensors[0])


@pytest.mark.parametrize("members", [1, 2])
def test_networks_that_embed_take_them(members):
    net = nn.Sequential(nn.Embedding(5, 2), nn.Flatten(), nn.Linear(12, 3))
    module = DeepEnsemble(net, members=members)
    trainer(max_epochs=1).fit(module, DataLoader(WHOLE, batch_size=10))
    assert module(WHOLE.tensors[0]).shape == (20, 3)
    with pytest.raises(ValueError, match="does not take inputs of type torch.float32"):
        module(torch.zeros(2, 6))

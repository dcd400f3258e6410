"""Laplace in Lightning: when it is fitted, what checkpoints hold, what is refused early."""

import pytest
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from module_cases import Blobs, adam, fitted, network, same, trainer
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler

from lightning_bnn.likelihoods import Gaussian
from lightning_bnn.modules import Laplace
from lightning_bnn.posteriors import LaplaceGaussian
from weightsym import params as P

pytestmark = pytest.mark.filterwarnings("ignore")


def laplace(net=None, **options):
    return Laplace(net or network(), **{"structure": "diag", "optimizer": adam, **options})


def fitted_in(path):
    state = torch.load(path, weights_only=True)["state_dict"]
    return {k: t for k, t in state.items() if k.startswith("state.fitted.")}


ENDS = {
    "the last epoch": ({"max_epochs": 4}, ()),
    "the last step": ({"max_steps": 9, "max_epochs": -1}, ()),
    "early stopping": (
        {"max_epochs": 50},
        (EarlyStopping("val/nll", min_delta=1e9, patience=1, check_on_train_epoch_end=True),),
    ),
    "early stopping after validation": (
        {"max_epochs": 50, "min_epochs": 5},
        (EarlyStopping("val/nll", min_delta=1e9, patience=1, check_on_train_epoch_end=False),),
    ),
}


class StopAndSave(Callback):
    """Acts after the module, as all callbacks with a monitor do."""

    monitor = "val/nll"

    def __init__(self, path):
        self.path = path

    def on_train_epoch_end(self, trainer, pl_module):
        trainer.should_stop = True
        trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("end", [*ENDS, "a callback"])
def test_the_last_checkpoint_has_the_curvature_of_its_weights(end, tmp_path):
    keep = ModelCheckpoint(tmp_path, save_last=True, save_on_train_epoch_end=True)
    options, callbacks = ENDS.get(end, ({"max_epochs": 50}, [StopAndSave(tmp_path / "last.ckpt")]))
    callbacks = [*callbacks, keep] if end in ENDS else callbacks
    module = laplace()
    fitted(module, None, *callbacks, enable_checkpointing=end in ENDS, **options)
    found = {k: t.clone() for k, t in module.state.fitted.tensors().items()}
    assert found
    assert same(
        fitted_in(tmp_path / "last.ckpt"), {f"state.fitted.{k}": t for k, t in found.items()}
    )
    module.fit_to(Blobs())
    assert same(found, module.state.fitted.tensors())
    fitted(module, max_epochs=1)  # which forgets it
    assert not same(found, module.state.fitted.tensors())


@pytest.mark.parametrize(
    ("options", "each"),
    [
        ({"batch_size": 32, "shuffle": True, "drop_last": True}, 32),
        ({"batch_size": 7, "sampler": WeightedRandomSampler(torch.ones(50), 200)}, 200),
    ],
    ids=["drops some", "repeats"],
)
def test_the_curvature_is_that_of_as_many_examples_as_there_are(options, each):
    x = torch.ones(50, 3)  # whichever are given, their mean is known
    data = TensorDataset(x, torch.randn(50, 1))
    likelihood = Gaussian("fixed", std=0.5)
    module = Laplace(nn.Linear(3, 1), likelihood=likelihood, structure="diag", prior_precision=1.0)
    with pytest.warns(UserWarning, match=f"yields {each} examples of 50"):
        trainer(max_epochs=1).fit(module, DataLoader(data, **options))
    found = module.posterior().blocks[0].eigenvalues
    torch.testing.assert_close(found, torch.full_like(found, 50 / 0.5**2))


class Endless(IterableDataset):
    def __iter__(self):
        for k in range(10_000):
            assert k < 500, "it is read without end"
            yield torch.randn(6), k % 3


def test_streams_are_read_as_far_as_the_trainer_reads_them():
    module = laplace(num_data=40)
    loader = DataLoader(Endless(), batch_size=10)
    trainer(max_epochs=1, limit_train_batches=4).fit(module, loader)
    assert module.state.fitted.tensors()


@pytest.mark.parametrize(
    ("structure", "precision"), [("kron", "bf16-true"), ("diag", "bf16-mixed"), ("full", "64-true")]
)
def test_precisions(structure, precision):
    module = laplace(structure=structure)
    module.example_input_array = torch.randn(2, 6)  # of another precision
    run = fitted(module, precision=precision)
    assert isinstance(module.posterior(), LaplaceGaussian)
    (found, *_) = run.test(module, Blobs(), verbose=False)
    assert found["test/mi"] > 0
    with pytest.raises(ValueError, match="Linearised networks cannot be exported"):
        module.predictive()


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_frozen_parts_of_the_last_layer_stay_in_predictions(frozen):
    net = network()
    getattr(net[3], frozen).requires_grad_(False)
    with torch.no_grad():
        net[3].bias += torch.tensor([5.0, 0.0, 0.0])
    module = laplace(net, layers="last", temperature=0.0, structure="full", eval_samples=3)
    fitted(module, max_epochs=1)
    x = torch.randn(7, 6)
    wanted = P.apply(module.template.eval(), module.member_stack(), x).softmax(-1)[0]
    torch.testing.assert_close(module.eval()(x), wanted)


def convolutions():
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 2), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(),
        nn.Linear(8, 3),
    )  # fmt: skip


def test_by_default_batch_norm_leaves_the_last_layer(caplog):
    """It is said; networks that have factors for all trained weights keep all layers."""
    torch.manual_seed(0)
    net = convolutions()
    ends = []
    for options in ({}, {"layers": "last"}):
        module = Laplace(net, optimizer=adam, **options)
        fitted(module, max_epochs=1)
        assert module.state.last_layer == "5"
        ends.append(module.state_dict())
    assert same(*ends)
    assert caplog.text.count("BatchNorm2d of Sequential has no Kronecker factors") == 1
    assert Laplace(network()).state.last_layer is None
    assert Laplace(net, structure="diag").state.last_layer is None
    net[2].requires_grad_(False)
    assert Laplace(net).state.last_layer is None


@pytest.mark.parametrize("options", [{}, {"layers": "last"}])
def test_noise_that_the_network_predicts(options):
    """It is found where it is, and the weights are uncertain besides."""
    torch.manual_seed(0)
    x = torch.linspace(-2, 2, 200)[:, None]
    y = x + torch.where(x > 0, 1.0, 0.1) * torch.randn(200, 1)
    data = DataLoader(TensorDataset(x, y), batch_size=50)
    net = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 2))
    module = laplace(net, likelihood=Gaussian("heteroscedastic"), prior_std=1.0, **options)
    run = fitted(module, data, max_epochs=30)
    (found,) = run.test(module, data, verbose=False)
    assert found["test/nll"] < 1.2
    prediction = module.eval()(x)
    assert prediction.epistemic.min() > 0
    assert prediction.noise[100:].mean() > 1.2 * prediction.noise[:100].mean()

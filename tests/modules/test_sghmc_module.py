"""Chains in Lightning: what is kept and where, the target, what is warned of."""

import warnings

import lightning as L
import pytest
import torch
from cases import Forward
from lightning.pytorch.callbacks import ModelCheckpoint
from module_cases import Blobs, network, same, state, trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bnn import samplers
from lightning_bnn.bank import CheckpointBank
from lightning_bnn.callbacks import CheckpointHarvester
from lightning_bnn.likelihoods import Gaussian
from lightning_bnn.modules import SGHMC, DeepEnsemble
from weightsym import params as P

quiet = pytest.mark.filterwarnings("ignore")


def sampler(parameters):
    return samplers.SGHMC(parameters, lr=0.05)


@quiet
@pytest.mark.parametrize(
    ("options", "steps", "kept"),
    [
        ({"every_n_steps": 4}, [4, 8, 12, 16], "in memory"),
        ({"every_n_steps": 5, "burn_in": 8}, [10, 15], "in a bank"),
        ({}, [6, 12, 18], "in memory"),
        ({"burn_in": 2}, [18], "in memory"),
        ({"every_n_epochs": 2}, [12], "in a bank"),
    ],
)
def test_what_is_kept(options, steps, kept, tmp_path):
    bank = None if kept == "in memory" else str(tmp_path / "bank")
    module = SGHMC(network(batch_norm=True), members=2, optimizer=sampler, bank=bank, **options)
    every = CheckpointHarvester(tmp_path / "all", every_n_steps=1)
    trainer(every, max_epochs=3).fit(module, Blobs())
    visited = CheckpointBank(tmp_path / "all", "r")
    rows = [2 * (s - 1) + m for s in steps for m in range(2)]
    networks = module.posterior().networks
    assert same(networks, visited[rows])
    chains = module.chains()
    assert chains["0.weight"].shape == (2, len(steps), 8, 6)
    assert torch.equal(chains["0.weight"][1, 0], visited[rows[1]]["0.weight"])
    if bank:
        records = CheckpointBank(bank, "r").records
        assert [(r["step"], r["member"]) for r in records[:3]] == [
            (steps[0], 0), (steps[0], 1), (steps[1], 0) if len(steps) > 1 else None
        ][: len(records)]  # fmt: skip


@quiet
def test_a_chain_in_a_bank_resumes_exactly(tmp_path):
    def run(folder, epochs, ckpt_path=None):
        torch.manual_seed(0)
        path = str(tmp_path / folder)
        module = SGHMC(network(), members=2, every_n_steps=4, optimizer=sampler, bank=path)
        keep = ModelCheckpoint(tmp_path / folder, save_last=True)
        run = trainer(keep, enable_checkpointing=True, max_epochs=epochs)
        run.fit(module, Blobs(), ckpt_path=ckpt_path)
        return module

    whole = run("one", 4)
    run("two", 2)
    first = tmp_path / "two" / "last.ckpt"
    first.rename(tmp_path / "two.ckpt")
    run("two", 3, tmp_path / "two.ckpt")  # goes on too far: these networks come again
    with pytest.raises(ValueError, match="networks of another run"):
        run("two", 1)
    resumed = run("two", 4, tmp_path / "two.ckpt")
    fresh = SGHMC(network(), members=2, optimizer=sampler, bank=str(tmp_path / "two"))
    last = tmp_path / "two" / "last.ckpt"
    (found, *_) = trainer().test(fresh, Blobs(), ckpt_path=last, verbose=False)
    assert len(fresh.samples) == 6
    (wanted, *_) = trainer().test(resumed, Blobs(), verbose=False)
    assert found == wanted
    assert same(resumed.posterior().networks, whole.posterior().networks)
    assert len(resumed.samples) == 6


@quiet
def test_cycles_keep_networks_while_they_sample():
    module = SGHMC(
        network(), every_n_steps=1, optimizer=sampler,
        lr_scheduler=lambda o: samplers.CyclicalSchedule(o, 6, exploration=0.5),
    )  # fmt: skip
    seen = []

    class Watched(samplers.SGHMC):
        def step(self, closure=None):
            out = super().step(closure)
            seen.append(self.param_groups[0]["temperature"])
            return out

    module.make_optimizer = lambda p: Watched(p, lr=0.05)
    trainer(max_epochs=3).fit(module, Blobs())
    assert len(seen) == 18
    assert len(module.samples) == sum(t > 0 for t in seen) == 9


def line():
    return Forward(lambda s, x: s.linear(x), linear=nn.Linear(2, 1, bias=False))


@quiet
def test_the_posterior_of_a_bayesian_linear_regression():
    """Thousands of chains; full batches are exact, minibatches add the variance of their noise."""
    torch.manual_seed(0)
    n, chains = 40, 3000
    x = torch.randn(n, 2, dtype=torch.float64)
    y = x @ torch.tensor([[1.0], [-0.5]]).double() + 0.7 * torch.randn(n, 1).double()
    precision = x.T @ x / 0.7**2 + 4 * torch.eye(2).double()
    mean = torch.linalg.solve(precision, x.T @ y / 0.7**2)[:, 0]
    temperature = 0.25
    module = SGHMC(
        line().double(), members=chains, likelihood=Gaussian(std=0.7).double(), prior_std=0.5,
        every_n_steps=20, burn_in=300,
        optimizer=lambda p: samplers.SGHMC(p, lr=0.05, temperature=temperature),
    )  # fmt: skip
    loader = DataLoader(TensorDataset(x, y), batch_sampler=20 * [range(n)])
    trainer(max_epochs=20, precision="64-true").fit(module, loader)
    rows = P.ravel(module.posterior().networks, stacked=True)[0]
    covariance = temperature * torch.linalg.inv(precision)
    scale = covariance.diagonal().sqrt()
    assert ((rows.mean(0) - mean).abs() < 0.05 * scale).all()
    error = (torch.cov(rows.T) - covariance).abs()
    assert (error < 0.05 * scale[:, None] * scale).all()


@quiet
@pytest.mark.parametrize(("temperature", "accumulate"), [(1.0, 1), (0.25, 1), (1.0, 2)])
def test_the_kinetic_temperature_is_logged(temperature, accumulate):
    def make(p):
        return samplers.SGHMC(p, lr=1e-4, temperature=temperature)

    run = trainer(max_epochs=2, log_every_n_steps=1, accumulate_grad_batches=accumulate)
    run.fit(SGHMC(network(), members=50, optimizer=make), Blobs())
    found = run.callback_metrics["train/kinetic_temperature"]
    assert float(found) == pytest.approx(temperature, rel=0.1 if accumulate == 1 else 0.15)


def test_every_group_of_weights_has_the_prior():
    def groups(parameters):
        first, *others = parameters
        return samplers.SGHMC([{"params": [first]}, {"params": others, "lr": 0.1}])

    found = SGHMC(network(), prior_std=0.5, optimizer=groups).configure_optimizers()
    assert [g["prior_precision"] for g in found.param_groups] == [4, 4]


@quiet
def test_seeds_and_fits_have_noise_of_their_own():
    def end(seed, fits=1):
        torch.manual_seed(0)
        module = SGHMC(network(), optimizer=sampler, seed=seed)
        for _ in range(fits):
            with torch.no_grad():
                for p in module.networks.parameters():
                    p.fill_(0.1)
            trainer(max_epochs=1).fit(module, Blobs())
        assert len(module.samples) == 1  # another run begins another chain
        return module.networks[0].weight

    assert torch.equal(end(0), end(0))
    assert not torch.allclose(end(0), end(1))
    assert not torch.allclose(end(0), end(0, fits=2))


class Broken(L.Callback):
    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == 8:
            raise RuntimeError("broken")


@quiet
def test_a_bank_is_let_go_of_whatever_goes_wrong(tmp_path):
    """And a fit that is refused leaves what there is."""
    options = {"every_n_steps": 2, "optimizer": sampler, "bank": str(tmp_path / "b")}
    module = SGHMC(network(), **options)
    keep = ModelCheckpoint(tmp_path, every_n_train_steps=6, save_top_k=-1, filename="{step}")
    with pytest.raises(RuntimeError, match="broken"):
        trainer(keep, Broken(), enable_checkpointing=True).fit(module, Blobs())
    other = SGHMC(network(), **options)  # the first one is still there
    trainer().fit(other, Blobs(), ckpt_path=tmp_path / "step=6.ckpt")
    assert len(other.samples) == 6
    with pytest.raises(ValueError, match="networks of another run"):
        trainer().fit(other, Blobs())
    assert len(other.samples) == 6


@quiet
def test_a_trainer_that_is_used_again_has_nothing_to_say(tmp_path, caplog):
    caplog.set_level("INFO", "lightning.pytorch")
    module = SGHMC(network(), optimizer=sampler, bank=str(tmp_path / "b"))
    run = trainer(max_epochs=1)
    run.fit(module, Blobs())
    run.validate(module, Blobs(), verbose=False)
    assert not [r for r in caplog.records if "EndsFit" in r.getMessage()]
    assert sum(type(c).__name__ == "EndsFit" for c in run.callbacks) == 1
    run.callbacks.append(Broken())  # another module, in which something goes wrong
    run.fit_loop.max_epochs = 3
    with pytest.raises(RuntimeError, match="broken"):
        run.fit(DeepEnsemble(network()), Blobs())


def test_a_run_that_would_keep_nothing_says_so_first():
    with pytest.warns(UserWarning, match="SGHMC will keep nothing: `burn_in`"):
        trainer(max_epochs=2).fit(SGHMC(network(), burn_in=50, optimizer=sampler), Blobs())


@quiet
def test_a_checkpoint_with_a_bank_needs_the_bank(tmp_path):
    module, run = SGHMC(network(), optimizer=sampler, bank=str(tmp_path / "b")), trainer()
    run.fit(module, Blobs())
    run.save_checkpoint(tmp_path / "it.ckpt")
    with pytest.raises(ValueError, match="pass the folder as `bank`"):
        SGHMC.load_from_checkpoint(tmp_path / "it.ckpt", network=network(), bank=None)


class Smoothed(nn.Module):
    """A likelihood of the user's own."""

    def __init__(self):
        super().__init__()
        self.loss = nn.CrossEntropyLoss(label_smoothing=0.1, reduction="none")

    def log_prob(self, outputs, targets):
        return torch.stack([-self.loss(o, targets) for o in outputs])

    def predictive(self, outputs):
        return outputs.softmax(-1).mean(0)


@pytest.mark.parametrize(
    ("module", "run", "message"),
    [
        ({}, {"gradient_clip_val": 1.0}, "Gradient clipping changes the target"),
        ({"prior_std": None}, {}, "There is no prior"),
        ({"network": network(0.2)}, {}, "Dropout changes the target"),
        ({"likelihood": Smoothed()}, {}, "Label smoothing changes the target"),
    ],
)
def test_what_changes_the_target_is_said_once(module, run, message):
    made = SGHMC(**{"network": network(), "optimizer": sampler, **module})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(max_epochs=2, **run).fit(made, Blobs())
    assert [message in str(w.message) for w in caught].count(True) == 1


@quiet
def test_examples_that_a_loader_drops_are_stated(caplog):
    x, y = Blobs().load().train
    loader = DataLoader(TensorDataset(x, y), batch_size=8, drop_last=True, shuffle=True)
    module = SGHMC(network(), optimizer=sampler)
    with caplog.at_level("INFO"):
        trainer(max_epochs=1).fit(module, loader)
    assert "the training set has 60 examples; every epoch drops 4." in caplog.text
    assert module.num_data == 60


@quiet
def test_before_the_first_sample_the_members_predict():
    module = SGHMC(network(), members=3, burn_in=100, optimizer=sampler)
    run = trainer(max_epochs=1)
    run.fit(module, Blobs())
    assert module.judging.samples == 3
    assert same(module.posterior().networks, module.member_stack())
    assert state(module).keys() == state(SGHMC(network(), members=3)).keys()

"""Chains in Lightning: what is kept and where, the target, energies, what is warned of."""

from functools import partial

import pytest
import torch
from cases import Forward
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from module_cases import Blobs, fitted, network, predicting, same, state, trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bnn import samplers
from lightning_bnn.bank import CheckpointBank
from lightning_bnn.callbacks import CheckpointHarvester
from lightning_bnn.likelihoods import Gaussian
from lightning_bnn.modules import HMC, MILE, SGHMC
from weightsym import params as P

pytestmark = pytest.mark.filterwarnings("ignore")


def sampler(parameters):
    return samplers.SGHMC(parameters, lr=0.05)


@pytest.mark.parametrize(
    ("options", "steps", "in_bank"),
    [
        ({"every_n_steps": 4}, [4, 8, 12, 16], False),
        ({"every_n_steps": 5, "burn_in": 8}, [10, 15], True),
        ({"burn_in": 2}, [18], False),
        ({"every_n_epochs": 2}, [12], True),
    ],
)
def test_what_is_kept(options, steps, in_bank, tmp_path):
    bank = str(tmp_path / "bank") if in_bank else None
    module = SGHMC(network(batch_norm=True), members=2, optimizer=sampler, bank=bank, **options)
    fitted(module, None, CheckpointHarvester(tmp_path / "all", every_n_steps=1), max_epochs=3)
    visited = CheckpointBank(tmp_path / "all", "r")
    rows = [2 * (s - 1) + m for s in steps for m in range(2)]
    assert same(module.posterior().networks, visited[rows])
    chains = module.state.chains()["0.weight"]
    assert chains.shape == (2, len(steps), 8, 6)
    assert torch.equal(chains[1, 0], visited[rows[1]]["0.weight"])
    if bank:
        found = [(r["step"], r["member"]) for r in CheckpointBank(bank, "r").records]
        assert found == [(s, m) for s in steps for m in range(2)]


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
    assert len(fresh.state.samples) == 6
    with pytest.raises(ValueError, match="pass the folder as `bank`"):
        SGHMC.load_from_checkpoint(last, network=network(), bank=None)
    (wanted, *_) = trainer().test(resumed, Blobs(), verbose=False)
    assert found == wanted
    assert same(resumed.posterior().networks, whole.posterior().networks)
    assert len(resumed.state.samples) == 6


def test_cycles_keep_networks_while_they_sample():
    module = SGHMC(
        network(), every_n_steps=1, optimizer=sampler,
        lr_scheduler=lambda o: samplers.CyclicalSchedule(o, 6, exploration=0.5),
    )  # fmt: skip
    seen = []
    see = LambdaCallback(
        on_train_batch_end=lambda t, *_: seen.append(t.optimizers[0].param_groups[0]["temperature"])
    )
    fitted(module, None, see, max_epochs=3)
    assert len(seen) == 18
    assert len(module.state.samples) == sum(t > 0 for t in seen) == 9


def line():
    return Forward(lambda s, x: s.linear(x), linear=nn.Linear(2, 1, bias=False))


def test_the_posterior_of_a_bayesian_linear_regression():
    """Thousands of chains; full batches are exact, minibatches add the variance of their noise."""
    torch.manual_seed(0)
    n, chains = 40, 1500
    x = torch.randn(n, 2, dtype=torch.float64)
    y = x @ torch.tensor([[1.0], [-0.5]]).double() + 0.7 * torch.randn(n, 1).double()
    precision = x.T @ x / 0.7**2 + 4 * torch.eye(2).double()
    mean = torch.linalg.solve(precision, x.T @ y / 0.7**2)[:, 0]
    temperature = 0.25
    module = SGHMC(
        line().double(), members=chains, likelihood=Gaussian(std=0.7).double(), prior_std=0.5,
        every_n_steps=20, burn_in=200,
        optimizer=lambda p: samplers.SGHMC(p, lr=0.05, temperature=temperature),
    )  # fmt: skip
    loader = DataLoader(TensorDataset(x, y), batch_sampler=20 * [range(n)])
    fitted(module, loader, max_epochs=20, precision="64-true")
    rows = P.ravel(module.posterior().networks, stacked=True)[0]
    covariance = temperature * torch.linalg.inv(precision)
    scale = covariance.diagonal().sqrt()
    assert ((rows.mean(0) - mean).abs() < 0.07 * scale).all()
    error = (torch.cov(rows.T) - covariance).abs()
    assert (error < 0.07 * scale[:, None] * scale).all()


def test_every_group_of_weights_has_the_prior():
    def groups(parameters):
        first, *others = parameters
        return samplers.SGHMC([{"params": [first]}, {"params": others, "lr": 0.1}])

    found = SGHMC(network(), prior_std=0.5, optimizer=groups).configure_optimizers()
    assert [g["prior_precision"] for g in found.param_groups] == [4, 4]


def test_seeds_and_fits_have_noise_of_their_own():
    def end(seed, fits=1):
        torch.manual_seed(0)
        module = SGHMC(network(), optimizer=sampler, seed=seed)
        for _ in range(fits):
            with torch.no_grad():
                for p in module.state.networks.parameters():
                    p.fill_(0.1)
            trainer(max_epochs=1).fit(module, Blobs())
        assert len(module.state.samples) == 1  # another run begins another chain
        return module.state.networks[0].weight

    assert torch.equal(end(0), end(0))
    assert not torch.allclose(end(0), end(1))
    assert not torch.allclose(end(0), end(0, fits=2))


def fails(trainer, *_):
    if trainer.global_step == 8:
        raise RuntimeError("broken")


def test_a_bank_is_let_go_of_whatever_goes_wrong(tmp_path):
    """And a fit that is refused leaves what there is."""
    options = {"every_n_steps": 2, "optimizer": sampler, "bank": str(tmp_path / "b")}
    module = SGHMC(network(), **options)
    keep = ModelCheckpoint(tmp_path, every_n_train_steps=6, save_top_k=-1, filename="{step}")
    broken = LambdaCallback(on_train_batch_end=fails)
    with pytest.raises(RuntimeError, match="broken"):
        fitted(module, None, keep, broken, enable_checkpointing=True)
    other = SGHMC(network(), **options)  # the first one is still there
    trainer().fit(other, Blobs(), ckpt_path=tmp_path / "step=6.ckpt")
    assert len(other.state.samples) == 6
    with pytest.raises(ValueError, match="networks of another run"):
        trainer().fit(other, Blobs())
    assert len(other.state.samples) == 6


def test_examples_that_a_loader_drops_are_stated(caplog):
    x, y = Blobs().load().train
    loader = DataLoader(TensorDataset(x, y), batch_size=8, drop_last=True, shuffle=True)
    module = SGHMC(network(), optimizer=sampler)
    with caplog.at_level("INFO"):
        fitted(module, loader, max_epochs=1)
    assert "the training set has 60 examples; every epoch drops 4." in caplog.text
    assert module.num_data == 60


def test_before_the_first_sample_the_members_predict():
    module = SGHMC(network(), members=3, burn_in=100, optimizer=sampler)
    fitted(module, max_epochs=1)
    assert predicting(module) == 3
    assert same(module.posterior().networks, module.member_stack())
    assert state(module).keys() == state(SGHMC(network(), members=3)).keys()


# ------------------------------------------------------------ energies of all the data
def few(parameters):
    """Short trajectories, for what does not depend on their length."""
    return samplers.HMC(parameters, 0.02, 3, adapt_steps=2)


def test_the_energy_is_that_of_all_the_data():
    """Whatever the batches are; its gradients too."""
    found = []
    for batch_size in (7, 60):
        torch.manual_seed(0)
        module = HMC(network(), members=2, prior_std=0.7, optimizer=few)
        data = Blobs(batch_size=batch_size)
        fitted(module, data, max_epochs=1)
        module.on_train_start()
        energies = module.method.energies(module.state, module.run)
        x, y = data.load().train
        stack = {n: t.detach().requires_grad_() for n, t in module.member_stack().items()}
        outputs = P.apply(module.template, stack, x)
        nll = -outputs.log_softmax(-1)[:, torch.arange(60), y].sum(1)
        squares = P.ravel(stack, stacked=True)[0].square().sum(1) / (2 * 0.7**2)
        torch.testing.assert_close(energies, (nll + squares).detach().double(), rtol=1e-6, atol=0)
        wanted = torch.autograd.grad((nll + squares).sum(), list(stack.values()))
        for p, grad in zip(module.state.networks.parameters(), wanted, strict=True):
            torch.testing.assert_close(p.grad, grad, rtol=1e-4, atol=1e-4)
        found.append(energies)
    assert found[0].shape == (2,)


def test_energies_are_exact_in_mixed_precision():
    """Metropolis' test compares them."""
    found = []

    class Watched(HMC):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            move = self.method.transition
            self.method.transition = lambda *args: found.append(move(*args)) or found[-1]

    for precision in ("32-true", "bf16-mixed"):
        torch.manual_seed(0)
        fitted(Watched(network(), optimizer=few), max_epochs=1, precision=precision)
    energies = torch.stack([terms["energy"] for terms in found])
    assert torch.equal(*energies.chunk(2))


def test_statistics_of_batch_norm_stay():
    torch.manual_seed(0)
    net = network(batch_norm=True)
    net[1].running_mean += 1
    module = HMC(net, members=2, optimizer=few)
    fitted(module, max_epochs=1)
    assert torch.equal(module.member_stack()["1.running_mean"], net[1].running_mean.expand(2, -1))


def test_acceptance_is_that_of_the_whole_run(tmp_path):
    def run(epochs, checkpoint=None):
        torch.manual_seed(0)
        module, whole = HMC(network(), members=2, optimizer=few), trainer(max_epochs=epochs)
        whole.fit(module, Blobs(), ckpt_path=checkpoint)
        whole.save_checkpoint(tmp_path / "it.ckpt")
        return module.state.notes

    first, whole = run(1), run(3)
    run(1)
    resumed = run(3, tmp_path / "it.ckpt")
    assert resumed["transitions"] == whole["transitions"] == 18
    assert torch.equal(resumed["acceptance"], whole["acceptance"])
    assert float(first["acceptance"].sum()) < float(whole["acceptance"].sum()) <= 2 * 18


# ------------------------------------------------------------ MILE
@pytest.mark.parametrize("burn_in", [0, 8])
def test_nothing_is_kept_of_the_descent_and_the_adaptation(burn_in):
    sampler = lambda p: samplers.MCLMC(p, 0.05, 2, descent_steps=2, adapt_steps=3)  # noqa: E731
    module = MILE(network(), members=2, optimizer=sampler, burn_in=burn_in)
    run = fitted(module, Blobs(batch_size=60), max_epochs=10)
    kept = 10 - max(burn_in, 5)
    assert len(module.posterior().networks["0.weight"]) == 2 * kept
    run.fit_loop.max_epochs = 20  # a second fit, with another sampler
    run.fit(module, Blobs(batch_size=60))
    assert len(module.posterior().networks["0.weight"]) == 2 * (kept + 5)
    assert {"train/energy_variance", "train/memory_length"} <= set(run.callback_metrics)


def test_several_transitions_of_a_step_are_as_many_steps(tmp_path):
    x = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=12)

    def fitted_chains(transitions, steps, ckpt=None, save=None):
        torch.manual_seed(0)
        module = HMC(
            nn.Linear(3, 1), members=2, transitions=transitions, every_n_steps=2, burn_in=6, seed=1,
            likelihood=Gaussian(std=0.5),
            optimizer=partial(samplers.HMC, step_size=0.05, leapfrog_steps=3, adapt_steps=4),
        )  # fmt: skip
        fitting = trainer(max_steps=steps, max_epochs=-1)
        fitting.fit(module, loader, ckpt_path=ckpt)
        if save:
            fitting.save_checkpoint(save)
        return module.posterior().networks, module.state.notes

    one, notes = fitted_chains(1, 20)
    five, of_five = fitted_chains(5, 4)
    assert len(one["weight"]) == 2 * (20 - 6) // 2
    assert all(torch.equal(one[n], five[n]) for n in one)
    assert torch.equal(notes["acceptance"], of_five["acceptance"])
    assert notes["transitions"] == of_five["transitions"] == 20
    path = tmp_path / "half.ckpt"
    fitted_chains(5, 2, save=path)
    resumed, _ = fitted_chains(5, 4, ckpt=path)
    assert all(torch.equal(one[n], resumed[n]) for n in one)
    other, _ = fitted_chains(5, 3)
    assert len(other["weight"]) < len(one["weight"])

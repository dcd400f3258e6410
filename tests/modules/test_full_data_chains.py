"""HMC and MILE in Lightning: the energy of all the data, acceptance, what is no draw."""

import pytest
import torch
from module_cases import Blobs, fitted, network, trainer

from lightning_bnn import samplers
from lightning_bnn.modules import HMC, MILE
from weightsym import params as P

pytestmark = pytest.mark.filterwarnings("ignore")


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
        torch.testing.assert_close(energies, (nll + squares).detach().double())
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

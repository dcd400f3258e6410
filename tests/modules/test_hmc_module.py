"""HMC in Lightning: the energy of all the data, a posterior in closed form, bad input."""

import pytest
import torch
from module_cases import Blobs, network, trainer
from torch.utils.data import DataLoader, TensorDataset

from lightning_bnn import samplers
from lightning_bnn.modules import HMC
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
        run, data = trainer(max_epochs=1), Blobs(batch_size=batch_size)
        run.fit(module, data)
        module.on_train_start()
        energies = module.method.energies(module.state, module.run)
        x, y = data.load().train
        stack = {n: t.detach().requires_grad_() for n, t in module.member_stack().items()}
        outputs = P.apply(module.template, stack, x)
        nll = -outputs.log_softmax(-1)[:, torch.arange(60), y].sum(1)
        squares = P.ravel(stack, stacked=True)[0].square().sum(1) / (2 * 0.7**2)
        torch.testing.assert_close(energies, (nll + squares).detach().double())
        wanted = torch.autograd.grad((nll + squares).sum(), list(stack.values()))
        for p, grad in zip(module.networks.parameters(), wanted, strict=True):
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
        trainer(max_epochs=1, precision=precision).fit(Watched(network(), optimizer=few), Blobs())
    energies = torch.stack([terms["energy"] for terms in found])
    assert torch.equal(*energies.chunk(2))
    with pytest.raises(ValueError, match="HMC needs exact energies"):
        trainer(max_epochs=1, precision="bf16-true").fit(HMC(network()), Blobs())


def test_statistics_of_batch_norm_stay():
    torch.manual_seed(0)
    net = network(batch_norm=True)
    net[1].running_mean += 1
    module = HMC(net, members=2, optimizer=few)
    trainer(max_epochs=1).fit(module, Blobs())
    assert torch.equal(module.member_stack()["1.running_mean"], net[1].running_mean.expand(2, -1))


def test_examples_that_a_loader_leaves_out_are_stated():
    x, y = torch.randn(20, 6), torch.randint(3, (20,))
    loader = DataLoader(TensorDataset(x, y), batch_size=8, drop_last=True, shuffle=True)
    with pytest.warns(UserWarning, match="gives 16 of 20 examples"):
        trainer(max_epochs=1).fit(HMC(network(), optimizer=few), loader)


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


def test_chains_that_can_never_move_are_named():
    """Once: nothing is ever accepted where the energy is no number; the others go on."""
    module = HMC(network(), members=2, optimizer=few)
    with torch.no_grad():
        next(module.state.parameters())[1] = torch.nan
    loader = DataLoader(TensorDataset(*Blobs().load().train), batch_size=20)
    with pytest.warns(UserWarning, match="ever be accepted") as said:
        trainer(max_epochs=2).fit(module, loader)
    told = [str(w.message) for w in said if "ever be accepted" in str(w.message)]
    assert len(told) == 1
    assert "chains [1] of 2 " in told[0]

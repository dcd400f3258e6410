"""SWAG in Lightning: moments, the high rate, BatchNorm statistics, fresh processes."""

import copy
import warnings

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from module_cases import Blobs, fitted, network, predicting, saved, trainer
from torch import nn
from torch.optim.swa_utils import update_bn

from lightning_bnn.bank import CheckpointBank
from lightning_bnn.callbacks import CheckpointHarvester
from lightning_bnn.methods.swag import HighRate
from lightning_bnn.modules import SWAG
from lightning_bnn.modules.prediction import posterior_of
from lightning_bnn.posteriors import LowRankGaussian, Mixture
from weightsym import params as P
from weightsym.networks.batch_norms import refreshed
from weightsym.networks.randomness import keyed_generator

pytestmark = pytest.mark.filterwarnings("ignore")


def sgd(parameters):
    return torch.optim.SGD(parameters, 0.1)


def test_it_is_the_gaussian_of_the_harvested_networks(tmp_path):
    """Two members, a start, and a rank below the number of networks."""
    module = SWAG(network(), members=2, start=2, rank=3, scale=0.4, optimizer=sgd)
    harvest = CheckpointHarvester(tmp_path, every_n_epochs=1, start=3)
    trainer(harvest, max_epochs=7).fit(module, Blobs())
    bank = CheckpointBank(tmp_path, "r")
    assert len(bank) == 10
    assert int(module.state.collected) == 5
    posterior = module.posterior()
    assert isinstance(posterior, Mixture)
    for m, mode in enumerate(posterior.components):
        wanted = LowRankGaussian.fit(bank[list(range(m, 10, 2))], rank=3, scale=0.4)
        torch.testing.assert_close(mode.mean, wanted.mean)
        torch.testing.assert_close(mode.std, wanted.std, rtol=1e-3, atol=1e-6)
        torch.testing.assert_close(mode.deviations, wanted.deviations, rtol=1e-3, atol=1e-6)


def test_by_default_the_second_half_is_collected_wherever_a_run_goes_on(tmp_path):
    """Members are judged while it trains, and draws afterwards; another fit starts anew."""
    module, seen = SWAG(network(), members=3, optimizer=sgd, eval_samples=7), []
    see = LambdaCallback(on_validation_end=lambda run, module: seen.append(predicting(module)))
    run = fitted(module, None, see, max_epochs=4)
    run.validate(module, Blobs(), verbose=False)
    assert set(seen[:-1]) == {3}
    assert seen[-1] == 7
    other = SWAG(network(), members=3, optimizer=sgd)
    path = saved(run, tmp_path / "it.ckpt")
    trainer(max_epochs=10).fit(other, Blobs(), ckpt_path=path)
    assert (module.state.start, int(module.state.collected), len(module.state.last)) == (2, 2, 2)
    assert (other.state.start, int(other.state.collected)) == (2, 8)
    fitted(module, max_epochs=8)
    assert int(module.state.collected) == 4 == len(module.state.last)


def test_small_variances_around_large_means_survive():
    module = SWAG(nn.Linear(2, 2), start=0, optimizer=sgd)
    g = torch.Generator().manual_seed(0)
    rows = [100 + 1e-3 * torch.randn(1, 2, 2, generator=g) for _ in range(30)]
    for row in rows:
        with torch.no_grad():
            module.state.networks.weight.copy_(row)
        module.state.collect()
    wanted = torch.stack(rows).double().std(0, correction=0)[0].float()
    module.has_weights = True
    found = module.posterior()
    torch.testing.assert_close(P.unravel(found.std, found.spec)["weight"], wanted, rtol=0.1, atol=0)


def rates(start, ramp, epochs, before=None):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1)
    inner = before(optimizer) if before else None
    schedule, found = HighRate(optimizer, 0.5, start, ramp, inner), []
    for _ in range(epochs):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return found


def test_the_high_rate():
    assert rates(2, 4, 8) == pytest.approx([0.1, 0.1, 0.1, 0.2, 0.3, 0.4, 0.5, 0.5])
    assert rates(1, 0, 4) == pytest.approx([0.1, 0.1, 0.5, 0.5])

    def halved(optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    wanted = [0.1, 0.05, 0.025, 0.025 + 0.475 / 2, 0.5]
    assert rates(2, 2, 5, halved) == pytest.approx(wanted)


@pytest.mark.parametrize("width", [4, 200])
def test_refreshed_statistics_are_those_of_torch(width):
    torch.manual_seed(0)
    net = network(0.5, batch_norm=True, width=width)
    networks, batches = P.populate(net, 3), [torch.randn(9, 6) for _ in range(5)]
    found = refreshed(net, networks, ((x,) for x in batches))
    for m, one in enumerate(P.unstack(networks)):
        alone = copy.deepcopy(net)
        alone.load_state_dict(one)
        alone[3].p = 0.0
        update_bn(batches, alone)
        for name in ("1.running_mean", "1.running_var"):
            torch.testing.assert_close(found[name][m], alone.state_dict()[name])
    assert float(networks["1.running_mean"].abs().max()) == 0


def test_drawn_networks_get_statistics_of_their_own(tmp_path):
    """After the fit, in a fresh module from a datamodule, and from a loader that is named."""
    module, data = SWAG(network(batch_norm=True), optimizer=sgd, eval_samples=5), Blobs()
    run = fitted(module, data, max_epochs=6)
    x = data.load().test[0]
    judged = posterior_of(module).networks
    (one,) = run.test(module, data, verbose=False)[:1]
    path = saved(run, tmp_path / "it.ckpt")

    def loaded():
        return SWAG.load_from_checkpoint(path, network=network(batch_norm=True))

    (two,) = trainer().test(loaded(), data, verbose=False)[:1]
    assert one == two
    alone = loaded().eval()
    with pytest.warns(UserWarning, match="There are no training data for the BatchNorm"):
        stale = alone(x)
    alone.use_training_data(data)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fresh = alone(x)
    assert not torch.allclose(stale, fresh)
    torch.testing.assert_close(fresh, module.eval()(x))
    # what predicts is a draw of the posterior with the statistics of its activations
    names = P.weight_names(module.template)
    wanted = module.posterior().sample(5, keyed_generator(0, "judged"))
    assert all(torch.equal(judged[n], wanted[n]) for n in names)

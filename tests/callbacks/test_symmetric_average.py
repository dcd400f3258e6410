"""Averages of runs: statistics of batch norms, other seeds, resumed runs, two processes."""

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, WeightAveraging
from processes import on_devices
from runs import Normed, Plain, Points, Recorder, built, fit
from torch.optim.swa_utils import update_bn

from lightning_bnn.callbacks import SymmetricAverage
from weightsym import average, discover, permute, random_permutations
from weightsym import params as P

pytestmark = pytest.mark.filterwarnings("ignore")
BATCHES = list(Points(36).x.split(6))


class Validated(Normed):
    """Keeps the weights with which it is validated."""

    seen = None

    def validation_step(self, batch, _):
        self.seen = {n: t.clone() for n, t in P.of(self.net).items()}

    def val_dataloader(self):
        return [Points(6)]


def averaged(*args, module=Normed, **options):
    module, recorder, callback = built(module), Recorder(), SymmetricAverage(*args)
    fit(module, recorder, callback, **options)
    return P.of(module.net), recorder.weights, callback


def norms(state):
    return {n: t for n, t in state.items() if "running" in n}


def close(found, expected, **options):
    for n, t in expected.items():
        torch.testing.assert_close(found[n], t, msg=n, **options)


# ------------------------------------------------------------ one run
def test_the_mean_of_all_steps_has_statistics_of_its_own():
    found, weights, callback = averaged()
    assert int(callback.networks) == 12
    mean = P.weighted_mean(P.stack(weights[1:]))
    close(found, {n: t for n, t in mean.items() if P.is_weight(n, t)}, rtol=1e-5, atol=1e-6)
    net = built(Normed).net
    net.load_state_dict({n: mean.get(n, t) for n, t in net.state_dict().items()})
    update_bn([*BATCHES, *BATCHES], net)  # torch's own, on the batches of both epochs
    close(norms(found), norms(P.of(net)), rtol=1e-4, atol=1e-5)
    # the negative control: Lightning averages statistics
    module = built(Normed)
    fit(module, WeightAveraging())
    plainly = norms(P.of(module.net))
    close(
        P.of(module.net),
        {n: t for n, t in found.items() if P.is_weight(n, t)},
        rtol=1e-5,
        atol=1e-6,
    )
    assert any((plainly[n] - t).abs().max() > 0.02 for n, t in norms(found).items())


def test_decay_and_schedule():
    found, weights, _ = averaged((), 0.5, 3, module=Plain)
    mean = weights[3]
    for step in (6, 9, 12):
        mean = {n: 0.5 * t + 0.5 * weights[step][n] for n, t in mean.items()}
    close(found, mean)
    found, weights, callback = averaged((), None, None, 1, 2, module=Plain)
    assert int(callback.networks) == 1
    close(found, weights[12])


def test_validation_and_checkpoints_have_these_statistics(tmp_path):
    module, callback = built(Validated), SymmetricAverage()
    trainer = fit(module, callback, num_sanity_val_steps=0)
    close(norms(module.seen), norms(P.of(module.net)))
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    state = torch.load(tmp_path / "x.ckpt", weights_only=True)["state_dict"]
    close({n.removeprefix("net."): t for n, t in state.items()}, P.of(module.net))


def test_before_the_first_average_the_module_is_as_it_is():
    module, recorder = built(Validated), Recorder()
    with pytest.warns(UserWarning, match="SymmetricAverage has averaged nothing"):
        fit(module, recorder, SymmetricAverage(start=100))
    close(P.of(module.net), recorder.weights[-1])
    close(module.seen, recorder.weights[-1])


def test_a_resumed_run_ends_like_an_uninterrupted_one(tmp_path):
    module, saving = built(Normed), ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
    fit(module, SymmetricAverage(), saving, max_epochs=4, enable_checkpointing=True)
    again = built(Normed)
    fit(again, SymmetricAverage(), max_epochs=4, ckpt_path=tmp_path / "epoch=0.ckpt")
    close(P.of(again.net), P.of(module.net), rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------ several runs
def test_other_runs_join_in_the_frame_of_this_one(tmp_path):
    alone, *_ = averaged()
    sym = discover(built(Normed).net, BATCHES[0])
    copy = permute(alone, sym, random_permutations(sym, torch.Generator().manual_seed(3)))
    torch.save(copy, tmp_path / "copy.pt")
    joined, *_ = averaged([tmp_path / "copy.pt"])
    close(joined, alone, rtol=1e-4, atol=1e-5)
    plainly = P.weighted_mean(P.stack([alone, copy]))
    assert (plainly["0.weight"] - alone["0.weight"]).abs().max() > 0.1
    torch.manual_seed(5)
    other = Normed()
    fit(other, data=None)
    torch.save({"state_dict": other.state_dict()}, tmp_path / "other.ckpt")
    joined, *_ = averaged([tmp_path / "other.ckpt"])
    wanted = average(P.stack([alone, P.of(other.net)]), sym)
    close(joined, {n: t for n, t in wanted.items() if P.is_weight(n, t)}, rtol=1e-4, atol=1e-5)


def run_on_two(folder):
    module = built(Normed)
    fit(module, SymmetricAverage(), devices=2, strategy="ddp", default_root_dir=folder,
        use_distributed_sampler=True)  # fmt: skip
    return {n: t.tolist() for n, t in P.of(module.net).items()}


@pytest.mark.e2e
def test_two_processes_share_their_statistics(tmp_path):
    first, second = on_devices(2, run_on_two, tmp_path)
    assert first == second
    net, x = built(Normed).net, Points(36).x
    net.load_state_dict({n: torch.tensor(t) for n, t in first.items()})
    hidden = net[0](x)
    torch.testing.assert_close(net[1].running_mean, hidden.mean(0), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(net[1].running_var, hidden.var(0), rtol=0.4, atol=0.05)


# ------------------------------------------------------------ mistakes
@pytest.mark.bad_input
def test_mistakes_are_refused(tmp_path):
    with pytest.raises(ValueError, match="`decay` must be between 0 and 1, got 1"):
        SymmetricAverage(decay=1)
    torch.save({"0.weight": torch.ones(2, 2)}, tmp_path / "x.pt")
    with pytest.raises(ValueError, match=r"x\.pt does not fit"):
        averaged([tmp_path / "x.pt"])

"""What every LightningModule of this package must do, looked at in one run of each."""

from types import SimpleNamespace

import pytest
import torch
from cases import Forward
from lightning.pytorch.callbacks import LambdaCallback
from module_cases import (
    MODULES,
    OF_EACH_CLASS,
    PER_INPUT,
    WITHOUT_N,
    Blobs,
    fitted,
    made,
    network,
    predicting,
    same,
    state,
    trainer,
)
from processes import on_devices, result
from sklearn.metrics import average_precision_score, roc_auc_score
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bnn import metrics as M
from lightning_bnn.bank import CheckpointBank
from lightning_bnn.callbacks import CheckpointHarvester, MassGap, PermutationTau, PosteriorFigures
from lightning_bnn.modules.prediction import begin
from lightning_bnn.posteriors import Mixture, Posterior
from weightsym import params as P

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.usefixtures("undrawn")]
STOPS = 6, 8
"""At the end of the first epoch and within the second: six steps make an epoch."""
DRAWN = "ensemble", "bethe", "sghmc"
"""Runs with all callbacks: it takes as long to read networks and to make figures as to train."""
AT_EPOCH_ENDS = "ensemble", "sgld", "swag", "multi-swag"
"""Those that do something when an epoch ends, and one that does not."""


def saves(folder):
    """Checkpoints of a run that is killed after some of its steps."""

    def save(trainer, *_):
        if trainer.global_step in STOPS:
            trainer.save_checkpoint(folder / f"{trainer.global_step}.ckpt")

    return LambdaCallback(on_train_batch_end=save)


def trained(name, folder):
    """A module after three epochs with dropout and BatchNorm, watched by our callbacks."""
    torch.manual_seed(0)
    net = network(0.3, batch_norm=True)
    before = {k: v.clone() for k, v in net.state_dict().items()}
    module, data, checkpoint = MODULES[name](net), Blobs(), folder / "last.ckpt"
    callbacks = [CheckpointHarvester(folder / "bank", 1)]
    if name in DRAWN:
        callbacks += [PermutationTau(), MassGap(6), PosteriorFigures(every_n_steps=6)]
    run = trainer(*callbacks, saves(folder), default_root_dir=folder, max_epochs=3)
    (start,) = run.validate(module, data, verbose=False)
    torch.manual_seed(0)
    run.fit(module, data)
    last = state(module)
    (end,) = run.validate(module, data, verbose=False)
    run.save_checkpoint(checkpoint)
    return SimpleNamespace(**locals())


LATE = "map", "chains", "uniform", "laplace full", "mfvi local"
"""Variants of others, which are trained for the laws with those tests that start processes."""
EACH = [pytest.param(n, marks=pytest.mark.e2e) if n in LATE else n for n in MODULES]


@pytest.fixture(scope="module", params=EACH)
def run(request, tmp_path_factory):
    return trained(request.param, tmp_path_factory.mktemp("run"))


def test_it_learns_and_leaves_the_network_alone(run):
    assert run.end["val/nll"] < run.start["val/nll"] - 0.1
    assert same(run.before, run.net.state_dict())
    assert run.module.num_data == (None if run.name in WITHOUT_N else 60)
    assert same(run.last, state(run.module))  # a validation changes nothing


@pytest.mark.parametrize("name", OF_EACH_CLASS)
def test_a_run_that_logs_nothing_trains_the_same(name):
    ends = []
    for options in ({}, {"log_every_n_steps": 0}, {"log_every_n_steps": 0, "barebones": True}):
        module = made(name)
        fitted(module, max_epochs=1, **options)
        ends.append(state(module))
    assert same(ends[0], ends[1])
    assert same(ends[0], ends[2])


@pytest.mark.parametrize("stop", STOPS)
def test_a_resumed_run_equals_an_uninterrupted_one(run, stop):
    """Dropout, BatchNorm, augmentation, shuffling: bit for bit, in and between epochs.

    The resumed run has none of our callbacks: those that look at a run do not change it.
    """
    if stop == STOPS[0] and run.name not in AT_EPOCH_ENDS:
        return
    torch.manual_seed(99)
    module = made(run.name, seed=99, dropout=0.3, batch_norm=True)
    trainer(max_epochs=3).fit(module, Blobs(), ckpt_path=run.folder / f"{stop}.ckpt")
    assert same(state(module), run.last)


def test_modes_are_what_the_members_have_found(run):
    module, template = run.module, run.module.template.eval()
    modes, judged = module.posterior().modes(), module.judged_modes(4)
    assert len(modes) == len(judged) == module.members
    x, seeded = run.data.load().test[0], torch.Generator().manual_seed
    one, other = (modes[k].sample(1, seeded(1)) for k in (0, -1))
    assert one.keys() == other.keys() == P.of(template).keys()
    assert same(one, other) == (module.members == 1)
    outputs = judged[0].predict(template, x, 1, seeded(1))
    assert outputs.shape == (1, len(x), 3)


@pytest.mark.frames
@pytest.mark.parametrize("run", OF_EACH_CLASS, indirect=True)
def test_a_checkpoint_predicts_the_same_elsewhere(run):
    net = network(0.0 if run.name in ("hmc", "mile") else 0.3, batch_norm=True)
    loaded = type(run.module).load_from_checkpoint(run.checkpoint, network=net, weights_only=True)
    wanted, found = run.run.predict(run.module, run.data), trainer().predict(loaded, run.data)
    for a, b in zip(wanted, found, strict=True):
        assert torch.equal(a.samples, b.samples)
        assert torch.equal(a.mean, b.mean)
    x = run.data.load().test[0][:5]
    assert torch.equal(run.module.eval()(x), loaded.eval()(x))


def numbers_of(name, checkpoint):
    module = made(name, seed=7, dropout=0.3, batch_norm=True)
    return trainer().test(module, Blobs(), ckpt_path=checkpoint, verbose=False)


@pytest.mark.e2e
@pytest.mark.parametrize("run", DRAWN, indirect=True)
def test_a_checkpoint_is_tested_in_a_fresh_process(run):
    """By `Trainer.test(ckpt_path=...)`, with the numbers of the process that trained."""
    wanted = run.run.test(run.module, run.data, verbose=False)
    found = result(numbers_of, run.name, run.checkpoint)
    for one, two in zip(found, wanted, strict=True):
        assert one == pytest.approx(two, abs=1e-6)


def test_members_weights_and_posterior(run):
    module = run.module
    template, stack, example = module.weights()
    assert P.stack_size(stack) == module.members
    assert list(stack) == list(P.of(template))
    assert example[0].shape == (2, 6)
    member = module.member(module.members - 1).eval()
    x = torch.randn(5, 6)
    wanted = P.apply(template.eval(), stack, x)[-1]
    torch.testing.assert_close(member(x), wanted)
    posterior = module.posterior()
    assert isinstance(posterior, Posterior)
    count = predicting(module)
    assert P.stack_size(posterior.sample(count)) == count
    both = Mixture([posterior, module.posterior()])
    assert both.predict(template.eval(), x, 2 * count).shape == (2 * count, 5, 3)
    before = state(module)
    for copied in posterior.state_dict().values():
        copied.zero_()
    assert same(before, state(module))


def test_a_plain_call_predicts_as_a_test_does(run):
    """Right after a fit a module is in training mode; modes and statistics stay as they are."""
    module, x = run.module, run.data.load().test[0]
    before, wanted = state(module), module.eval()(x)
    if run.name not in {*PER_INPUT, "laplace"}:  # which are no mean over networks
        torch.testing.assert_close(module.predictive()(x), wanted)
    module.train()
    module.population.follow(module.training)
    modes = [m.training for m in module.template.modules()]
    assert module.training
    assert all(modes)
    assert torch.equal(module(x), wanted)
    assert [m.training for m in module.template.modules()] == modes
    assert same(before, state(module))
    other = P.apply(module.template, {n: t.clone() for n, t in module.member_stack().items()}, x)
    assert not torch.allclose(other.softmax(-1).mean(0), wanted, atol=1e-3)  # batch statistics
    module.eval()


def test_every_number_of_a_test_is_that_of_the_metric(run):
    module, splits = run.module, run.data.load()
    (found, *_) = run.run.test(module, run.data, verbose=False)
    sets = {"": splits.test, "near/": splits.ood["near"], "far/": splits.ood["far"]}
    sets["closer/"] = splits.shift["closer"]
    module.eval()
    begin(module)
    outputs = {
        key: torch.cat([module.outputs((part,), k, b) for b, part in enumerate(x.split(16))], 1)
        for k, (key, (x, _)) in enumerate(sets.items())
    }
    probs = {key: values.softmax(-1).detach() for key, values in outputs.items()}
    wanted = {f"{key}mi": M.mutual_information(p).mean() for key, p in probs.items()}
    for key in ("", "closer/"):
        mean, labels = probs[key].mean(0), sets[key][1]
        wanted[f"{key}acc"] = (mean.argmax(1) == labels).double().mean()
        wanted[f"{key}nll"] = M.nll(mean, labels).mean()
        wanted[f"{key}brier"] = M.brier_score(mean, labels).mean()
        wanted[f"{key}ece"] = M.ece(mean, labels)
    inside = 1 - probs[""].mean(0).amax(1)
    for key in ("near/", "far/"):
        scores = torch.cat([inside, 1 - probs[key].mean(0).amax(1)]).double()
        is_ood = torch.arange(len(scores)) >= len(inside)
        wanted[f"{key}AUROC"] = roc_auc_score(is_ood, scores)
        wanted[f"{key}AUPR_out"] = average_precision_score(is_ood, scores)
        wanted[f"{key}AUPR_in"] = average_precision_score(~is_ood, -scores)
    for metric, value in wanted.items():
        assert found[f"test/{metric}"] == pytest.approx(float(value), abs=1e-6), metric
    assert "test/closer/AUROC" not in found


def test_our_callbacks_see_its_members(run):
    if run.name in DRAWN:
        _, tau, gap, *_ = run.run.callbacks
        assert len(tau.history) == 18
        assert len(gap.history) == 3
    rows = CheckpointBank(run.folder / "bank", "r")
    assert len(rows) == 18 * run.module.members
    for step in STOPS[:1]:
        whole = torch.load(run.folder / f"{step}.ckpt", weights_only=True)["state_dict"]
        resumed = made(run.name, dropout=0.3, batch_norm=True)
        resumed.load_state_dict(whole, strict=False)
        for name, tensor in resumed.member_stack().items():
            found = rows.layer(name)[(step - 1) * len(tensor) : step * len(tensor)]
            assert torch.equal(found, tensor), name
    assert bool(list(run.folder.rglob("*.png"))) == (run.name in DRAWN)


def two_inputs():
    a, b, out = nn.Linear(3, 4), nn.Linear(3, 4), nn.Linear(4, 3)
    return Forward(lambda s, x, y: s.out(torch.relu(s.a(x) + s.b(y))), a=a, b=b, out=out)


@pytest.mark.parametrize("name", ["mfvi", "bethe"])
def test_two_inputs_of_another_precision_from_plain_loaders(name):
    x, y = Blobs(n=30).load().train
    loader = DataLoader(TensorDataset(x[:, :3].double(), x[:, 3:].double(), y), 8, shuffle=True)
    module = MODULES[name](two_inputs())
    run = fitted(module, loader)
    assert module.num_data == 30
    found = run.test(module, [loader, loader], verbose=False)[0]
    assert found["test/ood/AUROC"] == pytest.approx(0.5, abs=0.02)
    prediction = run.predict(module, loader)[0]
    assert prediction.mean.shape == (8, 3)
    assert prediction.samples.shape == (predicting(module), 8, 3)


def run_on(devices, names, folder):
    """Differences between replicas, and the numbers of tests of the weights of one process."""
    out = {}
    for name in names:
        bank = {"bank": str(folder / f"bank{devices}")} if name == "sghmc" else {}
        module = made(name, batch_norm=True, **bank)
        data = Blobs(n=63, batch_size=100 if name in ("hmc", "mile") else 5)
        epochs = 12 if name in ("hmc", "mile") else 2
        options = {"devices": devices, "strategy": "ddp" if devices > 1 else "auto"}
        run = trainer(max_epochs=epochs, num_sanity_val_steps=0, **options)
        run.fit(module, data)
        assert run.global_step >= 12
        if devices > 1:
            out |= _replicas(name, module)
            module.load_state_dict(torch.load(folder / f"{name}.pt"))
            if bank:
                module.state.samples.path = str(folder / "bank1")
        else:
            torch.save(module.state_dict(), folder / f"{name}.pt")
        out[name] = run.test(module, data, verbose=False)[0]
        run.strategy.barrier()
    return out


def _replicas(name, module):
    rows = torch.cat([p.detach().flatten() for p in module.parameters()])
    found = {f"{name} replicas": float(_between_processes(rows).max())}
    if name == "mfvi":
        with module.randomness("train", 0):
            noise = module.method.draw(module.state).noise.flatten()
        found["noise"] = float(_between_processes(noise).mean())
    return found


def _between_processes(tensor):
    every = [torch.empty_like(tensor) for _ in range(2)]
    torch.distributed.all_gather(every, tensor)
    return (every[0] - every[1]).abs()


@pytest.mark.e2e
def test_two_processes(tmp_path):
    """Replicas stay equal, and a test gives the numbers of one process."""
    names = {MODULES[n].cls: n for n in OF_EACH_CLASS if n != "laplace"}.values()
    names = [*names, "mfvi", "chains", "mfvi flipout"]
    (alone,) = on_devices(1, run_on, 1, names, tmp_path)
    together, _ = on_devices(2, run_on, 2, names, tmp_path)
    assert together["noise"] > 0.5  # processes draw networks of their own: gradients vary less
    for name in names:
        assert together[f"{name} replicas"] == 0
        assert together[name].keys() == alone[name].keys()
        tolerance = 0.2 if name in PER_INPUT else 1e-6
        for key, value in alone[name].items():
            if name in PER_INPUT and "FPR95" in key:
                continue
            assert together[name][key] == pytest.approx(value, abs=tolerance), (name, key)

"""SymmetricAverage against averages made by hand and by Lightning, on every kind of run."""

import os
import pickle
import warnings

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from processes import on_devices
from runs import QUIET, RUNS, Plain, Points, Recorder, Stacked, Unreadable, built, fit
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from lightning_bnn.bank import CheckpointBank
from lightning_bnn.callbacks import CheckpointHarvester, SymmetricAverage, symmetric_average
from weightsym import average, discover, permute, random_permutations
from weightsym import params as P

X = torch.randn(20, 6, generator=torch.Generator().manual_seed(3))


class Normed(Plain):
    """A norm over batches, and a buffer with infinite values."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 5), nn.ReLU(),
            nn.Linear(5, 3),
        )  # fmt: skip
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
        self.save_hyperparameters()


class Judged(Normed):
    """Metrics of its own, and logs of every kind."""

    def __init__(self):
        super().__init__()
        self.accuracy, self.mean = MulticlassAccuracy(3), MeanMetric()

    def validation_step(self, batch, _):
        z = self.net(batch[0])
        self.accuracy(z, batch[1])
        self.mean.update(z.mean())
        self.log("accuracy", self.accuracy)
        self.log_dict({"loss": F.cross_entropy(z, batch[1]), "mean": self.mean})

    def on_validation_epoch_end(self):
        self.log("again", self.accuracy.compute())


class Jumping(L.Callback):
    """Exchanges the units of the network at ends of epochs: another network, the same function."""

    def __init__(self, at=(6, 12)):
        self.at = at

    def on_train_batch_end(self, trainer, module, *_):
        if trainer.global_step in self.at:
            sym = discover(module.net, torch.randn(2, 6))
            g = torch.Generator().manual_seed(trainer.global_step)
            moved = permute(P.of(module.net), sym, random_permutations(sym, g))
            for name, live in P.of(module.net).items():
                live.copy_(moved[name])


def validated(module, *callbacks, **options):
    """Train two epochs with validation at every end."""
    L.seed_everything(1, verbose=False)
    loaders = [DataLoader(Points(36), 6, shuffle=True), DataLoader(Points(36), 8)]
    trainer = L.Trainer(
        **{**QUIET, "max_epochs": 2, "num_sanity_val_steps": 2, "callbacks": list(callbacks),
           **options}
    )  # fmt: skip
    ckpt = options.pop("ckpt_path", None)
    trainer.fit(module, *loaders, ckpt_path=ckpt)
    return trainer


@pytest.fixture(scope="module", params=[*RUNS, "batch norm"])
def run(request, tmp_path_factory):
    """A run alone, and one with the callback and a record of all weights."""
    cls, options = RUNS.get(request.param, (Normed, {}))
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("run")
    alone, module = built(cls), built(cls)
    fit(alone, **options)
    recorder = Recorder("" if request.param == "layers as attributes" else "net")
    callback = SymmetricAverage(decay=0.8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit(module, recorder, callback, default_root_dir=folder, **options)
    return request.param, alone, module, recorder, callback, folder


# ------------------------------------------------------------ one run
def test_training_is_what_it_would_have_been(run):
    _, alone, module, *_ = run
    watched = module.state_dict().values()
    for (name, a), b in zip(alone.state_dict().items(), watched, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, msg=name, equal_nan=True)


def test_within_a_run_it_is_the_plain_average(run):
    name, _, module, recorder, callback, _ = run
    assert callback.networks == len(recorder.weights) - 1 >= 4
    assert callback.moved_units == 0
    state = callback.averaged_state(module)
    state = {n.replace("_orig_mod.", ""): t for n, t in state.items()}
    prefix = "" if name == "layers as attributes" else "net."
    for key, first in recorder.weights[1].items():
        if not P.is_weight(key, first):
            continue
        wide = first.float() if first.dtype == torch.bfloat16 else first
        for network in recorder.weights[2:]:
            wide = torch.lerp(wide, network[key].to(wide), 0.2)
        torch.testing.assert_close(state[prefix + key], wide.to(first))


def test_what_is_written_is_an_ordinary_checkpoint(run):
    name, _, module, _, callback, folder = run
    cls = RUNS.get(name, (Normed, {}))[0]
    content = torch.load(folder / "average.ckpt")
    assert {"epoch", "global_step", "pytorch-lightning_version"} <= content.keys()
    other, state = built(cls).to(next(module.parameters()).dtype), callback.averaged_state(module)
    other.load_state_dict(content["state_dict"], strict=True)
    for key, tensor in other.state_dict().items():
        torch.testing.assert_close(tensor, state[key], rtol=0, atol=0)


def test_it_equals_lightnings(tmp_path):
    ours, theirs = built(Plain), built(Plain)
    callback = SymmetricAverage(decay=0.7, path=None)
    fit(ours, callback)
    fit(theirs, EMAWeightAveraging(decay=0.7))
    for name, tensor in theirs.state_dict().items():
        torch.testing.assert_close(callback.averaged_state(ours)[name], tensor)


def test_equal_weights_at_the_ends_of_epochs(tmp_path):
    module, bank = built(Plain), tmp_path / "bank"
    callback = SymmetricAverage("swa", start=2, path=None)
    fit(module, callback, CheckpointHarvester(bank, every_n_epochs=1), max_epochs=4)
    kept = CheckpointBank(bank, "r")
    assert callback.networks == 3
    expected = kept.average(align=False, rows=slice(1, None))
    for name, tensor in expected.items():
        torch.testing.assert_close(callback.averaged_state(module)[f"net.{name}"], tensor)


# ------------------------------------------------------------ symmetries
@pytest.mark.parametrize("kind", ["ema", "swa"])
def test_jumps_along_symmetries_do_not_matter(kind):
    """Training goes on as if nothing had happened, and so does the average; not the plain one."""
    options = {"kind": kind, "decay": 0.8, "every_n_steps": 1, "path": None}
    recorder = Recorder()

    class WithoutMomentum(Plain):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.3)

    smooth, callback = built(WithoutMomentum, 0.0), SymmetricAverage(**options)
    fit(smooth, callback)
    jumping, second = built(WithoutMomentum, 0.0), SymmetricAverage(**options)
    fit(jumping, Jumping(), recorder, second)
    assert second.moved_units > 0
    expected = P.apply(smooth.net, _net(callback.averaged_state(smooth)), X)
    found = P.apply(jumping.net, _net(second.averaged_state(jumping)), X)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    plain = recorder.weights[1]
    for k, network in enumerate(recorder.weights[2:]):
        w = 0.2 if kind == "ema" else 1 / (k + 2)
        plain = {n: torch.lerp(t, network[n], w) for n, t in plain.items()}
    assert not torch.allclose(P.apply(jumping.net, plain, X), expected, atol=0.02)


def _net(state):
    return {n.removeprefix("net."): t for n, t in state.items() if n.startswith("net.")}


def test_a_bank_of_runs_averages_to_one(tmp_path):
    """Networks of a bank in one frame, as the function gives it."""
    net = built(Plain).net.eval()
    sym = discover(net, X[:2])
    with CheckpointBank(tmp_path / "bank") as bank:
        for seed in range(4):
            g = torch.Generator().manual_seed(seed)
            bank.append(permute(P.of(net), sym, random_permutations(sym, g)))
    mean = bank.average(sym, [1, 2, 3, 4])
    torch.testing.assert_close(P.apply(net, mean, X), net(X), rtol=0, atol=1e-6)
    assert not torch.allclose(P.apply(net, bank.average(align=False), X), net(X), atol=0.02)
    last = bank.average(sym, rows=slice(-2, None), signs=False)
    expected = average(bank[2:], sym, signs=False)
    assert all(torch.equal(last[n], t) for n, t in expected.items())


def test_several_networks_side_by_side():
    module, recorder = built(Stacked), Recorder("")
    callback = SymmetricAverage(decay=0.5, path=None)
    fit(module, callback, recorder, enable_checkpointing=False)
    state = callback.averaged_state(module)
    expected = recorder.weights[1]
    for network in recorder.weights[2:]:
        expected = {n: torch.lerp(t, network[n], 0.5) for n, t in expected.items()}
    for name, tensor in expected.items():
        torch.testing.assert_close(state[f"nets.{name}"], tensor)


# ------------------------------------------------------------ validation
def test_the_average_is_validated_beside(tmp_path):
    """Both are what validating either alone says; metrics of the module see its own outputs."""
    module, callback = built(Judged), SymmetricAverage(decay=0.6, path=None)
    trainer = validated(module, callback)
    found = {n: float(v) for n, v in trainer.callback_metrics.items()}
    other = built(Judged)
    other.load_state_dict(callback.averaged_state(module))
    alone = L.Trainer(**QUIET)
    for judged, prefix in ((module, ""), (other, "average/")):
        (expected,) = alone.validate(judged, DataLoader(Points(36), 8), verbose=False)
        for name in ("accuracy", "loss", "mean", "again"):
            assert found[prefix + name] == pytest.approx(expected[name], rel=1e-5), prefix + name
    assert found["average/moved_units"] == 0
    assert found["average/loss"] != pytest.approx(found["loss"], rel=1e-3)


def test_validating_does_not_change_training(tmp_path):
    """Shuffling, dropout and metrics go on as without the callback."""

    class Drawing(Judged):
        def validation_step(self, batch, index):
            torch.rand(3)
            super().validation_step(batch, index)

        def training_step(self, batch, _):
            z = F.dropout(self.net(batch[0]), 0.2)
            return F.cross_entropy(z, batch[1])

    alone, watched = built(Drawing), built(Drawing)
    first = validated(alone)
    second = validated(watched, SymmetricAverage(decay=0.6), default_root_dir=tmp_path)
    for a, b in zip(alone.state_dict().values(), watched.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    for name, value in first.callback_metrics.items():
        assert float(second.callback_metrics[name]) == float(value)


def test_several_loaders_and_short_signatures():
    class Two(Plain):
        def validation_step(self, batch, batch_idx, dataloader_idx=0):
            self.log("loss", F.cross_entropy(self.net(batch[0]), batch[1]))

    class Short(Plain):
        def validation_step(self, batch):
            self.log("loss", F.cross_entropy(self.net(batch[0]), batch[1]))

    L.seed_everything(1, verbose=False)
    loader = DataLoader(Points(36), 6)
    trainer = L.Trainer(**QUIET, max_epochs=1, callbacks=[SymmetricAverage(path=None)])
    trainer.fit(built(Two), loader, [loader, loader])
    assert {"average/loss/dataloader_idx_0", "average/loss/dataloader_idx_1"} <= set(
        trainer.callback_metrics
    )
    assert "average/loss" in validated(built(Short), SymmetricAverage(path=None)).callback_metrics


def test_a_module_that_cannot_be_copied_is_not_validated(tmp_path):
    class Uncopied(Plain):
        def __deepcopy__(self, memo):
            raise TypeError("no copies of me")

    callback = SymmetricAverage(path=None)
    with pytest.warns(UserWarning, match="does not validate, as .* no copies of me"):
        trainer = validated(built(Uncopied), callback)
    assert "average/val" not in trainer.callback_metrics
    assert callback.networks == 12


# ------------------------------------------------------------ batch norms
def test_statistics_are_those_of_the_last_inputs(tmp_path, monkeypatch):
    monkeypatch.setattr(symmetric_average, "_CALLS", 3)
    module, callback = built(Normed), SymmetricAverage(decay=0.5)
    fit(module, callback, default_root_dir=tmp_path)
    state = torch.load(tmp_path / "average.ckpt")["state_dict"]
    hidden = Points(36).x[18:] @ state["net.0.weight"].T + state["net.0.bias"]
    torch.testing.assert_close(state["net.1.running_mean"], hidden.mean(0))
    variance = hidden.unflatten(0, (3, 6)).var(1).mean(0)
    torch.testing.assert_close(state["net.1.running_var"], variance)
    assert state["net.1.num_batches_tracked"] == 12
    assert state["mask"].tolist() == [0.0, -torch.inf]
    assert torch.load(tmp_path / "average.ckpt")["epoch"] == 2


# ------------------------------------------------------------ what is odd
def test_an_unreadable_network_switches_it_off(tmp_path):
    callback = SymmetricAverage(path=str(tmp_path / "x.ckpt"))
    with pytest.warns(UserWarning, match="switched off: net: Net cannot be traced"):
        fit(built(Unreadable), callback)
    assert callback.networks == 0
    assert not (tmp_path / "x.ckpt").exists()


def test_a_diverged_run_goes_on():
    class Diverged(Plain):
        def training_step(self, batch, index):
            if index == 2:
                nn.init.constant_(self.net[0].weight, torch.inf)
            return super().training_step(batch, index)

    callback = SymmetricAverage(path=None)
    module = built(Diverged)
    with pytest.warns(UserWarning, match="does not average weights that are not finite"):
        fit(module, callback)
    assert callback.networks == 2
    assert all(t.isfinite().all() for t in callback.averaged_state(module).values())


def test_nothing_to_average(tmp_path):
    callback = SymmetricAverage("swa", start=9, path=str(tmp_path / "x.ckpt"))
    with pytest.warns(UserWarning, match="has averaged nothing"):
        fit(built(Plain), callback)
    assert not (tmp_path / "x.ckpt").exists()
    with pytest.raises(ValueError, match="There is no average yet"):
        callback.averaged_state(built(Plain))


def test_the_same_callback_in_another_run():
    callback, module = SymmetricAverage(path=None), built(Plain)
    fit(module, Jumping(), callback, max_epochs=1)
    assert callback.moved_units > 0
    fit(module, callback, max_epochs=1)
    assert callback.networks == 12
    assert callback.moved_units > 0  # it knows where the network stands
    assert pickle.loads(pickle.dumps(callback)).networks == 12
    fit(built(Normed), callback, max_epochs=1)
    assert callback.networks == 6


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "mean"}, "`kind` must be 'ema' or 'swa', got 'mean'"),
        ({"decay": 1.0}, "`decay` must be at least 0 and below 1, got 1.0"),
        ({"decay": float("nan")}, "`decay` must be at least 0 and below 1"),
        ({"every_n_steps": 0}, "`every_n_steps` must be at least 1, got 0"),
        ({"every_n_steps": 1, "every_n_epochs": 1}, "Give exactly one of"),
        ({"start": -1}, "`start` must not be negative"),
        ({"prefix": ""}, "`prefix` must not be empty"),
    ],
)
def test_errors(options, message):
    with pytest.raises(ValueError, match=message):
        SymmetricAverage(**options)


@pytest.mark.bad_input
def test_a_network_that_is_not_there():
    with pytest.raises(ValueError, match="no submodule 'body'; it has net"):
        fit(built(Plain), SymmetricAverage(module="body"))


# ------------------------------------------------------------ resume
@pytest.mark.parametrize("cls", [Plain, Normed])
def test_resumed_equals_uninterrupted(tmp_path, monkeypatch, cls):
    monkeypatch.setattr(symmetric_average, "_CALLS", 3)  # a resumed run has seen as many

    def make():
        return SymmetricAverage(decay=0.8, path=None)

    arguments = (0.0,) if cls is Plain else ()
    whole, module = make(), built(cls, *arguments)
    fit(module, Jumping(), whole, max_epochs=3)
    first = make()
    trainer = fit(built(cls, *arguments), Jumping(), first, max_epochs=1)
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    second, other = make(), built(cls, *arguments)
    torch.load(tmp_path / "x.ckpt", weights_only=True)
    fit(other, Jumping(), second, max_epochs=3, ckpt_path=str(tmp_path / "x.ckpt"))
    a, b = whole.averaged_state(module), second.averaged_state(other)
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if cls is Plain else {"rtol": 0, "atol": 0}
    for name, tensor in a.items():
        torch.testing.assert_close(b[name], tensor, **tolerance)
    assert second.networks == whole.networks == 18
    assert second.moved_units == whole.moved_units > 0


# ------------------------------------------------------------ processes
def run_on_two(kind, folder):
    module = built(Plain, 0.0)
    callback = SymmetricAverage(decay=0.8, path=str(folder / f"{kind}.ckpt"))
    options, samplers, size = {"devices": 1}, {}, 12
    if kind == "ddp":
        options = {"devices": 2, "strategy": "ddp", "use_distributed_sampler": False}
        rank = int(os.environ["RANK"])
        samplers = {"sampler": DistributedSampler(Points(36), 2, rank, shuffle=False)}
        size = 6
    trainer = L.Trainer(**QUIET, max_epochs=2, callbacks=[callback, Jumping((3,))], **options)
    loader = DataLoader(Points(36), size, **samplers)
    trainer.fit(module, loader, loader)
    trainer.strategy.barrier()
    metrics = {n: float(v) for n, v in trainer.callback_metrics.items()}
    return metrics, callback.networks


@pytest.mark.e2e
def test_two_processes_are_one(tmp_path):
    """What the first process averages, all validate, and one file has."""
    (alone, _), *_ = on_devices(1, run_on_two, "one", tmp_path)
    (first, count), (second, none) = on_devices(2, run_on_two, "ddp", tmp_path)
    assert (count, none) == (6, 0)
    assert "average/val" in second
    one, two = (torch.load(tmp_path / f"{k}.ckpt")["state_dict"] for k in ("one", "ddp"))
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=1e-4, atol=1e-6)
    halves = (first["average/val"] + second["average/val"]) / 2
    assert halves == pytest.approx(alone["average/val"], rel=1e-4)
    assert first["average/val"] != pytest.approx(first["val"], rel=1e-3)


def run_sharded(folder):
    from test_environments import Sharded

    strategy = L.pytorch.strategies.ModelParallelStrategy(
        data_parallel_size=2, tensor_parallel_size=1, save_distributed_checkpoint=False
    )
    callback = SymmetricAverage(path=str(folder / "x.ckpt"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = fit(built(Sharded, 0.0), callback, devices=2, strategy=strategy)
    said = [str(w.message) for w in caught if "SymmetricAverage" in str(w.message)]
    trainer.strategy.barrier()
    return said, callback.networks


@pytest.mark.e2e
def test_sharded_weights_switch_it_off(tmp_path):
    (said, count), _ = on_devices(2, run_sharded, tmp_path)
    assert said[0] == "SymmetricAverage is switched off: its weights are sharded over processes"
    assert count == 0
    assert not (tmp_path / "x.ckpt").exists()

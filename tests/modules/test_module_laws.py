"""What every LightningModule of this package must do."""

import subprocess
import sys
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from module_cases import (
    MODULES,
    PER_INPUT,
    WITHOUT_N,
    Blobs,
    dropping,
    made,
    network,
    same,
    state,
    trainer,
)
from sklearn.metrics import average_precision_score, roc_auc_score
from torch import nn
from torch.utils.data import DataLoader

from lightning_bnn import metrics as M
from lightning_bnn import params as P
from lightning_bnn.bank import CheckpointBank
from lightning_bnn.callbacks import CheckpointHarvester, MassGap, PermutationTau, PosteriorFigures
from lightning_bnn.posteriors import Mixture, Posterior

EACH = pytest.mark.parametrize("name", MODULES)
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class Stop(Exception):
    """The end of a run that was killed."""


class StopAfter(L.Callback):
    def __init__(self, steps):
        self.steps = steps

    def on_train_batch_start(self, trainer, *_):
        if trainer.global_step == self.steps:
            raise Stop


@EACH
def test_modes_are_what_the_members_have_found(name):
    module, data = made(name), Blobs()
    trainer(max_epochs=3).fit(module, data)
    posterior, judged = module.posterior(), module.judged_modes(4)
    modes = posterior.modes()
    assert len(modes) == len(judged) == (module.members)
    x = data.load().test[0]
    one, other = (
        mode.sample(1, torch.Generator().manual_seed(1)) for mode in (modes[0], modes[-1])
    )
    assert one.keys() == other.keys() == P.of(module.template).keys()
    assert same(one, other) == (module.members == 1)
    outputs = judged[0].predict(module.template, x, 1, torch.Generator().manual_seed(1))
    assert outputs.shape == (1, len(x), 3)


@EACH
def test_it_learns_and_leaves_the_network_alone(name):
    torch.manual_seed(0)
    net = network()
    before = {k: v.clone() for k, v in net.state_dict().items()}
    module, data = MODULES[name](net), Blobs()
    run = trainer(max_epochs=15)
    (start,) = run.validate(module, data, verbose=False)
    run.fit(module, data)
    (end,) = run.validate(module, data, verbose=False)
    assert end["val/nll"] < start["val/nll"] - 0.1
    assert same(before, net.state_dict())
    assert module.num_data == (None if name in WITHOUT_N else 60)


@EACH
@pytest.mark.parametrize("stop", [3, 6, 8])
def test_a_resumed_run_equals_an_uninterrupted_one(name, stop, tmp_path):
    """Dropout, BatchNorm, augmentation, shuffling: bit for bit, in and between epochs."""

    def run(*callbacks, ckpt_path=None, seed=0):
        torch.manual_seed(seed)
        module = made(name, dropout=0.3, batch_norm=True)
        torch.manual_seed(seed)
        going = trainer(*callbacks, enable_checkpointing=bool(callbacks), max_epochs=3)
        going.fit(module, Blobs(), ckpt_path=ckpt_path)
        return state(module)

    whole = run()
    keep = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_last=True, save_top_k=0)
    with pytest.raises(Stop):
        run(keep, StopAfter(stop))
    assert same(run(ckpt_path=tmp_path / "last.ckpt", seed=99), whole)


@pytest.mark.frames
@EACH
def test_a_checkpoint_predicts_the_same_elsewhere(name, tmp_path):
    module, data, run = made(name, batch_norm=True), Blobs(), trainer()
    run.fit(module, data)
    run.save_checkpoint(tmp_path / "it.ckpt")
    wanted, net = run.predict(module, data), network(batch_norm=True)
    loaded = type(module).load_from_checkpoint(
        tmp_path / "it.ckpt",
        network=dropping(net) if name in PER_INPUT else net,
        weights_only=True,
    )
    found = trainer().predict(loaded, data)
    for a, b in zip(wanted, found, strict=True):
        assert torch.equal(a.samples, b.samples)
        assert torch.equal(a.mean, b.mean)
    x = Blobs().load().test[0][:5]
    assert torch.equal(module.eval()(x), loaded.eval()(x))


FRESH = """
import sys, warnings
import torch
warnings.filterwarnings("ignore")
sys.path.insert(0, {tests!r})
torch.set_num_threads(1)
from module_cases import MODULES, PER_INPUT, Blobs, dropping, network, trainer
for name in MODULES:
    net = network(batch_norm=True)
    module = MODULES[name](dropping(net) if name in PER_INPUT else net)
    found = trainer().test(module, Blobs(), ckpt_path={folder!r} + f"/{{name}}.ckpt", verbose=False)
    torch.save(found, {folder!r} + f"/{{name}}.found")
"""


def test_every_checkpoint_is_tested_in_a_fresh_process(tmp_path):
    """By `Trainer.test(ckpt_path=...)`, with the numbers of the process that trained."""
    wanted = {}
    for name in MODULES:
        module, data, run = made(name, batch_norm=True), Blobs(), trainer(max_epochs=3)
        run.fit(module, data)
        run.save_checkpoint(tmp_path / f"{name}.ckpt")
        wanted[name] = run.test(module, data, verbose=False)
    script = tmp_path / "fresh.py"
    script.write_text(FRESH.format(tests=str(Path(__file__).parents[1]), folder=str(tmp_path)))
    command = [sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    for name, numbers in wanted.items():
        for one, two in zip(torch.load(tmp_path / f"{name}.found"), numbers, strict=True):
            assert one == pytest.approx(two, abs=1e-6), name


@EACH
def test_members_weights_and_posterior(name):
    module, data = made(name, batch_norm=True), Blobs()
    trainer(max_epochs=1).fit(module, data)
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
    count = module.judged_samples
    assert P.stack_size(posterior.sample(count)) == count
    both = Mixture([posterior, module.posterior()])
    assert both.predict(template.eval(), x, 2 * count).shape == (2 * count, 5, 3)
    before = state(module)
    for copied in posterior.state_dict().values():
        copied.zero_()
    assert same(before, state(module))


@EACH
def test_every_number_of_a_test_is_that_of_the_metric(name):
    module, data, run = made(name), Blobs(), trainer(max_epochs=3)
    run.fit(module, data)
    (found, *_) = run.test(module, data, verbose=False)
    splits = data.load()
    sets = {"": splits.test, "near/": splits.ood["near"], "far/": splits.ood["far"]}
    sets["closer/"] = splits.shift["closer"]
    module._start(None)
    outputs = {
        key: torch.cat([module.outputs((part,), k, b) for b, part in enumerate(x.split(16))], 1)
        for k, (key, (x, _)) in enumerate(sets.items())
    }
    probs = {key: values.softmax(-1).detach() for key, values in outputs.items()}
    for key in ("", "closer/"):
        mean, labels = probs[key].mean(0), sets[key][1]
        wanted = {
            "acc": (mean.argmax(1) == labels).double().mean(),
            "nll": M.nll(mean, labels).mean(),
            "brier": M.brier_score(mean, labels).mean(),
            "ece": M.ece(mean, labels),
        }
        for metric, value in wanted.items():
            assert found[f"test/{key}{metric}"] == pytest.approx(float(value), abs=1e-6)
    for key in probs:
        mi = M.mutual_information(probs[key]).mean()
        assert found[f"test/{key}mi"] == pytest.approx(float(mi), abs=1e-6)
    inside = 1 - probs[""].mean(0).amax(1)
    for key in ("near/", "far/"):
        scores = torch.cat([inside, 1 - probs[key].mean(0).amax(1)]).double()
        is_ood = torch.arange(len(scores)) >= len(inside)
        wanted = {
            "AUROC": roc_auc_score(is_ood, scores),
            "AUPR_out": average_precision_score(is_ood, scores),
            "AUPR_in": average_precision_score(~is_ood, -scores),
        }
        for metric, value in wanted.items():
            assert found[f"test/{key}{metric}"] == pytest.approx(float(value), abs=1e-6)
    assert "test/closer/AUROC" not in found


@EACH
def test_our_callbacks_see_its_members(name, tmp_path):
    module, tau, gap = made(name), PermutationTau(), MassGap(2)
    harvest = CheckpointHarvester(tmp_path / "bank", every_n_steps=1)
    figures = PosteriorFigures(every_n_steps=2)
    trainer(tau, gap, harvest, figures, default_root_dir=tmp_path).fit(module, Blobs())
    assert len(tau.history) == 12
    assert len(gap.history) > 0
    rows = CheckpointBank(tmp_path / "bank", "r")
    assert len(rows) == 12 * module.members
    last = {k: v[-1] for k, v in module.member_stack().items()}
    assert all(torch.equal(rows[-1][k], last[k]) for k in last)


class Pairs(torch.utils.data.Dataset):
    """Rows of blobs in any layout."""

    def __init__(self, layout, n=30):
        self.x, self.y = (t[:n] for t in Blobs().load().train)
        self.layout = layout

    def __len__(self):
        return len(self.x)

    def __getitem__(self, k):
        x, y = self.x[k], self.y[k]
        return {
            "tuple": (x, y),
            "dict": {"input": x, "target": y},
            "two inputs": (x[:3], x[3:], y),
            "double": (x.double(), y),
        }[self.layout]


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.out = nn.Linear(3, 4), nn.Linear(3, 4), nn.Linear(4, 3)

    def forward(self, x, y):
        return self.out(torch.relu(self.a(x) + self.b(y)))


@pytest.mark.parametrize("layout", ["tuple", "dict", "two inputs", "double"])
@pytest.mark.parametrize("name", ["ensemble", "mfvi", "bethe"])
def test_batches_of_any_layout_from_plain_loaders(name, layout):
    net = TwoInputs() if layout == "two inputs" else network()
    module, run = MODULES[name](net), trainer()
    loader = DataLoader(Pairs(layout), batch_size=8, shuffle=True)
    run.fit(module, loader, loader)
    assert module.num_data == (None if name in WITHOUT_N else 30)
    found = run.test(module, [loader, loader], verbose=False)[0]
    assert found["test/ood/AUROC"] == pytest.approx(0.5)
    predictions = run.predict(module, loader)
    assert predictions[0].mean.shape == (8, 3)
    assert predictions[0].samples.shape == (module.judged_samples, 8, 3)


@pytest.mark.parametrize("name", ["ensemble", "mfvi", "bethe", "multi-mfvi"])
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
def test_precisions(name, precision):
    module, run = made(name, batch_norm=True), trainer(precision=precision, max_epochs=4)
    run.fit(module, Blobs())
    assert run.callback_metrics["val/nll"] < 1.1
    run.test(module, Blobs(), verbose=False)


@pytest.mark.parametrize("name", ["ensemble", "mfvi", "uniform"])
@pytest.mark.parametrize("options", [{"accumulate_grad_batches": 3}, {"gradient_clip_val": 0.5}])
def test_accumulation_and_clipping(name, options):
    module, run = made(name), trainer(max_epochs=10, **options)
    run.fit(module, Blobs())
    assert run.callback_metrics["val/nll"] < 1.05


SCRIPT = """
import json, os, sys, warnings
import torch
warnings.filterwarnings("ignore")
sys.path.insert(0, {tests!r})
torch.set_num_threads(1)
from module_cases import Blobs, made, state, trainer
out = {{}}
for name in {names!r}:
    bank = dict(bank={folder!r} + "/bank{devices}") if name == "sghmc" else dict()
    module = made(name, batch_norm=True, **bank)
    data = Blobs(n=63, batch_size=100 if name == "hmc" else 5)
    epochs = 50 if name == "hmc" else 8 if name in {noisy!r} else 4
    kind = {strategy!r}
    run = trainer(max_epochs=epochs, devices={devices}, strategy=kind, num_sanity_val_steps=0)
    run.fit(module, data)
    assert run.global_step >= (50 if name in {noisy!r} else 20)
    own = {{k: v for k, v in module.named_parameters()}}
    rows = torch.cat([p.detach().flatten() for p in own.values()])
    if run.world_size > 1:
        every = [torch.empty_like(rows) for _ in range(run.world_size)]
        torch.distributed.all_gather(every, rows)
        out[name + " replicas"] = float((every[0] - every[1]).abs().max())
        if name == "mfvi":
            noise = module._scratch._held[1].flatten().contiguous()
            drawn = [torch.empty_like(noise) for _ in range(run.world_size)]
            torch.distributed.all_gather(drawn, noise)
            out["noise"] = float((drawn[0] - drawn[1]).abs().mean())
        module.load_state_dict(torch.load({folder!r} + "/" + name + ".pt"))
        if bank:
            module.samples.path = {folder!r} + "/bank1"
    else:
        torch.save(module.state_dict(), {folder!r} + "/" + name + ".pt")
    out[name] = run.test(module, data, verbose=False)[0]
    rank = run.global_rank
    run.strategy.barrier()
if rank == 0:
    with open({folder!r} + "/{devices}.json", "w") as file:
        json.dump(out, file)
if {devices} > 1:
    torch.distributed.barrier()
    os._exit(0)
"""


def test_two_processes(tmp_path):
    """Replicas stay equal, and a test gives the numbers of one process."""
    import json

    names = [n for n in MODULES if n not in ("map", "mfvi sampled", "multi-capacity")]
    tests = str(Path(__file__).parents[1])
    results = []
    for devices, strategy in ((1, "auto"), (2, "ddp")):
        script = tmp_path / f"run{devices}.py"
        script.write_text(
            SCRIPT.format(
                tests=tests,
                names=names,
                devices=devices,
                strategy=strategy,
                folder=str(tmp_path),
                noisy=("chains", "sghmc", "sgld", "hmc"),
            )  # fmt: skip
        )
        done = subprocess.run(
            [sys.executable, str(script)], capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stderr[-3000:]
        results.append(json.loads((tmp_path / f"{devices}.json").read_text()))
    alone, together = results
    assert together["noise"] > 0.5  # processes draw networks of their own: gradients vary less
    for name in names:
        assert together[f"{name} replicas"] == 0
        assert together[name].keys() == alone[name].keys()
        tolerance = 0.2 if name in PER_INPUT else 1e-6
        for key, value in alone[name].items():
            if name in PER_INPUT and "FPR95" in key:
                continue
            assert together[name][key] == pytest.approx(value, abs=tolerance), (name, key)

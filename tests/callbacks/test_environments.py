"""Two processes, the twin namespace, and the private names of Lightning."""

import csv

import lightning as L
import pytest
import torch
from processes import on_devices
from runs import QUIET, Plain, Points, Recorder, built, fit
from torch.distributed.fsdp import fully_shard

from lightning_bnn import _compat
from lightning_bnn.bank import CheckpointBank
from lightning_bnn.callbacks import CheckpointHarvester, MassGap, PermutationTau, PosteriorFigures


class Sharded(Plain):
    def configure_model(self):
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


def run_on_two(kind, folder):
    """Steps, and what the callbacks of the first process have seen."""
    strategy, module = "ddp", Plain
    if kind == "fsdp2":
        module = Sharded
        strategy = L.pytorch.strategies.ModelParallelStrategy(
            data_parallel_size=2, tensor_parallel_size=1, save_distributed_checkpoint=False
        )
    tau, gap, recorder = PermutationTau(), MassGap(3), Recorder()
    own = folder / "bank" if kind == "ddp" else None
    harvest = CheckpointHarvester(own, every_n_steps=1)
    looks = [tau, gap, recorder, PosteriorFigures(2, 3)] if kind == "ddp" else [tau]
    trainer = fit(
        built(module, 0.0), *looks, harvest, devices=2, strategy=strategy, default_root_dir=folder,
        use_distributed_sampler=True, num_sanity_val_steps=0,
    )  # fmt: skip
    rows = [[v.flatten().tolist() for v in w.values()] for w in recorder.weights]
    steps = trainer.global_step
    trainer.strategy.barrier()
    return {"tau": tau.history, "mass": gap.history, "weights": rows, "steps": steps}


@pytest.mark.e2e
def test_ddp(tmp_path):
    """The first process looks and writes; what it sees are the weights of all."""
    out, _ = on_devices(2, run_on_two, "ddp", tmp_path)
    bank = CheckpointBank(tmp_path / "bank", "r")
    assert out["steps"] == len(bank) == len(out["tau"]) == 6
    assert len(out["mass"]) == 2
    for network, expected in zip(bank, out["weights"][1:], strict=True):
        found = [v.flatten().tolist() for v in network.values()]
        assert found == expected


@pytest.mark.e2e
def test_fsdp2(tmp_path):
    """Sharded weights are gathered for the bank; looking at them is switched off."""
    out, _ = on_devices(2, run_on_two, "fsdp2", tmp_path)
    bank = CheckpointBank(tmp_path / "bank", "r")
    assert len(bank) == 6
    assert bank[0]["0.weight"].shape == (8, 6)
    assert not torch.equal(bank[0]["0.weight"], bank[5]["0.weight"])
    assert out["tau"] == []


# ------------------------------------------------------------ other packages
@pytest.mark.e2e
def test_the_twin_namespace(tmp_path):
    """`pytorch_lightning` is another package with other classes; the callbacks do not mind."""
    pl = pytest.importorskip("pytorch_lightning")

    class Twin(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Plain(0.0).net

        training_step = Plain.training_step
        configure_optimizers = Plain.configure_optimizers

    def train(ckpt_path=None, **more):
        L.seed_everything(0, verbose=False)
        harvest = CheckpointHarvester(tmp_path / "bank", every_n_steps=1)
        looks = [PermutationTau(), MassGap(2), harvest, PosteriorFigures(3, 2)]
        trainer = pl.Trainer(**QUIET, default_root_dir=tmp_path, callbacks=looks, **more)
        trainer.fit(Twin(), torch.utils.data.DataLoader(Points(), 6), ckpt_path=ckpt_path)
        return trainer

    first = train(max_epochs=1)
    first.save_checkpoint(tmp_path / "x.ckpt")
    trainer = train(max_epochs=2, ckpt_path=tmp_path / "x.ckpt")
    assert len(trainer.callbacks[0].history) == 12
    assert len(CheckpointBank(tmp_path / "bank", "r")) == 12
    assert trainer.callback_metrics["tau"] > 0


# ------------------------------------------------------------ private names
def test_canaries(tmp_path):
    """What `log` does, in the words of the private names: which steps, under which number."""
    rows = []

    class Counting(L.Callback):
        def on_train_batch_end(self, trainer, module, *_):
            module.log("canary", 1.0)
            if _compat.should_log(trainer):
                rows.append(_compat.figure_step(trainer))

    logger = L.pytorch.loggers.CSVLogger(tmp_path, flush_logs_every_n_steps=1)
    trainer = fit(built(Plain), Counting(), logger=logger, log_every_n_steps=4)
    with open(f"{trainer.log_dir}/metrics.csv") as file:
        logged = [int(row["step"]) for row in csv.DictReader(file)]
    assert logged == rows == [3, 7, 11]


class Logging(L.Callback):
    """Numbers of steps and epochs, with all that is logged so far."""

    def __init__(self, log):
        self.way, self.seen = log, []

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        self.way(module, "float", 0.1 * index, prog_bar=True)
        self.way(module, "whole", index)
        number = torch.tensor(2.0 * index, requires_grad=True)
        self.way(module, "both", number, on_step=True, on_epoch=True, batch_size=index + 1)
        self.seen.append({n: float(v) for n, v in trainer.callback_metrics.items()})

    def on_train_epoch_end(self, trainer, module):
        self.way(module, "epoch", trainer.current_epoch + 0.5, rank_zero_only=True)


def logged_by(log, folder, kind=Plain):
    logger, looks = L.pytorch.loggers.CSVLogger(folder), Logging(log)
    trainer = fit(built(kind), looks, logger=logger, max_epochs=3, log_every_n_steps=2)
    with open(f"{trainer.log_dir}/metrics.csv") as file:
        return looks.seen, file.read(), {n: float(v) for n, v in trainer.logged_metrics.items()}


@pytest.mark.filterwarnings("error:You called .self.log")  # that a number should be a float
def test_logging_again(tmp_path, monkeypatch):
    """Loggers, callbacks and means over epochs get the same, from Lightning's checks only once."""
    calls, theirs = [], L.LightningModule.log
    expected = logged_by(theirs, tmp_path)

    def counting(module, name, *args, **settings):
        calls.append(name)
        theirs(module, name, *args, **settings)

    monkeypatch.setattr(L.LightningModule, "log", counting)
    assert logged_by(_compat.log, tmp_path) == expected
    ours = [name for name in calls if name in ("float", "whole", "both", "epoch")]
    assert sorted(ours) == ["both", "epoch", "float", "whole"]


def test_modules_with_a_log_of_their_own(tmp_path):
    names = []

    class Own(Plain):
        def log(self, name, *args, **settings):
            names.append(name)
            super().log(name, *args, **settings)

    seen, *_ = logged_by(_compat.log, tmp_path, Own)
    assert names.count("float") == len(seen) > 2

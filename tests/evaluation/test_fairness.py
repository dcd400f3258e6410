"""What must not decide the numbers of a posterior: other posteriors, old data, its training."""

from dataclasses import replace

import lightning as L
import pytest
import torch
import yaml
from small_runs import bank, config, numbers, results
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bnn.bank import CheckpointBank
from lightning_bnn.cli import main
from lightning_bnn.datamodules import Diabetes
from lightning_bnn.evaluation.comparison import rows_of
from lightning_bnn.evaluation.problem import Problem, StoredBatches
from lightning_bnn.evaluation.protocols import PROTOCOLS
from lightning_bnn.evaluation.reference_networks import Reference
from lightning_bnn.evaluation.stored_posteriors import Location, read_posterior
from lightning_bnn.likelihoods import Gaussian
from lightning_bnn.models import mlp
from lightning_bnn.modules import MFVI
from weightsym import params as P

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("undrawn")]


def test_learned_noise_is_that_of_each_posterior(tmp_path):
    """Reading one must not change what another one, or the problem, says about noise."""
    problem = Problem(mlp(10, [3], 1), Diabetes(), Gaussian("learned"))
    for name, std in (("a", 0.2), ("b", 0.9)):
        module = MFVI(mlp(10, [3], 1), likelihood=Gaussian("learned", std=std), num_data=9)
        trainer = L.Trainer(max_epochs=0, logger=False, enable_checkpointing=False)
        trainer.strategy.connect(module)
        trainer.save_checkpoint(tmp_path / f"{name}.ckpt")
    read = {n: read_posterior(n, Location(tmp_path / f"{n}.ckpt"), problem) for n in ("a", "b")}
    stds = {name: float(p.likelihood.log_std.exp()) for name, p in read.items()}
    assert stds == pytest.approx({"a": 0.2, "b": 0.9})
    assert float(problem.likelihood.log_std.exp()) == 1.0


def test_files_of_networks_hold_no_learned_noise(tmp_path):
    problem = Problem(mlp(10, [3], 1), Diabetes(), Gaussian("learned"))
    with CheckpointBank(tmp_path / "bank") as held:
        held.extend(P.populate(problem.network, 3))
    stored = read_posterior("B", Location(tmp_path / "bank"), problem)
    beside = Reference(
        P.populate(problem.network, 5), problem.network, [torch.randn(2, 10)], PROTOCOLS["full"]
    )
    assert "nll" not in rows_of(stored, beside, [], "entropy")[0].numbers
    with pytest.raises(ValueError, match="B lacks the noise"):
        rows_of(stored, beside, [problem.test_set()], "entropy")
    fixed = replace(stored, likelihood=Gaussian())
    assert rows_of(fixed, beside, [problem.test_set()], "entropy")[0].numbers["nll"].value > 0


@pytest.fixture
def compared(tmp_path, monkeypatch, capsys):
    """Compare posteriors with a bank in an empty folder; what is printed."""
    monkeypatch.chdir(tmp_path)
    config(tmp_path)
    bank("ref", 6, seed=1)

    def printed(**posteriors):
        arguments = ["compare", "--data", "like.yaml", "ref", "--out", "out"]
        main([*arguments, *(x for n, p in posteriors.items() for x in (f"--posteriors.{n}", p))])
        return capsys.readouterr().out

    return printed


def test_a_run_that_saw_other_data_is_not_calibrated(compared, tmp_path, capsys):
    like = yaml.safe_load((tmp_path / "like.yaml").read_text())
    other = {**like, "data": {"class_path": "Digits", "init_args": {"seed": 5}}}
    for seed, (name, settings) in enumerate({"same": like, "other": other}.items(), start=2):
        bank(f"{name}/bank", 6, seed=seed)
        (tmp_path / name / "config.yaml").write_text(yaml.safe_dump(settings))
    out = compared(S="same/bank", O="other/bank")
    rows = {r["method"]: r for r in numbers("out", "calibrated") if r["mode"] == "Multi mode"}
    assert rows["S"]["NLL (T)"] > 0
    assert rows["O"]["NLL (T)"] is None
    assert "O was trained with other settings of the data" in out
    assert "S was trained" not in out
    with pytest.raises(SystemExit):
        main(["calibrate", "other/bank", "--data", "like.yaml"])
    assert "training examples may be among those for calibration" in capsys.readouterr().err


def test_stored_rows_know_the_data(compared, monkeypatch):
    bank("a", 3, seed=2)
    compared(A="a")
    first, kept = results("out")["settings"]["data_sha256"], StoredBatches.__iter__
    monkeypatch.setattr(
        StoredBatches, "__iter__", lambda self: iter([(x + 0.01, y) for x, y in kept(self)])
    )
    compared(A="a")
    assert results("out")["settings"]["data_sha256"] != first


TESTED = TensorDataset(torch.randn(4, 2), torch.zeros(4).long())


class Validated(L.LightningDataModule):
    """Two validation sets, which are there in one stage alone."""

    def prepare_data(self):
        self.stages = []

    def setup(self, stage):
        self.stages.append(stage)

    def test_dataloader(self):
        return DataLoader(TESTED)

    def val_dataloader(self):
        return [DataLoader(TESTED), DataLoader(TESTED)] if self.stages == ["fit"] else []


@pytest.mark.parametrize(
    ("data", "examples"),
    [(L.LightningDataModule.from_datasets(test_dataset=TESTED), None), (Validated(), 8)],
)
def test_validation_data_of_any_datamodule(data, examples):
    found = Problem(nn.Linear(2, 2), data).validation_set()
    assert (found if found is None else len(found.targets())) == examples

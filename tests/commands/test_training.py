"""`lightning-bnn fit | validate | test | predict`, and every preset."""

import os
import subprocess
import sys
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from preset_runs import ON_A_CPU, assert_fits_together, assert_trains, preset, printed, work_folder
from runs import QUIET
from shell import failure
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_bnn import callbacks
from lightning_bnn.cli import main
from lightning_bnn.commands.presets import preset_names
from lightning_bnn.commands.training import (
    TrainingCLI,
    checkpoint_folders,
    newest_checkpoint,
    training,
)
from lightning_bnn.modules import DeepEnsemble

pytestmark = pytest.mark.filterwarnings("ignore")
folder = pytest.fixture(work_folder)


FAST = ("digits_ensemble", "digits_mfvi", "digits_sghmc", "digits_laplace", "two_gaussians")
"""One for each way to train; the others differ in methods that have laws, data and sizes."""


LONGER = (
    "diabetes_hmc", "digits_dropout", "digits_mile",
    "digits_smile",
    "digits_multi_swag", "mnist_symmetrized_vi", "tractable_relu",
)  # fmt: skip
"""Networks, targets and methods that those have not; presets beyond them are not trained."""


@pytest.mark.parametrize("name", [*FAST, *(pytest.param(n, marks=pytest.mark.e2e) for n in LONGER)])
def test_a_preset_fits_and_tests(name, folder):
    assert_trains(main, name, folder)


@pytest.mark.e2e
@pytest.mark.parametrize("name", preset_names())
def test_what_every_preset_names_fits_together(name, folder, monkeypatch):
    assert_fits_together(main, name, folder, monkeypatch)


def test_every_callback_is_in_a_preset():
    text = printed(main, ["presets"])
    assert all(name in text for name in preset_names())
    assert "Deep ensemble of five perceptrons" in text
    text = "".join(printed(main, ["presets", name]) for name in ("digits_ensemble", "digits_hmc"))
    kinds = [n for n in callbacks.__all__ if issubclass(getattr(callbacks, n), L.Callback)]
    kinds.remove("DrawnWeights")  # for modules of one's own
    assert len(kinds) > 5
    assert all(f"lightning_bnn.callbacks.{name}" in text for name in kinds)


@pytest.mark.e2e
def test_a_run_is_trained_tested_and_predicted_with(folder):
    config = preset(main, "digits_ensemble", folder)
    short = ["--trainer.max_epochs", "2", "--trainer.enable_progress_bar", "false", *ON_A_CPU]
    main(["fit", "-c", config, *short, "--trainer.callbacks+", "LearningRateMonitor"])
    (checkpoint,) = folder.glob("lightning_logs/version_0/checkpoints/*.ckpt")
    saved = folder / "lightning_logs/version_0/config.yaml"
    assert "LearningRateMonitor" in saved.read_text()
    logged = EventAccumulator(str(saved.parent)).Reload().Tags()["scalars"]
    assert "train/loss" in logged
    assert "hp_metric" not in logged  # a placeholder of -1, which Lightning writes

    text = printed(main, ["test", "-c", str(saved), "--ckpt_path", str(checkpoint), *ON_A_CPU])
    rows = {line.split()[0]: line.split() for line in text.splitlines() if line.strip()}
    assert rows["set"][1:3] == ["acc", "nll"]
    assert float(rows["test"][1]) > 0.5
    assert {"scrambled", "inverted", "noise", "noisy", "moved"} <= rows.keys()

    cli = training(["predict", "-c", str(saved), "--ckpt_path", str(checkpoint), *ON_A_CPU])
    ours = cli.trainer.predict_loop.predictions
    loaded = DeepEnsemble.load_from_checkpoint(checkpoint, weights_only=True)  # no network given
    loaded.eval()
    x = torch.cat([b for b, *_ in _batches(cli)])
    torch.testing.assert_close(loaded(x), torch.cat([p.mean for p in ours]))


class CtrlC(L.Callback):
    """A user who has waited for two epochs."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.current_epoch == 2:
            raise KeyboardInterrupt


@pytest.mark.e2e
def test_what_is_interrupted_says_how_to_go_on(folder, capsys, monkeypatch):
    monkeypatch.setattr("signal.signal", lambda *_: None)  # Lightning ignores further ones
    config = preset(main, "digits_mfvi", folder)
    short = ["--trainer.enable_progress_bar", "false", "--trainer.max_epochs", "4", *ON_A_CPU]
    with pytest.raises(SystemExit):
        training(["fit", "-c", config, "--model.init_args.members", "2", *short], [CtrlC()])
    _, _, command = capsys.readouterr().out.partition("to continue: lightning-bnn ")
    with pytest.raises(SystemExit):  # negative control: with one member
        main(["fit", "-c", config, *command.split()[-2:]])
    assert "its run was configured by" in capsys.readouterr().err
    main(command.split())
    assert len(list(folder.glob("lightning_logs/*/checkpoints/epoch=3-*.ckpt"))) == 1


def test_which_checkpoint_is_the_newest(tmp_path):
    for time, (name, kind) in enumerate((("old", "MFVI"), ("mine", "MFVI"), ("other", "SWAG"))):
        torch.save({"lightning_bnn": {"class": kind}}, tmp_path / f"{name}.ckpt")
        os.utime(tmp_path / f"{name}.ckpt", (time, time))
    assert newest_checkpoint([tmp_path], "MFVI") == tmp_path / "mine.ckpt"
    assert newest_checkpoint([tmp_path], "SWAG") == tmp_path / "other.ckpt"
    assert newest_checkpoint([tmp_path], "HMC") is None
    assert newest_checkpoint([tmp_path], "MFVI", "*old*.ckpt") == tmp_path / "old.ckpt"
    (tmp_path / "broken.ckpt").write_text("no checkpoint")  # what is wrong is said by who loads it
    assert newest_checkpoint([tmp_path], "HMC") == tmp_path / "broken.ckpt"


def test_where_checkpoints_are_looked_for(tmp_path):
    """Where Lightning writes them: beside a configuration of logs, below a logger, or as told."""
    versions = [tmp_path / "runs" / f"version_{k}" for k in range(2)]
    first, second = (version / "checkpoints" for version in versions)
    first.mkdir(parents=True)
    second.mkdir(parents=True)
    told = {"enable_checkpointing": True, "callbacks": [ModelCheckpoint(tmp_path / "told")]}
    logged = {"logger": CSVLogger(tmp_path, "runs")}
    for options, config, folders in (
        ({}, "my.yaml", [tmp_path / "checkpoints"]),
        (logged, "my.yaml", [first, second]),
        (logged, versions[0] / "config.yaml", [first]),
        (told, versions[0] / "config.yaml", [tmp_path / "told"]),
    ):
        trainer = L.Trainer(**{**QUIET, **options}, default_root_dir=tmp_path)
        assert checkpoint_folders(trainer, [config]) == folders


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("name", "more"), [("checkpoint", []), ("last.ckpt", ["--ckpt_path", "last"])]
)
def test_untrained_weights_are_not_judged(name, more, folder, capsys):
    line = ["predict", "-c", preset(main, "digits_mfvi", folder), *ON_A_CPU, *more]
    message = failure(capsys, *line)
    assert message.startswith(f"lightning-bnn: There is no {name} of MFVI in ")
    assert not list(folder.rglob("predictions.pt"))
    main([*line, "--trainer.fast_dev_run", "1"])  # a rehearsal


def _batches(cli):
    data = cli.datamodule
    return [data.on_after_batch_transfer(b, 0) for b in data.predict_dataloader()]


@pytest.mark.parametrize(
    ("said", "kinds"),
    [("null", ["TensorBoardLogger"]), ("true", ["TensorBoardLogger"]), ("false", []),
     ("CSVLogger --trainer.logger.save_dir=runs", ["CSVLogger"])],
)  # fmt: skip
def test_who_logs_is_what_was_asked_for(said, kinds, folder, monkeypatch):
    monkeypatch.setattr(TrainingCLI, "_run_subcommand", lambda *_: None)
    where = f"--trainer.default_root_dir=runs --trainer.logger={said}".split()
    trainer = training(["fit", "-c", preset(main, "digits_ensemble", folder), *where]).trainer
    assert [type(logger).__name__ for logger in trainer.loggers] == kinds
    if kinds:
        assert Path(trainer.log_dir) == Path("runs/lightning_logs/version_0")


@pytest.mark.e2e
def test_without_a_name_the_newest_checkpoint_of_the_run_is_judged(folder):
    """And what is asked for counts beside what is in it."""
    config = preset(main, "digits_mfvi", folder)
    short = ["--trainer.enable_progress_bar", "false", *ON_A_CPU, "--trainer.limit_test_batches=1"]
    once = ["--trainer.max_epochs", "1", "--trainer.limit_val_batches", "0"]
    main(["fit", "-c", config, *short, *once, "--trainer.limit_train_batches", "1"])
    (checkpoint,) = folder.glob("lightning_logs/version_0/checkpoints/*.ckpt")
    named = printed(main, ["test", "-c", config, *short, "--ckpt_path", str(checkpoint)])
    found = printed(main, ["test", "-c", config, *short])
    assert f"checkpoint: {checkpoint} (the newest" in found
    assert found.endswith(named)
    saved = folder / "lightning_logs/version_0/config.yaml"
    fewer = ["--model.init_args.eval_samples", "3"]
    predicted = printed(main, ["predict", "-c", str(saved), *short, *fewer])
    assert f"checkpoint: {checkpoint}" in predicted
    found = torch.load(predicted.split("wrote ")[1].strip(), weights_only=True)
    assert found["samples"].shape == (3, 450, 10)
    assert found["mean"].shape == (450, 10)


@pytest.mark.e2e
def test_classes_in_the_current_folder_are_found_by_the_installed_command(folder):
    (folder / "mine.py").write_text(
        "import torch\nclass Net(torch.nn.Sequential):\n    def __init__(self):\n"
        "        super().__init__(torch.nn.Flatten(), torch.nn.Linear(64, 10))\n"
    )
    command = Path(sys.executable).parent / "lightning-bnn"
    args = ["fit", "--model", "DeepEnsemble", "--model.network", "mine.Net", "--data", "Digits"]
    done = subprocess.run(
        [str(command), *args, "--trainer.fast_dev_run", "1", *ON_A_CPU],
        capture_output=True, text=True, cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-500:]
    assert "recommended" not in done.stderr

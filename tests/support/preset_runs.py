"""Presets as files in an empty folder, trained for a batch or only put together."""

import contextlib
import io
from pathlib import Path

import fake_files
import yaml

from lightning_bnn.commands.training import TrainingCLI, training
from weightsym import params as P

ON_A_CPU = ["--trainer.accelerator", "cpu", "--trainer.devices", "1"]


def work_folder(tmp_path, monkeypatch):
    """An empty working directory, with data elsewhere."""
    data = tmp_path / "data"
    data.mkdir()
    fake_files.everything(data, monkeypatch)
    monkeypatch.setenv("LIGHTNING_BNN_DATA", str(data))
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    return work


def preset(main, name, folder):
    path = folder / f"{name}.yaml"
    path.write_text(printed(main, ["presets", name]))
    return str(path)


def printed(main, args):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        main(args)
    return out.getvalue()


def quick(name):
    """Fewer members and samples: what is tested is the wiring."""
    options = ["--trainer.fast_dev_run", "1", "--data.init_args.batch_size", "4"]
    if "ensemble" in name or name in ("two_gaussians", "demo_reference", "digits_drops"):
        options += ["--model.init_args.members", "2"]
    return [*options, "--model.init_args.eval_samples", "2", *ON_A_CPU]


def assert_trains(main, name, folder):
    """A batch of training and of the test."""
    cli = training(["fit", "-c", preset(main, name, folder), *quick(name)])
    numbers = cli.trainer.test(cli.model, cli.datamodule, verbose=False)[0]
    assert any(key.startswith("test/") for key in numbers)


def assert_fits_together(main, name, folder, monkeypatch):
    """The network takes the examples, the likelihood the targets; all of it can be made."""
    monkeypatch.setattr(TrainingCLI, "_run_subcommand", lambda *_: None)
    config = preset(main, name, folder)
    cli = training(["fit", "-c", config, *quick(name)])
    given = yaml.safe_load(Path(config).read_text())
    assert cli.config.fit.model.class_path.endswith("." + given["model"]["class_path"])
    model, data = cli.model, cli.datamodule
    assert model.make_optimizer(list(model.parameters())).param_groups
    data.setup("test")
    inputs, targets = next(iter(data.prepared(data.test_dataloader()[0])))
    outputs = P.apply(model.template.eval(), model.member_stack(), inputs[:4])
    assert model.likelihood.log_prob(outputs, targets[:4]).isfinite().all()

"""`fit --help` fits on a screen, imports nothing heavy, and names what there is."""

import inspect
import re
import sys

import lightning as L
import pytest
from jsonargparse import ArgumentParser

from lightning_bnn import datamodules, modules
from lightning_bnn.cli import TRAINING, main
from lightning_bnn.commands.class_help import class_asked_for, help_of_class


def said(capsys, *args):
    with pytest.raises(SystemExit) as end:
        main(list(args))
    assert end.value.code in (0, None)
    return capsys.readouterr().out


@pytest.mark.parametrize("name", TRAINING)
@pytest.mark.parametrize("ask", ["-h", "--help"])
def test_help_is_one_screen(name, ask, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "lightning_bnn.commands.training", None)  # cannot be imported
    text = said(capsys, name, ask)
    assert len(text.splitlines()) <= 30
    assert max(map(len, text.splitlines())) <= 100
    assert TRAINING[name][1:] in text


def test_every_option_of_it_is_one(capsys, monkeypatch):
    short = said(capsys, "fit", "--help")
    monkeypatch.setattr(sys, "argv", ["lightning-bnn", "fit", "--help.all"])
    whole = said(capsys, "fit", "--help.all")
    assert len(whole.splitlines()) > 300
    rows = re.findall(r"^  (--[\w.]+)", short.partition("options:")[2], re.MULTILINE)
    options = [row.replace(".KEY", "").replace("callbacks+", "callbacks") for row in rows]
    there = set(re.findall(r"--[\w.]+", whole))
    assert {"--model", "--trainer.callbacks", "--weights_only"} <= set(options)
    assert set(options) - {"--help.trainer", "--help.all"} <= there


def test_every_argument_of_the_trainer(capsys):
    text = said(capsys, "fit", "--help.trainer")
    assert max(map(len, text.splitlines())) <= 100
    rows = re.findall(r"^  --trainer\.(\w+)  +\S", text, re.MULTILINE)
    assert rows == list(inspect.signature(L.Trainer).parameters)
    assert "Stop training once this number of epochs is reached" in text
    assert text.count("as Lightning says") <= 3


# ------------------------------------------------------------ --model.help CLASS
KINDS = {"--model.help": (modules, L.LightningModule), "--data.help": (datamodules, object)}
CLASSES = [
    (option, name)
    for option, (module, kind) in KINDS.items()
    for name in module.__all__
    if inspect.isclass(getattr(module, name))
    if issubclass(getattr(module, name), kind) and name not in ("MissingData", "Splits")
]


@pytest.mark.parametrize(("option", "name"), CLASSES)
def test_what_a_class_takes_is_what_the_parser_takes(option, name):
    """Read from the source files, and found by the parser, which imports and inspects."""
    text = help_of_class(option, name)
    prefix = option.removesuffix("help") + "init_args."
    rows = re.findall(rf"^  {re.escape(prefix)}(\w+)  +(\S?)", text, re.MULTILINE)
    cls = getattr(KINDS[option][0], name)
    taken = ArgumentParser().add_class_arguments(cls, "it", fail_untyped=False)
    assert sorted(row for row, _ in rows) == sorted(arg.removeprefix("it.") for arg in taken)
    assert all(begins and begins != "(" for _, begins in rows)  # something is said about each
    assert max(map(len, text.splitlines())) <= 100
    assert len(text.splitlines()) <= 70
    first = inspect.cleandoc(cls.__doc__).split()[0].replace("`", "")
    assert text.startswith(f"{name}: {first}")


def test_types_defaults_and_meaning_are_shown():
    text = " ".join(help_of_class("--model.help", "MFVI").split())
    assert (
        "init_args.prior_std standard deviation of the Gaussian prior (float, default 1.0)" in text
    )
    assert '("closed" | "sampled", default "closed")' in text  # the choices behind a name
    assert "not changed (nn.Module, required)" in text
    assert "what every Bayesian takes: --model.init_args.likelihood" in text
    assert "init_args.method" not in text  # `MFVI` gives it


@pytest.mark.parametrize(
    "ask", [["--model.help", "MFVI"], ["--model.help=lightning_bnn.modules.MFVI"]]
)
def test_a_class_is_explained_without_importing_it(ask, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "lightning_bnn.commands.training", None)  # cannot be imported
    assert said(capsys, "fit", *ask).startswith("MFVI: A diagonal Gaussian")
    assert said(capsys, "test", "--data.help", "Digits").startswith("Digits: 1797 digits")


@pytest.mark.parametrize(
    "args",
    [
        ["--model.help"],
        ["--model.help", "MVFI"],
        ["--model.help", "Prediction.mean"],
        ["--model.help", "results_table"],
        ["--model.help", "torch.nn.Linear"],
        ["--data.help", "lightning_bnn.nowhere.Digits"],
        ["--model.network.help", "Linear"],
        ["-c", "MFVI"],
    ],
)
def test_other_questions_are_left_to_lightning(args):
    assert class_asked_for(args) is None

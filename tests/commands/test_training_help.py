"""`fit --help` fits on a screen, imports nothing heavy, and names what there is."""

import re
import sys

import lightning as L
import pytest

from lightning_bnn.cli import TRAINING, main


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


def test_the_trainer_in_a_line_each(capsys):
    import inspect

    text = said(capsys, "fit", "--help.trainer")
    rows = re.findall(r"^  --trainer\.(\w+)  +\S", text, re.MULTILINE)
    assert rows == list(inspect.signature(L.Trainer).parameters)
    assert "Stop training once this number of epochs is reached" in text
    assert text.count("as Lightning says") <= 3

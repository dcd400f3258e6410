"""Commands read from source files are those that run, and reading them imports nothing heavy."""

import importlib
import inspect
import subprocess
import sys
import types
import typing

import pytest

from lightning_bnn import cli
from lightning_bnn.commands.deferred import deferred
from lightning_bnn.params import networks

PLACES = {
    **{name: f"lightning_bnn.commands.{name}" for name in cli.COMMANDS},
    **{name: f"lightning_bnn.studies.{name}" for name in {**cli.STUDIES, **cli.REFERENCES}},
}


def shown(command, name, capsys):
    """What a command says about itself."""
    with pytest.raises(SystemExit):
        cli._call(command, name, ["--help"])
    return capsys.readouterr().out


@pytest.mark.parametrize("name", PLACES)
def test_help_from_the_source_is_that_of_the_function(name, capsys):
    ordinary = getattr(importlib.import_module(PLACES[name]), name)
    read = deferred(PLACES[name], name)
    assert read is not ordinary
    assert shown(read, name, capsys) == shown(ordinary, name, capsys)
    assert inspect.getdoc(read) == inspect.getdoc(ordinary)
    assert typing.get_type_hints(read) == typing.get_type_hints(ordinary)
    parameters = inspect.signature(ordinary).parameters.values()
    assert [(p.name, p.kind, p.default) for p in inspect.signature(read).parameters.values()] == [
        (p.name, p.kind, p.default) for p in parameters
    ]


def test_other_defaults_give_another_help(capsys, monkeypatch):
    """The comparison sees a difference."""
    read = deferred(PLACES["mass"], "mass")
    before = shown(read, "mass", capsys)
    monkeypatch.setattr(read, "__defaults__", (*read.__defaults__[:-1], "elsewhere"))
    assert shown(read, "mass", capsys) != before


@pytest.mark.e2e
def test_help_and_mistakes_import_nothing_heavy():
    """All in one interpreter in which torch, numpy and Lightning cannot be imported."""
    lines = [[name, "--help"] for name in (*PLACES, "presets", "fit")]
    lines += [["fit", "--model.help", "MFVI"], ["test", "--data.help", "Digits"]]
    lines += [["--help"], ["--version"], ["mass", "--membres", "3"], ["population"], ["toyy"]]
    code = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(('torch', 'numpy', 'scipy', 'lightning')))\n"
        "from lightning_bnn.cli import main\n"
        f"for line in {lines}:\n"
        "    try:\n        main(line)\n"
        "    except SystemExit as end:\n        print('ended', end.code)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("lightning-bnn: ")) == (0, 3), done.stderr
    assert done.stdout.count("ended None") + done.stdout.count("ended 0") == len(PLACES) + 4


# ------------------------------------------------------------ calls
SOURCE = '''
from collections.abc import Sequence
from typing import Literal

from lightning_bnn.params.networks import __all__ as NAMES

import lightning_bnn_heavy_and_missing as heavy

Size = Literal["small", "large"]
LIMIT: int = 3


def listed(first, /, size: Size = "small", *rest: int, limit: int = LIMIT, **more: Sequence[str]):
    """What it was given."""
    return first, size, rest, limit, more


def named(names: list[str] = NAMES):
    return names


def needing(value: heavy.Kind = 3): ...
'''


@pytest.fixture
def source(tmp_path, monkeypatch):
    """A file of the package that cannot be imported, since something is missing."""
    monkeypatch.setattr("lightning_bnn.commands.source_files._ROOT", tmp_path)
    (tmp_path / "given.py").write_text(SOURCE)
    (tmp_path / "params").mkdir()
    (tmp_path / "params" / "networks.py").write_text(inspect.getsource(networks))
    return "lightning_bnn.given"


def test_every_kind_of_parameter_is_passed_on(source, monkeypatch):
    command = deferred(source, "listed")
    with pytest.raises(ModuleNotFoundError):
        command(1)
    fake, there = (
        types.ModuleType("given"),
        SOURCE.replace("lightning_bnn_heavy_and_missing", "ast"),
    )
    exec(there.replace("heavy.Kind", "int"), fake.__dict__)
    monkeypatch.setitem(sys.modules, source, fake)
    assert command(1, "large", 4, 5, limit=6, a="b") == (1, "large", (4, 5), 6, {"a": "b"})
    assert command(1) == (1, "small", (), 3, {})


def test_names_are_followed_through_files(source):
    assert (
        inspect.signature(deferred(source, "named")).parameters["names"].default == networks.__all__
    )


def test_what_cannot_be_read_is_imported(source):
    with pytest.raises(ModuleNotFoundError, match="heavy_and_missing|given"):
        deferred(source, "needing")

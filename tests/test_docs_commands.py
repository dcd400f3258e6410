"""Commands of the docs are understood by their own parsers; what takes long is not run."""

import argparse
import contextlib
import io
import re
import runpy
import sys
import warnings
from fnmatch import filter as matching
from functools import partial
from pathlib import Path

import jsonargparse
import pytest
from pages import PAGES, ROOT, TUTORIALS, Command, commands, mentioned, page, spans

from lightning_bnn import cli
from lightning_bnn.bank import shipped_banks
from lightning_bnn.commands.presets import preset_names, preset_text
from lightning_bnn.references import reference_names
from weightsym import cli as core

pytestmark = pytest.mark.filterwarnings("ignore")
WITH_COMMANDS = [name for name in PAGES if commands(page(name))]
TARGETS = re.findall(r"^([a-z-]+):", page("Makefile"), re.MULTILINE)
SETTINGS = set(re.findall(r"\$[({](?:if \$\()?([A-Z]+)", page("Makefile")))
COMPARED = [c for name in PAGES for c in commands(page(name)) if c.shown and "symmetries" in c.line]


class Parsed(Exception):
    """The arguments were accepted."""


def understand(command, monkeypatch):
    """Let the parser of a command read its words; what goes to a file is written there."""
    words = command.words
    path = Path(words.pop()) if words[-2:-1] == [">"] else None
    program, *args = words if path is None else words[:-1]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), monkeypatch.context() as patch:
        PROGRAMS[program](args, patch)
    if path is not None:
        path.write_text(printed.getvalue())


def ours(args, patch, main=cli.main):
    """Presets are printed, which takes no time; all others end when they have been parsed."""
    patch.setattr(sys, "path", [*sys.path])  # to which the command adds the current folder
    with patch.context() as within:
        if args[:1] != ["presets"]:
            only_parse(jsonargparse.ArgumentParser, within)
        try:
            main(args)
        except Parsed:
            return
        except SystemExit as end:
            if end.code:
                raise
            return  # help was asked for
    assert args[0] == "presets"


def script(args, patch):
    """A file of this repository, up to its parser."""
    path = ROOT / args[0]
    patch.setattr(sys, "argv", [*args])
    patch.syspath_prepend(path.parent)
    only_parse(argparse.ArgumentParser, patch)
    with warnings.catch_warnings(), pytest.raises(Parsed):
        runpy.run_path(str(path), run_name="__main__")


def make(args, patch):
    targets = [word for word in args if "=" not in word]
    assert targets
    assert set(targets) <= set(TARGETS)
    assert {word.partition("=")[0] for word in args} - set(targets) <= SETTINGS


def install(args, patch):
    """Folders of this repository that can be installed."""
    assert args[0] == "install"
    for project in args[1:]:
        assert (ROOT / project.partition("[")[0] / "pyproject.toml").is_file()


PROGRAMS = {
    "lightning-bnn": ours,
    "weightsym": partial(ours, main=core.main),
    "pip": install,
    "python": script,
    "make": make,
}


def only_parse(kind, patch):
    """Parsers of a kind raise when they are done; those that they call on the way return."""
    parse = kind.parse_args

    def ending(parser, *args, **options):
        with patch.context() as within:
            within.setattr(kind, "parse_args", parse)
            parse(parser, *args, **options)
        raise Parsed

    patch.setattr(kind, "parse_args", ending)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


# ------------------------------------------------------------ the docs
@pytest.mark.parametrize("name", WITH_COMMANDS)
def test_commands_in_blocks_are_understood(name, monkeypatch):
    for command in commands(page(name)):
        understand(command, monkeypatch)


@pytest.mark.parametrize("name", [*PAGES, *TUTORIALS])
def test_commands_in_the_prose_are_understood(name, folder, monkeypatch):
    """Presets lie there as files; a name alone stands for the command, whatever it needs."""
    for preset in preset_names():
        (folder / f"{preset}.yaml").write_text(preset_text(preset))
    for command in mentioned(page(name)):
        alone = len(command.words) == 2 and command.words[0] in ("lightning-bnn", "weightsym")
        understand(Command(f"{command.line} --help") if alone else command, monkeypatch)


@pytest.mark.parametrize("name", [*PAGES, *TUTORIALS])
def test_presets_are_there(name):
    for config in re.findall(r"--config ([\w.]+)", page(name)):
        assert config in preset_names() or config.endswith(".yaml")
    names = [*reference_names(), *shipped_banks()]
    for span in spans(page(name)):
        if (
            re.fullmatch(r"(demo|digits|mnist|cifar|tiny_imagenet)[a-z0-9_*]+", span)
            and span not in names
        ):
            assert matching(preset_names(), span), f"there is no preset {span}"


@pytest.mark.parametrize("command", COMPARED, ids=lambda command: command.line)
def test_what_is_shown_is_what_the_command_prints(command, capsys):
    cli.main(command.words[1:])
    assert known(capsys.readouterr().out) == known(command.shown)


def known(text):
    """The lines of an output but for times and rounding errors."""
    unknown = re.compile(r"\d+\.\d s|\d+e-\d+|\d\.\de-\d+|certified.*")
    return [unknown.sub("", line).rstrip() for line in text.strip().splitlines()]


@pytest.mark.parametrize(
    "line",
    [
        "lightning-bnn population --config two_gaussians --member 3 --bank b --parts 3",
        "lightning-bnn fit -c digits_ensemble --trainer.epochs 3",
        "python benchmarks/vi.py dance",
        "make coffee",
    ],
)
def test_mistakes_are_noticed(line, monkeypatch):
    with pytest.raises((AssertionError, SystemExit)):
        understand(Command(line), monkeypatch)

"""Every command explains itself, and says what its function says."""

import importlib
import inspect
import os
import re
import subprocess
import sys
import typing

import lightning as L
import pytest
from processes import fresh
from shell import code_of, failure

from bnn_research.cli import Studies
from lightning_bnn import cli
from lightning_bnn.cli import TRAINING, main
from weightsym import Outcome

pytestmark = pytest.mark.filterwarnings("ignore")
SCRIPTS = {"lightning-bnn": cli.Commands(), "bnn-research": Studies()}
FUNCTIONS = {
    f"{program} {name}": (
        script.main,
        getattr(importlib.import_module(script.module_of(name)), name),
    )
    for program, script in SCRIPTS.items()
    for name in script.commands
    if name not in TRAINING
}


def said(capsys, *args, script=main):
    assert code_of(*args, script=script) in (0, None)
    return capsys.readouterr().out


@pytest.mark.parametrize("name", FUNCTIONS)
def test_help_lists_the_arguments_of_the_function(name, capsys):
    script, function = FUNCTIONS[name]
    hints = typing.get_type_hints(function)
    assert len(hints) <= 12  # with what it returns
    assert hints.keys() >= inspect.signature(function).parameters.keys()
    text = said(capsys, function.__name__, "--help", script=script)
    assert max(map(len, text.splitlines())) <= 130
    assert inspect.getdoc(function).partition("\n")[0] in " ".join(text.split())
    group = hints.pop("architecture", None)
    options = [*hints, *(() if group is None else inspect.signature(group).parameters)]
    assert all(re.search(rf"^  (--)?{o}\b", text, re.M) for o in options if o != "return")
    assert ("  --json" in text) == (hints["return"] is Outcome)


def test_every_command_that_decides_or_measures_gives_its_numbers():
    names = {n for n, (_, f) in FUNCTIONS.items() if typing.get_type_hints(f)["return"] is Outcome}
    others = {"demo", "presets", "reproduce", "posteriordb"}
    assert {name.split()[-1] for name in FUNCTIONS.keys() - names} == others


def test_the_list_of_commands_begins_with_the_demo_under_headings(capsys):
    lines = said(capsys, "--help").splitlines()
    headings = [line.rstrip(":") for line in lines if line.endswith(":")]
    assert headings == [*cli.Commands.headings.values()]
    assert lines[lines.index("begin:") + 1].split()[0] == "demo"
    assert all(any(line.startswith(f"  {name} ") for line in lines) for name in cli.EVERY)


@pytest.mark.e2e
def test_lists_of_commands_and_mistakes_import_nothing_heavy():
    """All in one interpreter, which has imported neither torch nor numpy nor Lightning."""
    lines = [["--help"], ["--version"], ["presets"], ["toyy"]]
    helps = [[name, "--help"] for name in cli.EVERY]
    code = (
        "import sys\n"
        "from bnn_research.cli import main as research\n"
        "from lightning_bnn.cli import main\n"
        f"lines = [(script, line) for script in (main, research) for line in {lines}]\n"
        f"lines += [(main, line) for line in {helps}]\n"
        "lines += [(main, ['fit', '-c', 'nowhere.yaml']), (main, ['test', '--config=/'])]\n"
        "for script, line in lines:\n"
        "    try:\n        script(line)\n"
        "    except SystemExit as end:\n        print('ended', end.code)\n"
        "assert not {'torch', 'numpy', 'scipy', 'lightning'} & sys.modules.keys()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout.count("ended 2")) == (0, 4), done.stderr
    assert "no file nowhere.yaml. `lightning-bnn presets NAME > FILE` writes" in done.stderr
    assert "`config`: / is a folder" in done.stderr
    assert "bnn-research: there is no command 'toyy'; did you mean 'toy'?" in done.stderr


MEANT = [
    (["fit", "--model", "MFV", "--data", "Digits"], "'MFVI'"),
    (["fit", "--model", "MFVI", "--data", "Digts"], "'Digits'"),
    (["fit", "--model=MFVI", "--data=Digits", "--trainer.callbacks+=MasGap"], "'MassGap'"),
]


@pytest.mark.e2e
def test_a_fresh_process_knows_what_was_meant():
    """Bare names of classes are known only once they are imported."""
    ends = fresh(lightning=[f"from lightning_bnn.cli import main; main({a})" for a, _ in MEANT])
    for (_, meant), (code, text) in zip(MEANT, ends, strict=True):
        assert code == 2
        assert f"did you mean {meant}?" in text.splitlines()[-1]


# ------------------------------------------------------------ what is refused
@pytest.mark.bad_input
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_value_of_another_type_is_named_with_what_fits(name, capsys):
    script, function = FUNCTIONS[name]
    hints, parameters = (
        typing.get_type_hints(function),
        dict(inspect.signature(function).parameters),
    )
    if group := hints.pop("architecture", None):
        parameters = parameters | dict(inspect.signature(group).parameters)
        hints |= typing.get_type_hints(group)
    needed = [n for n, p in parameters.items() if p.default is p.empty and n in hints]
    words = {n: "2" if hints[n] is int else "x" for n in needed}
    given = [f"--{n}={w}" for n, w in words.items()] if "config" in words else words.values()
    for option in parameters.keys() - {*needed, "architecture"}:
        kinds = {*typing.get_args(hints[option]), hints[option]} - {type(None)}
        choices = typing.get_args(next((k for k in kinds if typing.get_origin(k)), None))
        if kinds & {int, float, bool} or (choices and isinstance(choices[0], str)):
            line = [function.__name__, *given, f"--{option}", "nix"]
            sentence = failure(capsys, *line, script=script)
            assert f"`{option}` must be " in sentence
            assert "got nix" in sentence
            assert f"(`{name} --help` explains.)" in sentence
            assert all(repr(c) in sentence for c in choices if isinstance(c, str))
            assert not any(word in sentence for word in ("usage:", "Union"))
            assert len(sentence) < 500


# ------------------------------------------------------------ fit and the like


def test_every_option_of_it_is_one(capsys):
    short = said(capsys, "fit", "--help")
    whole = said(capsys, "fit", "--help.all")
    assert "known subclasses" not in whole
    assert {f"--trainer.{name}" for name in inspect.signature(L.Trainer).parameters} <= {
        *re.findall(r"--[\w.]+", whole)
    }
    rows = re.findall(r"^  (?:-c, )?(--[\w.]+)", short, re.MULTILINE)
    options = {row.replace(".KEY", "") for row in rows} - {"--help.all"}
    assert {"--config", "--model", "--trainer.callbacks", "--weights_only"} <= options
    assert options - {"--model.help", "--data.help"} <= set(re.findall(r"--[\w.]+", whole))


@pytest.mark.parametrize(
    ("given", "waits"),
    [({}, "10000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)],
    ids=["undecided", "a count", "a policy"],
)
def test_threads_wait_shortly_unless_the_user_has_decided(given, waits, monkeypatch):
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "")  # so that it is undone
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    seen = []
    count = "GOMP_SPINCOUNT"
    monkeypatch.setattr(cli.Commands, "run", lambda *_: seen.append(os.environ.get(count)))
    main(["presets"])
    assert seen == [waits]

"""Every command explains itself at once, from its source, and says what the function says."""

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

from lightning_bnn import cli
from lightning_bnn.cli import TRAINING, main

pytestmark = pytest.mark.filterwarnings("ignore")
PLACES = {name: cli.Commands().module_of(name) for name in cli.EVERY if name not in TRAINING}


def said(capsys, *args):
    assert code_of(*args) in (0, None)
    return capsys.readouterr().out


@pytest.mark.parametrize("name", PLACES)
def test_a_command_is_declared_as_it_is(name, capsys):
    function = getattr(importlib.import_module(PLACES[name]), name)
    declared = cli.declared(PLACES[name])
    assert declared is not function
    assert inspect.signature(declared) == inspect.signature(function)
    assert inspect.getdoc(declared) == inspect.getdoc(function)
    hints = typing.get_type_hints(declared)
    assert hints == typing.get_type_hints(function)
    assert len(hints) <= 12  # with what it returns
    assert hints.keys() >= inspect.signature(declared).parameters.keys()
    text = said(capsys, name, "--help")
    assert max(map(len, text.splitlines())) <= 130
    group = hints.pop("architecture", None)
    options = [*hints, *(() if group is None else inspect.signature(group).parameters)]
    assert all(re.search(rf"^  (--)?{o}\b", text, re.M) for o in options if o != "return")


@pytest.mark.e2e
def test_help_and_mistakes_import_nothing_heavy():
    """All in one interpreter, which has imported neither torch nor numpy nor Lightning."""
    lines = [[name, "--help"] for name in (*PLACES, "fit")]
    lines += [["--help"], ["--version"], ["mass", "--membres", "3"], ["population"], ["toyy"]]
    lines += [["fit", "-c", "nowhere.yaml"], ["test", "--config=/"]]
    code = (
        "import sys\n"
        "from lightning_bnn.cli import main\n"
        f"for line in {lines}:\n"
        "    try:\n        main(line)\n"
        "    except SystemExit as end:\n        print('ended', end.code)\n"
        "assert not {'torch', 'numpy', 'scipy', 'lightning'} & sys.modules.keys()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("lightning-bnn: ")) == (0, 5), done.stderr
    assert "no file nowhere.yaml. `lightning-bnn presets NAME > FILE` writes" in done.stderr
    assert "`config`: / is a folder" in done.stderr
    assert done.stdout.count("ended None") + done.stdout.count("ended 0") == len(PLACES) + 1


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
@pytest.mark.parametrize("name", PLACES)
def test_a_value_of_another_type_is_named_with_what_fits(name, capsys):
    declared = cli.declared(PLACES[name])
    hints, parameters = (
        typing.get_type_hints(declared),
        dict(inspect.signature(declared).parameters),
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
            sentence = failure(capsys, name, *given, f"--{option}", "nix")
            assert f"`{option}` must be " in sentence
            assert "got nix" in sentence
            assert f"(`lightning-bnn {name} --help` explains.)" in sentence
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

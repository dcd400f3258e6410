"""docs/architecture.md: the functions that it names exist, in the order in which they call."""

import ast
import re

import pytest
from pages import ROOT, page
from source_code import Source, identifiers

PACKAGE = ROOT / "lightning_bnn"
TEXT = page("docs/architecture.md")
WALK = re.compile(r"^### (.+)\n\n((?:\d+\. .+\n)+)", re.MULTILINE)
STEP = re.compile(r"^\d+\. `([\w/]+\.py): ([\w.]+)` [a-z].*\.$")
CONTRACT = re.compile(r"^\| `(\w+)\(([^)]*)\)` \|", re.MULTILINE)


def walks(text):
    """The steps of every walk, each a file and the name of a function there."""
    return {
        title: [STEP.match(line).groups() for line in lines.splitlines()]
        for title, lines in WALK.findall(text)
    }


WALKS = walks(TEXT)


def problems(steps, folder=PACKAGE):
    """Functions that do not exist, or that nothing names in the files of the steps before."""
    named: set[str] = set()
    for number, (file, name) in enumerate(steps):
        if not (folder / file).is_file():
            yield f"there is no file {file}"
            continue
        source = Source(folder / file, file)
        if name not in source.defined:
            yield f"{file} has no {name}"
        if number and name.rpartition(".")[2] not in named | set(identifiers(source.tree)):
            yield f"no step before names {name}"
        named |= set(identifiers(source.tree))


def test_layers_are_those_that_are_enforced():
    tomllib = pytest.importorskip("tomllib")  # from Python 3.11 on
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = next(c["layers"] for c in contracts["contracts"] if c["containers"] == [PACKAGE.name])
    assert f"Imports run down only: `{' > '.join(layers)}`." in page("CONTRIBUTING.md")


@pytest.mark.parametrize("title", list(WALKS))
def test_functions_of_a_walk_exist_and_are_called(title):
    assert list(problems(WALKS[title])) == []


def test_the_contract_is_that_of_the_code():
    source = Source(PACKAGE / "methods" / "method.py", "method")
    arguments = {
        d.name: [a.arg for a in d.node.args.args[1:]]
        for d in source.definitions()
        if isinstance(d.node, ast.FunctionDef)
    }
    stated = {f"Method.{name}": given.split(", ") for name, given in CONTRACT.findall(TEXT)}
    assert len(stated) == 6
    assert stated.items() <= arguments.items()

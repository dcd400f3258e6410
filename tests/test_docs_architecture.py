"""docs/architecture.md: the functions that it names exist, in the order in which they call."""

import ast
import inspect
import re

import pytest
from pages import ROOT, page

from lightning_bnn.methods import Method

PACKAGES = ROOT / "lightning_bnn", ROOT / "weightsym"
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


def definitions(tree):
    """Names of classes and functions; those of methods have dots."""
    for node in tree.body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            yield node.name
        if isinstance(node, ast.ClassDef):
            yield from (f"{node.name}.{name}" for name in definitions(node))


def problems(steps):
    """Functions that do not exist, or that nothing names in the files of the steps before."""
    named: set[str] = set()
    for number, (file, name) in enumerate(steps):
        (path,) = (folder / file for folder in PACKAGES if (folder / file).is_file())
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if name not in definitions(tree):
            yield f"{file} has no {name}"
        for node in ast.walk(tree):
            named.update(getattr(node, what, "") for what in ("id", "attr", "arg"))
        if number and name.rpartition(".")[2] not in named:
            yield f"no step before names {name}"


@pytest.mark.parametrize("title", list(WALKS))
def test_functions_of_a_walk_exist_and_are_called(title):
    assert list(problems(WALKS[title])) == []


def hooks(cls):
    """Functions that a method may have; the rest are facts about it."""
    return [name for name, value in vars(cls).items() if inspect.isfunction(value)]


def test_the_contract_is_that_of_the_code():
    stated = {name: given.split(", ") for name, given in CONTRACT.findall(TEXT)}
    assert len(stated) == 9 == len(hooks(Method))
    for name, given in stated.items():
        assert list(inspect.signature(getattr(Method, name)).parameters)[1:] == given

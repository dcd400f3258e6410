"""Docstrings say something: none is missing where nothing else explains a name, few are short."""

import ast
import doctest
import functools
import importlib

import pytest
from pages import ROOT, website
from source_code import Definition
from source_package import Package

reference = website("reference")

FEWEST = 5
COMPLETE = {
    "Bytes on disk.",
    "Differential entropy, in nats.",
    "Monte Carlo dropout.",
    "Number of training examples.",
    "Pictures of predictions.",
}
"""Docstrings of few words to which nothing can be added."""


@functools.cache
def package():
    return Package(ROOT / "lightning_bnn")


def is_short(docstring):
    return docstring not in COMPLETE and 0 < len((docstring or "").split()) < FEWEST


def needs_docstring(definition: Definition, package: Package) -> bool:
    """Whether it is exported, and no method of the same name in a base class explains it."""
    if not definition.is_exported or _is_overload_or_setter(definition):
        return False
    return not package.overrides(definition) and not any(
        hasattr(base, definition.node.name) for base in _foreign_bases(definition, package)
    )


def _is_overload_or_setter(definition):
    decorators = getattr(definition.node, "decorator_list", [])
    return any(ast.unparse(d).endswith(("overload", ".setter")) for d in decorators)


def _foreign_bases(definition, package):
    """Classes of Lightning, torch and others, from which the class of a method is derived."""
    if definition.owner is None or isinstance(definition.node, ast.ClassDef):
        return
    for name in package.foreign_bases(f"{definition.source.module}.{definition.owner}"):
        module, _, attribute = name.rpartition(".")
        yield getattr(importlib.import_module(module), attribute)


def test_what_is_public_and_new_has_a_docstring():
    missing = [
        definition.place
        for definition in package().definitions()
        if not definition.docstring and needs_docstring(definition, package())
    ]
    assert missing == []


def test_docstrings_have_enough_words_to_say_something():
    short = [
        f"{definition.place}: {definition.docstring}"
        for definition in package().definitions()
        if is_short(definition.docstring)
    ]
    assert short == []


# ------------------------------------------------------------ examples
WITHOUT_EXAMPLE = {
    "calibration.CLASS_METHODS": "a table",
    "calibration.GAUSSIAN_METHODS": "a table",
    "doctor.CHECKS": "a table",
    "engines.ENGINES": "a table",
    "engines.run_on_ray": "starts a cluster",
    "engines.run_on_slurm": "starts a cluster",
    "judging.TestSet": "an alias of a type",
    "params.Params": "an alias of a type",
    "posteriors.Predictor": "an alias of a type",
}
"""Public names whose docstring has no example, and why."""


def has_example(docstring):
    """Whether something is computed and what it is said to be is there, too."""
    return any(example.want for example in doctest.DocTestParser().get_examples(docstring or ""))


@pytest.mark.parametrize("module", reference.REFERENCE)
def test_every_public_name_has_an_example(module):
    home = importlib.import_module(f"lightning_bnn.{module}")
    docstrings = {name: getattr(home, name).__doc__ for name in reference.public_names(module)}
    without = {f"{module}.{name}" for name, text in docstrings.items() if not has_example(text)}
    assert without == {name for name in WITHOUT_EXAMPLE if name.startswith(f"{module}.")}

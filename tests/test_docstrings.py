"""Docstrings say something: none is missing where nothing else explains a name, few are short."""

import ast
import doctest
import functools
import importlib
import inspect
import pkgutil
from types import FunctionType

import pytest
from pages import ROOT, website

import lightning_bnn
import weightsym

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
METHODS = FunctionType, property, classmethod, staticmethod, functools.cached_property


def exported():
    """Every file, what it exports and defines, and methods that no base class explains."""
    core = pkgutil.walk_packages(weightsym.__path__, "weightsym.")
    for info in [*pkgutil.walk_packages(lightning_bnn.__path__, "lightning_bnn."), *core]:
        if "._" in info.name:
            continue
        module = importlib.import_module(info.name)
        yield info.name, module
        for name in getattr(module, "__all__", vars(module)):
            thing = inspect.unwrap(getattr(module, name))
            is_here = getattr(thing, "__module__", "") == info.name
            if is_here and getattr(thing, "__name__", "") == name and name[0] != "_":
                if isinstance(thing, (type, FunctionType)):
                    yield f"{info.name}.{name}", thing
                yield from own_methods(thing, f"{info.name}.{name}")


def own_methods(thing, place):
    if not isinstance(thing, type):
        return
    for name, member in vars(thing).items():
        inherited = any(hasattr(base, name) for base in thing.__bases__)
        if isinstance(member, METHODS) and not name.startswith("_") and not inherited:
            yield f"{place}.{name}", member


def test_what_is_public_and_new_has_a_docstring():
    found = dict(exported())
    assert len(found) > 1000
    assert [place for place, thing in found.items() if not thing.__doc__] == []


def test_docstrings_have_enough_words_to_say_something():
    short = []
    for path in [*(ROOT / "lightning_bnn").rglob("*.py"), *(ROOT / "weightsym").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                text = ast.get_docstring(node) or ""
                if text not in COMPLETE and 0 < len(text.split()) < FEWEST:
                    short.append(f"{path}: {text}")
    assert short == []


# ------------------------------------------------------------ examples
WITHOUT_EXAMPLE = {
    "engines.ENGINES": "a table",
    "engines.run_on_ray": "starts a cluster",
    "engines.run_on_slurm": "starts a cluster",
    "params.Params": "an alias of a type",
    "posteriors.Predictor": "an alias of a type",
}
"""Public names whose docstring has no example, and why."""


def has_example(docstring):
    """Whether something is computed and what it is said to be is there, too."""
    return any(example.want for example in doctest.DocTestParser().get_examples(docstring or ""))


@pytest.mark.parametrize("module", reference.REFERENCE)
def test_every_public_name_has_an_example(module):
    home = importlib.import_module(reference.module_of(module))
    docstrings = {name: getattr(home, name).__doc__ for name in reference.public_names(module)}
    without = {f"{module}.{name}" for name, text in docstrings.items() if not has_example(text)}
    assert without == {name for name in WITHOUT_EXAMPLE if name.startswith(f"{module}.")}

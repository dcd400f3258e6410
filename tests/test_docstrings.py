"""Docstrings say something: none is missing where nothing else explains a name, few are short."""

import ast
import doctest
import functools
import importlib

import pytest
from pages import ROOT, website
from source_code import Definition, Source
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


def test_few_names_are_excused_from_an_example():
    names = sum(len(reference.public_names(module)) for module in reference.REFERENCE)
    assert len(WITHOUT_EXAMPLE) < 0.05 * names


def test_an_example_says_what_comes_out():
    assert has_example("One.\n\n>>> 1 + 1\n2")
    assert not has_example("One.\n\n>>> one = 1")
    assert not has_example("See `two`.")
    assert not has_example(None)


# ------------------------------------------------------------ a small package
EXAMPLE = '''"""A file with everything in it."""

import lightning as L

__all__ = ["Module"]


class Module(L.LightningModule):
    """A module with three methods."""

    def training_step(self, batch): ...

    def __len__(self): ...

    def train(self):
        """Go on."""

    def missing(self):
        self.width, self.__dict__["depth"] = 1, 2
        self.register_buffer("order", None)


class Heir(Module):
    """A class that is not exported."""

    def missing(self): ...

    def other(self): ...
'''


@pytest.fixture
def example(tmp_path):
    folder = tmp_path / "example"
    folder.mkdir()
    (folder / "__init__.py").write_text('"""One that exports nothing of its own."""\n')
    (folder / "file.py").write_text(EXAMPLE)
    return Package(folder)


def test_only_new_public_names_need_docstrings(example):
    needing = {d.name for d in example.definitions() if needs_docstring(d, example)} - {""}
    assert needing == {"Module", "Module.missing"}
    assert [d.name for d in example.definitions() if is_short(d.docstring)] == ["Module.train"]


def test_classes_are_followed_to_their_bases(example):
    heir, module = example.ancestry("example.file.Heir")
    assert (heir.bases, heir.foreign) == (("example.file.Module",), ())
    assert module.foreign == ("lightning.LightningModule",)
    assert module.attributes == {"width", "depth", "order"}
    assert (example.depth("example.file.Heir"), example.depth("example.file.Module")) == (2, 1)


def test_code_lines_leave_out_blank_lines_comments_and_docstrings(tmp_path):
    path = tmp_path / "it.py"
    path.write_text('"""Two\nlines."""\n\n# why\nx = """a\nb"""  # two\n"""What x is."""\n')
    assert Source(path, "it").code_lines == 2

"""The docs: links lead somewhere, code runs, commands parse, names and tables are right."""

import argparse
import contextlib
import doctest
import importlib
import io
import re
import runpy
import shlex
import sys
import warnings
from pathlib import Path

import jsonargparse
import lightning as L
import pytest
import torchvision
import yaml
from pages import (
    PAGES,
    ROOT,
    TUTORIALS,
    benchmark_scripts,
    blocks,
    commands,
    dangling,
    page,
    pasted,
    script,
)

import lightning_bnn
from bnn_research import cli as research
from lightning_bnn import cli
from lightning_bnn.commands.presets import preset_names, preset_text
from weightsym import cli as core

pytestmark = pytest.mark.filterwarnings("ignore")
QUICK = "docs/metrics.md", "docs/studies.md"
"""Pages whose code takes less than a second."""
SITE = {name: script(f"website/{name}") for name in ("hooks", "reference", "readable")}
SCRIPTS = {"lightning-bnn": cli, "weightsym": core, "bnn-research": research}
reference, build = SITE["reference"], script("examples/tutorials/build")
benchmark = pytest.fixture(benchmark_scripts)


# ------------------------------------------------------------ links and code
@pytest.mark.parametrize(
    "name", [*PAGES, *TUTORIALS, "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"]
)
def test_links_lead_to_files_and_headings(name):
    assert dangling(page(name), (ROOT / name).parent) == []


@pytest.mark.parametrize("target", ["docs/module.md", "docs/modules.md#chains", "#sampling"])
def test_a_link_to_nowhere_is_found(target):
    good = "# Title\n[file](README.md), [heading](docs/modules.md#conventions), [here](#title)\n"
    assert dangling(f"{good}[nowhere]({target})", ROOT) == [target]


@pytest.mark.parametrize(
    "name",
    [
        n if n in QUICK else pytest.param(n, marks=pytest.mark.e2e)
        for n in PAGES
        if "```python" in page(n) and n != "docs/peers.md"  # `test_with_peers.py` pastes that one
    ],
)
def test_a_page_can_be_pasted(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small = torchvision.models.resnet18  # `make bench` reads the large one
    monkeypatch.setattr(torchvision.models, "resnet50", small)
    pasted(page(name), name)


def test_an_answer_has_at_most_fifteen_lines():
    answers = [b.text for b in blocks(page("docs/you-asked.md")) if b.language == "python"]
    assert len(answers) >= 10
    assert all(len([line for line in text.splitlines() if line.strip()]) <= 15 for text in answers)


# ------------------------------------------------------------ commands
class Parsed(Exception):
    """The arguments were accepted."""


def only_parse(kind, patch):
    """Parsers of a kind raise when they are done; those that they call on the way return."""
    parse = kind.parse_args

    def ending(parser, *args, **options):
        with patch.context() as within:
            within.setattr(kind, "parse_args", parse)
            parse(parser, *args, **options)
        raise Parsed

    patch.setattr(kind, "parse_args", ending)


def run_command(main, words, patch):
    """Print presets, which takes no time, and parse the arguments of other commands."""
    path = Path(words[-1]) if words[-2:-1] == [">"] else None
    patch.setattr(sys, "path", [*sys.path])  # to which the command adds the current folder
    if words[0] != "presets":
        only_parse(jsonargparse.ArgumentParser, patch)
    printed, code = io.StringIO(), None
    with contextlib.redirect_stdout(printed), contextlib.suppress(Parsed):
        try:
            main(words[:-2] if path else words)
        except SystemExit as end:
            code = end.code
    assert not code
    if path:
        path.write_text(printed.getvalue())


def understand(line, monkeypatch):
    """Let the parser of a command read its words."""
    program, *words = shlex.split(line, comments=True)
    with monkeypatch.context() as patch:
        if program in SCRIPTS:
            alone = ["--help"] if len(words) == 1 and words != ["presets"] else []
            run_command(SCRIPTS[program].main, [*words, *alone], patch)
        elif program == "python":
            patch.setattr(sys, "argv", words)
            patch.syspath_prepend((ROOT / words[0]).parent)
            only_parse(argparse.ArgumentParser, patch)
            with warnings.catch_warnings(), pytest.raises(Parsed):
                runpy.run_path(str(ROOT / words[0]), run_name="__main__")
        elif program == "make":
            targets = re.findall(r"^([a-z-]+):", page("Makefile"), re.MULTILINE)
            assert {word for word in words if "=" not in word} <= set(targets)
        else:
            assert program == "pip"


@pytest.fixture
def presets(tmp_path, monkeypatch):
    """The current folder, in which presets lie as files, and the configuration of a run."""
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "lightning_logs" / "version_0"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(preset_text("digits_mfvi"))
    for package in ("lightning_bnn", "bnn_research"):
        for preset in preset_names(package):
            (tmp_path / f"{preset}.yaml").write_text(preset_text(preset, package))


@pytest.mark.usefixtures("presets")
@pytest.mark.parametrize("name", [n for n in [*PAGES, *TUTORIALS] if commands(page(n))])
def test_commands_are_understood(name, monkeypatch):
    for line in commands(page(name)):
        understand(line, monkeypatch)


@pytest.mark.usefixtures("presets")
def test_commands_of_the_site_are_understood(monkeypatch):
    pictures = yaml.safe_load(page("website/pictures.yaml"))
    assert {path.name for path in (ROOT / "docs").glob("*.png")} == {*pictures}
    assert {*reference.commands(cli.Commands()), *reference.EXAMPLES} == cli.EVERY.keys()
    assert {*reference.commands(research.Studies())} == research.EVERY.keys()
    for line in "\n".join(reference.EXAMPLES.values()).splitlines():
        understand(line, monkeypatch)


@pytest.mark.parametrize(
    "line",
    [
        "lightning-bnn population --bank b --parts 3",
        "make coffee",
        "lightning-bnn fitt",
        "lightning-bnn toy",
        "bnn-research toyy",
    ],
)
def test_a_mistaken_command_is_noticed(line, monkeypatch):
    with pytest.raises((AssertionError, SystemExit)):
        understand(line, monkeypatch)


# ------------------------------------------------------------ names
def test_the_navigation_names_every_page_once():
    def leaves(nav):
        parts = nav.values() if isinstance(nav, dict) else nav
        return [nav] if isinstance(nav, str) else [leaf for part in parts for leaf in leaves(part)]

    written = [name.removeprefix("docs/") for name in [*PAGES, *TUTORIALS] if "README" not in name]
    written += [*SITE["hooks"].WHOLE, *SITE["hooks"].EXAMPLES, "gallery.md"]
    written += [f"reference/{name}.md" for name in [*reference.REFERENCE, "commands", "research"]]
    assert sorted(leaves(yaml.safe_load(page("mkdocs.yml"))["nav"])) == sorted(written)
    assert set(lightning_bnn.__all__) <= {*reference.REFERENCE, "compare"}


WITHOUT_EXAMPLE = {"Networks", "Params", "Predictor"}
"""Aliases of types."""


@pytest.mark.parametrize("name", reference.REFERENCE)
def test_every_public_name_is_in_the_reference_with_a_line_and_an_example(name):
    """What is computed there, and what comes out."""
    module = importlib.import_module(reference.module_of(name))
    text = reference.reference_page(name)
    rows = re.findall(r"^\| \[`(\w+)`\]\(\S+\) \| (.*) \|$", reference.contents(name), re.MULTILINE)
    assert sorted(row[0] for row in rows) == sorted(reference.public_names(name))
    assert {row[0] for row in rows if not row[1]} <= WITHOUT_EXAMPLE | {"ALL"}
    shown = [path.rpartition(".")[2] for path in reference.entries(text)]
    elsewhere = re.findall(r"^## `(\w+)`", text, re.MULTILINE)
    assert sorted(shown + elsewhere) == sorted(module.__all__)
    for own in set(reference.public_names(name)) - WITHOUT_EXAMPLE:
        docstring = getattr(module, own).__doc__ or ""
        assert any(e.want for e in doctest.DocTestParser().get_examples(docstring)), own


def test_every_study_and_module_is_in_the_docs():
    text = page("docs/studies.md") + page("docs/modules.md")
    modules = set(lightning_bnn.modules.__all__) - {"Prediction", "Predictive"}
    for name in [*research.EVERY, *modules]:
        assert re.search(rf"\b{name}\b", text), name


@pytest.mark.parametrize("module", SITE.values(), ids=SITE)
def test_examples_in_docstrings_of_the_site(module):
    result = doctest.testmod(module)
    assert result.attempted > result.failed == 0


# ------------------------------------------------------------ tables and outputs
@pytest.mark.parametrize(
    "name", [f"docs/{name}.md" for name in ("benchmarks", "doctor", "intervals", "scale")]
)
def test_tables_are_those_of_the_recorded_files(name, benchmark):
    tables = benchmark("tables")
    assert tables.filled(page(name)) == page(name)
    assert set(tables.shown(page(name))) <= {*benchmark("bench").RUNS, "gpu_populations"}


@pytest.mark.parametrize("name", build.names())
def test_a_tutorial_shows_its_script(name):
    output = re.compile(r"^(?:```text\n.*?^```|!\[[^\]]*\]\(\S+\))\n\n", re.MULTILINE | re.DOTALL)
    text, cells = page(f"docs/tutorials/{name}.md"), build.cells(build.script(name))
    assert output.sub("", text) == build.page(name, [build.Result()] * len(cells)) != text


NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]\d+)?")
FEW_EPOCHS = {"06_adapters": 2, "07_orbits": 10}
"""Of tutorials that take a minute, which `make bench` runs as they are."""


def printed_and_shown(name, folder):
    results, _ = build.run(name, folder)
    printed = "\n".join(result.printed for result in results if result.printed)
    text = page(f"docs/tutorials/{name}.md")
    return printed, "\n".join(re.findall(r"^```text\n(.*?)\n```$", text, re.M | re.S))


@pytest.mark.e2e
@pytest.mark.parametrize("name", FEW_EPOCHS)
@pytest.mark.usefixtures("undrawn")
def test_a_long_tutorial_has_the_words_of_its_page_after_few_epochs(name, tmp_path, monkeypatch):
    made, few = L.Trainer.__init__, {"max_epochs": FEW_EPOCHS[name]}
    monkeypatch.setattr(L.Trainer, "__init__", lambda *args, **o: made(*args, **o | few))
    printed, shown = ({*NUMBER.sub("#", t).split()} for t in printed_and_shown(name, tmp_path))
    assert printed == shown


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=pytest.mark.slow if n in FEW_EPOCHS else pytest.mark.e2e)
        for n in build.names()
    ],
)
@pytest.mark.usefixtures("undrawn")
def test_a_tutorial_prints_what_its_page_shows(name, tmp_path):
    """The same words, and numbers of which nine in ten are within a fifth on any machine."""
    printed, shown = printed_and_shown(name, tmp_path)
    assert NUMBER.sub("#", printed).split() == NUMBER.sub("#", shown).split()
    pairs = zip(NUMBER.findall(printed), NUMBER.findall(shown), strict=True)
    near = [float(a) == pytest.approx(float(b), rel=0.2, abs=0.01) for a, b in pairs]
    assert sum(near) >= 0.9 * len(near)

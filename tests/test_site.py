"""The site shows every page and every public name; nothing here needs what builds it."""

import doctest
import importlib
import importlib.util
import re
import sys
from types import SimpleNamespace

import pytest
import yaml
from pages import PAGES, ROOT, TUTORIALS

import lightning_bnn
from lightning_bnn.cli import EVERY, PRESETS, TRAINING

NO_REFERENCE = {
    "comparison": "exports nothing",
    "studies": "are commands",
}


def website(name):
    spec = importlib.util.spec_from_file_location(f"website_{name}", ROOT / f"website/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


hooks = website("hooks")


def settings():
    return yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))


def leaves(nav):
    if isinstance(nav, str):
        return [nav]
    parts = nav.values() if isinstance(nav, dict) else nav
    return [leaf for part in parts for leaf in leaves(part)]


def test_the_navigation_names_every_page_once():
    written = [name.removeprefix("docs/") for name in [*PAGES, *TUTORIALS] if name != "README.md"]
    made = [*hooks.WHOLE, "gallery.md", "reference/commands.md"]
    reference = [f"reference/{name}.md" for name in hooks.REFERENCE]
    assert sorted(leaves(settings()["nav"])) == sorted([*written, *made, *reference])


@pytest.mark.parametrize("name", hooks.REFERENCE)
def test_the_reference_has_every_public_name(name):
    module = importlib.import_module(f"lightning_bnn.{name}")
    shown = re.findall(r"^::: lightning_bnn\.\w+\.(\w+)$", hooks.reference_page(name), re.MULTILINE)
    assert sorted(shown) == sorted(module.__all__)


def test_every_public_module_has_a_page():
    assert set(lightning_bnn.__all__) <= {*hooks.REFERENCE, *NO_REFERENCE}
    assert not hasattr(importlib.import_module("lightning_bnn.comparison"), "__all__")


def test_every_command_has_an_entry():
    assert set(hooks.commands()) == EVERY.keys() - TRAINING.keys() - PRESETS.keys()
    for function in hooks.commands().values():
        assert f"::: {function}\n" in hooks.commands_page()


def test_the_gallery_shows_every_picture_that_a_page_shows():
    shown = set(re.findall(r"\]\((\S+\.png)\)", hooks.gallery_page()))
    assert all((ROOT / "docs" / picture).is_file() for picture in shown)
    assert {"toy.png", "width.png", "tutorials/03_comparing_distances_and_predictions.png"} <= shown


PICTURES = yaml.safe_load((ROOT / "website/pictures.yaml").read_text(encoding="utf-8"))


def test_every_picture_has_a_command_and_a_place():
    made = {path.name for path in (ROOT / "docs").glob("*.png")}  # those of tutorials are built
    assert made == {*PICTURES}
    pages = [path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md")]
    assert all(any(f"({name})" in page for page in pages) for name in PICTURES)
    gallery = hooks.gallery_page()
    assert all(about["command"].strip() in gallery for about in PICTURES.values())


@pytest.mark.parametrize("name", PICTURES)
def test_the_command_of_a_picture_is_there(name):
    for line in PICTURES[name]["command"].strip().splitlines():
        program, what = line.split()[:2]
        if program == "python":
            assert (ROOT / what).is_file()
        else:
            assert (program, what in {*EVERY, *TRAINING}) == ("lightning-bnn", True)


@pytest.mark.parametrize(
    ("target", "page", "place"),
    [
        ("docs/p1.md#claims", "index.md", "p1.md#claims"),
        ("CONTRIBUTING.md", "index.md", "contributing.md"),
        ("../README.md", "tour.md", "index.md"),
        ("../modules.md", "tutorials/02_posterior.md", "../modules.md"),
        ("../../README.md", "tutorials/02_posterior.md", "../index.md"),
        ("02_picture.png", "tutorials/02_posterior.md", "../tutorials/02_picture.png"),
        ("https://example.org/x", "tour.md", "https://example.org/x"),
        ("../examples/plain_loop.py", "tour.md", ""),
        ("LICENSE", "index.md", ""),
    ],
)
def test_links_of_the_repository_lead_to_pages_of_the_site(target, page, place):
    assert hooks.site_link(target, page) == place


def test_code_is_left_as_it_is():
    text = "[a](docs/p1.md)\n```python\n[f](docs/p1.md)\n```\n"
    assert hooks.with_site_links(text, "index.md") == text.replace("docs/p1.md", "p1.md", 1)


def test_examples_in_docstrings_of_the_site(monkeypatch):
    monkeypatch.setitem(sys.modules, "griffe", SimpleNamespace(Extension=object))
    for module in (hooks, website("docstrings")):
        result = doctest.testmod(module)
        assert result.attempted > 0
        assert result.failed == 0

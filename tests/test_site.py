"""The site shows every page and every public name; nothing here needs what builds it."""

import doctest
import importlib
import re

import pytest
import yaml
from pages import PAGES, ROOT, TUTORIALS, commands, website
from test_docs_commands import understand

import lightning_bnn
from lightning_bnn.cli import EVERY

hooks, reference, readable = website("hooks"), website("reference"), website("readable")


def settings():
    return yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))


def leaves(nav):
    if isinstance(nav, str):
        return [nav]
    parts = nav.values() if isinstance(nav, dict) else nav
    return [leaf for part in parts for leaf in leaves(part)]


def test_the_navigation_names_every_page_once():
    written = [name.removeprefix("docs/") for name in [*PAGES, *TUTORIALS] if "README" not in name]
    made = [*hooks.WHOLE, *hooks.EXAMPLES, "gallery.md", "reference/commands.md"]
    modules = [f"reference/{name}.md" for name in reference.REFERENCE]
    assert sorted(leaves(settings()["nav"])) == sorted([*written, *made, *modules])


# ------------------------------------------------------------ the reference
@pytest.mark.parametrize("name", reference.REFERENCE)
def test_the_reference_has_every_public_name(name):
    module = importlib.import_module(reference.module_of(name))
    page = reference.reference_page(name)
    shown = [path.rpartition(".")[2] for path in reference.entries(page)]
    elsewhere = re.findall(r"^## `(\w+)`", page, re.MULTILINE)
    assert sorted(shown + elsewhere) == sorted(module.__all__)
    for found in elsewhere:
        (place,) = re.findall(rf"\((\w+)\.md#[\w.]+\.{found}\)", page)
        assert getattr(importlib.import_module(reference.module_of(place)), found) is not None
        assert f"{reference.module_of(place)}.{found}" in everything()


def everything():
    pages = [reference.reference_page(name) for name in reference.REFERENCE]
    anchors = re.findall(r'<a id="(\S+)">', "".join(pages))
    return [*anchors, *(path for page in pages for path in reference.entries(page))]


def test_every_public_module_has_a_page():
    assert set(lightning_bnn.__all__) <= {*reference.REFERENCE, "studies"}


def test_every_command_has_an_entry():
    page = reference.commands_page()
    assert {*reference.commands(), *reference.EXAMPLES} == EVERY.keys()
    for function in reference.commands().values():
        assert f"::: {function}\n" in page
    for name in reference.EXAMPLES:
        assert f"\n## {name}\n" in page
    assert "--trainer.callbacks+ CLASS" in page


@pytest.mark.filterwarnings("ignore")
def test_the_examples_of_commands_are_understood(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # where the first one writes the configuration of the others
    for command in commands(f"```console\n{chr(10).join(reference.EXAMPLES.values())}\n```\n"):
        understand(command, monkeypatch)


# ------------------------------------------------------------ pictures
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
            assert (program, what in EVERY) == ("lightning-bnn", True)


@pytest.mark.parametrize("page", ["docs/benchmarks.md", *PAGES])
def test_no_link_is_lost(page):
    """All files that pages lead to are on the site."""
    name = {v: k for k, v in hooks.WHOLE.items()}.get(page, page.removeprefix("docs/"))
    text = re.sub(r"^```.*?^```$", "", (ROOT / page).read_text("utf-8"), flags=re.M | re.S)
    targets = [target for _, target in hooks._LINK.findall(text)]
    assert [target for target in targets if not hooks.site_link(target, name)] == []


def test_examples_in_docstrings_of_the_site():
    for module in (hooks, reference, readable):
        result = doctest.testmod(module)
        assert result.attempted > 0
        assert result.failed == 0

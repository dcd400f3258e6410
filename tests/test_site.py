"""The site shows every page and every public name; nothing here needs what builds it."""

import ast
import doctest
import importlib
import re
import sys
from types import SimpleNamespace

import pytest
import yaml
from pages import PAGES, ROOT, TUTORIALS, commands, website
from test_docs_commands import understand

import lightning_bnn
from lightning_bnn.cli import EVERY

NO_REFERENCE = {
    "comparison": "exports nothing",
    "studies": "are commands",
}


hooks, reference, readable = website("hooks"), website("reference"), website("readable")


@pytest.fixture
def docstrings(monkeypatch):
    """What rewrites docstrings, without the package that reads them."""
    monkeypatch.setitem(sys.modules, "griffe", SimpleNamespace(Extension=object, Alias=Alias))
    return website("docstrings")


class Alias(SimpleNamespace):
    def __init__(self, name, target, parent):
        super().__init__(name=name, target=target, parent=parent)


def settings():
    return yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))


def leaves(nav):
    if isinstance(nav, str):
        return [nav]
    parts = nav.values() if isinstance(nav, dict) else nav
    return [leaf for part in parts for leaf in leaves(part)]


def test_the_navigation_names_every_page_once():
    written = [name.removeprefix("docs/") for name in [*PAGES, *TUTORIALS] if name != "README.md"]
    made = [*hooks.WHOLE, *hooks.EXAMPLES, "gallery.md", "reference/commands.md"]
    modules = [f"reference/{name}.md" for name in reference.REFERENCE]
    assert sorted(leaves(settings()["nav"])) == sorted([*written, *made, *modules])


def test_every_part_of_the_site_is_called():
    there = {f"website/{path.name}" for path in (ROOT / "website").glob("*.py")}
    options = settings()["plugins"][-1]["mkdocstrings"]["handlers"]["python"]["options"]
    assert there == {*settings()["hooks"], *options["extensions"]}


# ------------------------------------------------------------ the reference
@pytest.mark.parametrize("name", reference.REFERENCE)
def test_the_reference_has_every_public_name(name):
    module = importlib.import_module(f"lightning_bnn.{name}")
    page = reference.reference_page(name)
    shown = [path.rpartition(".")[2] for path in reference.entries(page)]
    elsewhere = re.findall(r"^## `(\w+)`", page, re.MULTILINE)
    assert sorted(shown + elsewhere) == sorted(module.__all__)
    for found in elsewhere:
        (place,) = re.findall(rf"\((\w+)\.md#lightning_bnn\.\w+\.{found}\)", page)
        assert getattr(importlib.import_module(f"lightning_bnn.{place}"), found) is not None
        assert f"lightning_bnn.{place}.{found}" in everything()


def everything():
    pages = [reference.reference_page(name) for name in reference.REFERENCE]
    anchors = re.findall(r'<a id="(\S+)">', "".join(pages))
    return [*anchors, *(path for page in pages for path in reference.entries(page))]


def test_no_entry_is_a_file_and_none_comes_twice():
    """A name that a file shares with what it defines would show the file."""
    found = [path for name in reference.REFERENCE for path in named(name)]
    assert [path for path in found if reference.source(path)] == []
    objects = [object_at(path) for path in found]
    defined = [f"{it.__module__}.{it.__name__}" for it in objects if hasattr(it, "__name__")]
    assert len(defined) == len(set(defined))
    for name in ("symmetry.align", "symmetry.min_mass", "calibration.calibrated", "metrics.mmd"):
        assert f"lightning_bnn.{name}" not in found
        assert f"lightning_bnn.{name}" in everything()  # the path that users know


def named(name):
    return reference.entries(reference.reference_page(name))


def object_at(path):
    """What a path leads to, file by file and no other way."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def test_a_path_through_files_leads_to_what_users_import():
    for name in reference.REFERENCE:
        module = importlib.import_module(f"lightning_bnn.{name}")
        for path in named(name):
            assert object_at(path) is getattr(module, path.rpartition(".")[2])


def test_every_public_module_has_a_page():
    assert set(lightning_bnn.__all__) <= {*reference.REFERENCE, *NO_REFERENCE}
    assert not hasattr(importlib.import_module("lightning_bnn.comparison"), "__all__")


def test_every_command_has_an_entry():
    page = reference.commands_page()
    assert {*reference.commands(), *reference.EXAMPLES} == EVERY.keys()
    for function in reference.commands().values():
        assert f"::: {function}\n" in page
    for name in reference.EXAMPLES:
        assert f"\n## {name}\n" in page
    assert "--trainer.callbacks+ CLASS" in page
    assert "List the presets" in page


@pytest.mark.filterwarnings("ignore")
def test_the_examples_of_commands_are_understood(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # where the first one writes the configuration of the others
    for command in commands(f"```console\n{chr(10).join(reference.EXAMPLES.values())}\n```\n"):
        understand(command, monkeypatch)


# ------------------------------------------------------------ docstrings
def formulas():
    """Every formula of the package, and where it stands."""
    files = {path: path.read_text("utf-8") for path in (ROOT / "lightning_bnn").rglob("*.py")}
    for path in sorted(path for path, text in files.items() if "math:" in text):
        for node in ast.walk(ast.parse(files[path])):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                text = ast.get_docstring(node) or ""
                if "math::" in text or ":math:" in text:
                    yield f"{path.name}:{getattr(node, 'name', '')}", text


def test_every_formula_is_set(docstrings):
    """None has a command that is not known, and nothing of its source is left."""
    texts = dict(formulas())
    assert len(texts) > 50
    for place, text in texts.items():
        shown = docstrings.as_markdown(text)
        assert "math::" not in shown, place
        assert ":math:" not in shown, place
        written = text.count(":math:`") + len(re.findall(r"^ *\.\. math::", text, re.MULTILINE))
        assert shown.count("<math ") == shown.count("</math>") == written, place


@pytest.mark.parametrize(
    ("latex", "parts"),
    [
        (r"softmax(z)", ["<mi>softmax</mi>"]),
        (r"n \log p", ["<mi>log</mi><mspace", "<mi>p</mi>"]),
        (r"\log(p)", ['<mi>log</mi><mo stretchy="false">(']),
        (r"E|x|", ['lspace="0" rspace="0"', "|"]),
        (r"(-a)", ['form="prefix"']),
        (r"\min_x f", ["munder", "<mi>min</mi>"]),
        (r"a < b", ["&lt;"]),
        (r"\text{mass\_excess}", [">mass_excess<"]),
        (r"\textstyle\log 2", ["<mi>log</mi><mspace"]),
        (r"\sum_i \lVert x \rVert^2", ['<msup><mo stretchy="false">&#8214;']),
    ],
)
def test_formulas_are_set_as_tex_does(latex, parts, docstrings):
    found = docstrings.as_mathml(latex, "block")
    assert all(part in found for part in parts)
    assert 'display="block"' in found


def described(name, bases=(), members=(), text=None):
    """A class as it is read from a file."""
    made = SimpleNamespace(name=name, resolved_bases=list(bases), is_alias=False, is_class=True)
    made.bases = text or [base.name for base in bases]
    made.members, made.is_module = dict.fromkeys(members), False
    made.set_member = made.members.__setitem__
    return made


def test_private_bases_are_not_shown_and_what_they_have_is(docstrings):
    public = described("Metric", members=["reset"])
    first = described("_Error", [public], ["__init__", "update", "compute", "_state"])
    second = described("_Bins", [first], ["update"])
    shown = described("ECE", [second], ["compute"])
    package = SimpleNamespace(members={c.name: c for c in (shown, second, first, public)})
    docstrings.PublicBases().on_package(pkg=package)
    assert shown.bases == ["Metric"]
    assert shown.members.keys() == {"compute", "__init__", "update"}
    assert shown.members["compute"] is None  # its own
    assert public.members.keys() == {"reset"}


# ------------------------------------------------------------ pictures
def test_the_gallery_shows_every_picture_that_a_page_shows():
    shown = set(re.findall(r"\]\((\S+\.png)\)", hooks.gallery_page()))
    assert all((ROOT / "docs" / picture).is_file() for picture in shown)
    assert {"toy.png", "width.png", "tutorials/03_comparing_distances_and_predictions.png"} <= shown


def test_the_gallery_has_a_heading_for_each_page():
    parts = hooks.gallery_page().split("\n## ")[1:]
    pages = [re.search(r"\(([\w/]+\.md)\)", part)[1] for part in parts]
    assert {"p1.md", "demo.md", "tutorials/03_comparing.md"} <= set(pages)
    assert len(pages) == len(set(pages))
    assert all("![" in part for part in parts)


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
        ("../examples/plain_loop.py", "tour.md", "examples/plain_loop.md"),
        ("examples/plain_loop.py", "index.md", "examples/plain_loop.md"),
        ("benchmarks/apply.json", "benchmarks.md", "benchmarks/apply.json"),
        ("LICENSE", "index.md", ""),
    ],
)
def test_links_of_the_repository_lead_to_pages_of_the_site(target, page, place):
    assert hooks.site_link(target, page) == place


def test_code_is_left_as_it_is():
    text = "[a](docs/p1.md)\n```python\n[f](docs/p1.md)\n```\n"
    assert hooks.with_site_links(text, "index.md") == text.replace("docs/p1.md", "p1.md", 1)


@pytest.mark.parametrize("page", ["docs/benchmarks.md", *PAGES])
def test_no_link_is_lost(page):
    """All files that pages lead to are on the site."""
    name = page.removeprefix("docs/").replace("README.md", "index.md")
    text = re.sub(r"^```.*?^```$", "", (ROOT / page).read_text("utf-8"), flags=re.M | re.S)
    targets = [target for _, target in hooks._LINK.findall(text)]
    assert [target for target in targets if not hooks.site_link(target, name)] == []


def test_scripts_are_pages():
    assert len(hooks.EXAMPLES) == len([*(ROOT / "examples").glob("*.py")]) >= 4
    page = hooks.example_page("examples/plain_loop.py")
    assert "in a loop of one's own" in page.partition("```python")[0]
    assert "methods.MFVI(" in page.partition("```python")[2]
    assert "in a loop of one's own" not in page.partition("```python")[2]


def test_benchmarks_are_copied():
    assert "benchmarks" not in settings().get("exclude_docs", "")


# ------------------------------------------------------------ what is read
def test_contents_give_way_to_wide_tables():
    wide = [name for name in PAGES if readable.is_wide((ROOT / name).read_text("utf-8"))]
    assert "docs/p1.md" in wide
    assert len(wide) < 10
    page = SimpleNamespace(meta={})
    text = readable.on_page_markdown("# A\n\n## b\n\n## c\n\n|" + "---|" * 12, page, None, None)
    assert page.meta == {"hide": ["toc"]}
    assert "    [TOC]" in text
    narrow = "# A\n\n## b\n\n## c\n\n|" + "---|" * 3
    assert readable.on_page_markdown(narrow, SimpleNamespace(meta={}), None, None) == narrow


def test_pages_of_the_reference_that_are_wrong_are_refused():
    assert reference.faults('<h2 id="a.B"><h2 id="a.b"><h3 id="a.B.b">') == []
    assert reference.faults('<div class="doc doc-object doc-module">') == ["a file of the package"]
    assert reference.faults('<h2 id="a.B"><h2 id="c.B">') == ["B twice"]
    private = '<p class="doc doc-class-bases">Bases: <code>_Bins</code></p>'
    assert reference.faults(private) == ["a private class"]
    assert reference.faults("<p>:math:`x`</p>") == ["a formula that is not set"]


def test_examples_in_docstrings_of_the_site(docstrings):
    for module in (hooks, reference, readable, docstrings):
        result = doctest.testmod(module)
        assert result.attempted > 0
        assert result.failed == 0

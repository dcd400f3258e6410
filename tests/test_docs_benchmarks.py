"""The tables of the pages are those of the recorded files, and the files can be made again."""

import re

import pytest
from pages import ROOT, benchmark_scripts, page

FILES = sorted((ROOT / "docs" / "benchmarks").glob("*.json"))
PAGES = ("docs/benchmarks.md", "docs/scale.md")


script = pytest.fixture(benchmark_scripts)


@pytest.mark.parametrize("name", PAGES)
def test_tables_are_those_of_the_files(name, script):
    assert script("tables").filled(page(name)) == page(name)


def test_every_file_is_shown_once_and_made_by_a_run(script):
    on_pages = [name for p in PAGES for name in script("tables").shown(page(p))]
    assert sorted(on_pages) == sorted(path.stem for path in FILES)
    assert set(on_pages) <= set(script("bench").RUNS) == set(script("layouts").LAYOUTS)


@pytest.mark.parametrize("name", PAGES)
def test_every_table_leads_to_its_file(name, script):
    linked = re.findall(r"data: \[(\w+)\.json\]\((\S+)\)", page(name))
    assert [stem for stem, _ in linked] == script("tables").shown(page(name))
    assert all(ROOT / "docs" / place in FILES for _, place in linked)

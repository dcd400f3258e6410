"""A picture whose drawing code has changed since is noticed."""

import shutil
import sys

import pytest
import yaml
from pages import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import drawn

RECORD = drawn.record()
PICTURES = yaml.safe_load((ROOT / "website/pictures.yaml").read_text(encoding="utf-8"))
OWN = {
    "tutorials/02_posterior_uncertain_and_certain_digits.png",
    "tutorials/04_symmetries_loss_between_networks.png",
    "tutorials/05_populations_single_networks_and_groups.png",
}
"""What tutorials draw themselves: their pages are compared with their scripts."""


def test_what_draws_a_picture_is_known():
    docs = ROOT / "docs"
    there = {path.relative_to(docs).as_posix() for path in docs.rglob("*.png")}
    assert there == RECORD.keys() | OWN
    assert not RECORD.keys() & OWN


@pytest.mark.parametrize("name", RECORD)
def test_pictures_are_drawn_by_the_code_of_today(name):
    if RECORD[name]["code"] == drawn.LATER:
        pytest.xfail(drawn.LATER)
    how = f"pictures.py {name}" if name in PICTURES else "build.py of tutorials"
    assert not drawn.is_old(name), f"docs/{name} was drawn by other code: make it again ({how})"


def test_only_what_takes_long_is_left_for_later():
    later = [name for name, about in RECORD.items() if about["code"] == drawn.LATER]
    assert all(PICTURES[name]["minutes"] > 4 for name in later)


@pytest.mark.parametrize("code", ["106660696230", "12e456789012", "068e2fe68b7e"])
def test_a_digest_that_looks_like_a_number_stays_text(code, tmp_path, monkeypatch):
    monkeypatch.setattr(drawn, "RECORD", tmp_path / "drawn.yaml")
    monkeypatch.setattr(drawn, "digest", lambda by: code)
    drawn.RECORD.write_text("a.png: {code: to be made again, by: [some.function]}\n")
    drawn.remember(["a.png"])
    assert drawn.record() == {"a.png": {"code": code, "by": ["some.function"]}}
    assert not drawn.is_old("a.png")


# ------------------------------------------------------------ what counts as a change
BY = "lightning_bnn.studies.toy._figures"
CHANGES = {
    "colour": ("plots/panels.py", "tab:red", "tab:green", True),
    "a constant": ("plots/axes.py", "TEXT, TITLE = 10.5", "TEXT, TITLE = 9.5", True),
    "a function below": ("plots/axes.py", "free[0].legend(", "free[-1].legend(", True),
    "a title of the study": ("studies/toy.py", "scales removed", "scaled", True),
    "a comment": ("plots/axes.py", "_MOST = 12\n", "_MOST = 12  # entries\n", False),
    "a docstring": ("plots/panels.py", "Density of two weights", "Two weights", False),
    "another figure": ("plots/dots.py", "0.92", "0.5", False),
    "a table of the study": ("studies/toy.py", "not converged, %", "failed, %", False),
}


@pytest.fixture(scope="module")
def copied(tmp_path_factory):
    """The code that draws, where it can be changed."""
    root = tmp_path_factory.mktemp("copied")
    for part in ("plots", "studies"):
        shutil.copytree(ROOT / "lightning_bnn" / part, root / "lightning_bnn" / part)
    return root


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_what_is_drawn_is_noticed_and_no_other(name, copied):
    file, old, new, differs = CHANGES[name]
    path = copied / "lightning_bnn" / file
    text = path.read_text(encoding="utf-8")
    assert old in text
    before = drawn.digest([BY], copied)
    path.write_text(text.replace(old, new), encoding="utf-8")
    drawn.read.cache_clear()
    try:
        assert (drawn.digest([BY], copied) != before) == differs
    finally:
        path.write_text(text, encoding="utf-8")
        drawn.read.cache_clear()
    assert before == drawn.digest([BY])


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("function", "told"),
    [
        ("lightning_bnn.plots.nothing", "nothing called"),
        ("nowhere.at_all", "no file for 'nowhere'"),
    ],
)
def test_a_function_that_is_not_there_is_refused(function, told):
    with pytest.raises(ValueError, match=told):
        drawn.digest([function])

"""What runs outside of this suite is called, and notices what it is there for."""

import importlib.metadata
import re
import runpy
from types import SimpleNamespace

import pytest
import yaml
from no_skips import VARIABLE, unskipped
from pages import ROOT, page

OTHERS = page(".ci/others")


# ------------------------------------------------------------ packages of others
def report(**fields):
    return SimpleNamespace(skipped=True, outcome="skipped", longrepr="wandb is missing", **fields)


def test_a_skip_is_a_failure_where_nothing_may_be_skipped(monkeypatch):
    monkeypatch.setenv(VARIABLE, "1")
    assert unskipped(report()).outcome == "failed"
    assert "wandb is missing" in unskipped(report()).longrepr
    assert unskipped(report(wasxfail="known")).outcome == "skipped"
    monkeypatch.delenv(VARIABLE)
    assert unskipped(report()).outcome == "skipped"


def test_packages_of_others_are_tested_and_nothing_is_skipped():
    """Files that skip without a package run where it is installed, and not one of them skips."""
    assert f"export {VARIABLE}=1" in OTHERS
    named = set(re.findall(r"tests/\S+\.py", OTHERS))
    assert named == {"tests/callbacks/test_real_loggers.py", "tests/test_with_peers.py"}
    for name in named:
        assert "pytest.skip(" in page(name)
    jobs = yaml.safe_load(page(".github/workflows/ci.yml"))["jobs"]
    kinds = jobs["others"]["strategy"]["matrix"]["packages"]
    assert kinds == ["loggers", "peers"]
    for kind in kinds:
        assert f"\n  {kind}) " in OTHERS
        assert f"\n{kind}:  ## " in page("Makefile")
        assert f"\t.ci/others {kind}\n" in page("Makefile")


@pytest.mark.parametrize("name", ["run", "oldest", "others", "wheel"])
def test_scripts_can_be_run(name):
    assert (ROOT / ".ci" / name).stat().st_mode & 0o111


# ------------------------------------------------------------ requirements of the wheel
UNMET = runpy.run_path(str(ROOT / ".ci/satisfied.py"))["unmet"]


def test_what_the_wheel_requires_is_compared_with_what_is_there(monkeypatch):
    there = {"torch": "2.6.0", "scipy": "1.12.0", "lightning": "2.7.0rc1"}

    def version(name):
        if name in there:
            return there[name]
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setitem(UNMET.__globals__, "version", version)
    assert list(UNMET(["torch>=2.6", "lightning>=2.6"])) == []
    assert list(UNMET(["torch>=2.7"])) == ["torch>=2.7: 2.6.0 is installed"]
    assert list(UNMET(["scipy!=1.12.*,>=1.11"])) == ["scipy!=1.12.*,>=1.11: 1.12.0 is installed"]
    assert list(UNMET(["absent"])) == ["absent: not installed"]
    assert list(UNMET(['absent; extra == "dev"', 'absent; python_version < "3"'])) == []


def test_the_wheel_is_compared():
    assert ".ci/satisfied.py lightning_bnn" in page(".ci/wheel")
    assert list(UNMET(importlib.metadata.requires("lightning_bnn"))) == []

"""Where packages of others are tested, a skip is a failure."""

from types import SimpleNamespace

from no_skips import VARIABLE, unskipped


def report(**fields):
    return SimpleNamespace(skipped=True, outcome="skipped", longrepr="wandb is missing", **fields)


def test_a_skip_is_a_failure_where_nothing_may_be_skipped(monkeypatch):
    monkeypatch.setenv(VARIABLE, "1")
    assert unskipped(report()).outcome == "failed"
    assert "wandb is missing" in unskipped(report()).longrepr
    assert unskipped(report(wasxfail="known")).outcome == "skipped"
    monkeypatch.delenv(VARIABLE)
    assert unskipped(report()).outcome == "skipped"

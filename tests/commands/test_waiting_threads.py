"""Commands decide how long the threads of OpenMP wait awake before anything imports torch."""

import os

import pytest

from lightning_bnn import cli


@pytest.mark.parametrize(
    ("given", "waits"),
    [({}, "10000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)],
    ids=["undecided", "a count", "a policy"],
)
def test_threads_wait_shortly_unless_the_user_has_decided(given, waits, monkeypatch):
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "")  # so that it is undone
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    seen = []
    count = "GOMP_SPINCOUNT"
    monkeypatch.setattr(cli.Commands, "run", lambda *_: seen.append(os.environ.get(count)))
    cli.main(["presets"])
    assert seen == [waits]

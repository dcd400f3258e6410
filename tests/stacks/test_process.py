"""Torch's threads that wait for work end, and come back with it."""

import os
import sys

import pytest
import torch

from weightsym.networks import threads
from weightsym.networks.threads import end_waiting_threads, in_threads

TASKS = "/proc/self/task"
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="counts the threads of Linux")


@pytest.fixture(autouse=True)
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def shared_out():
    """An operation that needs both threads."""
    return torch.ones(1 << 20).add_(1.0).sum()


def test_a_thread_that_waits_ends_and_comes_back():
    total = shared_out()
    waiting = len(os.listdir(TASKS))
    assert end_waiting_threads()
    assert len(os.listdir(TASKS)) == waiting - 1
    assert torch.equal(shared_out(), total)
    assert len(os.listdir(TASKS)) == waiting


def test_without_such_a_library_everything_goes_on(monkeypatch):
    shared_out()
    waiting = len(os.listdir(TASKS))
    monkeypatch.setattr(threads.ctypes, "CDLL", lambda name: object())
    threads._pause.cache_clear()
    try:
        assert not end_waiting_threads()
        assert len(os.listdir(TASKS)) == waiting
    finally:
        threads._pause.cache_clear()


def in_a_pool(look):
    """Members shared out among two threads."""
    in_threads(lambda model, item: look(), [0, 1], torch.nn.Identity(), 2)


def in_a_chain(look):
    """The same for chains of layers."""
    running = pytest.importorskip("weightsym_fast.running")
    running._over_members(lambda first, last: look(), 2)


@pytest.mark.parametrize("run", [in_a_pool, in_a_chain])
def test_nothing_of_torch_waits_while_members_run(run):
    run(lambda: None)  # the pool is there from now on
    shared_out()
    waiting, seen = len(os.listdir(TASKS)), []
    run(lambda: seen.append(len(os.listdir(TASKS))))
    assert seen == [waiting - 1] * 2

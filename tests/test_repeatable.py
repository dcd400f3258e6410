"""One seed gives one result: nothing is drawn in the order of a set, whatever its hashes are."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import repeatable_draws
import torch
from repeatable_draws import adapted, hash_of

from weightsym import params as P


def test_new_members_of_adapted_networks_are_the_same_again():
    """Modules are hashed by their addresses, which are others in every copy."""
    hashes = [
        hash_of(P.populate(adapted(), 1, torch.Generator().manual_seed(seed)))
        for seed in (*[0] * 12, 1)
    ]
    assert len(set(hashes[:-1])) == 1
    assert hashes[-1] != hashes[0]


def started(seed):
    """A process that prints the hashes of all draws, in which words have other hashes."""
    environment = {**os.environ, "PYTHONHASHSEED": str(seed)}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    program = [sys.executable, "-W", "ignore", str(Path(repeatable_draws.__file__))]
    return subprocess.Popen(program, stdout=subprocess.PIPE, env=environment, text=True)


@pytest.mark.e2e
def test_no_draw_depends_on_the_hashes_of_words():
    """Of every method and every small network of `classics`, in two processes."""
    first, second = (json.loads(p.communicate()[0]) for p in [started(1), started(2)])
    assert len(first) > 50
    assert [name for name in first if first[name] != second[name]] == []

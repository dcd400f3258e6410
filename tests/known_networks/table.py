"""The table of networks whose symmetries are known: each is a forward, its parts, and counts."""

import functools
import os
import pickle
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from cases import Forward, randomise
from torch import nn

from weightsym import discover

__all__ = ["NETWORKS", "Network", "add", "counted", "linear", "network", "parameter"]


@dataclass(frozen=True, eq=False)
class Network:
    """A network in float64, its inputs, and what is known of its symmetries; None is not stated.

    `groups` are units of permutations, as in "5*3 3b": three groups of 5 channels, one of 3
    blocks. `matrices` are those that mix channels, as in "general 3*4, complex 2". `shifts` maps
    names of biases to sizes, `dead` those that nothing takes up. `held` is a pattern of what is
    reported, all of it; "" says that nothing is. `dimension` is that of the kernel of the
    Jacobian, of which discovery finds all but `missing`; where `kernel` is false it is known by
    hand only. `moves` are names of tensors that must move. Outputs show nothing of single tensors
    whose moves are `unnoticed`, and those of what is `random` are others at every call. What is
    `slow` is read by `make bench` only.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: Any
    groups: str | None = None
    scales: int | None = None
    signs: int | None = None
    matrices: str | None = None
    shifts: dict[str, int] | None = None
    dead: dict[str, int] | None = None
    held: str | None = ""
    dimension: int | None = None
    missing: int = 0
    kernel: bool = True
    moves: str = ""
    others: list[Any] = field(default_factory=list)
    tolerance: float = 1e-10
    unnoticed: bool = False
    random: bool = False
    slow: bool = False

    def made(self, seed=0):
        """The network with generic weights, and its inputs."""
        torch.manual_seed(seed)
        model = randomise(self.build().double()).eval()
        return model, tensors(self.inputs)

    @functools.cache  # noqa: B019  (one table, for all tests of a process)
    def known(self):
        """The network, its inputs, and its symmetries; nobody changes them."""
        model, x = self.made()
        return model, x, read_once(self.name, lambda: discover(model, *x))

    def other_inputs(self):
        """Inputs that discovery has not seen: of other lengths, or another batch."""
        torch.manual_seed(1)
        return [tensors(other) for other in self.others or [self.inputs]]


SHARED: list[Path] = []
"""The folder in which the processes of one run tell each other what they have read."""


def read_once(name, read):
    """What a process of this run has read, this one or another."""
    if not SHARED:
        return read()
    path = SHARED[0] / sha256(name.encode()).hexdigest()
    if not path.exists():
        draft = path.with_suffix(f".{os.getpid()}")
        draft.write_bytes(pickle.dumps(read()))
        draft.replace(path)
    return pickle.loads(path.read_bytes())


def tensors(inputs):
    """One shape, or a list of shapes, tensors and functions, as a tuple of tensors."""
    rows = inputs if isinstance(inputs, list) else [inputs]
    made = [torch.randn(r) if isinstance(r, tuple) else r() if callable(r) else r for r in rows]
    return tuple(t.double() if t.is_floating_point() else t for t in made)


def counted(items):
    """The counter of what "5*3" and the like list."""
    count = Counter()
    for item in filter(None, items):
        name, _, times = item.partition("*")
        count[name] += int(times or 1)
    return count


def parameter(*shape):
    """How to build a parameter of this shape."""
    return lambda: nn.Parameter(torch.randn(*shape))


def linear(*shape):
    """How to build a layer without a bias."""
    return lambda: nn.Linear(*shape, bias=False)


def built(part):
    """A pair of sizes is a layer, a function builds, all else is itself."""
    if isinstance(part, tuple):
        return nn.Linear(*part)
    return part() if callable(part) and not isinstance(part, nn.Module) else part


NETWORKS: dict[str, Network] = {}


def add(name, build, inputs, *counts, **known):
    """One more row, of a module."""
    assert name not in NETWORKS, name
    NETWORKS[name] = Network(name, build, inputs, *counts, **known)


_FIELDS = set(Network.__dataclass_fields__)


def network(*counts, inputs=(3, 5), name=None, **more):
    """One more row, of the function below: its name, with these parts."""
    known = {key: more.pop(key) for key in _FIELDS & set(more)}

    def row(forward):
        def build():
            return Forward(forward, **{key: built(part) for key, part in more.items()})

        add(name or forward.__name__.replace("_", " "), build, inputs, *counts, **known)
        return forward

    return row

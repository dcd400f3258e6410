"""Matching of a file's tensors to a network: dtypes, tied tensors, and foreign ones."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from weightsym.networks.devices import pieces
from weightsym.networks.files.names import NetworkNames, Renaming, find_names
from weightsym.networks.files.stored import StoredNetwork

Others = Literal["refuse", "copy"]
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True, eq=False)
class FittedNetwork(Mapping[str, Tensor]):
    """A network on disk under the tensor names of its architecture.

    It maps these names to tensors as they are stored, in pages of the file where that is mapped.
    Nobody keeps them; numbers that are not finite are refused.

    Attributes:
        stored: where it is.
        places: by name in the network, the name in the file.
        again: further names of tied tensors in the file, and the names in the network.
        others: names in the file that are none of the network.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from weightsym.files import NetworkNames, fit, open_network
    >>> path, net = Path(tempfile.mkdtemp()) / "run.pt", torch.nn.Linear(2, 3)
    >>> torch.save({f"model.{name}": t.half() for name, t in net.state_dict().items()}, path)
    >>> fitted = fit(open_network(path), NetworkNames.of(net))
    >>> list(fitted), fitted["weight"].dtype, fitted.number("weight").dtype
    (['weight', 'bias'], torch.float16, torch.float32)
    """

    stored: StoredNetwork
    places: Mapping[str, str]
    again: Mapping[str, str]
    others: tuple[str, ...]
    _finite: set[str] = field(default_factory=set, repr=False)

    @cached_property
    def names(self) -> dict[str, str]:
        """The name in the network, by name in the file."""
        return {key: name for name, key in self.places.items()} | dict(self.again)

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)

    def read(self, name: str) -> Tensor:
        """Read one tensor by its name in the network, in its stored dtype."""
        return self.stored.tensors[self.places[name]].read()

    def __getitem__(self, name: str) -> Tensor:
        tensor = self.read(name)
        if name not in self._finite:
            self._check(name, tensor)
            self._finite.add(name)
        return tensor

    def _check(self, name: str, tensor: Tensor) -> None:
        if tensor.is_floating_point() and not are_finite(tensor):
            raise ValueError(
                f"{self.stored.path}: {self.places[name]!r} holds NaN or infinite values."
            )

    def shape(self, name: str) -> torch.Size:
        """Return the shape of one tensor without reading it."""
        return self.stored.tensors[self.places[name]].shape

    def number(self, name: str) -> Tensor:
        """Read one tensor in float32, for computation."""
        tensor = self[name]
        if not tensor.is_floating_point():
            return tensor
        if tensor.dtype == torch.float64:
            self._check(name, tensor.float())
        return tensor.float()


def are_finite(tensor: Tensor) -> bool:
    """Return whether all entries of a tensor are finite, as its sum shows without extra memory.

    >>> are_finite(torch.tensor([1.0, -2.0])), are_finite(torch.tensor([torch.inf, -torch.inf]))
    (True, False)
    """
    wide = torch.promote_types(tensor.dtype, torch.float32)
    total = sum(float(part.sum(dtype=wide)) for part in pieces(tensor))
    return math.isfinite(total) or bool(torch.isfinite(tensor).all())


def fit(
    stored: StoredNetwork, names: NetworkNames, prefix: str | None = None, others: Others = "refuse"
) -> FittedNetwork:
    """Find the tensors of a network in a file, under the one prefix that fits all of them.

    Args:
        stored: what is on disk.
        names: of the network.
        prefix: what stands before all names in the file, if it is known.
        others: whether to refuse floating tensors that are none of the network, which would not
            move with it, or to copy them as they are.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from weightsym.files import open_network
    >>> path, net = Path(tempfile.mkdtemp()) / "run.pt", torch.nn.Linear(2, 3)
    >>> torch.save({f"model.{name}": t for name, t in net.state_dict().items()}, path)
    >>> fit(open_network(path), NetworkNames.of(net)).places
    {'weight': 'model.weight', 'bias': 'model.bias'}
    """
    places, renaming = find_names(stored.path, stored.tensors, names, prefix)
    again = _again(stored, names, places, renaming)
    unused = [n for n in stored.tensors if n not in again and n not in set(places.values())]
    fitted = FittedNetwork(stored, places, again, tuple(unused))
    _check_types(fitted, names)
    _check_ties(fitted)
    if others == "refuse":
        _check_others(fitted, {renaming.place(name) for name in names.buffers}, names.ignored)
    return fitted


def _again(
    stored: StoredNetwork, names: NetworkNames, places: Mapping[str, str], renaming: Renaming
) -> dict[str, str]:
    """Find the tied tensors that the file stores more than once."""
    firsts = names.aliases | {first: first for first in names.aliases.values()}
    repeated = {renaming.place(name): first for name, first in firsts.items()}
    return {p: first for p, first in repeated.items() if p in stored.tensors and p != places[first]}


# ------------------------------------------------------------ what cannot be moved
def _check_types(fitted: FittedNetwork, names: NetworkNames) -> None:
    for name, key in fitted.places.items():
        tensor, dtype = names.tensors[name], fitted.stored.tensors[key].dtype
        if tensor.is_floating_point() != (dtype in _FLOATS):
            raise ValueError(
                f"{fitted.stored.path}: {key!r} is of type {str(dtype).removeprefix('torch.')}, "
                f"and the network has {str(tensor.dtype).removeprefix('torch.')}: quantised "
                "networks are not supported."
            )


def _check_ties(fitted: FittedNetwork) -> None:
    for key, name in fitted.again.items():
        if not torch.equal(fitted.stored.tensors[key].read(), fitted.read(name)):
            raise ValueError(
                f"{fitted.stored.path}: {key!r} and {fitted.places[name]!r} are one tensor in the "
                "network, but differ in the file."
            )


def _check_others(fitted: FittedNetwork, buffers: Collection[str], ignored: Sequence[str]) -> None:
    """Refuse foreign tensors, which would not move with the network."""
    for name in fitted.others:
        tensor = fitted.stored.tensors[name]
        harmless = tensor.shape.numel() <= 1 or not tensor.dtype.is_floating_point
        unused = name in buffers or any(re.search(pattern, name) for pattern in ignored)
        if not (harmless or unused):
            raise ValueError(
                f"{fitted.stored.path} contains {name!r}, which is not part of the network and "
                "would not move with it; `--others copy` keeps such tensors unchanged."
            )

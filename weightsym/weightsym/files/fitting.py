"""Tensors of a network found in a file: its types, tied tensors, and foreign ones."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from weightsym import params as P
from weightsym.files.stored import StoredNetwork

__all__ = ["FittedNetwork", "NetworkNames", "Others", "find_names", "fit"]


@dataclass(frozen=True)
class NetworkNames:
    """The names of the tensors of a network.

    Attributes:
        tensors: all of them, each once.
        aliases: further names of tied tensors, and their first names.
        buffers: names that a file may have besides, because the network computes them anew.
        base: a first part of names that files may leave out.
        ignored: patterns of names that old files have, and that nothing uses.

    >>> import torch
    >>> from weightsym.files import NetworkNames
    >>> layers = (torch.nn.Linear(3, 3, bias=False) for _ in range(2))
    >>> net = torch.nn.Sequential(*layers)
    >>> net[1].weight = net[0].weight  # tied
    >>> names = NetworkNames.of(net)
    >>> list(names.tensors), names.aliases
    (['0.weight'], {'1.weight': '0.weight'})
    """

    tensors: Mapping[str, Tensor]
    aliases: dict[str, str] = field(default_factory=dict)
    buffers: frozenset[str] = frozenset()
    base: str = ""
    ignored: tuple[str, ...] = ()

    @classmethod
    def of(cls, module: nn.Module, base: str = "", ignored: Iterable[str] = ()) -> NetworkNames:
        """Those of a module.

        Args:
            module: any network.
            base: a first part of names that files may leave out.
            ignored: patterns of names that old files have, and that nothing uses.
        """
        firsts: dict[int, str] = {}
        aliases = {}
        for name, tensor in module.state_dict(keep_vars=True).items():
            first = firsts.setdefault(id(tensor), name)
            if first != name:
                aliases[name] = first
        buffers = frozenset(name for name, _ in module.named_buffers())
        return cls(P.of(module), aliases, buffers, base, tuple(ignored))


class Renaming(NamedTuple):
    """A prefix that a file puts before all names, and a part that it leaves out."""

    prefix: str = ""
    left_out: str = ""

    def place(self, name: str) -> str:
        """The name in the file."""
        return self.prefix + name.removeprefix(self.left_out)


def find_names(
    path: Path, stored: Mapping[str, Any], names: NetworkNames, prefix: str | None = None
) -> tuple[dict[str, str], Renaming]:
    """Find the one prefix with which all tensors of a network are in a file, in their shapes.

    Args:
        path: the file, for errors.
        stored: whatever has a shape, by name in the file.
        names: of the network.
        prefix: what stands before all names in the file, if it is known.

    Returns:
        By name in the network, the name in the file, and what renames the others.

    >>> import torch
    >>> net = torch.nn.Linear(2, 1)
    >>> state = {f"model.net.{name}": t for name, t in net.state_dict().items()}
    >>> find_names(Path("run.ckpt"), state, NetworkNames.of(net))[0]
    {'weight': 'model.net.weight', 'bias': 'model.net.bias'}
    """
    renamings = list(_renamings(stored, names, prefix))
    tables = [_places(stored, names, renaming) for renaming in renamings]
    misfits = [_misfit(stored, names.tensors, table) for table in tables]
    fitting = [k for k, why in enumerate(misfits) if why is None]
    if not fitting:
        present = [sum(place in stored for place in table.values()) for table in tables]
        nearest = present.index(max(present))
        raise ValueError(f"{path} does not fit: {misfits[nearest]}.")
    if any(tables[k] != tables[fitting[0]] for k in fitting):
        found = " or ".join(sorted({repr(renamings[k].prefix) for k in fitting}))
        raise ValueError(f"Several networks in {path} fit: choose one by its `prefix`, {found}.")
    return tables[fitting[0]], renamings[fitting[0]]


def _renamings(
    stored: Mapping[str, Any], names: NetworkNames, prefix: str | None
) -> Iterator[Renaming]:
    first = next(iter(names.tensors))
    aliases = [alias for alias, name in names.aliases.items() if name == first]
    for known in (first, *aliases) if prefix is None else ():
        for name in stored:
            if name.endswith(f".{known}"):
                yield Renaming(name.removesuffix(known))
    yield Renaming(prefix or "")
    if names.base and prefix is None:
        yield Renaming(left_out=f"{names.base}.")


def _places(stored: Mapping[str, Any], names: NetworkNames, renaming: Renaming) -> dict[str, str]:
    """Find the place of every tensor, of tied ones under any of their names."""
    places = {}
    for name in names.tensors:
        aliases = [alias for alias, first in names.aliases.items() if first == name]
        options = [renaming.place(n) for n in (name, *aliases)]
        places[name] = next((n for n in options if n in stored), options[0])
    return places


def _misfit(
    stored: Mapping[str, Any], wanted: Mapping[str, Tensor], places: Mapping[str, str]
) -> str | None:
    """Describe in half a sentence what a file lacks of a network, if anything.

    Args:
        stored: whatever has a shape, by name in the file.
        wanted: the tensors of the network.
        places: by name in the network, the name in the file.
    """
    missing = [name_in_file for name_in_file in places.values() if name_in_file not in stored]
    if missing:
        more = f" and {len(missing) - 1} more names" if len(missing) > 1 else ""
        return f"it lacks {missing[0]!r}{more}"
    for name, tensor in wanted.items():
        shape = stored[places[name]].shape
        if shape != tensor.shape:
            return (
                f"{places[name]!r} has shape {tuple(shape)}, the network has {tuple(tensor.shape)}"
            )
    return None


# ------------------------------------------------------------ tensors of a network in a file
Others = Literal["refuse", "copy"]
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True, eq=False)
class FittedNetwork:
    """A network on disk under the names of the network that it is.

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
    >>> fitted.read("weight").dtype, fitted.number("weight").dtype  # as stored, and to compute with
    (torch.float16, torch.float32)
    """

    stored: StoredNetwork
    places: Mapping[str, str]
    again: Mapping[str, str]
    others: tuple[str, ...]

    @cached_property
    def names(self) -> dict[str, str]:
        """By name in the file, the name in the network."""
        return {place: name for name, place in self.places.items()} | dict(self.again)

    def read(self, name: str) -> Tensor:
        """One tensor, by its name in the network, as it is stored."""
        return self.stored.read(self.places[name])

    def number(self, name: str) -> Tensor:
        """Read one tensor in float32, to compute with, and refuse numbers that are not finite."""
        tensor = self.read(name)
        if not tensor.is_floating_point():
            return tensor
        tensor = tensor.float()
        if not bool(torch.isfinite(tensor).all()):
            raise ValueError(
                f"{self.stored.path}: {self.places[name]!r} holds NaN or infinite values."
            )
        return tensor


def fit(
    stored: StoredNetwork, names: NetworkNames, prefix: str | None = None, others: Others = "refuse"
) -> FittedNetwork:
    """Find the tensors of a network in a file, behind the one prefix with which all are there.

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
    rest = [n for n in stored.tensors if n not in again and n not in set(places.values())]
    fitted = FittedNetwork(stored, places, again, tuple(rest))
    _check_types(fitted, names)
    _check_ties(fitted)
    if others == "refuse":
        _check_others(fitted, {renaming.place(name) for name in names.buffers}, names.ignored)
    return fitted


def _again(
    stored: StoredNetwork, names: NetworkNames, places: Mapping[str, str], renaming: Renaming
) -> dict[str, str]:
    """Tied tensors that the file holds more than once."""
    firsts = names.aliases | {first: first for first in names.aliases.values()}
    found = {renaming.place(name): first for name, first in firsts.items()}
    return {p: first for p, first in found.items() if p in stored.tensors and p != places[first]}


# ------------------------------------------------------------ what cannot be moved
def _check_types(fitted: FittedNetwork, names: NetworkNames) -> None:
    for name, tensor in names.tensors.items():
        dtype = fitted.stored.tensors[fitted.places[name]].dtype
        if tensor.is_floating_point() != (dtype in _FLOATS):
            raise ValueError(
                f"{fitted.stored.path}: {fitted.places[name]!r} is of type "
                f"{str(dtype).removeprefix('torch.')}, and the network has "
                f"{str(tensor.dtype).removeprefix('torch.')}: quantised networks are not read."
            )


def _check_ties(fitted: FittedNetwork) -> None:
    for place, name in fitted.again.items():
        if not torch.equal(fitted.stored.read(place), fitted.read(name)):
            raise ValueError(
                f"{fitted.stored.path}: {place!r} and {fitted.places[name]!r} are one tensor in "
                "the network, and differ in the file."
            )


def _check_others(fitted: FittedNetwork, buffers: Collection[str], ignored: Sequence[str]) -> None:
    """Numbers of something else would stay where they are while the network moves."""
    for name in fitted.others:
        tensor = fitted.stored.tensors[name]
        harmless = tensor.shape.numel() <= 1 or not tensor.dtype.is_floating_point
        unused = name in buffers or any(re.search(pattern, name) for pattern in ignored)
        if not (harmless or unused):
            raise ValueError(
                f"{fitted.stored.path} holds {name!r}, which is none of the network and would not "
                "move with it; `--others copy` keeps such tensors as they are."
            )

"""Names of the tensors of a network, and the corresponding names in a file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from weightsym.networks import dicts as P


@dataclass(frozen=True)
class NetworkNames:
    """The names of the tensors of a network.

    Attributes:
        tensors: all of them, each once.
        aliases: further names of tied tensors, and their first names.
        buffers: names that a file may have besides, because the network computes them anew.
        base: a first part of names that files may leave out.
        ignored: patterns of names that old files have, and that nothing uses.
        fixed: names that a file may lack, as the network holds these weights fixed.

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
    fixed: frozenset[str] = frozenset()

    @classmethod
    def of(cls, module: nn.Module, base: str = "", ignored: Iterable[str] = ()) -> NetworkNames:
        """Return the names of a module.

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
        fixed = frozenset(P.fixed_weights(module))
        return cls(P.of(module), aliases, buffers, base, tuple(ignored), fixed)


class Renaming(NamedTuple):
    """A prefix that a file adds to all names, and a part that it omits."""

    prefix: str = ""
    left_out: str = ""

    def place(self, name: str) -> str:
        """Return the name in the file."""
        return self.prefix + name.removeprefix(self.left_out)


def find_names(
    path: Path, stored: Mapping[str, Any], names: NetworkNames, prefix: str | None = None
) -> tuple[dict[str, str], Renaming]:
    """Find the one prefix under which a file has all tensors of a network in their shapes.

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
        present = [sum(key in stored for key in table.values()) for table in tables]
        nearest = present.index(max(present))
        members = any(key.startswith("state.networks.") for key in stored)
        hint = "; save one of its members with torch.save(module.member(0).state_dict(), 'one.pt')"
        raise ValueError(f"{path} does not fit: {misfits[nearest]}{hint if members else ''}.")
    if any(tables[k] != tables[fitting[0]] for k in fitting):
        prefixes = " or ".join(sorted({repr(renamings[k].prefix) for k in fitting}))
        raise ValueError(f"Several networks in {path} fit: choose one by its `prefix`, {prefixes}.")
    return tables[fitting[0]], renamings[fitting[0]]


def _renamings(
    stored: Mapping[str, Any], names: NetworkNames, prefix: str | None
) -> Iterator[Renaming]:
    first = next(iter(names.tensors))
    aliases = [alias for alias, name in names.aliases.items() if name == first]
    for network_names in (first, *aliases) if prefix is None else ():
        for name in stored:
            if name.endswith(f".{network_names}"):
                yield Renaming(name.removesuffix(network_names))
    yield Renaming(prefix or "")
    if names.base and prefix is None:
        yield Renaming(left_out=f"{names.base}.")


def _places(stored: Mapping[str, Any], names: NetworkNames, renaming: Renaming) -> dict[str, str]:
    """Return the name in the file of every tensor, of tied ones under any of their names."""
    places = {}
    for name in names.tensors:
        aliases = [alias for alias, first in names.aliases.items() if first == name]
        options = [renaming.place(n) for n in (name, *aliases)]
        present = [n for n in options if n in stored]
        if present or name not in names.fixed:
            places[name] = (present or options)[0]
    return places


def _misfit(
    stored: Mapping[str, Any], wanted: Mapping[str, Tensor], places: Mapping[str, str]
) -> str | None:
    """Describe in half a sentence the first tensor that a file lacks, if any.

    Args:
        stored: whatever has a shape, by name in the file.
        wanted: the tensors of the network.
        places: by name in the network, the name in the file.
    """
    missing = [name_in_file for name_in_file in places.values() if name_in_file not in stored]
    if missing:
        more = f" and {len(missing) - 1} more names" if len(missing) > 1 else ""
        return f"it lacks {missing[0]!r}{more}"
    for name, key in places.items():
        shape = stored[key].shape
        if shape != wanted[name].shape:
            size = tuple(wanted[name].shape)
            return f"{key!r} has shape {tuple(shape)}, the network has {size}"
    return None

"""The manifest: what its lines may say, and the tensors, files and records that they add up to."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from lightning_bnn.bank.shards import Layout, Shard, is_shard_name, overlapping
from lightning_bnn.params import Params, is_weight

__all__ = [
    "Added",
    "Contents",
    "Entry",
    "FORMAT",
    "Header",
    "Merged",
    "Truncated",
    "check_records",
    "header",
    "line_of",
    "parsed",
]


FORMAT = 1
"""The format of the manifests that this version writes and reads."""


@dataclass(frozen=True)
class Header:
    """The first line: all tensors of a network, and the type of stored weights if not their own."""

    dtype: torch.dtype | None
    layout: dict[str, Layout]


@dataclass(frozen=True)
class Added:
    """A file with new networks, and what is known of each."""

    shard: Shard
    records: list[dict[str, Any]]


@dataclass(frozen=True)
class Merged:
    """A file that holds the networks of several others, which it replaces."""

    shard: Shard
    names: list[str]


@dataclass(frozen=True)
class Truncated:
    """Only the first networks are left."""

    rows: int


Entry = Header | Added | Merged | Truncated


def line_of(entry: Entry) -> dict[str, Any]:
    """An entry as it is written; `parsed` is the inverse."""
    match entry:
        case Header(dtype, layout):
            tensors = {n: [_name(t.dtype), list(t.shape), t.is_weight] for n, t in layout.items()}
            return {"bank": FORMAT, "dtype": dtype and _name(dtype), "tensors": tensors}
        case Added(shard, records):
            return {**_shard_line(shard), "records": records}
        case Merged(shard, names):
            return {**_shard_line(shard), "merge": names}
        case Truncated(rows):
            return {"truncate": rows}


def parsed(line: Mapping[str, Any]) -> Entry:
    """The entry that a line stands for.

    Raises:
        ValueError: it stands for none; the message is half a sentence.
    """
    if "bank" in line:
        return _header(line)
    if "truncate" in line:
        _expect(line, truncate=_is_count)
        return Truncated(line["truncate"])
    if "merge" in line:
        return Merged(_shard(line, merge=_are_names), line["merge"])
    shard = _shard(line, records=_are_records)
    if len(line["records"]) != shard.rows:
        raise ValueError(f"it has {shard.rows} networks and {len(line['records'])} records")
    return Added(shard, line["records"])


def _header(line: Mapping[str, Any]) -> Header:
    _expect(line, bank=_is_count, dtype=_is_floating_type_or_none, tensors=_are_tensors)
    dtype = None if line["dtype"] is None else getattr(torch, line["dtype"])
    layout = {
        name: Layout(getattr(torch, dtype), torch.Size(shape), is_weight)
        for name, (dtype, shape, is_weight) in line["tensors"].items()
    }
    return Header(dtype, layout)


def _shard(line: Mapping[str, Any], **more: Callable[[Any], bool]) -> Shard:
    file = {"shard": _is_file, "rows": _is_count, "bytes": _is_count, "sha256": _is_hash}
    _expect(line, **file, checks=_are_checks, **more)
    return Shard(line["shard"], line["rows"], line["bytes"], line["sha256"], line["checks"])


def _shard_line(shard: Shard) -> dict[str, Any]:
    line = {"shard": shard.name, "rows": shard.rows, "bytes": shard.size, "sha256": shard.sha256}
    return {**line, "checks": dict(shard.checks)}


# ------------------------------------------------------------ what a value must be
def _expect(line: Mapping[str, Any], **values: Callable[[Any], bool]) -> None:
    if line.keys() != values.keys():
        odd = sorted(line.keys() ^ values.keys())[0]
        raise ValueError(f"{odd!r} is {'missing' if odd in values else 'unknown'}")
    for name, fits in values.items():
        if not fits(line[name]):
            raise ValueError(f"{name!r} cannot be {str(line[name])[:80]!r}")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_hash(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[0-9a-f]{64}", value) is not None


def _is_file(value: Any) -> bool:
    """Only a bare name that a bank gives: no path leads out of the folder."""
    return isinstance(value, str) and is_shard_name(value)


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(map(_is_file, value))


def _are_records(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(record, dict) for record in value)


def _are_checks(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_count, value.values()))


def _is_type(value: Any) -> bool:
    return isinstance(value, str) and isinstance(getattr(torch, value, None), torch.dtype)


def _is_floating_type_or_none(value: Any) -> bool:
    return value is None or (_is_type(value) and getattr(torch, value).is_floating_point)


def _are_tensors(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(each, list)
        and len(each) == 3
        and _is_type(each[0])
        and isinstance(each[1], list)
        and all(map(_is_count, each[1]))
        and isinstance(each[2], bool)
        for each in value.values()
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass
class Contents:
    """The state of a bank.

    Attributes:
        dtype: the type in which floating tensors are stored, if not their own.
        layout: the tensors of a network.
        shards: the files, in the order of their rows.
        records: what is known of each network.
        named: every file that there ever was; those that are no longer among the shards have been
            merged or truncated away.
    """

    dtype: torch.dtype | None = None
    layout: dict[str, Layout] = field(default_factory=dict)
    shards: list[Shard] = field(default_factory=list)
    records: list[dict[str, Any]] = field(default_factory=list)
    named: set[str] = field(default_factory=set)

    @property
    def replaced(self) -> set[str]:
        """Files whose networks are in other files now, or were truncated away."""
        return self.named - {shard.name for shard in self.shards}

    def apply(self, entry: Entry) -> None:
        """Change the state as one line says.

        Raises:
            ValueError: the entry contradicts those before it; the message is half a sentence.
        """
        if isinstance(entry, Header) == bool(self.layout):
            raise ValueError("there is a second header" if self.layout else "there is no header")
        match entry:
            case Header():
                self.dtype, self.layout = entry.dtype, entry.layout
            case Added():
                self._name(entry.shard)
                self.shards.append(entry.shard)
                self.records += entry.records
            case Merged():
                places = self._places(entry)
                self._name(entry.shard)
                self.shards[places] = [entry.shard]
            case Truncated():
                if entry.rows > len(self.records):
                    raise ValueError(f"there are {len(self.records)} networks, not {entry.rows}")
                del self.records[entry.rows :]
                remaining = overlapping(self.shards, slice(entry.rows))
                self.shards = [replace(shard, rows=part.stop) for shard, part in remaining]

    def _name(self, shard: Shard) -> None:
        if shard.name in self.named:
            raise ValueError(f"{shard.name} is there already")
        if shard.checks.keys() != self.layout.keys():
            raise ValueError(f"{shard.name} holds other tensors than the header tells")
        self.named.add(shard.name)

    def _places(self, entry: Merged) -> slice:
        """Where the files that are merged stand: one after the other."""
        names = [shard.name for shard in self.shards]
        first = names.index(entry.names[0]) if entry.names[0] in names else 0
        places = slice(first, first + len(entry.names))
        rows = sum(shard.rows for shard in self.shards[places])
        if names[places] != entry.names or rows != entry.shard.rows:
            raise ValueError("the files that are merged are not those of the bank")
        return places

    def stored_layout(self, name: str) -> Layout:
        """One tensor as it is in the files."""
        layout = self.layout[name]
        return layout._replace(dtype=self.dtype) if self.dtype and layout.is_weight else layout

    def check(self, networks: Params, bank: str) -> None:
        """Refuse networks of another kind than the first ones."""
        if networks.keys() != self.layout.keys():
            odd = sorted(networks.keys() ^ self.layout.keys())[0]
            raise ValueError(f"{bank} holds other networks: {odd!r} is in only one.")
        for name, tensor in networks.items():
            dtype, shape, _ = self.layout[name]
            if tensor.shape[1:] != shape:
                raise ValueError(
                    f"`{name}` has shape {tuple(tensor.shape[1:])}, in the bank {tuple(shape)}."
                )
            if torch.promote_types(dtype, tensor.dtype) != dtype:
                raise ValueError(f"`{name}` is {tensor.dtype}, the bank keeps {dtype}.")

    def stored(self, name: str, tensor: Tensor) -> Tensor:
        """A tensor in the type in which it is stored; buffers keep their own."""
        result = tensor.to(self.stored_layout(name).dtype)
        if self.dtype == torch.float16 and bool((result.isinf() & ~tensor.isinf()).any()):
            raise ValueError(f"`{name}` is too large for torch.float16: use torch.bfloat16.")
        return result


def header(networks: Params, dtype: torch.dtype | None, weights: Sequence[str] | None) -> Header:
    """The first line of a manifest: the first networks decide what all others look like."""
    layout = {
        name: Layout(
            t.dtype, t.shape[1:], is_weight(name, t) if weights is None else name in weights
        )
        for name, t in networks.items()
    }
    return Header(dtype, layout)


def check_records(records: Sequence[Mapping[str, Any]]) -> None:
    """Refuse records that are not plain JSON, before anything is written."""
    try:
        json.dumps([dict(record) for record in records])
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"`records` must be plain JSON: {error}.") from None

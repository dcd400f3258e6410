"""The lines of a manifest: what each may say, checked before anything relies on it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from lightning_bnn.bank.shards import Shard, is_shard_name

__all__ = [
    "FORMAT",
    "Added",
    "Entry",
    "Header",
    "Layout",
    "Merged",
    "Truncated",
    "line_of",
    "parsed",
]

FORMAT = 1
"""The format of the manifests that this version writes and reads."""


class Layout(NamedTuple):
    """One tensor of every network."""

    dtype: torch.dtype
    shape: torch.Size
    is_weight: bool


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

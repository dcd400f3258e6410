"""The lines of a manifest: what each may say, checked before anything believes it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from lightning_bnn.bank.shards import Shard, is_shard_name

__all__ = ["FORMAT", "Added", "Entry", "Header", "Layout", "Merged", "Truncated", "parsed"]

FORMAT = 1
"""Of the manifests that are written and read."""


class Layout(NamedTuple):
    """One tensor of every network."""

    dtype: torch.dtype
    shape: torch.Size
    is_weight: bool


@dataclass(frozen=True)
class Header:
    """The first line: the type in which weights are stored, if not their own, and all tensors."""

    dtype: torch.dtype | None
    layout: dict[str, Layout]

    def line(self) -> dict[str, Any]:
        """As it is written."""
        tensors = {n: [_name(t.dtype), list(t.shape), t.is_weight] for n, t in self.layout.items()}
        kind = None if self.dtype is None else _name(self.dtype)
        return {"bank": FORMAT, "dtype": kind, "tensors": tensors}


@dataclass(frozen=True)
class Added:
    """A file with new networks, and what is known of each."""

    shard: Shard
    records: list[dict[str, Any]]

    def line(self) -> dict[str, Any]:
        """As it is written."""
        return {**_line(self.shard), "records": self.records}


@dataclass(frozen=True)
class Merged:
    """A file that holds the networks of several others, which it replaces."""

    shard: Shard
    names: list[str]

    def line(self) -> dict[str, Any]:
        """As it is written."""
        return {**_line(self.shard), "merge": self.names}


@dataclass(frozen=True)
class Truncated:
    """Only the first networks are left."""

    rows: int

    def line(self) -> dict[str, Any]:
        """As it is written."""
        return {"truncate": self.rows}


Entry = Header | Added | Merged | Truncated


def parsed(line: Mapping[str, Any]) -> Entry:
    """What a line means.

    Raises:
        ValueError: it means nothing; the message is a half sentence.
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
    _expect(line, bank=_is_format, dtype=_is_kind, tensors=_are_tensors)
    kind = None if line["dtype"] is None else getattr(torch, line["dtype"])
    layout = {
        name: Layout(getattr(torch, dtype), torch.Size(shape), is_weight)
        for name, (dtype, shape, is_weight) in line["tensors"].items()
    }
    return Header(kind, layout)


def _shard(line: Mapping[str, Any], **more: Callable[[Any], bool]) -> Shard:
    checks = {"checks": _are_checks} if "checks" in line else {}  # banks of before have none
    _expect(
        line, shard=_is_file, rows=_is_count, bytes=_is_count, sha256=_is_hash, **checks, **more
    )
    own = line["shard"], line["rows"], line["bytes"], line["sha256"]
    return Shard(*own, line.get("checks"))


def _line(shard: Shard) -> dict[str, Any]:
    checks = {} if shard.checks is None else {"checks": dict(shard.checks)}
    named = {"shard": shard.name, "rows": shard.rows, "bytes": shard.size, "sha256": shard.sha256}
    return {**named, **checks}


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


def _is_format(value: Any) -> bool:
    return _is_count(value) and value == FORMAT


def _is_hash(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[0-9a-f]{64}", value) is not None


def _is_file(value: Any) -> bool:
    """A bare name of a bank's own: no path leads out of the folder."""
    return isinstance(value, str) and is_shard_name(value)


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(map(_is_file, value))


def _are_records(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(record, dict) for record in value)


def _are_checks(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_count, value.values()))


def _is_dtype(value: Any) -> bool:
    return isinstance(value, str) and isinstance(getattr(torch, value, None), torch.dtype)


def _is_kind(value: Any) -> bool:
    return value is None or (_is_dtype(value) and getattr(torch, value).is_floating_point)


def _are_tensors(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(each, list)
        and len(each) == 3
        and _is_dtype(each[0])
        and isinstance(each[1], list)
        and all(map(_is_count, each[1]))
        and isinstance(each[2], bool)
        for each in value.values()
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

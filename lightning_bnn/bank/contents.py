"""What the lines of a manifest add up to: tensors, files, records."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from lightning_bnn.bank.entries import Added, Entry, Header, Layout, Merged, Truncated
from lightning_bnn.bank.shards import Shard, overlapping
from lightning_bnn.params import Params, is_weight

__all__ = ["Contents", "check_records", "header"]


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

"""What the lines of a manifest add up to: tensors, files, records."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_bnn.bank.shards import Shard, overlapping
from lightning_bnn.params import Params, is_weight

__all__ = ["Contents", "Layout", "check_records", "header", "shard_entry"]


class Layout(NamedTuple):
    """One tensor of every network."""

    dtype: torch.dtype
    shape: torch.Size
    is_weight: bool


@dataclass
class Contents:
    """The state of a bank.

    Attributes:
        dtype: in which floating tensors are stored, if not in their own.
        layout: the tensors of a network.
        shards: the files, in the order of their rows.
        records: what is known of each network.
    """

    dtype: torch.dtype | None = None
    layout: dict[str, Layout] = field(default_factory=dict)
    shards: list[Shard] = field(default_factory=list)
    records: list[dict[str, Any]] = field(default_factory=list)

    def apply(self, entry: Mapping[str, Any]) -> None:
        """What one line means."""
        if "bank" in entry:
            self.dtype = _dtype(entry["dtype"])
            self.layout = {
                name: Layout(_dtype(kind), torch.Size(shape), is_w)
                for name, (kind, shape, is_w) in entry["tensors"].items()
            }
        elif "truncate" in entry:
            del self.records[entry["truncate"] :]
            kept = overlapping(self.shards, slice(entry["truncate"]))
            self.shards = [shard.first(part.stop) for shard, part in kept]
        elif "merge" in entry:
            names = [shard.name for shard in self.shards]
            first = names.index(entry["merge"][0])
            self.shards[first : first + len(entry["merge"])] = [Shard.of(entry)]
        else:
            self.shards.append(Shard.of(entry))
            self.records += entry["records"]

    def check(self, networks: Params, where: str) -> None:
        """Refuse networks of another kind than the first ones."""
        if networks.keys() != self.layout.keys():
            odd = sorted(networks.keys() ^ self.layout.keys())[0]
            raise ValueError(f"{where} holds other networks: {odd!r} is in only one.")
        for name, tensor in networks.items():
            shape = self.layout[name].shape
            if tensor.shape[1:] != shape:
                raise ValueError(
                    f"`{name}` has shape {tuple(tensor.shape[1:])}, in the bank {tuple(shape)}."
                )
            own = self.layout[name].dtype
            if torch.promote_types(own, tensor.dtype) != own:
                raise ValueError(f"`{name}` is {tensor.dtype}, the bank keeps {own}.")

    def stored(self, name: str, tensor: Tensor) -> Tensor:
        """A tensor in the type in which it is stored; buffers keep their own."""
        own = self.layout[name]
        result = tensor.to(self.dtype if self.dtype and own.is_weight else own.dtype)
        if self.dtype == torch.float16 and bool((result.isinf() & ~tensor.isinf()).any()):
            raise ValueError(f"`{name}` is too large for torch.float16: use torch.bfloat16.")
        return result


def header(
    networks: Params, dtype: torch.dtype | None, weights: Sequence[str] | None
) -> dict[str, Any]:
    """The first line of a manifest: the first networks decide what all of them look like."""
    layout = {
        name: (
            str(t.dtype).removeprefix("torch."),
            list(t.shape[1:]),
            is_weight(name, t) if weights is None else name in weights,
        )
        for name, t in networks.items()
    }
    kind = str(dtype).removeprefix("torch.") if dtype else None
    return {"bank": 1, "dtype": kind, "tensors": layout}


def shard_entry(shard: Shard, **more: Any) -> dict[str, Any]:
    """The line that adds a file."""
    named = {
        "shard": shard.name,
        "rows": shard.rows,
        "bytes": shard.size,
        "sha256": shard.sha256,
    }
    return {**named, **more}


def _dtype(name: str | None) -> Any:
    return None if name is None else getattr(torch, name)


def check_records(records: Sequence[Mapping[str, Any]]) -> None:
    """Before anything is written: records are plain JSON."""
    for record in records:
        try:
            json.dumps(dict(record))
        except TypeError as error:
            raise ValueError(f"`records` must be plain JSON: {error}.") from None

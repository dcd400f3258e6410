"""Thousands of networks on disk, appended singly or in stacks, read by row or by layer."""

from __future__ import annotations

import bisect
import operator
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, SupportsIndex, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_bnn.bank.disk import WriterLock, check_file
from lightning_bnn.bank.manifest import Manifest, check_records, header
from lightning_bnn.bank.rows import checksum, rows_per_block, write_block
from weightsym.files import sync
from weightsym.params import Params, check_floating_type, stack, stack_size


class CheckpointBank:
    """Networks of one architecture on disk, appended singly or in stacks.

    A bank is a folder with one file of networks, row after row, and a manifest of JSON lines, which
    describes the rows and holds a record of each. Once `append` has returned, its network survives
    a crash at any moment. The file is mapped into memory: a layer of all networks, or one network,
    is read without touching the rest.

    A manifest that does not match its checksums or the file is refused, and every tensor is
    compared with its checksum when it is first read.

    Args:
        path: the folder.
        mode: ``"a"`` to append (creates the folder if needed), ``"r"`` to read only, also while
            another process appends.
        dtype: type in which floating tensors are stored, for example ``torch.float16``; networks
            are read in their own type. By default they are stored in that type, too.
        weights: names of the weights, see `shapes`; by default all floating tensors that are not
            BatchNorm statistics.

    >>> import tempfile
    >>> bank = CheckpointBank(tempfile.mkdtemp())
    >>> bank.append({"w": torch.zeros(2)}, step=1)
    >>> bank.extend({"w": torch.ones(3, 2)})
    >>> len(bank), bank[1]["w"], bank.records[0]
    (4, tensor([1., 1.]), {'step': 1})
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        mode: Literal["a", "r"] = "a",
        dtype: torch.dtype | None = None,
        weights: Sequence[str] | None = None,
    ) -> None:
        if mode not in ("a", "r"):
            raise ValueError(f"`mode` must be 'a' or 'r', got {mode!r}.")
        if dtype is not None:
            check_floating_type("dtype", dtype)
        self.path, self.mode = Path(path), mode
        if mode == "r" and not self.path.is_dir():
            raise ValueError(f"There is no bank at {self.path}.")
        self._dtype, self._weights = dtype, weights
        self._file = self.path / "networks.bin"
        self._lock = WriterLock(self.path) if mode == "a" else None
        try:
            self._begin()
        except BaseException:  # or nobody could append until this one is collected
            self.close()
            raise

    def _begin(self) -> None:
        manifest = self.path / "manifest.jsonl"
        if not os.path.lexists(manifest) and (self.mode == "r" or self._file.exists()):
            raise ValueError(f"There is no manifest.jsonl among the files at {self.path}.")
        self.reload()
        if self._dtype not in (None, self._manifest.dtype) and self._manifest.layout:
            raise ValueError(f"`dtype`: {self!r} already exists, but {self._dtype} was requested.")

    def reload(self) -> None:
        """Read the manifest again, to see the appends of another process."""
        manifest = Manifest(self.path / "manifest.jsonl")
        check_file(self._file)
        size = self._file.stat().st_size if self._file.exists() else 0
        if size < len(manifest.records) * manifest.row_bytes or (size and not manifest.layout):
            raise ValueError(
                f"The manifest of the bank {self.path} does not match {self._file.name}, "
                f"which has {size} bytes: restore a copy of both; nothing has been "
                "changed."
            )
        self._manifest = manifest
        self._mapped: Any = None
        self._checked: set[tuple[int, str]] = set()

    # -------------------------------------------------------- content
    @property
    def rows(self) -> int:
        """The number of networks in the bank."""
        return len(self._manifest.records)

    @property
    def records(self) -> list[dict[str, Any]]:
        """The records of the networks: step, epoch, metrics and others."""
        return self._manifest.records

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tensors, including buffers."""
        return tuple(self._manifest.layout)

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """The layers: the shapes of one network's weights, without buffers."""
        return {name: t.shape for name, t in self._manifest.layout.items() if t.is_weight}

    @property
    def stored_as(self) -> torch.dtype | None:
        """The dtype in which weights are stored, or None for their own."""
        return self._manifest.dtype

    @property
    def nbytes(self) -> int:
        """The size of all networks on disk."""
        return self.rows * self._manifest.row_bytes

    def __len__(self) -> int:
        return self.rows

    def __repr__(self) -> str:
        stored_as = f", stored as {self._manifest.dtype}" if self._manifest.dtype else ""
        return f"CheckpointBank({str(self.path)!r}: {self.rows} networks{stored_as})"

    # -------------------------------------------------------- reading
    @overload
    def __getitem__(self, rows: SupportsIndex) -> Params: ...
    @overload
    def __getitem__(
        self, rows: slice | Sequence[SupportsIndex] | Tensor | NDArray[Any]
    ) -> Params: ...
    def __getitem__(
        self, rows: SupportsIndex | slice | Sequence[SupportsIndex] | Tensor | NDArray[Any]
    ) -> Params:
        """Read one network, or a stack of some (indices, or a mask of all), in their own dtypes."""
        if isinstance(rows, slice):
            start, stop, step = rows.indices(self.rows)  # the same ones if the bank grows meanwhile
            if step == 1:
                return self._copied(slice(start, stop))
            rows = range(start, stop, step)
        chosen = _selected(rows, self.rows)
        if not chosen.ndim:
            return self._network(int(chosen))
        return stack([self._network(int(row)) for row in chosen]) if len(chosen) else self[0:0]

    def __iter__(self) -> Iterator[Params]:
        return (self._network(row) for row in range(self.rows))

    def _network(self, row: int) -> Params:
        return {n: t[0] for n, t in self._copied(slice(row, row + 1)).items()}

    def _copied(self, rows: slice) -> Params:
        copies = {n: self.layer(n, rows).clone() for n in self.names}
        self._manifest.require_rows(rows.stop)  # as of now: they may have been written over
        return copies

    def layer(self, name: str, rows: slice = slice(None)) -> Tensor:
        """Return one tensor of some networks, ``(rows, *shape)``, in its own dtype.

        It may share memory with the bank's view of the file: clone it before you change it in
        place, or use it after another process may have truncated the bank, as a resumed run does.
        """
        tensor = self._stored(name, rows).to(self._manifest.layout[name].dtype)
        self._manifest.require_rows(rows.indices(self.rows)[1])
        return tensor

    def read(self, name: str, rows: slice, columns: slice) -> Tensor:
        """Return some features of one flattened layer of some networks, as stored."""
        tensor = self._stored(name, rows)
        flat = tensor.reshape(len(tensor), self._manifest.layout[name].shape.numel())
        copy = flat[:, columns].clone()
        self._manifest.require_rows(rows.indices(self.rows)[1])
        return copy

    def blocks(self, memory: int = 2**28) -> Iterator[Params]:
        """Yield stacks of bounded size, each with at least one network."""
        layout = self._manifest.layout.values()
        size = sum(t.shape.numel() * t.dtype.itemsize for t in layout)
        step = max(1, memory // max(1, size))
        for start in range(0, self.rows, step):
            yield self[start : start + step]

    def verify(self) -> None:
        """Compare the whole file with its checksums, and raise an error at the first difference."""
        self._checked.clear()
        for name in self.names:
            self._stored(name, slice(None))

    # -------------------------------------------------------- writing
    def append(self, network: Params, **record: Any) -> None:
        """Append one network, and return once it is on disk.

        Args:
            network: its tensors.
            **record: fields to store with it: ``step``, ``epoch``, ``metrics``, ...
        """
        _check_dict("network", network)
        self.extend({name: t[None] for name, t in network.items()}, [record])

    def extend(self, networks: Params, records: Sequence[Mapping[str, Any]] | None = None) -> None:
        """Append a stack of networks in one write, or leave the bank unchanged on an error.

        Args:
            networks: their tensors, each with a leading dimension.
            records: fields to store with each.
        """
        self._check_writable()
        _check_dict("networks", networks)
        count = stack_size(networks)
        records = [{}] * count if records is None else records
        if len(records) != count:
            raise ValueError(
                f"`records` must have one entry per network: {count}, got {len(records)}."
            )
        check_records(records)
        manifest = self._manifest
        if not manifest.layout:
            manifest.write(header(networks, self._dtype, self._weights))
        manifest.check(networks)
        manifest.require_unchanged()
        if count:
            step = rows_per_block(manifest.row_bytes)
            checks = self._write(networks, range(0, count, step), step)
            split = {"rows": step} if step < count else {}
            copies = [dict(record) for record in records]
            manifest.write({"records": copies, "checks": checks, **split})

    def truncate(self, rows: int) -> None:
        """Remove all networks except the first ``rows``."""
        self._check_writable()
        if not 0 <= rows <= self.rows:
            raise ValueError(f"`rows` must be in 0..{self.rows}, got {rows}.")
        if rows < self.rows:
            last = next((b.start for b in reversed(self._manifest.blocks) if b.start < rows), 0)
            checks = [checksum(self._stored(name, slice(last, rows))) for name in self.names]
            self._manifest.write({"truncate": rows, "checks": checks})
            self._checked.clear()

    def absorb(self, other: CheckpointBank) -> None:
        """Append all networks of another bank."""
        if other.path.resolve() == self.path.resolve():
            raise ValueError("`other` is this bank itself.")
        start = 0
        for networks in other.blocks():
            stop = start + stack_size(networks)
            self.extend(networks, other.records[start:stop])
            start = stop

    def close(self) -> None:
        """Stop appending, so that another process can append. Reading still works."""
        lock, self._lock, self.mode = self._lock, None, "r"
        if lock is not None:
            lock.release()

    def __enter__(self) -> CheckpointBank:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -------------------------------------------------------- the file
    def _check_writable(self) -> None:
        if self.mode != "a":
            raise ValueError(f"The bank {self.path} is open for reading only.")

    def _write(self, networks: Params, starts: range, step: int) -> list[int]:
        """Write rows after the existing ones, and return the checksums of all blocks."""
        is_new, manifest, checks = not self._file.exists(), self._manifest, list[int]()
        with self._file.open("xb" if is_new else "r+b", buffering=0) as file:
            file.seek(self.rows * manifest.row_bytes)  # a crash may have left others there
            for start in starts:
                rows = slice(start, start + step)
                block = partial(_rows_of, manifest, networks, rows)
                count = len(range(*rows.indices(stack_size(networks))))
                checks += write_block(file, manifest.layout, manifest.row_bytes, block, count)
            os.fsync(file.fileno())
        if is_new:
            sync(self.path)
        return checks

    def _stored(self, name: str, rows: slice) -> Tensor:
        """Map a tensor of some networks, as stored, and compare it with its checksums once."""
        if name not in self._manifest.layout:
            names = ", ".join(self.names[:5]) or "nothing"
            raise ValueError(f"The bank has no tensor {name!r}; it holds {names}, ...")
        if rows.step not in (None, 1):
            raise ValueError(f"`rows` must be a slice without a step, got {rows}.")
        start, stop, _ = rows.indices(self.rows)
        tensor, blocks = self._column(name), self._manifest.blocks
        first = bisect.bisect_right(blocks, start, key=lambda block: block.start) - 1
        for block in blocks[max(0, first) :]:
            if block.start >= stop:
                break
            if (block.start, name) not in self._checked:
                check = block.checks[self.names.index(name)]
                if checksum(tensor[block.start : block.stop]) != check:
                    self._manifest.require_rows(block.stop)
                    raise ValueError(
                        f"{self._file} is corrupt: the checksum of {name!r} in the "
                        f"networks {block.start} to {block.stop - 1} does not match."
                    )
                self._checked.add((block.start, name))
        return tensor[start : max(start, stop)]

    def _column(self, name: str) -> Tensor:
        """Map one tensor of all networks, whose rows are apart in memory."""
        layout, size = self._manifest.layout[name], self.nbytes
        if not size:
            return torch.empty(self.rows, *layout.shape, dtype=layout.stored)
        if self._mapped is None or self._mapped.nbytes() < size:
            self._mapped = torch.UntypedStorage.from_file(str(self._file), False, size)
        item = layout.stored.itemsize
        strides = [*accumulate(layout.shape[:0:-1], operator.mul, initial=1)][::-1]
        strides = [self._manifest.row_bytes // item, *strides[: len(layout.shape)]]
        whole = torch.empty(0, dtype=layout.stored).set_(self._mapped)
        return whole.as_strided((self.rows, *layout.shape), strides, layout.offset // item)


def _rows_of(manifest: Manifest, networks: Params, rows: slice, name: str) -> Tensor:
    return manifest.stored(name, networks[name][rows])


def _check_dict(name: str, value: Any) -> None:
    if not isinstance(value, Mapping):
        raise ValueError(
            f"`{name}` must be a dict of tensors, such as the result of `params.of` or "
            f"`params.stack`, got a {type(value).__name__}."
        )


def _selected(rows: Any, count: int) -> NDArray[Any]:
    """Return row indices, one or several, from indices or from a mask."""
    try:
        index = np.asarray(rows.tolist() if isinstance(rows, Tensor) else rows)
        chosen = np.asarray(np.arange(count)[index if index.size else index.astype(int)])
        if chosen.ndim <= 1:
            return chosen
    except (IndexError, TypeError, ValueError):
        pass
    raise IndexError(
        f"The bank has {count} networks: `rows` must be a number, numbers, a slice or one truth "
        f"value for each, got {str(rows)[:80]} (`layer` reads one tensor of all)."
    )

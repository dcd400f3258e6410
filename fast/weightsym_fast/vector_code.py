"""A writer of LLVM functions on vectors, with one lane for each example."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from weightsym_fast.chains import Pair, StageSizes


class VectorCode:
    """One function: members from ``first`` to ``last``, blocks of examples, loops of known length.

    Values are names or literals of LLVM, as strings. All pointers among the arguments point to
    memory of their own.

    Args:
        name: of the function.
        pointers: names of the arguments that are pointers.
        number_type: ``"float"`` or ``"double"``.
        lanes: numbers in a vector.
    """

    def __init__(self, name: str, pointers: tuple[str, ...], number_type: str, lanes: int) -> None:
        self.kind, self.lanes = number_type, lanes
        self.vector, self.mask = f"<{lanes} x {number_type}>", f"<{lanes} x i1>"
        self.label, self._count = "start", 0
        self._slots: list[str] = []
        self._lines: list[str] = []
        arguments = [f"ptr noalias %{p}" for p in pointers]
        numbers = ("shared", "first", "last", "blocks", "valid", "weights", "biases")
        self._head = (
            f"define void @{name}({', '.join([*arguments, *(f'i64 %{n}' for n in numbers)])})"
        )

    def text(self) -> str:
        """Return the whole function as LLVM assembly."""
        return "\n".join(
            [
                f"{self._head} alignstack(64) {{",
                "start:",
                *self._slots,
                *self._lines,
                "ret void",
                "}",
            ]
        )

    def do(self, line: str) -> None:
        """Add an instruction without a result."""
        self._lines.append(line)

    def let(self, expression: str) -> str:
        """Add an instruction, and return the name of its result."""
        self._count += 1
        self._lines.append(f"%v{self._count} = {expression}")
        return f"%v{self._count}"

    # ------------------------------------------------------------ loops
    @contextmanager
    def loop(self, count: int | str, start: str = "0") -> Iterator[str]:
        """Loop from ``start`` up to ``count``, at least once, and yield the index.

        Args:
            count: where it ends, a number or the name of one.
            start: where it begins.
        """
        if count == 1:
            yield "0"
            return
        self._count += 1
        head, before, index = f"l{self._count}", self.label, f"%i{self._count}"
        self._lines += [
            f"br label %{head}",
            f"{head}:",
            f"{index} = phi i64 [ {start}, %{before} ], [ {index}n, %{head}e ]",
        ]
        self.label = head
        yield index
        self._lines += [
            f"br label %{head}e",
            f"{head}e:",
            f"{index}n = add nuw nsw i64 {index}, 1",
            f"{index}c = icmp eq i64 {index}n, {count}",
            f"br i1 {index}c, label %{head}x, label %{head}",
            f"{head}x:",
        ]
        self.label = f"{head}x"

    def parts(self, count: int, size: int) -> Iterator[tuple[str, int]]:
        """Loop over parts of one size, then over the remainder, and yield the first index of each.

        Args:
            count: how much there is.
            size: of all parts but the last.
        """
        whole, remainder = divmod(count, size)
        if whole:
            with self.loop(whole) as k:
                yield self.index((k, size)), size
        if remainder:
            yield str(whole * size), remainder

    # ------------------------------------------------------------ integers and addresses
    def index(self, *terms: tuple[str, int | str]) -> str:
        """Return the sum of products of indices and strides.

        Args:
            *terms: pairs of an index and its stride.
        """
        total = "0"
        for value, stride in terms:
            if value == "0" or stride == 0:
                continue
            piece = value if stride == 1 else self.let(f"mul nuw nsw i64 {value}, {stride}")
            total = piece if total == "0" else self.let(f"add nuw nsw i64 {total}, {piece}")
        return total

    def at(self, pointer: str, index: str | int, number_type: str | None = None) -> str:
        """Return the address at an offset from a pointer.

        Args:
            pointer: where counting begins.
            index: how many numbers further.
            number_type: what is counted, by default numbers of this function.
        """
        if index in ("0", 0):
            return pointer
        return self.let(
            f"getelementptr inbounds {number_type or self.kind}, ptr {pointer}, i64 {index}"
        )

    # ------------------------------------------------------------ vectors
    def load(self, pointer: str, index: str | int = 0) -> str:
        """Read a vector from memory."""
        address = self.at(pointer, index)
        return self.let(f"load {self.vector}, ptr {address}, align {self.bytes}")

    def store(self, value: str, pointer: str, index: str | int = 0) -> None:
        """Write a vector to memory."""
        address = self.at(pointer, index)
        self.do(f"store {self.vector} {value}, ptr {address}, align {self.bytes}")

    @property
    def bytes(self) -> int:
        """The size of a number in bytes."""
        return 4 if self.kind == "float" else 8

    def store_number(self, value: str, pointer: str, index: str | int = 0) -> None:
        """Write a single number to memory."""
        address = self.at(pointer, index)
        self.do(f"store {self.kind} {value}, ptr {address}, align {self.bytes}")

    def number(self, value: int | float) -> str:
        """Return a vector of equal constants."""
        if value == 0:
            return "zeroinitializer"
        return self.spread(f"{self.kind} 0x{_bits(value, self.kind):016X}", self.vector)

    def spread(self, typed: str, vector: str) -> str:
        """Return a vector with a value in all lanes.

        Args:
            typed: the value with its type.
            vector: the type of the vector.
        """
        first = self.let(f"insertelement {vector} poison, {typed}, i64 0")
        zeros = f"<{self.lanes} x i32> zeroinitializer"
        return self.let(f"shufflevector {vector} {first}, {vector} poison, {zeros}")

    def spread_from(self, pointer: str, index: str | int) -> str:
        """Return a vector with a number from memory in all lanes."""
        single = self.let(f"load {self.kind}, ptr {self.at(pointer, index)}, align {self.bytes}")
        return self.spread(f"{self.kind} {single}", self.vector)

    def fused(self, a: str, b: str, c: str) -> str:
        """Return ``a * b + c``."""
        v = self.vector
        name = f"@llvm.fmuladd.v{self.lanes}f{8 * self.bytes}"
        return self.let(f"call contract {v} {name}({v} {a}, {v} {b}, {v} {c})")

    def arithmetic(self, operation: str, a: str, b: str) -> str:
        """Return ``fadd``, ``fmul`` or ``fdiv`` of two vectors."""
        return self.let(f"{operation} {self.vector} {a}, {b}")

    def compare(self, how: str, a: str, b: str) -> str:
        """Return the mask of lanes where a relation holds between ``a`` and ``b``."""
        return self.let(f"fcmp {how} {self.vector} {a}, {b}")

    def select(self, mask: str, a: str, b: str, vector: str | None = None) -> str:
        """Return ``a`` where the mask is set, elsewhere ``b``."""
        v = vector or self.vector
        return self.let(f"select {self.mask} {mask}, {v} {a}, {v} {b}")

    def total(self, vector: str) -> str:
        """Return the sum of all lanes."""
        name = f"@llvm.vector.reduce.fadd.v{self.lanes}f{8 * self.bytes}"
        zero = f"{self.kind} 0x8000000000000000"
        return self.let(f"call reassoc {self.kind} {name}({zero}, {self.vector} {vector})")

    def slot(self, vector: str | None = None) -> str:
        """Declare a variable, in a register if possible."""
        self._count += 1
        self._slots.append(f"%s{self._count} = alloca {vector or self.vector}, align 64")
        return f"%s{self._count}"

    def read(self, slot: str, vector: str | None = None) -> str:
        """Return the value of a variable."""
        return self.let(f"load {vector or self.vector}, ptr {slot}, align 64")

    def write(self, value: str, slot: str, vector: str | None = None) -> None:
        """Set a variable."""
        self.do(f"store {vector or self.vector} {value}, ptr {slot}, align 64")


def _bits(value: int | float, number_type: str) -> int:
    import struct

    if number_type == "float":  # LLVM writes single precision in the bits of a double
        value = struct.unpack("f", struct.pack("f", value))[0]
    return int.from_bytes(struct.pack(">d", value), "big")


@dataclass(frozen=True)
class Address:
    """Pointers to the first input, output and note of a tile, and its position in a window."""

    x: str
    out: str
    notes: str
    place: str


def weights_of(code: VectorCode, stage: StageSizes, m: str) -> tuple[str, str]:
    """Return pointers to the weights and biases of a member."""
    weight = code.at("%weight", code.index((m, "%weights")))
    return weight, code.at("%bias", code.index((m, "%biases")))


def block_of(code: VectorCode, stage: StageSizes, m: str, b: str) -> Address:
    """Return pointers to the activations of a block of examples of a member."""
    block = code.index((m, "%blocks"), (b, 1))
    shared = code.index((code.index((m, "%shared")), "%blocks"), (b, 1))
    x = code.index((shared, stage.channels * math.prod(stage.padded) * code.lanes))
    out = code.index((block, stage.outputs * math.prod(stage.out_padded) * code.lanes))
    notes = code.index((block, stage.notes * stage.note_bits * code.lanes // 8))
    return Address(code.at("%x", x), code.at("%out", out), code.at("%notes", notes, "i8"), "0")


def channel_of(
    code: VectorCode, stage: StageSizes, address: Address, group: str, first: str
) -> Address:
    """Return the address of a group's inputs and of a channel's outputs."""
    rows, columns = stage.out_padded
    top, left = stage.out_pads[0], stage.out_pads[2]
    x = code.index((group, stage.depth * math.prod(stage.padded) * code.lanes))
    out = code.index((first, rows * columns * code.lanes))
    inner = (top * columns + left) * code.lanes
    notes = code.index((first, stage.notes // stage.outputs * stage.note_bits * code.lanes // 8))
    return Address(
        code.at(address.x, x),
        code.at(code.at(address.out, out), inner),
        code.at(address.notes, notes, "i8"),
        "0",
    )


@contextmanager
def windows(code: VectorCode, stage: StageSizes, address: Address) -> Iterator[Address]:
    """Loop over windows, or over tiles without pooling."""
    (rows, columns), step, _, _ = stage.steps_of_tiles
    across, width = stage.padded[1], stage.out_padded[1]
    out_step = stage.steps_of_tiles[3] if stage.pooling == "none" else (1, 1)
    with code.loop(rows) as i, code.loop(columns) as j:
        x = code.index(
            (i, step[0] * stage.stride[0] * across * code.lanes),
            (j, step[1] * stage.stride[1] * code.lanes),
        )
        out = code.index((i, out_step[0] * width * code.lanes), (j, out_step[1] * code.lanes))
        window = code.index((i, columns), (j, 1))
        size = _notes_of_window(stage) * stage.note_bits * code.lanes // 8
        notes = code.at(address.notes, code.index((window, size)), "i8")
        yield Address(code.at(address.x, x), code.at(address.out, out), notes, "0")


@contextmanager
def tiles(code: VectorCode, stage: StageSizes, address: Address) -> Iterator[Address]:
    """Loop over the tiles of a window."""
    _, _, (rows, columns), inner = stage.steps_of_tiles
    across = stage.padded[1]
    with code.loop(rows) as i, code.loop(columns) as j:
        x = code.index(
            (i, inner[0] * stage.stride[0] * across * code.lanes),
            (j, inner[1] * stage.stride[1] * code.lanes),
        )
        offset = code.index((i, inner[0] * stage.window[1]), (j, inner[1]))
        notes = address.notes
        if stage.pooling == "mean" and stage.notes:
            notes = code.at(notes, code.index((offset, code.lanes // 8)), "i8")
        yield Address(code.at(address.x, x), address.out, notes, offset)


def _notes_of_window(stage: StageSizes) -> int:
    return (
        math.prod(stage.window) if stage.pooling == "mean" and stage.notes else min(stage.notes, 1)
    )


def later_channel(code: VectorCode, stage: StageSizes, address: Address, k: int) -> Address:
    """Return the address of a later channel's outputs."""
    notes = k * (stage.notes // stage.outputs) * stage.note_bits * code.lanes // 8
    out = k * math.prod(stage.out_padded) * code.lanes
    return Address(
        address.x, code.at(address.out, out), code.at(address.notes, notes, "i8"), address.place
    )


def cell_of(stage: StageSizes, position: Pair, tap: Pair) -> Pair:
    """Return the index of the input of a tap, relative to the first of a tile."""
    row, column = (
        p * s + t * d
        for p, s, t, d in zip(position, stage.stride, tap, stage.dilation, strict=True)
    )
    return row, column


def offset_of(code: VectorCode, stage: StageSizes, cell: Pair) -> int:
    """Return the offset of an input from the first of a tile."""
    return (cell[0] * stage.padded[1] + cell[1]) * code.lanes


@contextmanager
def taps_of(code: VectorCode, stage: StageSizes, x: str) -> Iterator[tuple[list[Pair], str, str]]:
    """Yield taps, inputs and first weight. Large kernels loop over rows."""
    if stage.tile.whole_kernel:
        yield stage.taps, x, "0"
        return
    with code.loop(stage.kernel[0]) as s:
        moved = code.index((s, stage.dilation[0] * stage.padded[1] * code.lanes))
        row = [(0, t) for t in range(stage.kernel[1])]
        yield row, code.at(x, moved), code.index((s, stage.kernel[1]))


def weight_index(
    code: VectorCode, stage: StageSizes, channel: str, c: str = "0", tap: str = "0"
) -> str:
    """Return the index of the weight of an output channel, an input channel and a tap."""
    taps = math.prod(stage.kernel)
    return code.index((channel, stage.depth * taps), (c, taps), (tap, 1))


def valid_lanes(code: VectorCode, b: str) -> str:
    """Return a mask of the lanes with examples."""
    lanes, vector = code.lanes, f"<{code.lanes} x i64>"
    numbers = ", ".join(f"i64 {k}" for k in range(lanes))
    left = code.let(f"sub i64 %valid, {code.index((b, lanes))}")
    return code.let(f"icmp slt {vector} <{numbers}>, {code.spread(f'i64 {left}', vector)}")


def place_number(code: VectorCode, stage: StageSizes, start: str, number: int) -> str:
    """Return the index of a position in its window, as in notes."""
    if start == "0":
        return str(number)
    wide = code.let(f"add i64 {start}, {number}")
    return code.let(f"trunc i64 {wide} to i{stage.note_bits}")


def lets_through(code: VectorCode, value: str, slope: float) -> str:
    """Mask the positions where a rectifier passes gradients. As in torch, ReLU does for NaN."""
    return code.compare("ugt" if slope == 0 else "ogt", value, "zeroinitializer")

"""Writes functions in LLVM's language whose numbers are vectors: one lane for each example."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["VectorCode"]


class VectorCode:
    """One function: members from ``first`` to ``last``, blocks of examples, loops of known length.

    Values are names or literals of LLVM, as strings. All pointers among the arguments point to
    memory of their own.

    Args:
        name: of the function.
        pointers: names of the arguments that are pointers.
        kind: ``"float"`` or ``"double"``.
        lanes: numbers in a vector.
    """

    def __init__(self, name: str, pointers: tuple[str, ...], kind: str, lanes: int) -> None:
        self.kind, self.lanes = kind, lanes
        self.vector, self.mask = f"<{lanes} x {kind}>", f"<{lanes} x i1>"
        self.label, self._count = "start", 0
        self._slots: list[str] = []
        self._lines: list[str] = []
        arguments = [f"ptr noalias %{p}" for p in pointers]
        numbers = ("shared", "first", "last", "blocks", "valid")
        self._head = (
            f"define void @{name}({', '.join([*arguments, *(f'i64 %{n}' for n in numbers)])})"
        )

    def text(self) -> str:
        """The whole function, as LLVM reads it."""
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
        """Add an instruction; its result has a new name."""
        self._count += 1
        self._lines.append(f"%v{self._count} = {expression}")
        return f"%v{self._count}"

    # ------------------------------------------------------------ loops
    @contextmanager
    def loop(self, count: int | str, start: str = "0") -> Iterator[str]:
        """From ``start`` to before ``count``, at least once; gives the index.

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
        """Loop over parts of one size, then take what is left: gives the first index of each.

        Args:
            count: how much there is.
            size: of all parts but the last.
        """
        whole, rest = divmod(count, size)
        if whole:
            with self.loop(whole) as k:
                yield self.index((k, size)), size
        if rest:
            yield str(whole * size), rest

    # ------------------------------------------------------------ integers and addresses
    def index(self, *terms: tuple[str, int | str]) -> str:
        """Sum of products of indices and strides.

        Args:
            *terms: pairs of an index and its stride.
        """
        total = "0"
        for value, stride in terms:
            if value == "0" or stride == 0:
                continue
            part = value if stride == 1 else self.let(f"mul nuw nsw i64 {value}, {stride}")
            total = part if total == "0" else self.let(f"add nuw nsw i64 {total}, {part}")
        return total

    def at(self, pointer: str, index: str | int, kind: str | None = None) -> str:
        """The address of a place behind a pointer.

        Args:
            pointer: where counting begins.
            index: how many numbers further.
            kind: what is counted, by default numbers of this function.
        """
        if index in ("0", 0):
            return pointer
        return self.let(f"getelementptr inbounds {kind or self.kind}, ptr {pointer}, i64 {index}")

    # ------------------------------------------------------------ vectors
    def load(self, pointer: str, index: str | int = 0) -> str:
        """Read a vector from memory."""
        place = self.at(pointer, index)
        return self.let(f"load {self.vector}, ptr {place}, align {self.bytes}")

    def store(self, value: str, pointer: str, index: str | int = 0) -> None:
        """Write a vector to memory."""
        place = self.at(pointer, index)
        self.do(f"store {self.vector} {value}, ptr {place}, align {self.bytes}")

    @property
    def bytes(self) -> int:
        """How many bytes a number has."""
        return 4 if self.kind == "float" else 8

    def store_number(self, value: str, pointer: str, index: str | int = 0) -> None:
        """Write a single number to memory."""
        place = self.at(pointer, index)
        self.do(f"store {self.kind} {value}, ptr {place}, align {self.bytes}")

    def number(self, value: int | float) -> str:
        """A vector of equal numbers."""
        if value == 0:
            return "zeroinitializer"
        return self.spread(f"{self.kind} 0x{_bits(value, self.kind):016X}", self.vector)

    def spread(self, typed: str, vector: str) -> str:
        """A vector of equal values.

        Args:
            typed: the value with its type.
            vector: the type of the vector.
        """
        first = self.let(f"insertelement {vector} poison, {typed}, i64 0")
        zeros = f"<{self.lanes} x i32> zeroinitializer"
        return self.let(f"shufflevector {vector} {first}, {vector} poison, {zeros}")

    def spread_from(self, pointer: str, index: str | int) -> str:
        """A vector of equal numbers, from one in memory."""
        one = self.let(f"load {self.kind}, ptr {self.at(pointer, index)}, align {self.bytes}")
        return self.spread(f"{self.kind} {one}", self.vector)

    def fused(self, a: str, b: str, c: str) -> str:
        """``a * b + c``."""
        v = self.vector
        name = f"@llvm.fmuladd.v{self.lanes}f{8 * self.bytes}"
        return self.let(f"call contract {v} {name}({v} {a}, {v} {b}, {v} {c})")

    def arithmetic(self, operation: str, a: str, b: str) -> str:
        """``fadd``, ``fmul`` or ``fdiv`` of two vectors."""
        return self.let(f"{operation} {self.vector} {a}, {b}")

    def compare(self, how: str, a: str, b: str) -> str:
        """A mask: where ``a`` stands in a relation to ``b``."""
        return self.let(f"fcmp {how} {self.vector} {a}, {b}")

    def select(self, mask: str, a: str, b: str, vector: str | None = None) -> str:
        """``a`` where the mask is set, elsewhere ``b``."""
        v = vector or self.vector
        return self.let(f"select {self.mask} {mask}, {v} {a}, {v} {b}")

    def total(self, vector: str) -> str:
        """The sum of all lanes, a number."""
        name = f"@llvm.vector.reduce.fadd.v{self.lanes}f{8 * self.bytes}"
        zero = f"{self.kind} 0x8000000000000000"
        return self.let(f"call reassoc {self.kind} {name}({zero}, {self.vector} {vector})")

    def slot(self, vector: str | None = None) -> str:
        """A variable; it lives in a register if it can."""
        self._count += 1
        self._slots.append(f"%s{self._count} = alloca {vector or self.vector}, align 64")
        return f"%s{self._count}"

    def read(self, slot: str, vector: str | None = None) -> str:
        """The value of a variable."""
        return self.let(f"load {vector or self.vector}, ptr {slot}, align 64")

    def write(self, value: str, slot: str, vector: str | None = None) -> None:
        """Give a variable a value."""
        self.do(f"store {vector or self.vector} {value}, ptr {slot}, align 64")


def _bits(value: int | float, kind: str) -> int:
    import struct

    if kind == "float":  # LLVM writes single precision in the bits of a double
        value = struct.unpack("f", struct.pack("f", value))[0]
    return int.from_bytes(struct.pack(">d", value), "big")

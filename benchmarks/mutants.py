"""Faults that a source file could have: one expression changed, the rest as it was.

Nobody sees the difference in messages, annotations, assertions (``strict`` of zip is one) and
progress bars, and sizes of chunks change memory but no results: these are left alone.
"""

import ast
import math
import os
import re
from collections.abc import Iterable, Iterator
from copy import copy
from dataclasses import dataclass

SPARED = {
    ("metrics/calibration.py", "_WAITING_BATCHES"): "when counts are added, not what",
    ("metrics/distances.py", "_COLUMNS"): "how many differences at once",
    ("metrics/distances.py", "_SHORTEST_PIECE"): "how many differences at once",
    ("metrics/diversity.py", "_CHUNK"): "how many pairs at once",
    ("metrics/kernels.py", "_CHUNK"): "how many kernels at once",
    ("metrics/mmd.py", "memory"): "how many weights at once",
    ("metrics/reference.py", "_PROGRESS_FROM"): "when there is a progress bar",
    ("metrics/reference.py", "memory"): "how many weights at once, and when they go to a file",
    ("metrics/mmd.py", "_CHUNK"): "how many permutations at once",
    ("posteriors/base.py", "_AT_ONCE"): "how many networks at once",
    ("posteriors/curvature.py", "_BYTES"): "how many Jacobians at once",
    ("posteriors/curvature.py", "_LARGEST"): "a limit of memory",
    ("posteriors/mutual_information.py", "_SINGLE"): "where float32 is precise enough",
    ("posteriors/permanents.py", "_SAFE"): "where float64 is precise enough",
    ("posteriors/streaming.py", "memory"): "how many networks at once",
    ("posteriors/streaming.py", "_BYTES"): "how many networks at once",
    ("posteriors/streaming.py", "_AT_ONCE"): "how many networks at once",
    ("posteriors/symmetrized.py", "_CHUNK"): "how many permutations at once",
    ("posteriors/unit_layers.py", "_SCREEN"): "a first look that later ones correct",
}
COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
ARITHMETIC = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.Pow: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.BitAnd: ast.BitOr,
}  # fmt: skip
_PAIRS = (
    "min max|amin amax|argmin argmax|cummin cummax|sum mean|any all|zeros ones|zeros_like ones_like"
    "|floor ceil|sqrt square|log log1p|exp expm1|triu tril|maximum minimum|mul_ div_|add_ sub_"
)
NAMES = {a: b for pair in _PAIRS.split("|") for a, b in (pair.split(), pair.split()[::-1])}
OPTIONS = {"dim", "keepdim", "correction", "stable", "descending", "right", "largest", "dtype"}
_SILENT = (ast.Raise, ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom)
_DECLARING = {"annotation", "returns", "decorator_list"}
_SHOWN_OR_ASSERTED = {"strict", "disable", "leave"}


@dataclass(frozen=True)
class Fault:
    """One expression of a file, by bytes, and what stands there instead."""

    file: str
    line: int
    start: int
    stop: int
    kind: str
    old: str
    new: str

    @property
    def folder(self) -> str:
        return "symmetry" if self.file.startswith("weightsym/") else self.file.split("/")[1]

    @property
    def where(self) -> str:
        return f"{self.file.removeprefix('lightning_bnn/')}:{self.line}"

    @property
    def key(self) -> str:
        return f"{self.file}:{self.line}:{self.start}: {self.old} -> {self.new}"

    def applied(self, source: str) -> str:
        """The file with the fault."""
        data = source.encode()
        return (data[: self.start] + self.new.encode() + data[self.stop :]).decode()

    def difference(self) -> str:
        """Both expressions, shortened to where they differ."""
        new = self.new[1:-1] if self.new.startswith("(") else self.new
        start = max(0, len(os.path.commonprefix([self.old, new])) - 30)
        cut = [f"`{'…' * (start > 0)}{text[start : start + 60]}`" for text in (self.old, new)]
        return " → ".join(cut).replace("|", "\\|").replace("\n", " ")


def faults_of(source: str, file: str) -> Iterator[Fault]:
    """All faults of all kinds that one file can have."""
    starts = [0]
    for line in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    spared = {name for path, name in SPARED if file.endswith(path)}
    for node in _computing(ast.parse(source), spared):
        for kind, change in KINDS.items():
            for new in change(node):
                start = starts[node.lineno - 1] + node.col_offset
                stop = starts[node.end_lineno - 1] + node.end_col_offset
                text = ast.unparse(new)
                text = text if isinstance(new, ast.stmt) else f"({text})"
                yield Fault(file, node.lineno, start, stop, kind, ast.unparse(node), text)


def _computing(node: ast.AST, spared: set[str]) -> Iterator[ast.AST]:
    """This node and those below whose change could be seen."""
    if isinstance(node, _SILENT) or _declares(node, spared):
        return
    yield node
    for name, value in _fields(node, spared):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and name not in _DECLARING:
                yield from _computing(child, spared)


def _fields(node: ast.AST, spared: set[str]) -> Iterable[tuple[str, object]]:
    """Of a signature only the defaults of what is not spared."""
    if not isinstance(node, ast.arguments):
        return ast.iter_fields(node)
    named = node.args[len(node.args) - len(node.defaults) :] + node.kwonlyargs
    defaults = zip(named, node.defaults + node.kw_defaults, strict=True)
    return [(arg.arg, value) for arg, value in defaults if arg.arg not in spared]


def _declares(node: ast.AST, spared: set[str]) -> bool:
    """Names that are exported, imports for type checkers, messages and what is spared by hand."""
    if isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        names = {n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)}
        return bool(names & {"__all__", *spared})
    if isinstance(node, ast.If):
        return "TYPE_CHECKING" in ast.unparse(node.test)
    if isinstance(node, ast.keyword):
        return node.arg in _SHOWN_OR_ASSERTED
    return isinstance(node, ast.Call) and bool(re.search(r"warn|_log\.", ast.unparse(node.func)))


# ------------------------------------------------------------ kinds
def _with(node: ast.AST, **changes: object) -> ast.AST:
    other = copy(node)
    for name, value in changes.items():
        setattr(other, name, value)
    return other


def comparison(node: ast.AST) -> list[ast.AST]:
    if not isinstance(node, ast.Compare) or len(node.ops) > 1:
        return []
    return [_with(node, ops=[COMPARISONS[type(node.ops[0])]()])]


def arithmetic(node: ast.AST) -> list[ast.AST]:
    if not isinstance(node, ast.BinOp | ast.AugAssign) or type(node.op) not in ARITHMETIC:
        return []
    return [_with(node, op=ARITHMETIC[type(node.op)]())]


def logic(node: ast.AST) -> list[ast.AST]:
    if isinstance(node, ast.BoolOp):
        return [_with(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())]
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        return [ast.Constant(not node.value)]
    return []


def sign(node: ast.AST) -> list[ast.AST]:
    return [node.operand] if isinstance(node, ast.UnaryOp) else []


def number(node: ast.AST) -> list[ast.AST]:
    if not isinstance(node, ast.Constant) or type(node.value) not in (int, float):
        return []
    changed = [node.value + 1] if type(node.value) is int else [2 * node.value, node.value / 2]
    return [ast.Constant(value) for value in changed if value != node.value]


def name(node: ast.AST) -> list[ast.AST]:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        swapped = NAMES.get(node.func.attr)
        known = hasattr(math, swapped or "") or ast.unparse(node.func.value) != "math"
        return [_with(node, func=_with(node.func, attr=swapped))] if swapped and known else []
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        swapped = NAMES.get(node.func.id)
        return (
            [_with(node, func=ast.Name(swapped))] if swapped in {"min", "max", "any", "all"} else []
        )
    return []


def option(node: ast.AST) -> list[ast.AST]:
    """An argument that has a default, left out."""
    if not isinstance(node, ast.Call):
        return []
    kept = [[k for k in node.keywords if k is not each] for each in node.keywords]
    pairs = zip(node.keywords, kept, strict=True)
    return [_with(node, keywords=others) for each, others in pairs if each.arg in OPTIONS]


KINDS = {f.__name__: f for f in (comparison, arithmetic, logic, sign, number, name, option)}

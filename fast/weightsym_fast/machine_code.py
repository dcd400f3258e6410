"""Machine code of stages, by LLVM, for this processor. Made in memory when it is first needed."""

from __future__ import annotations

import ctypes
import functools
import importlib
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from weightsym_fast.chains import StageSizes
from weightsym_fast.forward_code import forward
from weightsym_fast.gradient_code import before_backward, input_gradient, weight_gradient
from weightsym_fast.vector_code import VectorCode

KINDS = {4: "float", 8: "double"}
_LOCK = threading.Lock()
_log = logging.getLogger("weightsym.params")


@functools.lru_cache(maxsize=1)
def has_compiler() -> bool:
    """Check whether llvmlite is installed and works, and warn once if it is broken."""
    try:
        _compiler()
    except ModuleNotFoundError:
        return False
    except (ImportError, RuntimeError, OSError, AttributeError) as error:
        _log.warning(
            ("Stacks of small networks run slowly, since llvmlite does not work (%s)."), error
        )
        return False
    return True


@functools.lru_cache(maxsize=1)
def _compiler() -> Any:
    llvm: Any = importlib.import_module("llvmlite.binding")
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    if llvm.llvm_version_info[0] < OLDEST:
        raise RuntimeError(f"it has LLVM {llvm.llvm_version_info[0]}, {OLDEST} is needed")
    features = llvm.get_host_cpu_features()

    def machine() -> Any:
        return llvm.Target.from_default_triple().create_target_machine(
            cpu=llvm.get_host_cpu_name(), features=features.flatten(), opt=2, jit=True
        )

    machine()
    return llvm, machine, features


OLDEST = 20
"""The first version of LLVM with pointers that do not say what they point to, in llvmlite 0.45."""


def lanes_of(size: int) -> int:
    """Count the numbers of so many bytes in a vector, the examples in a block.

    Args:
        size: bytes of a number.
    """
    return 16 if size == 4 and _compiler()[2].get("avx512f") else 8


def compiled(stage: StageSizes | None, function: str, size: int) -> Any:
    """A function of a stage, compiled at the first call. It runs without Python's lock.

    Args:
        stage: its sizes; nothing for functions of single numbers.
        function: one of `FUNCTIONS`.
        size: bytes of a number.
    """
    with _LOCK:
        return _compiled(stage, function, size)


@functools.lru_cache(maxsize=1024)
def _compiled(stage: StageSizes | None, function: str, size: int) -> Any:
    lanes, number_type = lanes_of(size), KINDS[size]
    vector, suffix = f"<{lanes} x {number_type}>", f"v{lanes}f{8 * size}"
    text = f"""{code_of(stage, function, number_type, lanes)}
declare {vector} @llvm.fmuladd.{suffix}({vector}, {vector}, {vector})
declare {number_type} @llvm.vector.reduce.fadd.{suffix}({number_type}, {vector})
"""
    return _callable(text, function, [ctypes.c_void_p] * 5 + [ctypes.c_int64] * 7)


def _callable(text: str, function: str, arguments: list[Any]) -> Any:
    """Compile a function. Its ``address`` is for other machine code."""
    llvm, new_machine, _ = _compiler()
    machine = new_machine()  # which the engine takes: it goes when the engine goes
    module = llvm.parse_assembly(text)
    module.triple, module.data_layout = machine.triple, str(machine.target_data)
    passes = llvm.create_new_function_pass_manager()
    passes.add_sroa_pass()  # variables become registers; there is nothing else to improve
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options())
    passes.run(module.get_function(function), builder)
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    address = engine.get_function_address(function)
    call: Any = ctypes.CFUNCTYPE(None, *arguments)(address)
    call.engine, call.address = engine, address  # the engine owns the code
    return call


# ------------------------------------------------------------ functions of single numbers
_TANH = (
    (4.89352455891786e-03, 6.37261928875436e-04, 1.48572235717979e-05, 5.12229709037114e-08)
    + (-8.60467152213735e-11, 2.00018790482477e-13, -2.76076847742355e-16),
    (4.89352518554385e-03, 2.26843463243900e-03, 1.18534705686654e-04, 1.19825839466702e-06),
)
"""Coefficients of odd and even powers, as in Eigen: exact to single precision below the bound."""
_TANH_BOUND = 7.90531110763549805


def _tanh(code: VectorCode, stage: None) -> None:
    """``out = tanh(x)`` in single precision."""
    with code.loop("%last", "%first") as k:
        address = code.index((k, code.lanes))
        x = code.load("%x", address)
        for sign, relation in ((1, "ogt"), (-1, "olt")):
            bound = code.number(sign * _TANH_BOUND)
            x = code.select(code.compare(relation, x, bound), bound, x)
        square, sums = code.arithmetic("fmul", x, x), []
        for powers in _TANH:
            total = code.number(powers[-1])
            for power in powers[-2::-1]:
                total = code.fused(total, square, code.number(power))
            sums.append(total)
        odd = code.arithmetic("fmul", x, sums[0])
        code.store(code.arithmetic("fdiv", odd, sums[1]), "%out", address)


def _tanh_backward(code: VectorCode, stage: None) -> None:
    """``out = x * (1 - weight ** 2)``, where ``weight`` are values of the function."""
    with code.loop("%last", "%first") as k:
        address = code.index((k, code.lanes))
        y, g = code.load("%weight", address), code.load("%x", address)
        falling = code.arithmetic("fsub", code.number(1), code.arithmetic("fmul", y, y))
        code.store(code.arithmetic("fmul", g, falling), "%out", address)


def _difference(code: VectorCode, stage: None) -> None:
    """``out = x - weight`` for every member, and ``notes``, which is ``bias`` times that."""
    scale = code.spread_from("%bias", 0)
    with code.loop("%last", "%first") as m, code.loop("%blocks") as k:
        shared = code.index((k, code.lanes))
        address = code.index((code.index((m, "%blocks"), (k, 1)), code.lanes))
        away = code.arithmetic("fsub", code.load("%x", address), code.load("%weight", shared))
        code.store(away, "%out", address)
        code.store(code.arithmetic("fmul", away, scale), "%notes", address)


def _add(code: VectorCode, stage: None) -> None:
    """``out += bias * x``."""
    scale = code.spread_from("%bias", 0)
    with code.loop("%last", "%first") as k:
        address = code.index((k, code.lanes))
        code.store(
            code.fused(scale, code.load("%x", address), code.load("%out", address)), "%out", address
        )


FUNCTIONS: dict[str, Callable[[VectorCode, Any], None]] = {
    "forward": forward,
    "before_backward": before_backward,
    "weight_gradient": weight_gradient,
    "input_gradient": input_gradient,
    "tanh": _tanh,
    "tanh_backward": _tanh_backward,
    "difference": _difference,
    "add": _add,
}
POINTERS = ("x", "weight", "bias", "out", "notes")
"""Gradients stand where that of which they are the gradient stands."""


def code_of(stage: StageSizes | None, function: str, number_type: str, lanes: int) -> str:
    """Write the code that LLVM compiles.

    Args:
        stage: the sizes; nothing for functions of single numbers.
        function: a name in ``FUNCTIONS``.
        number_type: ``"float"`` or ``"double"``.
        lanes: examples in a block.
    """
    code = VectorCode(function, POINTERS, number_type, lanes)
    FUNCTIONS[function](code, stage)
    return code.text()


# ------------------------------------------------------------ calls in a row
class Call(NamedTuple):
    """A call of machine code.

    Attributes:
        function: what `compiled` returns.
        tensors: whose addresses it takes; None stands for no address.
        numbers: its other arguments.
    """

    function: Any
    tensors: Sequence[Tensor | None]
    numbers: tuple[int, ...]

    @classmethod
    def of_numbers(
        cls, name: str, tensors: Sequence[Tensor | None], count: int, blocks: int = 1
    ) -> Call:
        """A call of a function of single numbers, ``count`` times ``blocks`` vectors of them."""
        first = tensors[0]
        assert first is not None
        function = compiled(None, name, first.element_size())
        return cls(function, tensors, (0, 0, count, blocks, 0, 0, 0))

    def row(self) -> tuple[int, ...]:
        """The address of the function, and its arguments."""
        places = [0 if t is None else t.data_ptr() for t in self.tensors]
        return self.function.address, *places, *self.numbers


Step = Call | Callable[[], Any]


class CallSequence:
    """A sequence of repeated steps, with those in machine code free of Python.

    Args:
        steps: calls of machine code, and Python functions.
    """

    def __init__(self, steps: Sequence[Step]) -> None:
        self.steps = list(steps)
        self._pieces: list[Any] = []
        for step in self.steps:
            if not isinstance(step, Call):
                self._pieces.append(step)
            elif self._pieces and isinstance(self._pieces[-1], list):
                self._pieces[-1] += step.row()
            else:
                self._pieces.append([*step.row()])
        self._pieces = [_table(p) if isinstance(p, list) else p for p in self._pieces]

    def __call__(self, times: int = 1) -> None:
        """Take all steps a number of times."""
        in_code = len(self._pieces) == 1 and isinstance(self._pieces[0], ctypes.Array)
        inside = times if in_code else 1
        for _ in range(times // max(inside, 1)):
            for piece in self._pieces:
                if isinstance(piece, ctypes.Array):
                    _loop()(piece, len(piece) // _WIDTH, inside)
                else:
                    piece()


_WIDTH = 13


def _table(numbers: list[int]) -> Any:
    return (ctypes.c_int64 * len(numbers))(*numbers)


@functools.lru_cache(maxsize=1)
def _loop() -> Any:
    """A function that makes the calls of a table several times."""
    kinds = ["ptr"] * 6 + ["i64"] * 7
    loads = [
        f"%p{k} = getelementptr i64, ptr %row, i64 {k}\n%a{k} = load {argument_type}, ptr %p{k}"
        for k, argument_type in enumerate(kinds)
    ]
    arguments = ", ".join(f"{argument_type} %a{k}" for k, argument_type in enumerate(kinds) if k)
    text = f"""define void @loop(ptr %table, i64 %count, i64 %times) {{
start:
%all = mul i64 %count, %times
%none = icmp eq i64 %all, 0
br i1 %none, label %end, label %again
again:
%k = phi i64 [ 0, %start ], [ %next, %again ]
%which = urem i64 %k, %count
%begin = mul i64 %which, {_WIDTH}
%row = getelementptr i64, ptr %table, i64 %begin
{chr(10).join(loads)}
call void %a0({arguments})
%next = add i64 %k, 1
%done = icmp eq i64 %next, %all
br i1 %done, label %end, label %again
end:
ret void
}}"""
    return _callable(text, "loop", [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64])

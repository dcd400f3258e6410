"""Machine code of stages, by LLVM, for this processor. Made in memory when it is first needed."""

from __future__ import annotations

import ctypes
import functools
import logging
import threading
from collections.abc import Callable
from typing import Any, cast

from weightsym.fast.forward_code import forward
from weightsym.fast.gradient_code import before_backward, input_gradient, weight_gradient
from weightsym.fast.stage import Stage
from weightsym.fast.vector_code import VectorCode

__all__ = ["compiled", "has_compiler", "lanes_of", "FUNCTIONS", "code_of"]

KINDS = {4: "float", 8: "double"}
_LOCK = threading.Lock()
_log = logging.getLogger("weightsym.params")


@functools.lru_cache(maxsize=1)
def has_compiler() -> bool:
    """Check whether llvmlite is installed and works. A warning says once if it is, and does not."""
    try:
        _compiler()
    except ModuleNotFoundError:
        return False
    except (ImportError, RuntimeError, OSError, AttributeError) as error:
        _log.warning("Stacks of small networks run slowly, llvmlite does not work (%s).", error)
        return False
    return True


@functools.lru_cache(maxsize=1)
def _compiler() -> Any:
    import llvmlite.binding as llvm

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


def compiled(stage: Stage, function: str, size: int) -> Callable[..., None]:
    """A function of a stage, compiled at the first call. It runs without Python's lock.

    Args:
        stage: its sizes.
        function: one of `stage_code.FUNCTIONS`.
        size: bytes of a number.
    """
    with _LOCK:
        return _compiled(stage, function, size)


@functools.lru_cache(maxsize=1024)
def _compiled(stage: Stage, function: str, size: int) -> Callable[..., None]:
    llvm, new_machine, _ = _compiler()
    machine = new_machine()  # which the engine takes: it goes when the engine goes
    lanes, kind = lanes_of(size), KINDS[size]
    vector, suffix = f"<{lanes} x {kind}>", f"v{lanes}f{8 * size}"
    text = f"""{code_of(stage, function, kind, lanes)}
declare {vector} @llvm.fmuladd.{suffix}({vector}, {vector}, {vector})
declare {kind} @llvm.vector.reduce.fadd.{suffix}({kind}, {vector})
"""
    module = llvm.parse_assembly(text)
    module.triple, module.data_layout = machine.triple, str(machine.target_data)
    passes = llvm.create_new_function_pass_manager()
    passes.add_sroa_pass()  # variables become registers; there is nothing else to improve
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options())
    passes.run(module.get_function(function), builder)
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    arguments = [ctypes.c_void_p] * 5 + [ctypes.c_int64] * 5
    call: Any = ctypes.CFUNCTYPE(None, *arguments)(engine.get_function_address(function))
    call.engine = engine  # which owns the code
    return cast(Callable[..., None], call)


FUNCTIONS = {
    "forward": forward,
    "before_backward": before_backward,
    "weight_gradient": weight_gradient,
    "input_gradient": input_gradient,
}
POINTERS = ("x", "weight", "bias", "out", "notes")
"""Gradients stand where that of which they are the gradient stands."""


def code_of(stage: Stage, function: str, kind: str, lanes: int) -> str:
    """Write the code that LLVM compiles.

    Args:
        stage: the sizes.
        function: a name in ``FUNCTIONS``.
        kind: ``"float"`` or ``"double"``.
        lanes: examples in a block.
    """
    code = VectorCode(function, POINTERS, kind, lanes)
    FUNCTIONS[function](code, stage)
    return code.text()

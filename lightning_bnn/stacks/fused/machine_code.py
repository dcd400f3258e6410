"""Machine code of stages, by LLVM, for this processor."""

from __future__ import annotations

import ctypes
import functools
import logging
import threading
from collections.abc import Callable
from typing import Any

from lightning_bnn.stacks.fused.stage import Stage
from lightning_bnn.stacks.fused.stage_code import code_of

__all__ = ["compiled", "has_compiler", "lanes_of"]

_log = logging.getLogger("lightning_bnn.params")
_LOCK = threading.Lock()
KINDS = {4: "float", 8: "double"}


@functools.lru_cache(maxsize=1)
def _machine() -> Any:
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    features = llvm.get_host_cpu_features()
    target = llvm.Target.from_default_triple()
    machine = target.create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=features.flatten(), opt=2, jit=True
    )
    return llvm, machine, features


@functools.lru_cache(maxsize=1)
def has_compiler() -> bool:
    """Whether llvmlite is installed and works; a warning says once if not."""
    try:
        _machine()
    except (ImportError, RuntimeError, OSError, AttributeError) as error:
        _log.warning("Stacks of small networks run slowly, llvmlite does not work (%s).", error)
        return False
    return True


def lanes_of(size: int) -> int:
    """How many numbers of so many bytes a vector has."""
    return 16 if size == 4 and _machine()[2].get("avx512f") else 8


_KEPT: list[Any] = []


@functools.lru_cache(maxsize=256)
def _compiled(stage: Stage, function: str, size: int) -> Callable[..., None]:
    llvm, machine, _ = _machine()
    code = code_of(stage, function, KINDS[size], lanes_of(size))
    lanes = lanes_of(size)
    v, f = f"<{lanes} x {KINDS[size]}>", f"v{lanes}f{8 * size}"
    text = f"""{code}
declare {v} @llvm.fmuladd.{f}({v}, {v}, {v})
declare {KINDS[size]} @llvm.vector.reduce.fadd.{f}({KINDS[size]}, {v})
"""
    module = llvm.parse_assembly(text)
    module.triple, module.data_layout = machine.triple, str(machine.target_data)
    module.verify()
    passes = llvm.create_new_function_pass_manager()
    passes.add_sroa_pass()
    options = llvm.create_pipeline_tuning_options(speed_level=1)
    passes.run(module.get_function(function), llvm.create_pass_builder(machine, options))
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    _KEPT.append(engine)
    arguments = [ctypes.c_void_p] * 5 + [ctypes.c_int64] * 5
    call: Callable[..., None] = ctypes.CFUNCTYPE(None, *arguments)(
        engine.get_function_address(function)
    )
    return call


def compiled(stage: Stage, function: str, size: int) -> Callable[..., None]:
    """A function of a stage, compiled at the first call.

    Args:
        stage: its sizes.
        function: one of `stage_code.FUNCTIONS`.
        size: bytes of a number.
    """
    with _LOCK:
        return _compiled(stage, function, size)

"""A fake device: CPU memory that refuses to mix with other devices.

Code that would fail on a GPU because one of its tensors is on the CPU or on another GPU also fails
here, with the numbers of the CPU. Registration changes a process permanently: tests with it need a
process of their own.

>>> import torch
>>> from lightning import Trainer
>>> from lightning_bnn import testing
>>> testing.register()
>>> x = torch.ones(3, device="pretended:0")
>>> (x + 1).device, (x + 1).tolist()
(device(type='pretended', index=0), [2.0, 2.0, 2.0])
>>> x + torch.ones(3)
Traceback (most recent call last):
RuntimeError: aten::add.Tensor: tensors on pretended:0 and cpu
>>> Trainer(**testing.trainer_options(), logger=False).strategy.root_device
device(type='pretended', index=0)
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.utils import backend_registration
from torch.utils._python_dispatch import return_and_correct_aliasing

__all__ = ["PretendedAccelerator", "register", "trainer_options"]

NAME, COUNT = "pretended", 2
_CPU = torch.device("cpu")
_MAY_MEET_ANY = "aten::copy_", "aten::_to_copy"
_MAY_MEET_CPU = "aten::index.", "aten::index_put", "aten::_index_put"
"""Operations that GPUs, too, allow with tensors of other devices."""
_LOWER = """addmm addmv addbmm baddbmm bmm mm mv matmul linear prelu conv1d conv2d conv3d
convolution conv_transpose1d conv_transpose2d conv_transpose3d scaled_dot_product_attention"""
_SINGLE = """softmax log_softmax cross_entropy_loss nll_loss mse_loss kl_div layer_norm group_norm
norm cumsum cumprod prod exp log log1p expm1 pow"""
"""Operations that autocast computes in lower, and in single precision."""
_AUTOCAST: Any = torch._C._parse_dispatch_key("AutocastPrivateUse1")
_libraries: list[torch.library.Library] = []
_generators: list[torch.Generator] = []
_places: dict[int, torch.device] = {}
"""Devices of generators by their addresses, since generators lose their class in calls."""
_tensor = torch.tensor
_TorchGenerator: Any = torch.Generator
_GeneratorKind: Any = type(torch.Generator)


def register(draws_of_cpu: bool = False) -> None:
    """Register two fake devices with torch, and reset their random numbers.

    Args:
        draws_of_cpu: share the random numbers of the CPU, for equal results.

    >>> register()
    >>> torch.get_device_module("pretended").device_count()
    2
    """
    setup = getattr(backend_registration, "_setup_privateuseone_for_python_backend", None)
    if setup is None:
        raise ImportError(
            "This version of torch has no devices written in Python: use a newer one."
        )
    if not _libraries:
        setup(NAME, backend_module=_Backend())
        torch.autograd.set_multithreading_enabled(False)  # it has threads for one device
        torch.distributed.Backend.backend_capability["gloo"].append(NAME)
        _libraries.extend(torch.library.Library(name, "IMPL") for name in ("_", "aten"))
        _libraries[0].fallback(_computed, "PrivateUse1")
        _libraries[0].fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
        for names, dtype in (_LOWER, None), (_SINGLE, torch.float32):
            for operation in (o for name in names.split() for o in _overloads(name)):
                cast = functools.partial(_autocast, operation, dtype)
                _libraries[1].impl(operation, cast, "AutocastPrivateUse1")
        torch.tensor, torch.Generator = _new_tensor, _Generator  # type: ignore[misc,assignment]
    generators = [_Generator(torch.device(NAME, k)).manual_seed(0) for k in range(COUNT)]
    _generators[:] = [torch.default_generator] * COUNT if draws_of_cpu else generators


def trainer_options(index: int = 0) -> dict[str, Any]:
    """Return arguments of a Trainer for one of the devices.

    For several processes, add ``accelerator=PretendedAccelerator()``, ``devices`` and a strategy.

    >>> trainer_options(1)["strategy"].root_device
    device(type='pretended', index=1)
    """
    strategy = SingleDeviceStrategy(device=torch.device(NAME, index))
    return {"accelerator": PretendedAccelerator(), "strategy": strategy}


class PretendedAccelerator(CPUAccelerator):
    """The accelerator of the devices, for a Trainer.

    >>> PretendedAccelerator.get_parallel_devices(1)
    [device(type='pretended', index=0)]
    """

    def setup_device(self, device: torch.device) -> None:
        pass

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        return [torch.device(NAME, k) for k in range(int(devices))]

    @staticmethod
    def auto_device_count() -> int:
        return COUNT

    @staticmethod
    def name() -> str:
        return NAME


class PretendedTensor(torch.Tensor):
    """A tensor of a device, backed by a tensor of the CPU."""

    memory: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # as in torch

    @staticmethod
    def __new__(cls, memory: torch.Tensor, device: torch.device) -> PretendedTensor:
        with torch.inference_mode(False):
            wrapper = torch.Tensor._make_wrapper_subclass(
                cls, memory.size(), memory.stride(), memory.storage_offset(),
                dtype=memory.dtype, device=device,
            )  # fmt: skip
        wrapper.memory = memory
        return wrapper

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub has no class method
        cls, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _computed(operation, *args, **(kwargs or {}))

    @property
    def data(self) -> Any:
        return PretendedTensor(self.memory.detach(), self.device)

    @data.setter
    def data(self, value: Any) -> None:
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]  # a descriptor
        self.memory = value.memory

    def __getitem__(self, index: Any) -> Any:
        """Index by lists of numbers on the CPU."""
        parts = index if isinstance(index, tuple) else (index,)
        return super().__getitem__(tuple(_tensor(p) if type(p) is list else p for p in parts))

    def data_ptr(self) -> int:
        return self.memory.data_ptr()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __repr__(self) -> str:  # type: ignore[override]  # torch's has an argument
        return f"{self.detach().cpu()!r}.to({str(self.device)!r})"

    def __format__(self, spec: str) -> str:
        return format(self.detach().cpu(), spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            copied = PretendedTensor(self.memory.detach().clone(), self.device)
            copied.requires_grad_(self.requires_grad)
            if isinstance(self, torch.nn.Parameter):
                copied._is_param = True
            memo[id(self)] = copied
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.memory.detach().__reduce_ex__(protocol)


class _Backend:
    """The interface of a device for torch."""

    def is_initialized(self) -> bool:
        return True

    is_available = is_initialized

    def _is_in_bad_fork(self) -> bool:
        return False

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return COUNT

    def manual_seed_all(self, seed: int) -> None:
        for generator in _generators:
            generator.manual_seed(seed)

    def get_rng_state(self, device: Any = NAME) -> torch.Tensor:
        return _generators[_numbered(device).index].get_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = NAME) -> None:
        _generators[_numbered(device).index].set_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


class _AnyGenerator(_GeneratorKind):
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _TorchGenerator)


class _Generator(_TorchGenerator, metaclass=_AnyGenerator):
    """Create a generator of these devices or of others."""

    def __new__(cls, device: Any = "cpu") -> Any:
        generator = super().__new__(cls) if _is_ours(device) else _TorchGenerator(device)
        _places[generator._cdata] = _numbered(device)
        return generator

    @property
    def device(self) -> torch.device:
        return _places[self._cdata]


# ------------------------------------------------------------ operations
def _computed(operation: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the result of an operation, on a fake device if its tensors or target are there."""
    name, draws, aliases, composite = _facts(operation)
    if composite:  # in inference mode
        return operation.decompose(*args, **kwargs)
    met: dict[torch.device, None] = {}
    inner, options = _inside(args, met), {k: _inside(v, met) for k, v in kwargs.items()}
    _check_devices(name, list(met))
    wanted = kwargs.get("device")
    device = next(filter(_is_ours, met), _CPU) if wanted is None else _numbered(wanted)
    generator = kwargs.get("generator")
    if generator is not None and _places.get(generator._cdata, _CPU) != device:
        raise RuntimeError(f"{name}: the generator is not on {device}")
    if not _is_ours(device):
        return operation(*inner, **options)
    if wanted is not None:
        options["device"] = _CPU
    with _draws_of(device) if draws and generator is None else contextlib.nullcontext():
        results = _outside(operation(*inner, **options), device)
    return return_and_correct_aliasing(operation, args, kwargs, results) if aliases else results


def _inside(value: Any, met: dict[torch.device, None]) -> Any:
    """Replace tensors by their CPU memory, and record conflicting devices."""
    container = type(value)
    if container is PretendedTensor:
        met[value.device] = None
        return value.memory
    if container is list or container is tuple:
        return container([_inside(v, met) for v in value])
    if isinstance(value, torch.Tensor) and value.dim():
        met[value.device] = None
    return value


def _outside(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        if value._is_zerotensor():  # which has no memory
            value = torch.zeros(value.shape, dtype=value.dtype)
        return PretendedTensor(value, device)
    several = type(value) in (list, tuple)
    return type(value)(_outside(v, device) for v in value) if several else value


@functools.cache
def _facts(operation: Any) -> tuple[str, bool, bool, bool]:
    """Return the name of an operation, and whether it draws, returns views, or is composite."""
    name, key = operation.name(), "CompositeImplicitAutograd"
    aliases = any(argument.alias_info for argument in operation._schema.arguments)
    draws = torch.Tag.nondeterministic_seeded in operation.tags
    return name, draws, aliases, torch._C._dispatch_has_kernel_for_dispatch_key(name, key)


def _check_devices(name: str, met: list[torch.device]) -> None:
    indexed = name.startswith(_MAY_MEET_CPU) and sum(map(_is_ours, met)) == 1
    if len(met) > 1 and not indexed and not name.startswith(_MAY_MEET_ANY):
        raise RuntimeError(f"{name}: tensors on {' and '.join(map(str, met))}")


@contextlib.contextmanager
def _draws_of(device: torch.device) -> Iterator[None]:
    """Let the CPU draw from the generator of a device."""
    of_device, of_cpu = _generators[device.index], torch.default_generator
    if of_device is of_cpu:
        yield
        return
    before = of_cpu.get_state()
    of_cpu.set_state(of_device.get_state())
    try:
        yield
    finally:
        of_device.set_state(of_cpu.get_state())
        of_cpu.set_state(before)


def _is_ours(device: Any) -> bool:
    return torch.device(device).type == NAME


def _numbered(device: Any) -> torch.device:
    return (
        torch.device(NAME, torch.device(device).index or 0)
        if _is_ours(device)
        else torch.device(device)
    )


def _overloads(name: str) -> list[Any]:
    packet = getattr(torch.ops.aten, name)
    return [getattr(packet, overload) for overload in packet.overloads() if "out" not in overload]


def _autocast(operation: Any, dtype: torch.dtype | None, *args: Any, **kwargs: Any) -> Any:
    """Register an operation for autocast, in a fixed or in the lower precision."""
    dtype = dtype or torch.get_autocast_dtype(NAME)

    def cast(value: Any) -> Any:
        floats = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(dtype) if floats and value.dtype != torch.float64 else value

    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(_AUTOCAST)):
        return operation(*map(cast, args), **{k: cast(v) for k, v in kwargs.items()})


def _new_tensor(data: Any, *, device: Any = None, **options: Any) -> torch.Tensor:
    """Replace `torch.tensor`, which torch does not dispatch to devices in Python."""
    if device is None or not _is_ours(device):
        return _tensor(data, device=device, **options)
    trained = options.pop("requires_grad", False)
    return _tensor(data, **options).to(device).requires_grad_(trained)

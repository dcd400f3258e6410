"""A device called "pretended" for machines without any: memory of the CPU that only meets its own.

What would fail on a GPU because one of its tensors is on the CPU, or on another GPU, fails here,
too, and the numbers are those of the CPU. There are two such devices, with random numbers of their
own. Registering them changes the process for good: give such tests a process of their own.

>>> import torch
>>> from lightning_bnn import testing
>>> testing.register()
>>> x = torch.ones(3, device="pretended:0")
>>> (x + 1).device, (x + 1).tolist()
(device(type='pretended', index=0), [2.0, 2.0, 2.0])
>>> x + torch.ones(3)
Traceback (most recent call last):
RuntimeError: aten::add.Tensor: tensors on pretended:0 and cpu
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.utils._python_dispatch import return_and_correct_aliasing

__all__ = ["register", "trainer_options"]

NAME = "pretended"
COUNT = 2
_CPU = torch.device("cpu")
_KEY: Any = torch._C._parse_dispatch_key("AutocastPrivateUse1")
_AUTOCAST = torch._C.DispatchKeySet(_KEY)
_MAY_MEET_ANY = "aten::copy_", "aten::_to_copy"
_MAY_MEET_CPU = "aten::index.", "aten::index_put", "aten::_index_put"
"""Operations that GPUs, too, allow with tensors of the CPU."""
_LOWER = (
    "addmm addmv addbmm baddbmm bmm mm mv matmul linear prelu conv1d conv2d conv3d convolution "
    "conv_transpose1d conv_transpose2d conv_transpose3d scaled_dot_product_attention"
).split()
_SINGLE = (
    "softmax log_softmax cross_entropy_loss nll_loss mse_loss kl_div layer_norm group_norm norm "
    "cumsum cumprod prod exp log log1p expm1 pow"
).split()
"""Operations that autocast computes in lower, and in single precision."""
_libraries: list[torch.library.Library] = []
_generators: list[torch.Generator] = []
_places: dict[int, torch.device] = {}
"""Devices of generators by their addresses: they lose their class when they are handed over."""
_tensor = torch.tensor
_TorchGenerator: Any = torch.Generator
_TorchKind: Any = type(_TorchGenerator)


def register(draws_of_cpu: bool = False) -> None:
    """Make the devices known to torch.

    Args:
        draws_of_cpu: have the random numbers of the CPU go on there, so that results can be equal.

    >>> register()
    >>> torch.get_device_module("pretended").device_count()
    2
    """
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    if not _libraries:
        _setup_privateuseone_for_python_backend(NAME, backend_module=_Backend())
        _libraries.extend(torch.library.Library(name, "IMPL") for name in ("_", "aten"))
        _libraries[0].fallback(_computed, "PrivateUse1")
        _libraries[0].fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
        for name in (*_LOWER, *_SINGLE):
            dtype = None if name in _LOWER else torch.float32
            for operation in _overloads(name):
                cast = functools.partial(_autocast, operation, dtype)
                _libraries[1].impl(operation, cast, "AutocastPrivateUse1")
        torch.tensor, torch.Generator = _new_tensor, _Generator  # type: ignore[misc,assignment]
    made = [_Generator(torch.device(NAME, k)).manual_seed(0) for k in range(COUNT)]
    _generators[:] = [torch.default_generator] * COUNT if draws_of_cpu else made


def trainer_options(index: int = 0) -> dict[str, Any]:
    """What a Trainer on this device gets.

    Args:
        index: which of the two it is. For a strategy of several processes, override ``strategy``
            and give ``devices``.

    >>> Trainer(**trainer_options(1), logger=False).strategy.root_device
    device(type='pretended', index=1)
    """
    strategy = SingleDeviceStrategy(device=torch.device(NAME, index))
    return {"accelerator": PretendedAccelerator(), "strategy": strategy}


class PretendedTensor(torch.Tensor):
    """A tensor of this device, and the tensor of the CPU that is its memory."""

    memory: torch.Tensor

    @staticmethod
    def __new__(cls, memory: torch.Tensor, device: torch.device) -> PretendedTensor:
        with torch.inference_mode(False):
            made = torch.Tensor._make_wrapper_subclass(
                cls,
                memory.size(),
                strides=memory.stride(),
                storage_offset=memory.storage_offset(),
                dtype=memory.dtype,
                device=device,
            )
        made.memory = memory
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # as in torch

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
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self.memory = value.memory

    def __getitem__(self, index: Any) -> Any:
        """Lists of numbers go by way of the CPU."""
        parts = index if isinstance(index, tuple) else (index,)
        return super().__getitem__(tuple(_tensor(p) if type(p) is list else p for p in parts))

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def data_ptr(self) -> int:
        return self.memory.data_ptr()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{self.cpu()!r}.to({str(self.device)!r})"

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


class PretendedAccelerator(Accelerator):
    """What a Trainer needs to know of the device."""

    def setup_device(self, device: torch.device) -> None:
        pass

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        return {}

    def teardown(self) -> None:
        pass

    @staticmethod
    def parse_devices(devices: Any) -> list[int]:
        return devices if isinstance(devices, list) else list(range(int(devices)))

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        return [torch.device(NAME, k) for k in devices]

    @staticmethod
    def auto_device_count() -> int:
        return COUNT

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def name() -> str:
        return NAME


class _Backend:
    """What torch asks a device for."""

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
        return _generators[torch.device(device).index or 0].get_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = NAME) -> None:
        _generators[torch.device(device).index or 0].set_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


class _Kind(_TorchKind):
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _TorchGenerator)


class _Generator(_TorchGenerator, metaclass=_Kind):
    """Of the device or, as usual, of another."""

    def __new__(cls, device: Any = "cpu") -> Any:
        device = torch.device(device)
        if device.type != NAME:
            made = _TorchGenerator(device)
            _places.pop(made._cdata, None)
            return made
        made = super().__new__(cls)
        _places[made._cdata] = _numbered(device)
        return made

    @property
    def device(self) -> torch.device:
        return _places[self._cdata]


# ------------------------------------------------------------ operations
def _computed(operation: Any, *args: Any, **kwargs: Any) -> Any:
    """The result of an operation, on this device if its tensors or the wanted device are."""
    name, draws, aliases, composite = _facts(operation)
    if composite:
        return operation.decompose(*args, **kwargs)
    met: dict[torch.device, None] = {}
    inner, options = _inside(args, met), {k: _inside(v, met) for k, v in kwargs.items()}
    _check_devices(name, list(met))
    ours = [device for device in met if device.type == NAME]
    wanted = kwargs.get("device")
    device = _numbered(wanted) if wanted is not None else ours[0] if ours else _CPU
    generator = kwargs.get("generator")
    if generator is not None and _places.get(generator._cdata, _CPU) != device:
        raise RuntimeError(f"{name}: a generator of another device than {device}")
    if device.type != NAME:
        return operation(*inner, **options)
    if wanted is not None:
        options["device"] = _CPU
    with _draws_of(device) if draws and generator is None else contextlib.nullcontext():
        results = _outside(operation(*inner, **options), device)
    return return_and_correct_aliasing(operation, args, kwargs, results) if aliases else results


def _inside(value: Any, met: dict[torch.device, None]) -> Any:
    """Arguments with the memory of our tensors, whose devices, and others', are noted."""
    if isinstance(value, PretendedTensor):
        met[value.device] = None
        return value.memory
    if isinstance(value, torch.Tensor) and value.dim():
        met[value.device] = None
    return type(value)(_inside(v, met) for v in value) if type(value) in (list, tuple) else value


def _outside(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        if value._is_zerotensor():  # which has no memory
            value = torch.zeros(value.shape, dtype=value.dtype)
        return PretendedTensor(value, device)
    return (
        type(value)(_outside(v, device) for v in value)
        if isinstance(value, list | tuple)
        else value
    )


@functools.cache
def _facts(operation: Any) -> tuple[str, bool, bool, bool]:
    """Its name, and whether it draws, may return memory of an argument, and consists of others."""
    name, draws = operation.name(), torch.Tag.nondeterministic_seeded in operation.tags
    aliases = any(argument.alias_info for argument in operation._schema.arguments)
    key = "CompositeImplicitAutograd"
    return name, draws, aliases, torch._C._dispatch_has_kernel_for_dispatch_key(name, key)


def _check_devices(name: str, met: list[torch.device]) -> None:
    indexed = name.startswith(_MAY_MEET_CPU) and len([d for d in met if d != _CPU]) == 1
    if len(met) > 1 and not indexed and not name.startswith(_MAY_MEET_ANY):
        raise RuntimeError(f"{name}: tensors on {' and '.join(map(str, met))}")


@contextlib.contextmanager
def _draws_of(device: torch.device) -> Iterator[None]:
    """Meanwhile the CPU, which computes, draws from the generator of a device."""
    own, of_cpu = _generators[device.index], torch.default_generator
    before = of_cpu.get_state()
    of_cpu.set_state(own.get_state())
    try:
        yield
    finally:
        own.set_state(of_cpu.get_state())
        if own is not of_cpu:
            of_cpu.set_state(before)


def _numbered(device: Any) -> torch.device:
    device = torch.device(device)
    return torch.device(NAME, device.index or 0) if device.type == NAME else device


def _overloads(name: str) -> list[Any]:
    packet = getattr(torch.ops.aten, name)
    return [getattr(packet, overload) for overload in packet.overloads() if "out" not in overload]


def _autocast(operation: Any, dtype: torch.dtype | None, *args: Any, **kwargs: Any) -> Any:
    """An operation within autocast, in a precision or in the lower one."""
    dtype = dtype or torch.get_autocast_dtype(NAME)

    def cast(value: Any) -> Any:
        floats = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(dtype) if floats and value.dtype != torch.float64 else value

    with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
        return operation(*map(cast, args), **{k: cast(v) for k, v in kwargs.items()})


def _new_tensor(data: Any, *, device: Any = None, **options: Any) -> torch.Tensor:
    """`torch.tensor`, which torch does not send to devices in Python."""
    if device is None or torch.device(device).type != NAME:
        return _tensor(data, device=device, **options)
    requires_grad = options.pop("requires_grad", False)
    return _tensor(data, **options).to(device).requires_grad_(requires_grad)

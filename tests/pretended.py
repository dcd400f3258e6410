"""A device called "pretended" on machines without any: memory of the CPU that only meets its own.

Whatever would fail on a GPU because one of its tensors is on the CPU fails here, too; the numbers
are those of the CPU. Registering it changes the process for good: take a process of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map_only

NAME = "pretended"
_MAY_MEET_CPU = ("aten::copy_", "aten::_to_copy", "aten::index.", "aten::index_put")
"""Operations that GPUs, too, allow with tensors of the CPU."""
_LIBRARY = torch.library.Library("_", "IMPL")
_tensor = torch.tensor
_GENERATORS = set()
"""Addresses of this device's generators, which lose their class when they are handed over."""


class Pretended(torch.Tensor):
    """A tensor of this device, and the tensor of the CPU that is its memory."""

    memory: torch.Tensor

    @staticmethod
    def __new__(cls, memory):
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            memory.size(),
            strides=memory.stride(),
            storage_offset=memory.storage_offset(),
            dtype=memory.dtype,
            device=torch.device(NAME, 0),
        )
        made.memory = memory
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, operation, types, args=(), kwargs=None):
        return _computed(operation, *args, **(kwargs or {}))

    def tolist(self):
        return self.cpu().tolist()

    def __deepcopy__(self, memo):
        if id(self) not in memo:
            copied = Pretended(self.memory.detach().clone()).requires_grad_(self.requires_grad)
            if isinstance(self, torch.nn.Parameter):
                copied._is_param = True
            memo[id(self)] = copied
        return memo[id(self)]


class PretendedAccelerator(Accelerator):
    """What a Trainer needs to know of the device."""

    def setup_device(self, device):
        pass

    def get_device_stats(self, device):
        return {}

    def teardown(self):
        pass

    @staticmethod
    def parse_devices(devices):
        return devices

    @staticmethod
    def get_parallel_devices(devices):
        return [torch.device(NAME, k) for k in range(devices)]

    @staticmethod
    def auto_device_count():
        return 1

    @staticmethod
    def is_available():
        return True

    @staticmethod
    def name():
        return NAME


class Generator(torch.Generator):
    """Draws on the CPU, whatever its device."""

    def __new__(cls, device="cpu"):
        made = super().__new__(cls)
        made.place = torch.device(device)
        (_GENERATORS.add if _is_ours(made.place) else _GENERATORS.discard)(made._cdata)
        return made

    @property
    def device(self):
        return self.place


class _Backend:
    """What torch asks a device for."""

    def is_initialized(self):
        return True

    def is_available(self):
        return True

    def current_device(self):
        return 0

    def device_count(self):
        return 1

    def manual_seed_all(self, seed):
        pass

    def get_rng_state(self, device=None):
        return torch.get_rng_state()

    def set_rng_state(self, state, device=None):
        pass

    def get_amp_supported_dtype(self):
        return [torch.bfloat16]

    def _is_in_bad_fork(self):
        return False


def register() -> None:
    """Make the device known to torch."""
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend(NAME, backend_module=_Backend())
    _LIBRARY.fallback(_computed, "PrivateUse1")
    torch.tensor, torch.Generator = _new_tensor, Generator


def trainer_options() -> dict[str, Any]:
    """For a Trainer on this device; its tensors cannot be made in inference mode."""
    strategy = SingleDeviceStrategy(device=torch.device(NAME, 0))
    return {"accelerator": PretendedAccelerator(), "strategy": strategy, "inference_mode": False}


def _computed(operation, *args, **kwargs):
    """The result of an operation, on this device if its tensors or the wanted device are."""
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    ours = [t for t in tensors if isinstance(t, Pretended)]
    name = operation.name()
    alone = all(isinstance(t, Pretended) or t.dim() == 0 for t in tensors)
    if ours and not alone and not name.startswith(_MAY_MEET_CPU):
        raise RuntimeError(f"{name}: tensors on the CPU and on {NAME}")
    device = kwargs.get("device")
    wanted = bool(ours) if device is None else _is_ours(device)
    _check_generator(name, kwargs.get("generator"), wanted)
    inner, options = tree_map_only(Pretended, lambda t: t.memory, (args, kwargs))
    if wanted and device is not None:
        options["device"] = "cpu"
    results = operation(*inner, **options)
    if not wanted:
        return results
    results = tree_map_only(torch.Tensor, Pretended, results)
    return return_and_correct_aliasing(operation, args, kwargs, results) if ours else results


def _check_generator(name, generator, wanted):
    if generator is not None and (generator._cdata in _GENERATORS) != wanted:
        raise RuntimeError(f"{name}: a generator of another device")


def _is_ours(device):
    return torch.device(device).type == NAME


def _new_tensor(data, *, device=None, **options):
    """`torch.tensor`, which torch does not send to devices in Python."""
    if device is None or not _is_ours(device):
        return _tensor(data, device=device, **options)
    return _tensor(data, **options).to(device)

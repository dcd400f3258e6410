"""A real device that draws the random numbers of the CPU, so that both compute the same."""

import contextlib
from functools import partial
from unittest import mock

import torch

_KEYS = {"cuda": "CUDA", "mps": "MPS", "xpu": "XPU"}


_TorchGenerator = torch.Generator


class _Generator(torch.Generator):
    """Draws on the CPU, whatever its device."""

    def __new__(cls, device="cpu"):
        made = super().__new__(cls)
        made.place = torch.device(device)
        return made

    @property
    def device(self):
        return self.place

    def get_state(self):
        """What the device's own generator of this seed would have, as nothing is drawn from it."""
        if self.place.type == "cpu":
            return super().get_state()
        return _TorchGenerator(self.place).manual_seed(self.initial_seed()).get_state()


@contextlib.contextmanager
def cpu_draws(device):
    """Meanwhile, every operation that draws on the device draws on the CPU and moves its result."""
    key = _KEYS[torch.device(device).type]
    with torch.library._scoped_library("aten", "IMPL") as library:
        for name in torch._C._dispatch_get_registrations_for_dispatch_key(key):
            operation = _operation(name)
            if operation is not None and _draws(operation):
                library.impl(operation, partial(_drawn, operation), key)
        with mock.patch.object(torch, "Generator", _Generator):
            yield


def _operation(name):
    namespace, _, rest = name.partition("::")
    base, _, overload = rest.partition(".")
    packet = getattr(torch.ops.aten, base, None) if namespace == "aten" else None
    return getattr(packet, overload or "default", None)


def _draws(operation):
    names = [argument.name for argument in operation._schema.arguments]
    return "generator" in names or operation is torch.ops.aten.native_dropout.default


def _drawn(operation, *args, **kwargs):
    tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)]
    device = tensors[0].device
    there = {id(t): t.cpu() for t in tensors}
    results = operation(
        *(there.get(id(a), a) for a in args), **{k: there.get(id(v), v) for k, v in kwargs.items()}
    )
    here = {id(there[id(t)]): t for t in tensors}
    if isinstance(results, torch.Tensor):
        return _moved(results, here, device)
    return tuple(_moved(result, here, device) for result in results)


def _moved(result, here, device):
    """A tensor that was written in place keeps its identity."""
    written = here.get(id(result))
    return result.to(device) if written is None else written.copy_(result)

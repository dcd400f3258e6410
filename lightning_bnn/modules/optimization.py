"""Optimizers and gradient clipping that keep networks apart which are trained side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from lightning_bnn._compat import trainer_of
from lightning_bnn.harvest import epochs_of
from lightning_bnn.modules.core import Core
from lightning_bnn.samplers.cyclical import interval_of
from weightsym.params import at_least_single

_PROBES = ((3, 4, 5), (3, 4))
_SCALES = (1e-3, 1.0, 1e3)


def configured_optimizers(module: Core) -> Any:
    """One optimizer for all members, if it does not mix them, and its schedule.

    Args:
        module: says how both are made.
    """
    if module.members > 1:
        check_elementwise(module.make_optimizer)
    optimizer: Any = None
    if module.method.trains:
        optimizer = module.make_optimizer([p for p in module.parameters() if p.requires_grad])
    scheduler = None if module.make_scheduler is None else module.make_scheduler(optimizer)
    trainer = trainer_of(module)
    epochs = 0 if trainer is None else epochs_of(trainer)
    resumed = trainer is not None and trainer.ckpt_path is not None
    given = scheduler
    scheduler = module.method.configure_optimizer(
        module.state, optimizer, module.run, given, epochs, resumed
    )
    if scheduler is None:
        return optimizer
    if scheduler is not given and module.lr_interval == "step":
        raise ValueError(
            f"The schedule of {module.method.name} counts epochs: leave `lr_interval` 'step' out."
        )
    watched = getattr(scheduler, "monitor", "val/nll")
    interval = module.lr_interval or interval_of(scheduler)
    config = {"scheduler": scheduler, "interval": interval, "monitor": watched}
    return {"optimizer": optimizer, "lr_scheduler": config}


def check_elementwise(optimizer: Callable[[Iterable[Tensor]], Any]) -> None:
    """Refuse an optimizer that would let members of a stack influence each other.

    Three small networks are moved by two steps, once as a stack and once each on its own, with
    gradients of very different sizes; the results must agree. An optimizer class that says
    ``elementwise = True`` (one that adds noise, say) is believed.

    Args:
        optimizer: makes one for given parameters.
    """
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator) for shape in _PROBES]
    grads = [torch.randn(shape, generator=generator) for shape in _PROBES]
    for grad in grads:
        grad *= torch.tensor(_SCALES).reshape(-1, *(1,) * (grad.ndim - 1))
    try:
        together = _moved(optimizer, values, grads)
        if together is None:
            return
        apart = [
            _moved(optimizer, [v[m] for v in values], [g[m] for g in grads])
            for m in range(len(_SCALES))
        ]
    except (TypeError, ValueError, RuntimeError) as error:
        raise _refused(optimizer, f"it cannot move a stack of tensors: {error}") from error
    for k, moved in enumerate(together):
        if not torch.allclose(moved, torch.stack([a[k] for a in apart if a]), rtol=1e-4, atol=1e-7):
            raise _refused(optimizer, "the step of one network would depend on the others")


def _moved(
    make: Callable[[Iterable[Tensor]], Any], values: list[Tensor], grads: list[Tensor]
) -> list[Tensor] | None:
    tensors = [torch.nn.Parameter(v.clone()) for v in values]
    optimizer = make(tensors)
    if getattr(optimizer, "elementwise", False):
        return None
    for _ in range(2):
        for tensor, grad in zip(tensors, grads, strict=True):
            tensor.grad = grad.clone()
        optimizer.step()
    return [t.detach() for t in tensors]


def _refused(optimizer: Any, reason: str) -> ValueError:
    name = getattr(optimizer, "__name__", None) or type(optimizer).__name__
    return ValueError(
        f"`optimizer` {name} cannot train members side by side: {reason}. Take an elementwise one "
        "(SGD, Adam, AdamW, RMSprop, ...) or `members=1`."
    )


def clip_members(stacks: Iterable[Tensor], limit: float) -> None:
    """Clip the norm of the gradient of every member as if it were alone.

    Args:
        stacks: parameters whose first dimension counts members.
        limit: largest norm of the gradient of one member.
    """
    grads = [t.grad for t in stacks if t.grad is not None]
    if not grads:
        return
    norms = torch.stack([at_least_single(g).flatten(1).norm(dim=1) for g in grads]).norm(dim=0)
    factors = (limit / (norms + 1e-6)).clamp(max=1)
    for grad in grads:
        grad *= factors.to(grad).reshape(-1, *(1,) * (grad.ndim - 1))

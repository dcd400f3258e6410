"""The base of stochastic-gradient samplers: the target, and noise shared by replicas."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_bnn.samplers.sampler import Sampler, cut, seed_of
from weightsym.params import keyed_generator

__all__ = ["Langevin"]


class Tempered(Sampler):
    r"""A torch optimizer with a known target, and noise shared by replicas.

    .. math:: \exp\big(-(N \cdot \mathrm{loss}(\theta) + \tfrac{\lambda}{2} \|\theta\|^2) / T\big)

    The arguments are those of `Langevin`.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        num_data: int | None,
        temperature: float,
        prior_precision: float | None,
        weight_decay: float | None,
        seed: int | None,
        **more: Any,
    ) -> None:
        if prior_precision is not None and weight_decay is not None:
            raise ValueError(
                "`prior_precision` and `weight_decay` are equivalent up to N: set only one."
            )
        self._scratch: dict[Any, Tensor] = {}
        super().__init__(
            params, lr=lr, num_data=num_data, temperature=temperature, seed=seed,
            prior_precision=prior_precision, weight_decay=weight_decay, **more,
        )  # fmt: skip

    def __getstate__(self) -> dict[str, Any]:
        """Omit buffers that are only reused."""
        return {**super().__getstate__(), "_scratch": {}}

    def _noise(self, group: dict[str, Any], params: Sequence[Tensor], index: str) -> list[Tensor]:
        """Draw noise for all tensors at once, valid until the next draw."""
        values = [local(p) for p in params]
        first = values[0]
        seed, step, dtype = seed_of(group), group["step"], str(first.dtype)
        key = (seed, step, index, "noise", dtype, *_shard(params[0]))
        generator = keyed_generator(*key, device=first.device)
        flat = self._memory(first, sum(v.numel() for v in values)).normal_(generator=generator)
        return cut(flat, values)

    def _memory(self, like: Tensor, size: int) -> Tensor:
        """Reuse the same memory at every step, since new pages would cost as much as the draw."""
        memory = self._scratch.get((like.device, like.dtype))
        if memory is None or len(memory) < size:
            memory = self._scratch[like.device, like.dtype] = like.new_empty(size)
        return memory[:size]

    def _check(self, group: dict[str, Any]) -> None:
        if group["num_data"] is None:
            raise ValueError(
                f"{type(self).__name__} needs `num_data`, the number of training examples; the "
                "modules of lightning_bnn fill it in."
            )
        if any(p.grad is not None and p.grad.is_sparse for p in group["params"]):
            raise ValueError(f"{type(self).__name__} does not support sparse gradients.")
        half = {p.dtype for p in group["params"]} & {torch.bfloat16, torch.float16}
        if half and group["step"] == 0:
            warnings.warn(
                f"Small steps are lost to rounding in {half.pop()}: use a mixed precision.",
                stacklevel=3,
            )


class Langevin(Tempered):
    r"""A torch optimizer whose parameters move through a tempered posterior.

    The loss is a mean over examples, and N of them define the target

    .. math:: \exp\big(-(N \cdot \mathrm{loss}(\theta) + \tfrac{\lambda}{2} \|\theta\|^2) / T\big)

    Everything that can change while it runs (``lr``, ``temperature``, ...) lives in the parameter
    groups. The noise depends on the seed, the step and the shard only: replicas of a data-parallel
    run stay equal, and a resumed run draws what the uninterrupted one would have drawn.

    Args:
        params: parameters or parameter groups.
        lr: step size.
        num_data: N; set by our modules.
        temperature: T; 0 is plain optimization.
        prior_precision: :math:`\lambda` of a Gaussian prior.
        weight_decay: :math:`\lambda / N` instead.
        seed: of the noise; by default torch's own, or 0 with several processes, and in our modules
            theirs.

    >>> class GradientDescent(Langevin):
    ...     def update(self, group, params, values, grads, noise):
    ...         torch._foreach_add_(values, grads, alpha=-group["lr"])
    >>> w = torch.nn.Parameter(torch.zeros(2))
    >>> rest = {"prior_precision": None, "weight_decay": None, "seed": None}
    >>> sampler = GradientDescent([w], lr=0.5, num_data=100, temperature=0.0, **rest)
    >>> w.grad = torch.tensor([1.0, 2.0])
    >>> sampler.step()
    >>> w.tolist()
    [-0.5, -1.0]
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step of all groups.

        Args:
            closure: computes the loss and its gradients anew.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for index, group in enumerate(self.param_groups):
            self._check(group)
            params = [p for p in group["params"] if p.grad is not None]
            for index_of_kind, same in enumerate(alike(params)):
                self._move(group, same, f"{index}.{index_of_kind}")
            group["step"] += 1
        return loss

    def _move(self, group: dict[str, Any], params: list[Tensor], index: str) -> None:
        values = [local(p) for p in params]
        grads = [local(p.grad) for p in params if p.grad is not None]
        noise = self._noise(group, params, index) if group["temperature"] > 0 else None
        self.update(group, params, values, grads, noise)

    @abstractmethod
    def update(
        self,
        group: dict[str, Any],
        params: list[Tensor],
        values: list[Tensor],
        grads: list[Tensor],
        noise: list[Tensor] | None,
    ) -> None:
        """Update ``values`` in place.

        Args:
            group: rates and counters.
            params: keys of the state.
            values: the local parts of all parameters.
            grads: gradients of the mean loss, not to be changed; the prior adds `decay_of` times
                the values.
            noise: standard normal numbers; None at temperature 0.
        """


def temperature_of(group: dict[str, Any]) -> float:
    """Return T / N, the temperature in units of the mean loss."""
    return group["temperature"] / group["num_data"]


def decay_of(group: dict[str, Any]) -> float:
    """Return the factor of the values that the prior adds to gradients of the mean loss."""
    if group["prior_precision"] is not None:
        return group["prior_precision"] / group["num_data"]
    return group["weight_decay"] or 0.0


def alike(params: Sequence[Tensor]) -> list[list[Tensor]]:
    """Group parameters by device, type and shard."""
    groups: dict[Any, list[Tensor]] = {}
    for p in params:
        groups.setdefault((p.device, p.dtype, _shard(p)), []).append(p)
    return list(groups.values())


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _shard(tensor: Tensor) -> tuple[int, ...]:
    """Name the shard of a parameter: shards have different noise, copies do not."""
    if not isinstance(tensor, DTensor):
        return ()
    coordinate: Sequence[int] = tensor.device_mesh.get_coordinate() or []
    split = [k for k, placement in enumerate(tensor.placements) if placement.is_shard()]
    return tuple(coordinate[k] for k in split)

"""Variational inference at the cost of Adam: the improved variational online Newton method."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bnn.samplers.langevin import Tempered, alike, decay_of, local, temperature_of
from weightsym.params import Params, check_fraction, check_positive

__all__ = ["IVON"]

_REMEDY = (
    "call `perturb()` before the network, give `step` a closure, or add the callback DrawnWeights "
    "to the Trainer."
)


class IVON(Tempered):
    r"""Learns a diagonal Gaussian over weights from one gradient per step, at drawn weights.

    .. math:: \theta = m + \sigma \xi, \quad \sigma^2 = \frac{T}{N (h + \delta)}, \quad
        \hat h = \hat g \cdot \frac{\theta - m}{\sigma^2}, \quad \delta = \lambda / N

    .. math:: h \leftarrow h + \rho (\hat h - h) + \frac{\rho^2 (\hat h - h)^2}{2 (h + \delta)},
        \quad m \leftarrow m - \eta\, (h_0 + \delta)\, \frac{\bar g + \delta m}{h + \delta}

    with the gradient :math:`\hat g` of the mean loss at the drawn weights, its running mean
    :math:`\bar g` (without the bias of its start) and :math:`\rho = 1 -` ``hessian_momentum``.

    The parameters are the means, except between `perturb` and `restore` or `step`. A ``closure`` is
    evaluated at drawn weights. One draw belongs to one step: gradients accumulated over several
    batches, or averaged over processes, are those of one large batch. In a Trainer the callback
    `DrawnWeights` does all of this, and the module `IVON` needs nothing. Clipped gradients lead to
    another Gaussian unless `observe` is called before clipping, as both do.

    Args:
        params: parameters or parameter groups.
        lr: step size, that of SGD with momentum at the initial curvature.
        num_data: number of training examples N.
        temperature: T.
        prior_precision: of a Gaussian prior.
        weight_decay: ``prior_precision / num_data`` instead.
        momentum: of the gradients.
        hessian_momentum: of the curvature h, which must have time to change: 0.99999 for large
            networks, 0.999 for short runs.
        hessian_init: initial curvature :math:`h_0`.
        seed: of the noise; by default torch's own, or 0 with several processes, and in our modules
            theirs.

    References:
        | Variational Learning is Effective for Large Deep Networks (Shen et al., 2024)
        | https://arxiv.org/abs/2402.17641

    >>> w = nn.Parameter(torch.zeros(500))
    >>> optimizer = IVON([w], lr=0.5, num_data=100, prior_precision=10.0, hessian_momentum=0.99)
    >>> for _ in range(2000):
    ...     optimizer.perturb()
    ...     w.grad = 2 * (w.detach() - 1)  # of the mean loss (w - 1)^2
    ...     optimizer.step()
    >>> precise = 1 / (100 * 2 + 10)  # the variance of the posterior
    >>> round(w.mean().item(), 2), round((optimizer.deviation(w) ** 2).mean().item() / precise, 1)
    (0.95, 1.0)
    """

    draws_itself = True
    """Whether `step` draws weights for its closure."""
    certain: Collection[Tensor] = ()
    """Parameters without a distribution, updated as by SGD with momentum."""
    _zeroed = True
    _observed: dict[Tensor, Tensor] | None = None
    """Unclipped gradients times offsets, if the gradients may have been clipped since."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.2,
        num_data: int | None = None,
        temperature: float = 1.0,
        prior_precision: float | None = None,
        weight_decay: float | None = None,
        momentum: float = 0.9,
        hessian_momentum: float = 0.9995,
        hessian_init: float = 1.0,
        seed: int | None = None,
    ) -> None:
        check_fraction("hessian_momentum", hessian_momentum)
        check_positive("temperature", temperature)
        check_positive("hessian_init", hessian_init)
        super().__init__(
            params, lr, num_data, temperature, prior_precision, weight_decay, seed,
            momentum=momentum, hessian_momentum=hessian_momentum, hessian_init=hessian_init,
        )  # fmt: skip

    # ------------------------------------------------------------ draws
    @torch.no_grad()
    def perturb(self) -> None:
        """Replace the means by drawn weights, which stay the same until the next step."""
        for p in self._drawn(self._parameters()):
            if "mean" not in self.state[p]:
                offset = self.offset(p)
                self.state[p]["mean"] = local(p).clone()
                local(p).add_(offset)

    @torch.no_grad()
    def restore(self) -> None:
        """Replace drawn weights by the means."""
        for p in self._parameters():
            mean = self.state[p].pop("mean", None)
            if mean is not None:
                local(p).copy_(mean)

    def offset(self, parameter: Tensor) -> Tensor:
        """Return the difference of drawn weights from their means, until the next step.

        Args:
            parameter: of this optimizer.
        """
        if "offset" not in self.state[parameter]:
            self._draw()
        offset: Tensor = self.state[parameter]["offset"]
        return offset

    @torch.no_grad()
    def _draw(self) -> None:
        for index, group in enumerate(self.param_groups):
            self._check(group)
            for number, same in enumerate(alike([*self._drawn(group["params"])])):
                precisions = torch._foreach_add([self.curvature(p) for p in same], decay_of(group))
                torch._foreach_div_(precisions, temperature_of(group))
                torch._foreach_sqrt_(precisions)
                noise = self._noise(group, same, f"{index}.{number}")
                offsets = torch._foreach_div(noise, precisions)
                for p, offset in zip(same, offsets, strict=True):
                    self.state[p]["offset"] = offset

    def curvature(self, parameter: Tensor) -> Tensor:
        """Return the estimated curvature h of the mean loss.

        Args:
            parameter: of this optimizer.
        """
        state = self.state[parameter]
        if "curvature" not in state:
            start = self._group(parameter)["hessian_init"]
            state["curvature"] = torch.full_like(local(parameter), start).detach()
        curvature: Tensor = state["curvature"]
        return curvature

    def deviation(self, parameter: Tensor) -> Tensor:
        """Return the posterior standard deviations of a parameter.

        Args:
            parameter: of this optimizer.
        """
        group = self._group(parameter)
        return deviations_of(self.curvature(parameter), decay_of(group), temperature_of(group))

    def deviations(self, network: nn.Module) -> Params:
        """Return the standard deviations of a network by name, for `DiagonalGaussian`.

        Args:
            network: with parameters of this optimizer.
        """
        drawn = set(self._drawn(self._parameters()))
        return {n: self.deviation(p) for n, p in network.named_parameters() if p in drawn}

    # ------------------------------------------------------------ steps
    @torch.no_grad()
    def observe(self) -> None:
        """Read gradients before they are clipped for the next step.

        The curvature is learned from these gradients. The prior is added to them, so that data and
        prior are clipped alike. Otherwise the means would be drawn to zero.

        >>> w = nn.Parameter(torch.ones(3))
        >>> optimizer = IVON([w], num_data=10, prior_precision=1.0)
        >>> optimizer.perturb()
        >>> w.grad = 100 * (w.detach() - 1)
        >>> optimizer.observe()
        >>> _ = nn.utils.clip_grad_norm_([w], 1.0)
        >>> optimizer.step()
        """
        if self._observed is not None:
            return
        self._observed = {}
        for group in self.param_groups:
            self._check(group)
            for p in self._drawn(group["params"]):
                state = self.state[p]
                if p.grad is not None and "offset" in state:
                    grad = local(p.grad)
                    self._observed[p] = grad * state["offset"]
                    grad.add_(state.get("mean", local(p)), alpha=decay_of(group))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update means and curvature from gradients at drawn weights.

        Args:
            closure: computes the loss and its gradients anew.
        """
        loss = None if closure is None else self._at_drawn_weights(closure)
        self.restore()
        for group in self.param_groups:
            self._check(group)
            params = [p for p in group["params"] if p.grad is not None]
            if any("offset" not in self.state[p] for p in self._drawn(params)):
                raise RuntimeError(f"IVON needs gradients at drawn weights: {_REMEDY}")
            for same in alike([*self._drawn(params)]):
                self._learn_curvature(group, same)
                self._move(group, same, decay_of(group))
            for same in alike([p for p in params if p in self.certain]):
                self._move(group, same, 0.0)
            group["step"] += 1
        for p in self._parameters():
            self.state[p].pop("offset", None)
        self._observed = None
        return loss

    def _at_drawn_weights(self, closure: Callable[[], Any]) -> Any:
        drawn = [*self._drawn(self._parameters())]
        mixed = self.draws_itself and any(
            p.grad is not None and "mean" not in self.state[p] for p in drawn
        )
        if self.draws_itself:
            self.perturb()
        self._zeroed = False
        with torch.enable_grad():
            loss = closure()
        if mixed and not self._zeroed:
            raise RuntimeError(f"Some of the gradients are not at drawn weights: {_REMEDY}")
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients.

        Args:
            set_to_none: whether to remove them instead of setting them to zero.
        """
        self._zeroed, self._observed = True, None
        super().zero_grad(set_to_none)

    def _learn_curvature(self, group: dict[str, Any], params: list[Tensor]) -> None:
        curvatures, rate = [self.curvature(p) for p in params], 1 - group["hessian_momentum"]
        damped = torch._foreach_add(curvatures, decay_of(group))
        changes = self._products(params)
        torch._foreach_mul_(changes, damped)
        torch._foreach_div_(changes, temperature_of(group))
        torch._foreach_sub_(changes, curvatures)
        torch._foreach_add_(curvatures, changes, alpha=rate)
        torch._foreach_mul_(changes, changes)
        torch._foreach_addcdiv_(curvatures, changes, damped, value=rate**2 / 2)

    def _products(self, params: list[Tensor]) -> list[Tensor]:
        """Return unclipped gradients times offsets."""
        if self._observed is not None:
            return [self._observed[p] for p in params]
        grads = [local(p.grad) for p in params if p.grad is not None]
        return [*torch._foreach_mul(grads, [self.state[p]["offset"] for p in params])]

    def _move(self, group: dict[str, Any], params: list[Tensor], decay: float) -> None:
        values = [local(p) for p in params]
        for p, value in zip(params, values, strict=True):
            if "momentum" not in self.state[p]:
                self.state[p]["momentum"] = torch.zeros_like(value)
        means = [self.state[p]["momentum"] for p in params]
        grads = [local(p.grad) for p in params if p.grad is not None]
        torch._foreach_lerp_(means, grads, 1 - group["momentum"])
        steps = torch._foreach_div(means, 1 - group["momentum"] ** (group["step"] + 1))
        if decay and self._observed is None:
            torch._foreach_add_(steps, values, alpha=decay)
        curvatures = torch._foreach_add([self.curvature(p) for p in params], decay)
        torch._foreach_div_(steps, curvatures)
        length = group["lr"] * (group["hessian_init"] + decay)
        torch._foreach_add_(values, steps, alpha=-length)

    def _drawn(self, params: Iterable[Tensor]) -> Iterator[Tensor]:
        return (p for p in params if p.requires_grad and p not in self.certain)

    def _parameters(self) -> Iterator[Tensor]:
        return (p for group in self.param_groups for p in group["params"] if p.requires_grad)

    def _group(self, parameter: Tensor) -> dict[str, Any]:
        return next(g for g in self.param_groups if any(p is parameter for p in g["params"]))


def deviations_of(curvature: Tensor, decay: float, temperature: float) -> Tensor:
    """Return the standard deviations of weights, in units of the mean loss."""
    return ((curvature + decay) / temperature).rsqrt()

"""Variational inference by natural gradients: the method around the optimizer `IVON`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bnn import samplers
from lightning_bnn.methods.method import AS_IT_IS, Fit, Method, Purpose
from lightning_bnn.methods.mfvi import Means, trained_names
from lightning_bnn.methods.networks import gaussian_prior, tell_prior
from lightning_bnn.methods.run import Batch, Run
from lightning_bnn.posteriors import Posterior
from lightning_bnn.posteriors.empirical import mixture_of
from lightning_bnn.samplers.ivon import deviations_of
from lightning_bnn.samplers.langevin import decay_of, temperature_of
from weightsym import params as P
from weightsym.params import Params, check_not_negative

__all__ = ["VariationalOnlineNewton"]

_UNTIL_TRAINED = 0.01
"""Standard deviation until an optimizer is known."""
_LEAST_CHANGE = 0.5
"""Least length of a run, in time constants of the curvature."""


class Curvatures(Means):
    """A mean and a curvature of the loss for every weight of every member.

    Args:
        stack: the members, whose weights are the means.
        names: weights that have a distribution; all other tensors are constants.

    Attributes:
        notes: ``temperature`` T / N and ``decay`` of the optimizer, once it is known.
    """

    optimizer: samplers.IVON | None = None

    def __init__(self, stack: Params, names: Sequence[str]) -> None:
        super().__init__(stack, names)
        self.register_buffer("curvature", torch.zeros_like(self.mean.data))
        self.curvature: Tensor
        self.notes.update(temperature=None, decay=None)

    def flat_deviations(self) -> Tensor:
        if self.notes["temperature"] is None:
            return torch.full_like(self.curvature, _UNTIL_TRAINED)
        return deviations_of(self.curvature, self.notes["decay"], self.notes["temperature"])

    def __getstate__(self) -> dict[str, Any]:
        """Omit the optimizer, which checkpoints store separately."""
        return {**self.__dict__, "optimizer": None}


@dataclass(eq=False)
class VariationalOnlineNewton(Method):
    r"""A diagonal Gaussian over the weights of any network, at the cost of Adam.

    .. math:: L = E_q[\mathrm{NLL}(\omega)] + \frac{1}{N} \big(E_q[-\log p(\omega)] - T H(q)\big)

    The objective is that of `MFVI`. Its steps are natural gradients, computed from one gradient at
    drawn weights. The optimizer is `lightning_bnn.samplers.IVON`, which receives N and the prior;
    its ``hessian_init`` and ``hessian_momentum`` matter most. With several members, the posterior
    is a mixture.

    Args:
        prior_std: standard deviation of a Gaussian prior over all weights; None leaves it to the
            optimizer.
        temperature: T, of the tempered posterior; by default the optimizer's, which is 1.

    References:
        | Variational Learning is Effective for Large Deep Networks (Shen et al., 2024)
        | https://arxiv.org/abs/2402.17641

    >>> import torch
    >>> from lightning_bnn import methods, params, samplers
    >>> from lightning_bnn.models import mlp
    >>> net, x, y = mlp(2, [4], 2), torch.randn(50, 2), torch.arange(50) % 2
    >>> method, run = methods.VariationalOnlineNewton(), methods.Run(net, num_data=50)
    >>> batch = methods.Batch((x,), y)
    >>> state = method.init(net, params.populate(net, members=2))
    >>> optimizer = samplers.IVON(state.parameters(), num_data=50)
    >>> _ = method.configure_optimizer(state, optimizer, run)  # tells it the prior
    >>> method.before_fit(state, methods.Fit(optimizer=optimizer), run)
    >>> for _ in range(3):
    ...     optimizer.zero_grad()
    ...     method.losses(state, batch, run)["loss"].sum().backward()
    ...     optimizer.step()
    >>> [type(mode).__name__ for mode in method.posterior(state, run).modes()]
    ['DiagonalGaussian', 'DiagonalGaussian']
    """

    prior_std: float | None = 1.0
    temperature: float | None = None

    name = "IVON"
    unfitted = "its Gaussians are used as initialised"

    def __post_init__(self) -> None:
        self.prior = gaussian_prior(self.prior_std)
        check_not_negative("temperature", self.temperature, optional=True)

    def init(self, network: nn.Module, stack: Params) -> Curvatures:
        return Curvatures(stack, trained_names(network, stack))

    def losses(self, state: Curvatures, batch: Batch, run: Run) -> dict[str, Tensor]:
        """Return the mean negative log-likelihood at drawn weights, without the prior."""
        weights: Tensor = state.mean
        if state.optimizer is not None:
            weights = weights + state.optimizer.offset(state.mean)
        stack = {**P.unravel(weights, state.spec), **state.constants.tensors()}
        return {"loss": run.losses(stack, batch)}

    # ------------------------------------------------------------ the optimizer
    def configure_optimizer(
        self, state: Curvatures, optimizer: Any, run: Run, scheduler: Any = None, *fit: Any
    ) -> Any:
        if not isinstance(optimizer, samplers.IVON):
            raise ValueError(
                f"`optimizer` {type(optimizer).__name__} does not learn a posterior: use "
                "lightning_bnn.samplers.IVON, or the module MFVI."
            )
        tell_prior(optimizer, self.prior)
        return scheduler

    def before_fit(self, state: Curvatures, fit: Fit, run: Run) -> None:
        """Let the state and the optimizer share the curvature."""
        optimizer, group = fit.optimizer, fit.optimizer.param_groups[0]
        if self.temperature is not None:  # also of a run that had another one
            for each in optimizer.param_groups:
                each["temperature"] = self.temperature
        optimizer.draws_itself = False  # the draws are made by `losses`
        params = {p for each in optimizer.param_groups for p in each["params"]}
        optimizer.certain = params - {state.mean}  # of the likelihood
        is_fresh = "curvature" not in optimizer.state[state.mean]
        if state.notes["temperature"] is None or fit.anew or not is_fresh:
            state.curvature.copy_(optimizer.curvature(state.mean))
        optimizer.state[state.mean]["curvature"] = state.curvature
        state.optimizer = optimizer
        state.notes.update(
            temperature=temperature_of(group),
            decay=decay_of(group),
        )
        changes = fit.steps * (1 - group["hessian_momentum"])
        if changes < _LEAST_CHANGE and not fit.trial:
            run.warn(
                f"With `hessian_momentum` {group['hessian_momentum']} the curvature hardly "
                f"changes in {fit.steps:g} steps: set a smaller one, or train longer."
            )

    def before_clipping(self, state: Curvatures) -> None:
        assert state.optimizer is not None
        state.optimizer.observe()

    def after_fit(self, state: Curvatures, run: Run) -> None:
        state.optimizer = None

    def posterior(self, state: Curvatures, run: Run, purpose: Purpose = AS_IT_IS) -> Posterior:
        return mixture_of(state.modes())

"""The local learning coefficient: the effective number of parameters of a network, by SGLD.

References:
    | The Local Learning Coefficient: A Singularity-Aware Complexity Measure (Lau et al., 2023)
    | https://arxiv.org/abs/2308.12108
    | A Widely Applicable Bayesian Information Criterion (Watanabe, 2013)
    | https://arxiv.org/abs/1208.6338
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map

from lightning_bnn.methods.run import Batch, evaluation, member_losses
from lightning_bnn.metrics.convergence import LEAST, rhat
from lightning_bnn.samplers import SGLD
from weightsym import Symmetries, check_symmetries, orbit_directions
from weightsym import params as P
from weightsym.params import (
    Params,
    check_count,
    check_integer,
    check_not_negative,
    check_positive,
    first_line,
    keyed_generator,
)

Loss = Callable[[Any, Tensor], Tensor]

__all__ = ["CoefficientEstimate", "learning_coefficient"]

_EVALUATIONS = 100
"""Evaluations on all the data by every chain, where gradients are those of minibatches."""
_TANGENTS = 10_000_000
"""Largest number of entries in the tangents of an orbit whose rank is computed."""


@dataclass(frozen=True, eq=False)
class CoefficientEstimate:
    r"""A local learning coefficient with its diagnostics.

    Attributes:
        value: :math:`\hat\lambda`, the mean over all chains.
        error: its standard error, from the differences between chains.
        rhat: R-hat of the losses of the chains.
        wbic: :math:`n\, E[L_n]`, the Bayesian information criterion of singular models.
        bound: upper bound of the coefficient where the loss is smooth.
        loss: :math:`L_n` of the network.
        losses: visited by the chains, ``(chains, draws)``.

    >>> estimate = CoefficientEstimate(1.52, 0.1, 1.01, 60.2, 2.0, 0.6, torch.zeros(4, 8))
    >>> print(estimate)
    1.52 +- 0.1 (at most 2, R-hat 1.01)
    """

    value: float
    error: float
    rhat: float
    wbic: float
    bound: float
    loss: float
    losses: Tensor = field(repr=False)

    def __str__(self) -> str:
        trust = f"(at most {self.bound:.4g}, R-hat {self.rhat:.3g})"
        return f"{self.value:.4g} +- {self.error:.2g} {trust}"


def learning_coefficient(
    network: nn.Module,
    loss: Loss,
    data: tuple[Any, ...],
    symmetries: Symmetries | None = None,
    chains: int = 4,
    steps: int = 1000,
    lr: float = 0.03,
    localization: float = 100.0,
    batch_size: int | None = None,
    seed: int = 0,
) -> CoefficientEstimate:
    r"""Estimate the local learning coefficient of a network at a minimum of its loss.

    .. math:: \hat\lambda = n \beta\, (E[L_n(w)] - L_n(w^*)), \quad
        w \sim \exp\Big(-n \beta L_n(w) - \frac{\gamma}{2} \|w - w^*\|^2\Big), \quad
        \beta = \frac{1}{\log n}

    :math:`\lambda` is the rate at which the expected loss exceeds its minimum, :math:`\lambda \log
    n / n` for n examples: half the number of parameters for a regular model, less for a singular
    one. Chains of `SGLD` start at the network and run side by side. The second half of their steps
    is averaged.

    The restoring term makes the estimate smaller: a direction of curvature k contributes :math:`n
    \beta k / (n \beta k + \gamma) / 2` instead of one half. Steps make it larger, by :math:`1 / (1
    - \eta (k + \gamma / (n \beta)) / 2)`, and so does the noise of minibatches. Compare estimates
    only if all settings are equal. A negative estimate means that chains found lower losses: the
    network was not at a minimum.

    Symmetries do not change the loss, which is therefore a function of d minus the orbit's
    dimension many numbers, and :math:`\lambda` is at most half of these. A warning names an
    estimate above that bound. Orbits of large networks, whose tangents have more than ten million
    entries, are not counted.

    Args:
        network: in evaluation mode during the estimate, with the weights :math:`w^*`; it is not
            changed.
        loss: function of outputs and targets that returns the mean loss, in nats.
        data: inputs, followed by targets.
        symmetries: result of `discover`; without it, the bound is half of all parameters.
        chains: number of chains, at least 2, of ``steps`` gradients each.
        steps: number of steps of every chain.
        lr: step size :math:`\eta`, in the scale of an SGD on the mean loss.
        localization: :math:`\gamma`.
        batch_size: number of examples per gradient, drawn by every chain for itself; by default
            all. Losses are those of all the data, at 100 steps of a chain.
        seed: seed of all random numbers.

    >>> from lightning_bnn.models import mlp
    >>> net, x = mlp(1, [1], 1), torch.randn(100, 1)
    >>> _ = [p.data.zero_() for p in net.parameters()]  # outputs w2 relu(w1 x + b1) + b2
    >>> half_square = lambda outputs, y: (outputs - y).square().mean() / 2
    >>> settings = {"lr": 0.1, "localization": 1.0, "steps": 200}
    >>> estimate = learning_coefficient(net, half_square, (x, torch.zeros(100, 1)), **settings)
    >>> bool(0 < estimate.value < 1), estimate.bound  # of four parameters
    (True, 2.0)
    """
    check_chains(chains, steps, lr, localization, batch_size, seed)
    batch = _checked(data)
    n, beta = batch.examples, 1 / math.log(batch.examples)
    bound = _bound(network, symmetries)
    with evaluation(network), torch.inference_mode(False), torch.enable_grad():
        around = _Around(network, loss, chains)
        losses = around.losses(batch).detach()
        if losses.shape != (chains,):
            raise ValueError(f"`loss` must return one number, got shape {tuple(losses.shape[1:])}.")
        centre = float(losses[0])
        if not math.isfinite(centre):
            raise ValueError(f"the loss of `network` is {centre}: there is nothing to estimate.")
        rates = {"lr": lr, "temperature": 1 / beta, "prior_precision": localization / beta}
        sampler = SGLD(around.moves.values(), num_data=n, seed=seed, **rates)
        losses = around.run(sampler, batch, steps, batch_size, seed)
    if lost := (~losses.isfinite().all(1)).nonzero().flatten().tolist():
        raise ValueError(f"chains {lost} of {chains} have diverged: set a smaller `lr`.")
    values = n * beta * (losses.mean(1) - centre)
    estimate = CoefficientEstimate(
        value=float(values.mean()),
        error=float(values.std() / math.sqrt(chains)),
        rhat=float(rhat(losses)),
        wbic=float(n * losses.mean()),
        bound=bound,
        loss=centre,
        losses=losses,
    )
    if estimate.value - 2 * estimate.error > estimate.bound:
        warnings.warn(
            f"The learning coefficient {estimate} exceeds its bound for a smooth loss: the "
            "chains are not in equilibrium, or their steps are too large. Set a smaller "
            "`lr`, and more `steps`.",
            stacklevel=2,
        )
    return estimate


class _Around:
    """Displacements from one network, moved by a sampler."""

    def __init__(self, network: nn.Module, loss: Loss, chains: int) -> None:
        self.network, self.loss, self._at_once = network, loss, True
        self.centre = {n: t.expand(chains, *t.shape) for n, t in P.of(network).items()}
        trained = [n for n, p in network.named_parameters() if p.requires_grad]
        if not trained:
            raise ValueError("`network` has no weights that require gradients.")
        self.moves = {n: torch.zeros_like(self.centre[n]).requires_grad_() for n in trained}

    def losses(self, batch: Batch) -> Tensor:
        """Return the loss of every chain, and set the gradients."""
        stack = {**self.centre, **{n: self.centre[n] + t for n, t in self.moves.items()}}

        each = partial(self._each, rows=0 if batch.per_member else None)
        return member_losses(self.network, stack, batch, each)

    def _each(self, outputs: Any, targets: Tensor, rows: int | None) -> Tensor:
        """Compute the losses at once, or one by one if the loss reads values."""
        dims = tree_map(lambda t: 0 if isinstance(t, Tensor) else None, outputs)
        if self._at_once:
            try:
                losses: Tensor = torch.vmap(self._loss, (dims, rows))(outputs, targets)
                return losses
            except RuntimeError:
                self._at_once = False
        members = range(max(len(t) for t in tree_leaves(outputs) if isinstance(t, Tensor)))
        some = (
            tree_map(lambda t, k=k: t[k] if isinstance(t, Tensor) else t, outputs) for k in members
        )
        matching = (targets if rows is None else targets[k] for k in members)
        return torch.stack([self._loss(o, t) for o, t in zip(some, matching, strict=True)])

    def _loss(self, outputs: Any, targets: Tensor) -> Tensor:
        try:
            value = self.loss(outputs, targets)
        except (RuntimeError, ValueError):  # vmap has errors of its own
            raise
        except Exception as error:
            raise ValueError(f"`loss` fails: {type(error).__name__} {first_line(error)}") from error
        if not isinstance(value, Tensor):
            raise ValueError(f"`loss` must return a tensor, got {type(value).__name__}.")
        return value

    def run(self, sampler: SGLD, batch: Batch, steps: int, size: int | None, seed: int) -> Tensor:
        """Return losses on all the data in the second half of a run, ``(chains, draws)``."""
        first, trace = steps // 2, []
        every = 1 if size is None else max(1, (steps - first) // _EVALUATIONS)
        for step in range(steps):
            sampler.zero_grad()
            losses = self.losses(batch if size is None else self._some(batch, size, seed, step))
            if size is not None and step >= first and (step - first) % every == 0:
                with torch.no_grad():
                    trace.append(self.losses(batch))
            elif size is None and step >= first:
                trace.append(losses.detach())
            losses.sum().backward()
            sampler.step()
        return torch.stack(trace, 1).double().cpu()

    def _some(self, batch: Batch, size: int, seed: int, step: int) -> Batch:
        """Draw a minibatch for every chain."""
        chains = len(next(iter(self.centre.values())))
        generator = keyed_generator(seed, "rows", step)
        rows = torch.randint(batch.examples, (chains, size), generator=generator)
        rows = rows.to(batch.targets.device)
        inputs = tree_map(lambda t: t[rows] if isinstance(t, Tensor) else t, batch.inputs)
        return Batch(inputs, batch.targets[rows], per_member=True)


def check_chains(
    chains: int, steps: int, lr: float, localization: float, batch_size: int | None, seed: int
) -> None:
    """Validate the arguments of `learning_coefficient`."""
    check_count("chains", chains, 2)
    check_count("steps", steps, 2 * LEAST)
    check_positive("lr", lr)
    check_not_negative("localization", localization)
    check_count("batch_size", batch_size, optional=True)
    check_integer("seed", seed)


def _checked(data: tuple[Any, ...]) -> Batch:
    """Return the data as one batch with enough examples."""
    if not isinstance(data, (tuple, list)) or len(data) < 2 or not isinstance(data[-1], Tensor):
        raise ValueError("`data` must be inputs and targets, the latter a tensor.")
    *inputs, targets = data
    if len(targets) < 2:
        raise ValueError(f"`data` has {len(targets)} example: 1 / log(n) needs at least 2.")
    return Batch(tuple(inputs), targets)


def _bound(network: nn.Module, symmetries: Symmetries | None) -> float:
    """Return half of the dimensions off the orbit that leaves fixed weights unchanged."""
    trained = {n: p.numel() for n, p in network.named_parameters() if p.requires_grad}
    numbers = sum(trained.values())
    if symmetries is None:
        return numbers / 2
    check_symmetries(symmetries)
    params, generators = P.of(network), symmetries.scaling_dof + symmetries.shift_dof
    generators += sum(group.dimension for group in symmetries.linear)
    if not 0 < generators * sum(t.numel() for t in params.values()) <= _TANGENTS:
        return numbers / 2
    orbit = orbit_directions(params, symmetries)
    rows = [orbit.times(row) for row in torch.eye(orbit.size)]
    fixed = [{n: t for n, t in row.items() if n not in trained} for row in rows]
    return (numbers - _rank(rows, 1e-9) + _rank(fixed)) / 2


def _rank(rows: list[Params], tolerance: float | None = None) -> int:
    """Return the rank of tangents scaled to equal length."""
    if not rows[0]:
        return 0
    tangents = torch.stack([torch.cat([t.flatten() for t in row.values()]) for row in rows])
    return int(torch.linalg.matrix_rank(F.normalize(tangents, eps=1e-300), rtol=tolerance))

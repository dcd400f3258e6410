"""Microcanonical Langevin Monte Carlo with all the data, many chains at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_bnn.samplers.energy_sampler import EnergySampler
from lightning_bnn.samplers.isokinetic import (
    Array,
    TunedSteps,
    Tuning,
    adam,
    add_to_spread,
    as_array,
    bend,
    library_of,
    refresh,
    total_spread,
    unit,
)
from lightning_bnn.samplers.sampler import seed_of
from weightsym.params import (
    check_count,
    check_positive,
    keyed_generator,
    where_precise,
    widest,
)

__all__ = ["MCLMC"]

_SIZES_ONLY, _WITH_SPREAD = 0.8, 0.9
"""Fractions of the adaptation after which the spread of weights, and then a trace, is recorded."""
_TRACED = 128
"""Number of weights that determine the length of memory."""
_LEAST_TRACE = 16


class MCLMC(TunedSteps, EnergySampler):
    r"""Chains of constant speed, rotated by the gradient and refreshed by noise.

    .. math:: dx = u \, dt, \quad du = (1 - u u^T) \Big(\frac{-\nabla U}{T (d - 1)} \, dt
        + \sqrt{\tfrac{2}{L d}} \, dW\Big)

    No test corrects the error of the integrator: the distribution of the draws is off by as much as
    the energy errors of the steps vary. The closure returns the energies :math:`U` of the chains,
    see `EnergySampler`. During the first ``descent_steps`` transitions every chain descends by
    Adam. During the next ``adapt_steps`` each adapts its step size to the requested variance, and
    the length L of its memory to the time between independent draws. Neither phase gives draws of
    the posterior. ``energy_variances`` has the variance reached since, which may exceed the
    requested one, because the adaptation gives outliers little weight.

    Args:
        params: parameters.
        step_size: initial step size.
        steps: number of integrator steps per transition, each with two gradients.
        energy_variance: requested variance of the energy error of a step, over the number of
            weights. At 5e-4 variances of a Gaussian of condition 100 are 1.3 % too small, at 1e-2
            5.5 %.
        length: length after which directions are forgotten; by default the square root of the
            number of weights until the adaptation chooses it.
        descent_steps: number of initial transitions of Adam, with as many gradients as others.
        descent_lr: its learning rate, which falls to zero as a cosine.
        adapt_steps: number of transitions that adapt step sizes and lengths.
        temperature: T.
        seed: of directions; by default torch's own, and in our modules theirs.

    References:
        | Microcanonical Hamiltonian Monte Carlo (Robnik et al., 2023), https://arxiv.org/abs/2212.08549
        | Microcanonical Langevin Ensembles (Sommer et al., 2025), https://arxiv.org/abs/2502.06335

    >>> chains = torch.nn.Parameter(torch.randn(500, 10))  # of a standard normal
    >>> def closure():
    ...     energies = chains.square().sum(1) / 2
    ...     chains.grad = chains.detach().clone()
    ...     return energies
    >>> sampler = MCLMC([chains], step_size=0.5, descent_steps=0, adapt_steps=0)
    >>> for _ in range(20):
    ...     energies = sampler.step(closure)
    >>> round(chains.var().item(), 1)
    1.0
    """

    def __init__(
        self,
        params: Iterable[Any],
        step_size: float = 1e-2,
        steps: int = 10,
        energy_variance: float = 5e-4,
        length: float | None = None,
        descent_steps: int = 100,
        descent_lr: float = 5e-3,
        adapt_steps: int = 200,
        temperature: float = 1.0,
        seed: int | None = None,
    ) -> None:
        check_positive("step_size", step_size)
        check_positive("descent_lr", descent_lr)
        check_count("steps", steps)
        super().__init__(
            params, lr=step_size, steps=steps, energy_variance=energy_variance, length=length,
            descent_steps=descent_steps, descent_lr=descent_lr, adapt_steps=adapt_steps,
            temperature=temperature, seed=seed, tuning={},
        )  # fmt: skip

    # ------------------------------------------------------------ transitions
    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor:  # type: ignore[override]  # needs a closure, of tensors
        """Take one transition of every chain.

        Args:
            closure: sets the gradients and returns the energies, ``(chains,)``.

        Returns:
            Energies of the chains as they are now; before the last step while they descend.
        """
        group = self.param_groups[0]
        move = self._descend if group["step"] < group["descent_steps"] else self._sample
        energies = move(group, closure)
        group["step"] += 1
        return energies

    def _descend(self, group: dict[str, Any], closure: Callable[[], Tensor] | None) -> Tensor:
        """Take steps of Adam, independently for each chain."""
        x, each, state = self.rows(), 2 * group["steps"], self.state[self.moving()[0]]
        energies = torch.zeros(0)
        for k in range(group["step"] * each, (group["step"] + 1) * each):
            energies, gradient = self.look(closure, x)
            total, first = group["descent_steps"] * each, group["descent_lr"]
            mean, size, rate = adam(state, gradient, k, total, first)
            x.addcdiv_(mean, size, value=-rate)
        self.put(x)
        if group["step"] + 1 == group["descent_steps"]:
            self.state.clear()
        return energies

    def _sample(self, group: dict[str, Any], closure: Callable[[], Tensor] | None) -> Tensor:
        """Take steps of the dynamics. A chain with a non-finite step stays, and turns around."""
        temperature, rows, state = group["temperature"], self.rows(), self.state[self.moving()[0]]

        def cooled(values: Tensor) -> Array:
            return as_array(values) if temperature == 1 else as_array(values) / temperature

        def look(x: Array) -> tuple[Array, Array]:
            energies, gradients = self.look(closure, torch.as_tensor(x))
            return cooled(energies), cooled(gradients)

        def slope(x: Array) -> Array:
            return cooled(self.slope(closure, torch.as_tensor(x)))

        with np.errstate(all="ignore"):
            position = self._place(rows, look)
            generator, tuning = self._generator(rows, "steps"), self._tuning(rows)
            noise = rows.new_empty(group["steps"], *rows.shape).normal_(generator=generator)
            phase = self._phase()
            for each in as_array(noise):
                new, error = integrate(position, tuning.sizes, look, slope)
                errors = error**2 / rows.shape[1]  # not finite where energy or gradient are not
                well = library_of(errors).isfinite(errors)
                if isinstance(well, Tensor) or not well.all():  # a device is not waited for
                    new = new.where(well, position._replace(direction=-position.direction))
                turned = refresh(new.direction, each, tuning.sizes, tuning.lengths)
                position = new._replace(direction=turned)
                self._learn(phase, tuning, errors, position.x, state)
        self._conclude(tuning, state)
        group["tuning"] = {"all": tuning.as_rows()}
        state["direction"] = self._stored(position.direction)
        self.put(torch.as_tensor(position.x))
        return torch.as_tensor(position.energy) * temperature

    def _place(self, rows: Tensor, look: Callable[[Array], Any]) -> Place:
        if rows.shape[1] < 2:
            raise ValueError("MCLMC needs chains of at least two entries, got one.")
        direction = self.state[self.moving()[0]].get("direction")
        if direction is None:
            direction = torch.empty_like(rows).normal_(
                generator=self._generator(rows, "directions")
            )
        x = as_array(rows)
        return Place(x, unit(as_array(direction)), *look(x))

    def _generator(self, like: Tensor, name: str) -> torch.Generator:
        group = self.param_groups[0]
        return keyed_generator(seed_of(group), group["step"], name, device=like.device)

    def _tuning(self, rows: Tensor) -> Tuning:
        group, (chains, numbers) = self.param_groups[0], rows.shape
        if group["tuning"]:
            return Tuning.from_rows(group["tuning"]["all"].to(rows.device, widest(rows.device)))
        return Tuning.start(chains, group["lr"], group["length"] or numbers**0.5, rows.device)

    # ------------------------------------------------------------ adaptation
    def _phase(self, ahead: int = 0) -> str:
        """Return the phase of this transition, or of a later one."""
        group = self.param_groups[0]
        after, adapting = group["step"] + ahead - group["descent_steps"], group["adapt_steps"]
        if after >= adapting:
            return "sampling"
        parts = (_SIZES_ONLY, "sizes"), (_WITH_SPREAD, "spread"), (1.0, "trace")
        return next(phase for share, phase in parts if after < math.ceil(share * adapting))

    def _learn(
        self, phase: str, tuning: Tuning, errors: Array, x: Array, state: dict[str, Any]
    ) -> None:
        """Adapt the size of the next step, and the length of memory, to one step."""
        if phase == "sampling":
            tuning.watch(errors)
        elif phase == "trace":
            places = np.linspace(0, x.shape[1] - 1, min(_TRACED, x.shape[1])).astype(int)
            state.setdefault("trace", []).append(self._stored(x[:, places]))
        else:
            tuning.adapt(errors, self.param_groups[0]["energy_variance"])
            if phase == "spread":
                add_to_spread(state, self._stored(x))

    def _stored(self, array: Array) -> Tensor:
        """Convert an array for the state, whose type becomes that of parameters on loading."""
        return torch.as_tensor(array).to(self.moving()[0].dtype)

    def _conclude(self, tuning: Tuning, state: dict[str, Any]) -> None:
        """Choose the length of memory at the end of a phase with the data for it."""
        phase = self._phase()
        if phase == self._phase(1) or phase in ("sizes", "sampling"):
            return
        if phase == "spread":
            lengths = total_spread(state).sqrt()
        else:
            lengths = memory_length(
                torch.stack(state.pop("trace"), 1), torch.as_tensor(tuning.sizes)
            )
        if self.param_groups[0]["length"] is None:
            usable, chosen = lengths.isfinite() & (lengths > 0), torch.as_tensor(tuning.lengths)
            tuning.lengths = as_array(torch.where(usable, lengths, chosen))


_B = 0.1931833275037836
"""Coefficient of the second-order splitting with the least error."""


class Place(NamedTuple):
    """Positions and directions of chains, all ``(chains, numbers)`` except the energy.

    Attributes:
        x: positions.
        direction: of unit length.
        energy: ``(chains,)``.
        gradient: of the energy.
    """

    x: Array
    direction: Array
    energy: Array
    gradient: Array

    def where(self, chains: Array, rejected: Place) -> Place:
        """Combine these values for some chains with others for the rest.

        Args:
            chains: mask, ``(chains,)``.
            rejected: of the same chains.
        """
        pick, where = chains[:, None], library_of(chains).where
        return Place(
            where(pick, self.x, rejected.x),
            where(pick, self.direction, rejected.direction),
            where(chains, self.energy, rejected.energy),
            where(pick, self.gradient, rejected.gradient),
        )


def integrate(
    position: Place,
    sizes: Array,
    look: Callable[[Array], tuple[Array, Array]],
    slope: Callable[[Array], Array],
) -> tuple[Place, Array]:
    """Take one step of the minimal-norm integrator, and return its energy error.

    Args:
        position: of the chains.
        sizes: of the steps, ``(chains,)``.
        look: returns energies and gradients at given positions.
        slope: returns the gradients alone.
    """
    half = (sizes / 2)[:, None]
    direction, first = bend(position.direction, position.gradient, _B * sizes)
    x = position.x + half * direction
    direction, second = bend(direction, slope(x), (1 - 2 * _B) * sizes)
    x = x + half * direction
    energy, gradient = look(x)
    direction, third = bend(direction, gradient, _B * sizes)
    error = first + second + third + energy - position.energy
    return Place(x, direction, energy, gradient), error


def memory_length(trace: Tensor, sizes: Tensor) -> Tensor:
    r"""Estimate the distance after which chains should forget their direction.

    It is :math:`0.4\,\epsilon` times the mean number of steps per independent draw.

    Args:
        trace: entries after every step, ``(chains, steps, numbers)``.
        sizes: of the steps, ``(chains,)``.

    Returns:
        ``(chains,)``; NaN where the trace is too short or constant.
    """
    from lightning_bnn.metrics.convergence import effective_sample_size

    chains, steps, _ = trace.shape
    if steps < _LEAST_TRACE:
        return torch.full_like(sizes, torch.nan)
    series = where_precise(trace.transpose(0, 1)[None]).double()
    apart = steps / effective_sample_size(series)
    return 0.4 * sizes * apart.to(sizes.device).reshape(chains, -1).nanmean(1)

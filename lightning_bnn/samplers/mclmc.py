"""Microcanonical Langevin Monte Carlo with all the data, many chains at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_bnn.samplers.energy_sampler import EnergySampler
from weightsym.arguments import check_count, check_integer, check_positive
from weightsym.devices import precise, where_precise, widest
from weightsym.randomness import keyed_generator

__all__ = ["MCLMC"]

_SIZES_ONLY, _WITH_SPREAD = 0.8, 0.9
"""Parts of the adaptation after which the spread of weights, and then a trace of them, is taken."""
_TRACED = 128
"""How many weights the length of memory is chosen by."""
_BETA, _BETA_SQUARE, _EPS = 0.9, 0.999, 1e-8
Array = Any
"""Of numpy on the CPU, whose small operations take a third of the time of torch's, else a tensor.
All are in the `widest` type."""


class MCLMC(EnergySampler):
    r"""Chains of constant speed, whose direction the gradient bends and noise refreshes.

    .. math:: dx = u \, dt, \quad du = (1 - u u^T) \Big(\frac{-\nabla U}{T (d - 1)} \, dt
        + \sqrt{\tfrac{2}{L d}} \, dW\Big)

    No test corrects the error of the integrator: the law of the draws is off by as much as the
    energy errors of the steps vary. The closure returns the energies :math:`U` of the chains, see
    `EnergySampler`. In the first ``descent_steps`` transitions every chain descends by Adam to
    where it starts; in the next ``adapt_steps`` each adapts its step size to the wanted variance,
    and the length L of its memory to the time between independent draws. Neither gives draws of
    the posterior. ``energy_variances`` says what was reached since: the adaptation trusts outliers
    little, and may end above what was asked for.

    Args:
        params: parameters.
        step_size: where its adaptation starts.
        steps: of the integrator in one transition; each takes two gradients.
        energy_variance: wanted variance of the energy error of a step, over the number of weights.
            At 5e-4 variances of a Gaussian of condition 100 are 1.3 % too small, at 1e-2 5.5 %.
        length: after which directions are forgotten; by default the root of the number of weights
            until the adaptation chooses it.
        descent_steps: transitions of Adam first, with as many gradients as others have.
        descent_lr: its learning rate, which falls to zero as a cosine.
        adapt_steps: how many transitions adapt step sizes and lengths.
        temperature: T.
        seed: of directions, 0 by default; our modules fill in theirs.

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
        for name, value in (
            ("step_size", step_size), ("energy_variance", energy_variance),
            ("descent_lr", descent_lr), ("temperature", temperature),
        ):  # fmt: skip
            check_positive(name, value)
        if length is not None:
            check_positive("length", length)
        check_count("steps", steps)
        check_count("descent_steps", descent_steps, 0)
        check_count("adapt_steps", adapt_steps, 0)
        if seed is not None:
            check_integer("seed", seed)
        defaults: dict[str, Any] = {
            "lr": step_size,
            "steps": steps,
            "energy_variance": energy_variance,
            "length": length,
            "descent_steps": descent_steps,
            "descent_lr": descent_lr,
            "adapt_steps": adapt_steps,
            "temperature": temperature,
            "seed": seed,
            "step": 0,
            "tuning": {},
        }
        super().__init__(params, defaults)

    # ------------------------------------------------------------ what is known of the steps
    @property
    def step_sizes(self) -> Tensor:
        """Size of every chain's next step, nothing before the first one."""
        return self._known("sizes")

    @property
    def lengths(self) -> Tensor:
        """Length after which each chain forgets its direction, nothing before the first step."""
        return self._known("lengths")

    @property
    def energy_variances(self) -> Tensor:
        """Mean squared energy error of a step over the number of weights, of every chain.

        Since the adaptation; NaN before.
        """
        return self._known("squares") / self._known("steps")

    @property
    def failed_steps(self) -> Tensor:
        """Number of steps of every chain that were undone since the adaptation, as not finite."""
        return self._known("failed")

    def metrics(self) -> dict[str, Tensor]:
        """Numbers that are worth logging, means over the chains of what is known by now."""
        numbers = {
            "energy_variance": self.energy_variances,
            "step_size": self.step_sizes,
            "memory_length": self.lengths,
        }
        return {name: values.mean() for name, values in numbers.items() if values.isfinite().any()}

    def _known(self, name: str) -> Tensor:
        lists = self.param_groups[0]["tuning"]
        return torch.tensor(lists.get(name, []), dtype=torch.float64)

    # ------------------------------------------------------------ transitions
    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor:  # type: ignore[override]  # needs a closure, of tensors
        """One transition of every chain.

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
        """Adam, each chain for itself."""
        x, each, state = self.rows(), 2 * group["steps"], self.state[self.moving()[0]]
        mean, square = (state.setdefault(name, torch.zeros_like(x)) for name in ("mean", "square"))
        energies = torch.zeros(0)
        for k in range(group["step"] * each, (group["step"] + 1) * each):
            energies, gradient = self.look(closure, x)
            rate = 1 + math.cos(math.pi * k / (group["descent_steps"] * each))
            rate *= group["descent_lr"] / 2 / (1 - _BETA ** (k + 1))
            mean.lerp_(gradient, 1 - _BETA)
            square.mul_(_BETA_SQUARE).addcmul_(gradient, gradient, value=1 - _BETA_SQUARE)
            size = square.sqrt().div_(math.sqrt(1 - _BETA_SQUARE ** (k + 1))).add_(_EPS)
            x.addcdiv_(mean, size, value=-rate)
        self.put(x)
        if group["step"] + 1 == group["descent_steps"]:
            self.state.clear()
        return energies

    def _sample(self, group: dict[str, Any], closure: Callable[[], Tensor] | None) -> Tensor:
        """Some steps of the dynamics. Who leaves the finite numbers stays, and turns around."""
        temperature, rows, state = group["temperature"], self.rows(), self.state[self.moving()[0]]

        def look(x: Array) -> tuple[Array, Array]:
            energies, gradients = self.look(closure, torch.as_tensor(x))
            return _array(energies) / temperature, _array(gradients) / temperature

        def slope(x: Array) -> Array:
            return _array(self.slope(closure, torch.as_tensor(x))) / temperature

        with np.errstate(all="ignore"):
            position = self._place(rows, look)
            generator, tuning = self._generator(rows, "steps"), self._tuning(rows)
            for _ in range(group["steps"]):
                new, error = integrate(position, tuning.sizes, look, slope)
                errors = error**2 / rows.shape[1] + 0 * new.total()  # NaN where that is not finite
                position = new.where(
                    _library(errors).isfinite(errors),
                    position._replace(direction=-position.direction),
                )
                noise = _array(torch.empty_like(rows).normal_(generator=generator))
                turned = refresh(position.direction, noise, tuning.sizes, tuning.lengths)
                position = position._replace(direction=turned)
                self._learn(tuning, errors, position.x, state)
        self._conclude(tuning, state)
        group["tuning"], state["direction"] = tuning.as_lists(), self._stored(position.direction)
        self.put(torch.as_tensor(position.x))
        return torch.as_tensor(position.energy) * temperature

    def _place(self, rows: Tensor, look: Callable[[Array], Any]) -> Place:
        if rows.shape[1] < 2:
            raise ValueError("MCLMC needs at least two numbers in a chain, got one.")
        direction = self.state[self.moving()[0]].get("direction")
        if direction is None:
            direction = torch.empty_like(rows).normal_(
                generator=self._generator(rows, "directions")
            )
        x = _array(rows)
        return Place(x, _unit(_array(direction)), *look(x))

    def _generator(self, like: Tensor, name: str) -> torch.Generator:
        group = self.param_groups[0]
        return keyed_generator(group["seed"] or 0, group["step"], name, device=like.device)

    def _tuning(self, rows: Tensor) -> Tuning:
        group, (chains, numbers) = self.param_groups[0], rows.shape
        if group["tuning"]:
            return Tuning.from_lists(group["tuning"], rows.device)
        return Tuning.start(chains, group["lr"], group["length"] or numbers**0.5, rows.device)

    # ------------------------------------------------------------ adaptation
    def _phase(self, ahead: int = 0) -> str:
        """Name the phase of a transition: of this one, or of one that is some ahead."""
        group = self.param_groups[0]
        after, adapting = group["step"] + ahead - group["descent_steps"], group["adapt_steps"]
        if after >= adapting:
            return "sampling"
        parts = (_SIZES_ONLY, "sizes"), (_WITH_SPREAD, "spread"), (1.0, "trace")
        return next(phase for share, phase in parts if after < math.ceil(share * adapting))

    def _learn(self, tuning: Tuning, errors: Array, x: Array, state: dict[str, Any]) -> None:
        """Learn from one step the size of the next, and the length of memory."""
        phase = self._phase()
        if phase == "sampling":
            tuning.watch(errors)
        elif phase == "trace":
            places = np.linspace(0, x.shape[1] - 1, min(_TRACED, x.shape[1])).astype(int)
            state.setdefault("trace", []).append(self._stored(x[:, places]))
        else:
            tuning.adapt(errors, self.param_groups[0]["energy_variance"])
            if phase == "spread":
                _add_to_spread(state, self._stored(x))

    def _stored(self, array: Array) -> Tensor:
        """An array as the state keeps it: loading makes everything of the type of parameters."""
        return torch.as_tensor(array).to(self.moving()[0].dtype)

    def _conclude(self, tuning: Tuning, state: dict[str, Any]) -> None:
        """Choose the length of memory where a phase ends that says something of it."""
        phase = self._phase()
        if phase == self._phase(1) or phase in ("sizes", "sampling"):
            return
        if phase == "spread":
            lengths = _total_spread(state).sqrt()
        else:
            lengths = memory_length(
                torch.stack(state.pop("trace"), 1), torch.as_tensor(tuning.sizes)
            )
        if self.param_groups[0]["length"] is None:
            usable, chosen = lengths.isfinite() & (lengths > 0), torch.as_tensor(tuning.lengths)
            tuning.lengths = _array(torch.where(usable, lengths, chosen))


def _add_to_spread(state: dict[str, Any], x: Tensor) -> None:
    """Running mean and sum of squared deviations, by Welford."""
    for name in ("mean", "deviation"):
        state.setdefault(name, torch.zeros_like(x))
    state["count"] = state.get("count", 0) + 1
    away = x - state["mean"]
    state["mean"] += away / state["count"]
    state["deviation"] += away * (x - state["mean"])


def _total_spread(state: dict[str, Any]) -> Tensor:
    """Sum of the variances of all weights, of every chain."""
    deviation = state.pop("deviation")
    state.pop("mean")
    return deviation.sum(1, dtype=widest(deviation.device)) / state.pop("count")


_B = 0.1931833275037836
"""Of the splitting of second order whose error is least."""


def _array(tensor: Tensor) -> Array:
    """The array that computes on a device."""
    return precise(tensor).numpy() if tensor.device.type == "cpu" else precise(tensor)


def _library(array: Array) -> Any:
    """The library whose functions take an array: both have the same."""
    return torch if isinstance(array, Tensor) else np


def _length(rows: Array) -> Array:
    """The Euclidean length of every row."""
    return _library(rows).sqrt((rows * rows).sum(1))


def _unit(rows: Array) -> Array:
    """Rows of unit length."""
    return rows / (_length(rows) + _LEAST)[:, None]


_LEAST = 1e-30


class Place(NamedTuple):
    """Positions and directions of chains, all ``(chains, numbers)`` but the energy.

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

    def total(self) -> Array:
        """The sum of all numbers of a chain, ``(chains,)``: finite if they all are."""
        return (self.x + self.direction + self.gradient).sum(1) + self.energy

    def where(self, chains: Array, rejected: Place) -> Place:
        """These for some chains, the other's for the rest.

        Args:
            chains: which, ``(chains,)``.
            rejected: of the same chains.
        """
        pick, where = chains[:, None], _library(chains).where
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
    """One step of the minimal-norm integrator, which takes two gradients, and its energy error.

    Args:
        position: where the chains are.
        sizes: of the steps, ``(chains,)``.
        look: energies and their gradients at given positions.
        slope: the gradients alone.
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


def bend(direction: Array, gradient: Array, sizes: Array) -> tuple[Array, Array]:
    """Directions after a time in which the gradient was the same, and what kinetic energy gained.

    Args:
        direction: of unit length, ``(chains, numbers)``.
        gradient: of the energy.
        sizes: how long, ``(chains,)``.
    """
    library, freedom = _library(gradient), gradient.shape[1] - 1
    norm = _length(gradient)
    safe = norm + _LEAST
    angle = norm * (sizes / freedom)
    cosine = ((gradient * direction).sum(1) / -safe).clip(-1, 1)
    fade = library.exp(-angle)
    rest = 1 - fade
    along = rest * (1 + fade + cosine * rest) / -safe
    turned = along[:, None] * gradient + (2 * fade)[:, None] * direction
    gain = angle - math.log(2) + library.log((1 + cosine) + (1 - cosine) * fade * fade)
    return _unit(turned), freedom * gain


def refresh(direction: Array, noise: Array, sizes: Array, lengths: Array) -> Array:
    """Directions that forget themselves over some length.

    Args:
        direction: of unit length, ``(chains, numbers)``.
        noise: standard normal numbers.
        sizes: of the step, ``(chains,)``.
        lengths: after which a direction is forgotten.
    """
    library = _library(direction)
    spread = library.sqrt(library.expm1(2 * sizes / lengths) / direction.shape[1])
    return _unit(direction + spread[:, None] * noise)


_FADE, _TRUST, _ORDER = 99 / 101, 9.0, 6
_SHRINK = 0.8
_LEAST_TRACE = 16


@dataclass
class Tuning:
    """The step sizes of every chain and what they rest on, each field ``(chains,)`` and precise.

    Attributes:
        sizes: of steps.
        largest: that have not failed yet.
        weighted: faded sum of squared errors over the sixth power of their step sizes, each with
            a weight that trusts outliers less.
        weights: faded sum of these weights.
        lengths: after which directions are forgotten.
        squares: sum of squared errors over the number of weights, since the adaptation.
        steps: how many they are of.
        failed: how many more were undone since, as something was not finite.
    """

    sizes: Array
    largest: Array
    weighted: Array
    weights: Array
    lengths: Array
    squares: Array
    steps: Array
    failed: Array

    @classmethod
    def start(cls, chains: int, size: float, length: float, device: torch.device) -> Tuning:
        """Of chains that know nothing yet.

        Args:
            chains: how many.
            size: of their steps.
            length: after which directions are forgotten.
            device: where the arrays are.
        """
        first = [size, math.inf, 0.0, 0.0, length, 0.0, 0.0, 0.0]
        names = [field.name for field in fields(cls)]
        return cls.from_lists({n: [v] * chains for n, v in zip(names, first, strict=True)}, device)

    @classmethod
    def from_lists(cls, lists: dict[str, list[float]], device: torch.device) -> Tuning:
        """Read what `as_lists` has made, exactly.

        Args:
            lists: of every field.
            device: where the arrays are.
        """
        rows = torch.tensor(list(lists.values()), dtype=torch.float64)
        rows = _array(rows.to(device, widest(device)))
        return cls(**dict(zip(lists, rows, strict=True)))

    def as_lists(self) -> dict[str, list[float]]:
        """Plain numbers, which checkpoints keep in double precision."""
        names = [field.name for field in fields(self)]
        rows = _library(self.sizes).stack([getattr(self, name) for name in names]).tolist()
        return dict(zip(names, rows, strict=True))

    def adapt(self, errors: Array, wanted: float) -> None:
        """Take the errors of one step into account, and choose the sizes of the next.

        A step that failed makes all later ones of its chain smaller.

        Args:
            errors: squares over the number of weights; not finite where a step has failed.
            wanted: their mean.
        """
        library = _library(errors)
        well = library.isfinite(errors)
        ratio = library.where(well, errors, wanted) / wanted + 1e-8
        trust = library.where(well, library.exp(-0.5 * (library.log(ratio) / _TRUST) ** 2), 0.0)
        fade = library.where(well, _FADE, 1.0)
        self.weighted = fade * self.weighted + trust * ratio / self.sizes**_ORDER
        self.weights = fade * self.weights + trust
        self.largest = library.where(well, self.largest, _SHRINK * self.sizes)
        lengths = (self.weighted / self.weights) ** (-1 / _ORDER)
        lengths = library.where(self.weights > 0, lengths, self.sizes)
        self.sizes = library.minimum(lengths, self.largest)

    def watch(self, errors: Array) -> None:
        """Count the errors of one step of the sampling.

        Args:
            errors: as in `adapt`.
        """
        library = _library(errors)
        well = library.isfinite(errors)
        self.squares = self.squares + library.where(well, errors, 0.0)
        self.steps = self.steps + well
        self.failed = self.failed + ~well


def memory_length(trace: Tensor, sizes: Tensor) -> Tensor:
    r"""Compute how far chains should go before they forget their direction.

    That is :math:`0.4\,\epsilon` times the mean number of steps for an independent draw.

    Args:
        trace: numbers after every step, ``(chains, steps, numbers)``.
        sizes: of the steps, ``(chains,)``.

    Returns:
        ``(chains,)``; NaN where the trace is too short or constant.
    """
    from lightning_bnn.metrics.chains import effective_sample_size

    chains, steps, _ = trace.shape
    if steps < _LEAST_TRACE:
        return torch.full_like(sizes, torch.nan)
    series = where_precise(trace.transpose(0, 1)[None]).double()
    apart = steps / effective_sample_size(series)
    return 0.4 * sizes * apart.to(sizes.device).reshape(chains, -1).nanmean(1)

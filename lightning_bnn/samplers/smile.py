"""Microcanonical Langevin dynamics with minibatch gradients."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_bnn.samplers.energy_sampler import as_rows
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
from lightning_bnn.samplers.langevin import Langevin, decay_of, temperature_of
from weightsym.params import precise

__all__ = ["SMILE"]

_RATE, _FLOOR, _NOISY = 0.01, 0.1, 0.01
"""Of the averages of gradients; of the least deviation, in units of the median of those that are
larger than a part of the largest."""
_DESCENT = 5e-3
"""Initial rate of Adam."""
_QUIET = 0.5
"""Fraction of the weights without noise above which the user is warned."""
_SCALES_AND_SIZES = 0.7
"""Fraction of the adaptation in which scales are learned; the rest measures the spread of weights.
"""


class SMILE(TunedSteps, Langevin):
    r"""Chains of constant speed, rotated by minibatch gradients.

    .. math:: dx = C u \, dt, \quad du = (1 - u u^T) \Big(\frac{-C \nabla U}{T (d - 1)} \, dt
        + \sqrt{\tfrac{2}{L d}} \, dW\Big), \quad C \propto 1 / \mathrm{std}(\nabla U)

    Isotropic noise of the gradients acts as dW: it refreshes u and leaves the target invariant.
    Anisotropic noise makes some directions too wide and others too narrow, and the diagonal C makes
    it isotropic. After ``descent_steps`` of Adam, ``adapt_steps`` tune every chain:

    - *C* comes from running averages of half the squared differences of successive gradients, which
      hold their noise and little of their change. Deviations below a tenth of their median count as
      that, the mean square of C is one, and C is fixed after seven tenths of the adaptation.
    - *The step size* comes from energy errors, of the kinetic energy that the half kicks before and
      after a step give, and of the trapezoid rule between. Their mean square over d becomes
      ``energy_variance``, which also keeps small by what angle the noise of a gradient turns u.

    The dynamics, the effect of noise on them, a C that makes noise isotropic, and step sizes from
    energy errors are from the paper. Steps of one gradient by leapfrog (theirs take two, of the
    same minibatch), the differences (theirs are deviations from a running mean), an absolute target
    (theirs compares each error with earlier ones, and undoes outliers), tuning that ends, and the
    refreshment dW are ours. On networks theirs is refreshed by gradient noise alone, which exact
    gradients do not have. The description of theirs is from the abstract of the paper and the code
    of its authors.

    Parameters of a group with one type and device share one u, and d is their number of entries.
    With ``"stacked": True`` in a group the first dimension counts chains, as our modules set it;
    otherwise all its parameters form one chain. ``"precondition": False`` disables C, so that
    biases remain. ``is_tuning`` is true while steps give no draws of the posterior. At T = 0 it
    descends with steps of equal length.

    Args:
        params: parameters or parameter groups.
        lr: length of a step, by the root of the mean square over directions; the adaptation starts
            from it, and schedules of it scale the result.
        num_data: number of training examples.
        temperature: T.
        prior_precision: of a Gaussian prior.
        energy_variance: requested mean square of the energy error of a step, over d.
        length: L; by default the square root of d, until the adaptation knows the spread of the
            chain.
        descent_steps: number of initial steps of Adam, whose rate falls to zero as a cosine.
        adapt_steps: number of steps that tune; with 0 all steps have the length ``lr``, and C is
            one.
        seed: of the noise; by default torch's own, or 0 with several processes, and in our modules
            theirs.

    References:
        | Can Microcanonical Langevin Dynamics Leverage Mini-Batch Gradient Noise?
        | (Sommer et al., 2026), https://arxiv.org/abs/2602.06500

    >>> chains = torch.nn.Parameter(torch.randn(500, 10))  # of a normal of variance 1 / 100
    >>> fixed = {"descent_steps": 0, "adapt_steps": 0}
    >>> group = {"params": [chains], "stacked": True}
    >>> sampler = SMILE([group], lr=0.1, num_data=100, **fixed)
    >>> for _ in range(200):
    ...     noise = torch.randn(500, 10) / 5  # of minibatches
    ...     chains.grad = chains.detach() + noise  # of the mean loss w^2 / 2
    ...     sampler.step()
    >>> round(chains.var().item(), 2)
    0.01
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        num_data: int | None = None,
        temperature: float = 1.0,
        prior_precision: float | None = None,
        energy_variance: float = 5e-4,
        length: float | None = None,
        descent_steps: int = 1000,
        adapt_steps: int = 1000,
        seed: int | None = None,
    ) -> None:
        super().__init__(
            params, lr, num_data, temperature, prior_precision, None, seed,
            energy_variance=energy_variance, length=length, precondition=True,
            descent_steps=descent_steps, adapt_steps=adapt_steps, stacked=None, tuning={},
        )  # fmt: skip

    # ------------------------------------------------------------ what is known of the steps
    @property
    def step_sizes(self) -> Tensor:
        """Length of the next step of every chain, None before the first one."""
        sizes = [g["lr"] * rows[0] for g in self.param_groups for rows in g["tuning"].values()]
        return torch.cat(sizes) if sizes else torch.tensor([])

    # ------------------------------------------------------------ steps
    def update(
        self,
        group: dict[str, Any],
        params: list[Tensor],
        values: list[Tensor],
        grads: list[Tensor],
        noise: list[Tensor] | None,
    ) -> None:
        """Take one step of all chains, see the class."""

        def rows_of(tensors: Sequence[Tensor]) -> Tensor:
            return as_rows(tensors if group["stacked"] else [t[None] for t in tensors])

        state, rows = self.state[params[0]], rows_of(values)
        if rows.shape[1] < 2:
            raise ValueError("SMILE needs chains of at least two entries, got one.")
        previous = state.get("direction", state.get("mean", rows))
        if previous.shape != rows.shape or any(self.state.get(p) for p in params[1:]):
            raise ValueError(
                "SMILE moves all parameters of a chain together: the same ones must have "
                "gradients at every step."
            )
        grad = rows_of(grads).add_(rows, alpha=decay_of(group))
        if group["step"] < group["descent_steps"]:
            grad = grad.where(grad.isfinite().all(1, keepdim=True), 0)
            total = group["descent_steps"]
            mean, size, rate = adam(state, grad, group["step"], total, _DESCENT)
            rows.add_(mean / size, alpha=-rate)
            if group["step"] + 1 == group["descent_steps"]:
                state.clear()
        elif noise is None:
            scales = _scales_of(state)
            rows = rows - torch.as_tensor(group["lr"] * scales * unit(scales * as_array(grad)))
            for tuning in group["tuning"].values():
                tuning[-2], tuning[-1] = math.nan, 0.0  # no step is under way
        else:
            index = str(next(k for k, p in enumerate(group["params"]) if p is params[0]))
            force = as_array(grad) / temperature_of(group)
            with np.errstate(all="ignore"):
                rows = self._move_chains(group, state, index, rows, force, rows_of(noise))
        pieces = rows.split([v.numel() // len(rows) for v in values], 1)
        shaped = [piece.reshape(v.shape) for piece, v in zip(pieces, values, strict=True)]
        torch._foreach_copy_(values, shaped)

    def _move_chains(
        self,
        group: dict[str, Any],
        state: dict[str, Any],
        index: str,
        rows: Tensor,
        gradient: Array,
        noise: Tensor,
    ) -> Tensor:
        """Finish the current steps, adapt to them, and begin the next.

        A chain with a non-finite gradient goes back, turns around, and waits for the next one.
        """
        fresh, x, xi = "direction" not in state, as_array(rows), as_array(noise)
        tuning, pending, taken = self._tuning(group, index, rows)
        where, scales = library_of(x).where, _scales_of(state)
        direction = unit(xi) if fresh else as_array(state["direction"])
        drift = taken[:, None] * scales * direction

        unknown = group["energy_variance"]
        direction, errors = _arrive(direction, scales * gradient, pending, taken, unknown)
        well = library_of(x).isfinite(errors)
        x = where(well[:, None], x, x - drift)
        gradient = where(well[:, None], gradient, 0.0)
        if not fresh:
            self._learn(group, state, tuning, errors, torch.as_tensor(gradient), rows)
        scales, sizes = _scales_of(state), where(well, group["lr"] * tuning.sizes, 0.0)
        if not fresh:
            direction = refresh(direction, xi, sizes, tuning.lengths)
        direction, pending = _depart(direction, scales * gradient, sizes)
        under_way = library_of(x).stack([where(well, pending, math.nan), sizes])
        group["tuning"][index] = torch.cat([tuning.as_rows(), torch.as_tensor(under_way)])
        state["direction"] = torch.as_tensor(direction).to(rows.dtype)
        return torch.as_tensor(x + sizes[:, None] * scales * direction)

    def _tuning(self, group: dict[str, Any], index: str, like: Tensor) -> tuple[Any, Array, Array]:
        """Return the tuning, and the energy errors and lengths of the current steps."""
        if index in group["tuning"]:
            stored = group["tuning"][index].to(like.device)
            return Tuning.from_rows(stored[:-2]), *as_array(stored[-2:])
        chains, numbers = like.shape
        tuning = Tuning.start(chains, 1.0, group["length"] or numbers**0.5, like.device)
        return tuning, math.nan * tuning.sizes, 0 * tuning.sizes

    # ------------------------------------------------------------ tuning
    def _phase(self, group: dict[str, Any], ahead: int = 0) -> str:
        """Return the phase of this step, or of a later one."""
        after, steps = group["step"] + ahead - group["descent_steps"], group["adapt_steps"]
        if after >= steps:
            return "sampling"
        return "scales" if after < math.ceil(_SCALES_AND_SIZES * steps) else "spread"

    def _learn(
        self,
        group: dict[str, Any],
        state: dict[str, Any],
        tuning: Tuning,
        errors: Array,
        gradient: Tensor,
        rows: Tensor,
    ) -> None:
        """Adapt the size of the next step, and scales or the length of memory, to a step."""
        phase = self._phase(group)
        if phase == "sampling":
            tuning.watch(errors)
            return
        tuning.adapt(errors, group["energy_variance"])
        ends = phase != self._phase(group, 1)
        if phase == "scales" and group["precondition"]:
            rate = max(_RATE, 1 / max(1, group["step"] - group["descent_steps"] - 1))
            _add_to_scales(state, gradient.to(rows.dtype), rate, ends)
        elif phase == "spread":
            add_to_spread(state, torch.as_tensor(as_array(rows) / _scales_of(state)).to(rows.dtype))
            if ends and group["length"] is None:
                spread = total_spread(state).sqrt()
                usable = spread.isfinite() & (spread > 0)
                lengths = torch.as_tensor(tuning.lengths)
                tuning.lengths = as_array(torch.where(usable, spread, lengths))


def _arrive(
    direction: Array, force: Array, pending: Array, taken: Array, unknown: float
) -> tuple[Array, Array]:
    """Return directions after the half kick that ends a step, and squared energy errors over d.

    Where the force is not finite, errors are NaN and directions are reversed.
    """
    library = library_of(force)
    turned, gain = bend(direction, force, taken / 2)
    error = pending + gain + taken / 2 * (force * direction).sum(1)
    finite = library.isfinite(pending)
    errors = library.where(finite, error**2 / force.shape[1], unknown) + 0 * force.sum(1)
    return library.where(library.isfinite(errors)[:, None], turned, -direction), errors


def _depart(direction: Array, force: Array, sizes: Array) -> tuple[Array, Array]:
    """Return directions after the half kick that begins a step, and half of its energy error."""
    direction, gain = bend(direction, force, sizes / 2)
    return direction, gain + sizes / 2 * (force * direction).sum(1)


def _add_to_scales(state: dict[str, Any], gradient: Tensor, rate: float, is_last: bool) -> None:
    """Add a change of gradients to the scales, whose statistics are dropped at the end."""
    if "last" in state:
        squares = (gradient - state["last"]).square() / 2
        state.setdefault("square", squares).lerp_(squares, rate)
        state["scales"] = _inverse(precise(state["square"]).sqrt()).to(gradient.dtype)
    state["last"] = gradient
    if is_last:
        if "scales" in state:
            _warn_of_silence(state["scales"])
        state.pop("last")
        state.pop("square", None)


def _warn_of_silence(scales: Tensor) -> None:
    """Warn if most weights have too little noise to be scaled."""
    largest, differ = scales.amax(1, keepdim=True), scales.amin(1) < scales.amax(1)
    share = float(((scales == largest).double().mean(1) * differ).max())
    if share > _QUIET:
        warnings.warn(
            f"SMILE: gradients of {100 * share:.0f} % of the weights have hardly any noise "
            "(inputs that are zero?), so the distribution of the others is too wide: "
            "compare with HMC or SGHMC.",
            stacklevel=2,
        )


def _scales_of(state: dict[str, Any]) -> Array:
    """Return C of every chain, or one until it is known."""
    return as_array(state["scales"]) if "scales" in state else 1.0


def _inverse(std: Tensor) -> Tensor:
    """Return scales with a mean square of one that equalise deviations, except very small ones.

    Weights with hardly any noise, such as those of inputs that are zero, are excluded from the
    median.
    """
    noisy = torch.where(std > _NOISY * std.amax(1, keepdim=True), std, math.nan)
    floor = _FLOOR * noisy.nanmedian(1, keepdim=True).values.nan_to_num(0)
    inverse = 1 / std.clamp(min=floor + 1e-30)
    return inverse / inverse.square().mean(1, keepdim=True).sqrt()

"""Energies and gradients of chains, planned once for a run as calls of machine code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bnn.likelihoods import Categorical, Gaussian
from lightning_bnn.methods.run import Batch, Run
from weightsym.fast import Plan, Program, Unsuitable, adding, plan_of
from weightsym.params import Params, precise

__all__ = ["PlannedField"]


class PlannedField:
    """Energies and gradients of chains by machine code, see `samplers.energy_sampler.Field`.

    Args:
        run: knows network and likelihood.
        rows: the weights that move, ``(chains, numbers)``.
        names: of these weights, in their order.
        stack: all weights.
        data: all batches.
        prior_std: of the weights that move.

    Raises:
        Unsuitable: if the networks are not small chains of layers on the CPU.
    """

    def __init__(
        self,
        run: Run,
        rows: Tensor,
        names: Sequence[str],
        stack: Params,
        data: Sequence[Batch],
        prior_std: float,
    ) -> None:
        self.run, self.precision = run, prior_std**-2
        self.evaluated = len(rows) * sum(batch.examples for batch in data)
        (weights, self.rows), (momenta, self.momenta) = _room(rows), _room(rows)
        rooms = [_room(rows) for _ in data]
        self.misfits, steps = [], list[Any]()
        for batch, (_, gradients) in zip(data, rooms, strict=True):
            if len(batch.inputs) > 1 or batch.per_member:
                raise Unsuitable("its inputs are not the same tensor for all chains")
            moving, into = (_pieces(r, names, stack) for r in (self.rows, gradients))
            plan = plan_of(run.network, {**stack, **moving}, batch.inputs[0], into)
            self.misfits.append(_misfit(plan, batch.targets, run))
            steps += [*plan.forward, self.misfits[-1].step, *plan.backward]
        (total, self.gradients), *others = rooms
        unit, precision = rows.new_ones(1), rows.new_full((1,), self.precision)
        steps += [adding(memory, unit, total) for memory, _ in others]
        steps.append(adding(weights, precision, total))
        self.size, self.kick = rows.new_zeros(1), rows.new_zeros(1)
        push = adding(total, self.kick, momenta), adding(momenta, self.size, weights)
        self.program, self.trajectory = Program(steps), Program([*steps, *push])

    def agrees(self, rows: Tensor, energies: Tensor, gradients: Tensor) -> bool:
        """Check that it gives what was computed in another way.

        Args:
            rows: where the chains were.
            energies: of them.
            gradients: of these.
        """
        evaluated = self.run.evaluated
        values = self.look(rows)
        self.run.evaluated = evaluated
        return all(map(_close, values, (energies, gradients)))

    def look(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Energies and gradients.

        Args:
            rows: the weights of every chain.
        """
        gradients = self.slope(rows)
        energies = torch.linalg.vecdot(precise(rows), precise(rows)) * (self.precision / 2)
        for misfit in self.misfits:
            energies += misfit.energies()
        return energies, gradients

    def slope(self, rows: Tensor) -> Tensor:
        """The gradients alone."""
        self.run.evaluated += self.evaluated
        self.rows.copy_(rows)
        self.program()
        return self.gradients

    def leapfrog(self, x: Tensor, momenta: Tensor, steps: int, size: float, kick: float) -> None:
        """Steps of `EnergySampler.leapfrog`, without Python in between where that is possible."""
        self.run.evaluated += steps * self.evaluated
        self.rows.copy_(x)
        self.momenta.copy_(momenta)
        self.size.fill_(size)
        self.kick.fill_(kick)
        self.trajectory(steps)
        x.copy_(self.rows)
        momenta.copy_(self.momenta)


def _room(like: Tensor) -> tuple[Tensor, Tensor]:
    """Zeros in whole vectors of machine code, and the matrix that they begin with."""
    memory = like.new_zeros(-(-like.numel() // _VECTOR) * _VECTOR)
    return memory, memory[: like.numel()].view_as(like)


_VECTOR = 16
"""The largest number of lanes."""


def _close(values: Tensor, wanted: Tensor) -> bool:
    scale = 1e-4 * wanted[wanted.isfinite()].abs().amax() if wanted.isfinite().any() else 1.0
    return torch.allclose(values, wanted, 1e-3, float(scale), equal_nan=True)


def _pieces(rows: Tensor, names: Sequence[str], stack: Params) -> Params:
    sizes = [stack[n][0].numel() for n in names]
    pieces = zip(names, rows.split(sizes, 1), strict=True)
    return {n: piece.unflatten(1, stack[n].shape[1:]) for n, piece in pieces}


class _Misfit:
    """The negative log-likelihood of planned outputs: its slopes, and its energies afterwards.

    Attributes:
        step: fills in the slopes.
    """

    def __init__(self, plan: Plan, targets: Tensor, run: Run) -> None:
        self.plan, self.targets, self.run = plan, targets, run
        self.step: Any = self.fill_slopes

    def fill_slopes(self) -> None:
        with torch.enable_grad():
            outputs = self.plan.examples_first().requires_grad_()
            nll = len(self.targets) * self.run.nll(outputs, self.targets)
            (slopes,) = torch.autograd.grad(nll.sum(), outputs)
        self.plan.slopes.copy_(self.plan.laid_out(slopes))
        self.nll = nll.detach()

    def energies(self) -> Tensor:
        return precise(self.nll)


class _GaussianMisfit(_Misfit):
    """Squares of differences where the outputs are; those of lanes without examples are zero."""

    def __init__(self, plan: Plan, targets: Tensor, run: Run) -> None:
        super().__init__(plan, targets, run)
        self.difference, self.std = torch.empty_like(plan.outputs), run.likelihood.log_std.exp()
        least = -run.likelihood.log_prob(targets[None], targets).sum()
        self.least, self.scale = float(least), float(self.std) ** -2
        laid_out = plan.laid_out(targets.to(plan.outputs.dtype)[None])
        self.step = plan.difference(laid_out, laid_out.new_full((1,), self.scale), self.difference)

    def energies(self) -> Tensor:
        squares = torch.linalg.vector_norm(self.difference.flatten(1), dim=1, dtype=torch.float64)
        return squares.square() * (self.scale / 2) + self.least


class _CategoricalMisfit(_Misfit):
    """Probabilities but for the one of the target, where the outputs are."""

    def __init__(self, plan: Plan, targets: Tensor, run: Run) -> None:
        super().__init__(plan, targets, run)
        classes = plan.outputs.shape[2]
        ones = nn.functional.one_hot(targets.long(), classes).to(plan.outputs.dtype)
        self.ones = plan.laid_out(ones[None])
        self.is_used = self.ones.sum(2, keepdim=True)  # lanes have examples

    def fill_slopes(self) -> None:
        torch.softmax(self.plan.outputs, 2, out=self.plan.slopes)
        self.plan.slopes.sub_(self.ones).mul_(self.is_used)

    def energies(self) -> Tensor:
        logs = self.plan.outputs.log_softmax(2)
        return -(logs * self.ones).flatten(1).sum(1, dtype=torch.float64)


def _misfit(plan: Plan, targets: Tensor, run: Run) -> _Misfit:
    likelihood = run.likelihood
    if type(likelihood) is Gaussian and likelihood.noise == "fixed":
        return _GaussianMisfit(plan, targets, run)
    plain = type(likelihood) is Categorical and likelihood.ignore_index is None
    return (_CategoricalMisfit if plain else _Misfit)(plan, targets, run)

"""Energies and gradients of chains, planned once per run as calls of machine code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from weightsym.networks.engines import Energies, Loss, Outputs
from weightsym.params import precise
from weightsym_fast.chains import Unsuitable
from weightsym_fast.machine_code import CallSequence
from weightsym_fast.outputs import plan_of
from weightsym_fast.running import GradientPlan, adding


class PlannedChains:
    """Energies of small networks on the CPU, with trajectories that run without Python."""

    name = "planned chains"
    kinds = (Energies,)

    def takes(self, job: Energies) -> str | None:
        if any(t.device.type != "cpu" for t in job.moving.values()):
            return "it has tensors on another device"
        if job.own_inputs:
            return "its members have inputs of their own"
        energies, *gradients = job.by_torch(job)  # says what is wrong with the data
        try:
            with torch.no_grad(), torch.autocast("cpu", enabled=False):
                field = PlannedField(job)
                agrees = field.agrees(_rows(job.moving), energies, _cat(gradients))
        except Unsuitable as reason:
            return str(reason)
        job.notes["field"] = field
        return None if agrees else "its plan does not give what it gives"

    def run(self, job: Energies) -> PlannedField:
        field: PlannedField = job.notes["field"]
        return field


class PlannedField:
    """A `Field` of energies and gradients by machine code.

    Args:
        job: asks for it.

    Raises:
        Unsuitable: if the networks are not small chains of layers on the CPU.
    """

    def __init__(self, job: Energies) -> None:
        self.job, rows = job, _rows(job.moving)
        (weights, self.rows), (momenta, self.momenta) = _room(rows), _room(rows)
        rooms = [_room(rows) for _ in job.batches]
        self.misfits, steps = [], list[Any]()
        for (inputs, targets), (_, gradients) in zip(job.batches, rooms, strict=True):
            moving, into = (_pieces(r, job.moving) for r in (self.rows, gradients))
            stack = {**job.stack, **moving}
            asked = Outputs(job.network, stack, job.by_torch, inputs)
            self.misfits.append(_misfit(plan_of(asked, into), targets, job.loss))
            plan = self.misfits[-1].plan
            steps += [*plan.forward, self.misfits[-1].step, *plan.backward]
        (total, self.gradients), *others = rooms
        unit, precision = rows.new_ones(1), rows.new_full((1,), job.precision)
        steps += [adding(memory, unit, total) for memory, _ in others]
        steps.append(adding(weights, precision, total))
        self.size, self.kick = rows.new_zeros(1), rows.new_zeros(1)
        push = adding(total, self.kick, momenta), adding(momenta, self.size, weights)
        self.program, self.trajectory = CallSequence(steps), CallSequence([*steps, *push])

    def agrees(self, rows: Tensor, energies: Tensor, gradients: Tensor) -> bool:
        """Return whether the results agree with another computation.

        Args:
            rows: positions of the chains.
            energies: at these positions.
            gradients: at these positions.
        """
        return all(map(_close, self._look(rows), (energies, gradients)))

    def look(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        self.job.count(1)
        return self._look(rows)

    def _look(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        self.rows.copy_(rows)
        self.program()
        energies = torch.linalg.vecdot(precise(rows), precise(rows)) * (self.job.precision / 2)
        for misfit in self.misfits:
            energies += misfit.energies()
        return energies, self.gradients

    def slope(self, rows: Tensor) -> Tensor:
        self.job.count(1)
        self.rows.copy_(rows)
        self.program()
        return self.gradients

    def leapfrog(self, x: Tensor, momenta: Tensor, steps: int, size: float, kick: float) -> None:
        self.job.count(steps)
        self.rows.copy_(x)
        self.momenta.copy_(momenta)
        self.size.fill_(size)
        self.kick.fill_(kick)
        self.trajectory(steps)
        x.copy_(self.rows)
        momenta.copy_(self.momenta)


def _room(like: Tensor) -> tuple[Tensor, Tensor]:
    """Allocate zeros in whole vectors of machine code, and the matrix at their start."""
    memory = like.new_zeros(-(-like.numel() // _VECTOR) * _VECTOR)
    return memory, memory[: like.numel()].view_as(like)


_VECTOR = 16
"""The largest number of lanes."""


def _close(values: Tensor, wanted: Tensor) -> bool:
    scale = 1e-4 * wanted[wanted.isfinite()].abs().amax() if wanted.isfinite().any() else 1.0
    return torch.allclose(values, wanted, 1e-3, float(scale), equal_nan=True)


def _pieces(rows: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    sizes = [t[0].numel() for t in like.values()]
    pieces = zip(like.items(), rows.split(sizes, 1), strict=True)
    return {n: piece.unflatten(1, t.shape[1:]) for (n, t), piece in pieces}


def _rows(tensors: Mapping[str, Tensor]) -> Tensor:
    return _cat([*tensors.values()])


def _cat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([t.detach().flatten(1) for t in tensors], 1)


class _Misfit:
    """The negative log-likelihood of planned outputs: first its gradients, then its values.

    Attributes:
        step: fills in the slopes.
    """

    def __init__(self, plan: GradientPlan, targets: Tensor, loss: Loss) -> None:
        self.plan, self.targets, self.loss = plan, targets, loss
        self.step: Any = self.fill_slopes

    def fill_slopes(self) -> None:
        outputs = self.plan.examples_first()
        self.nll, slopes = _with_slopes(self.loss, outputs, self.targets)
        self.plan.slopes.copy_(self.plan.laid_out(slopes))

    def energies(self) -> Tensor:
        return precise(self.nll)


def _with_slopes(loss: Loss, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sums of a loss over examples, and their gradients."""
    with torch.enable_grad():
        nll = len(targets) * loss.mean(outputs.requires_grad_(), targets)
        (slopes,) = torch.autograd.grad(nll.sum(), outputs)
    return nll.detach(), slopes


class _SquaresMisfit(_Misfit):
    """Squared errors in the memory of the outputs, zero in lanes without examples.

    The factor of the squares is the slope of the loss, and their offset its value at no error.
    """

    def __init__(self, plan: GradientPlan, targets: Tensor, loss: Loss) -> None:
        super().__init__(plan, targets, loss)
        self.difference, targets = torch.empty_like(plan.outputs), targets.to(plan.outputs.dtype)
        nothing = torch.zeros_like(targets[:1])
        self.scale = float(_with_slopes(loss, nothing[None] + 1, nothing)[1].flatten()[0])
        self.least = float(len(targets) * loss.mean(targets[None], targets))
        laid_out = plan.laid_out(targets[None])
        self.step = plan.difference(laid_out, laid_out.new_full((1,), self.scale), self.difference)

    def energies(self) -> Tensor:
        squares = torch.linalg.vector_norm(self.difference.flatten(1), dim=1, dtype=torch.float64)
        return squares.square() * (self.scale / 2) + self.least


class _CrossEntropyMisfit(_Misfit):
    """Softmax probabilities minus the one-hot target, in the memory of the outputs."""

    def __init__(self, plan: GradientPlan, targets: Tensor, loss: Loss) -> None:
        super().__init__(plan, targets, loss)
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


def _misfit(plan: GradientPlan, targets: Tensor, loss: Loss) -> _Misfit:
    if loss.formula == "squares":
        return _SquaresMisfit(plan, targets, loss)
    is_plain = loss.formula == "cross-entropy" and targets.ndim == 1  # a class for each example
    return (_CrossEntropyMisfit if is_plain else _Misfit)(plan, targets, loss)

"""Sweeps that balance what enters and leaves every unit, and Newton steps with a certificate.

Balancing makes the mass that enters every unit equal to the mass that leaves it, in closed form and
one group at a time. Where the units of one group feed each other, a separable majorant is minimised
instead; where balancing is slow, Newton steps by conjugate gradients take over. The last Newton
system also gives a flow that is conserved at every unit, a point of the dual problem, and so a
bound on what is left to gain.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_bnn.symmetry.laplacian import Laplacian
from lightning_bnn.symmetry.mass_problem import Flow, MassProblem

__all__ = ["balance", "newton_direction"]

_ROUGHEST = 0.1
"""Of the gradient, what a Newton direction may leave open."""
_FLAT = 1e-15
"""Of the curvature if every scale had mass of its own, what is no more than rounding."""


# ------------------------------------------------------------ sweeps
def balance(
    problem: MassProblem, u: Tensor, alive: Tensor, tolerance: float, most: int
) -> tuple[Tensor, int]:
    """Sweeps while they converge fast, then Newton steps."""
    sweep = None if problem.composites.count else _Sweep(problem, alive)
    if sweep is None or sweep.coupled:
        first = min(4, most)
        for _ in range(first):
            u = _majorised_step(problem, u, alive)
        return _newton(problem, u, alive, tolerance, most, first)
    goal = max(tolerance**0.5 / 4, 1e-14)
    f, last = problem.factors(u), float("inf")
    for iteration in range(1, most + 1):
        moved = sweep(f)
        if moved < goal:
            break
        if iteration >= 4 and moved > 0.3 * last:
            return _newton(problem, problem.logs(f), alive, tolerance, most, iteration)
        last = moved
    return problem.logs(f), iteration


def _majorised_step(problem: MassProblem, u: Tensor, alive: Tensor) -> Tensor:
    """All groups at once, each product of factors bounded by a sum of powers of them.

    In terms of two scales that is half a step.
    """
    flow = problem.flow(u)
    return u + _ratio(flow.inflow, flow.outflow, alive).log() / (4 * problem.degree)


def _ratio(inflow: Tensor, outflow: Tensor, alive: Tensor) -> Tensor:
    return torch.where(alive, outflow, 1) / torch.where(alive, inflow, 1)


class _Sweep:
    """Closed-form updates, group by group; ``coupled`` says that a group feeds itself."""

    def __init__(self, problem: MassProblem, alive: Tensor) -> None:
        self.problem, self.alive = problem, alive
        ends = torch.tensor(problem.sizes, dtype=torch.long).cumsum(0).tolist()
        self.spans = list(zip([0, *ends], ends, strict=False))
        owner = torch.repeat_interleave(
            torch.arange(len(self.spans)), torch.tensor(problem.sizes, dtype=torch.long)
        )
        self.owner = torch.cat([owner, torch.tensor([-1]), owner])
        self.uses: list[list[_Use]] = [[] for _ in self.spans]
        self.coupled = False
        for m in problem.matrices:
            rows, columns = self._owners(m.rows), self._owners(m.columns)
            self.coupled |= bool(set(rows) & set(columns))
            for g in rows:
                self.uses[g].append(self._use(m.rows, m.columns, m.squares, g))
            for g in columns:
                self.uses[g].append(self._use(m.columns, m.rows, m.squares.mT, g))

    def _owners(self, index: Tensor) -> list[int]:
        return [g for g in self.owner[index.reshape(-1).cpu()].unique().tolist() if g >= 0]

    def _use(self, ends: Tensor, other_ends: Tensor, squares: Tensor, group: int) -> _Use:
        flat, n = ends.reshape(-1), self.problem.variables
        start, stop = self.spans[group]
        at = torch.nonzero(self.owner.to(flat.device)[flat] == group)[:, 0]
        slot = flat[at]
        slot = torch.where(slot < n, slot - start, slot - n - 1 - start + (stop - start))
        everything = len(at) == len(flat)
        return _Use(ends, other_ends, squares, None if everything else at, slot)

    def __call__(self, f: Tensor) -> float:
        """Update the factors of every group once, in place; returns the largest step."""
        p, n = self.problem, self.problem.variables
        extremes = [torch.ones((), dtype=f.dtype, device=f.device)]
        for (start, stop), uses in zip(self.spans, self.uses, strict=True):
            up, down = slice(start, stop), slice(n + 1 + start, n + 1 + stop)
            both = torch.cat([p.plus[:, up] * f[:, up], p.minus[:, up] * f[:, down]], -1)
            for use in uses:
                both.index_add_(-1, use.slot, use.mass(f))
            inflow, outflow = both.chunk(2, -1)
            ratio = _ratio(inflow, outflow, self.alive[:, up])
            extremes += [ratio.amax(), 1 / ratio.amin()]
            root = ratio.sqrt()
            f[:, up] *= root
            f[:, down] /= root
        return math.log(float(torch.stack(extremes).max())) / 4


class _Use(NamedTuple):
    """One end of a matrix as a group sees it: ``slot`` says where its mass flows in or out."""

    ends: Tensor
    other_ends: Tensor
    squares: Tensor
    at: Tensor | None
    slot: Tensor

    def mass(self, f: Tensor) -> Tensor:
        """Mass at the positions of the group, ``(members, positions)``."""
        mass = (
            f[:, self.ends] * torch.matmul(self.squares, f[:, self.other_ends][..., None])[..., 0]
        )
        mass = mass.flatten(1)
        return mass if self.at is None else mass[:, self.at]


# ------------------------------------------------------------ Newton
def _newton(
    problem: MassProblem, u: Tensor, alive: Tensor, tolerance: float, most: int, iteration: int
) -> tuple[Tensor, int]:
    last = torch.inf
    while iteration < most:
        t, gap = newton_direction(problem.flow(u), alive)
        value = problem.value(u)
        worst = float(torch.where(value > 0, gap / value, 0).max())
        if 1e-12 > worst > last / 2:  # down to rounding
            break
        last = worst
        iteration += 1
        u = _line_search(problem, u, t / 2, value)
        if worst <= tolerance:
            break
    return u, iteration


def _line_search(problem: MassProblem, u: Tensor, step: Tensor, value: Tensor) -> Tensor:
    """Halve the steps of those members whose mass would not fall."""
    length = torch.ones_like(value)
    for _ in range(30):
        new = problem.value(u + length[:, None] * step)
        worse = ~(new <= value)
        if not bool(worse.any()):
            break
        length = torch.where(worse, length / 2, length)
    return u + length[:, None] * step


def newton_direction(flow: Flow, alive: Tensor) -> tuple[Tensor, Tensor]:
    r"""Solve the Laplacian system and bound what is left to gain.

    With y the flow, g its excess at the units and L t = -g, the flow :math:`y (1 + \delta)` with
    :math:`\delta = a \cdot t` is conserved. It is a point of the dual problem, whose value there is
    :math:`\sum y (1 + \delta)(1 - \log(1 + \delta))`. So

    .. math:: m - m^* \le \frac{1}{2} \frac{t^T L t}{1 - \max|\delta|} + 2 |L t + g|_1,

    the last term for what conjugate gradients leave open.
    """
    g = (flow.inflow - flow.outflow) * alive
    laplacian = Laplacian(flow)
    t = _conjugate_gradients(laplacian, -g, alive)
    product = laplacian(t) * alive
    residual = product + g
    widest = t.abs().amax(-1) if t.shape[-1] else torch.zeros_like(g.sum(-1))
    widest = flow.problem.degree * widest
    quadratic = (t * product).sum(-1) / 2
    gap = torch.where(widest < 1, quadratic / (1 - widest).clamp_min(1e-300), torch.inf)
    return t, gap + 2 * residual.abs().sum(-1)


def _conjugate_gradients(laplacian: Laplacian, b: Tensor, alive: Tensor) -> Tensor:
    """Jacobi-preconditioned, all members at once, until the slowest is done.

    Far from the minimum a rough direction will do: what is left open is at most a tenth, and falls
    with the excess itself, so that steps converge as fast as exact ones. Nothing is done along
    directions in which the mass is flat: what is there of the excess is rounding.
    """
    diagonal = torch.where(alive, laplacian.single, 1)
    x, r = torch.zeros_like(b), b
    z = r / diagonal
    p, rz = z, (r * z).sum(-1)
    forcing = (rz / diagonal.sum(-1).clamp_min(1e-300)).clamp(1e-26, _ROUGHEST**2)
    stop = forcing * rz.clamp_min(1e-300) + 1e-36 * diagonal.sum(-1)
    for _ in range(4 * b.shape[-1] + 10):
        if not bool((rz > stop).any()):
            break
        lp = laplacian(p) * alive
        curvature = (p * lp).sum(-1)
        curved = curvature > _FLAT * (diagonal * p.square()).sum(-1)
        alpha = torch.where((rz > stop) & curved, rz / curvature, 0)
        x, r = x + alpha[:, None] * p, r - alpha[:, None] * lp
        z = r / diagonal
        new = (r * z).sum(-1)
        p, rz = z + (new / rz.clamp_min(1e-300))[:, None] * p, new
    return x

"""The least mass over all rescalings, with a certificate.

Balancing makes the mass that enters every unit equal to the mass that leaves it, in closed form and
one group at a time. Where the units of one group feed each other, a separable majorant is minimised
instead; where balancing is slow, Newton steps by conjugate gradients take over. The last Newton
system also gives a flow that is conserved at every unit, a point of the dual problem, and so a
bound on what is left to gain.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float64, Int
from torch import Tensor

from lightning_bnn.params import Params
from lightning_bnn.symmetry.attainment import without_vanishing_terms
from lightning_bnn.symmetry.groups import Symmetries
from lightning_bnn.symmetry.mass_oracle import solve_by_cvxpy
from lightning_bnn.symmetry.mass_problem import Flow, MassProblem, mass, mass_problem
from lightning_bnn.symmetry.validation import check_finite, check_params

__all__ = ["MinMass", "mass", "min_mass"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class MinMass:
    """The least mass over all rescalings; for a stack, tensors have a member dimension.

    Attributes:
        mass: mass of the network as it is.
        minimum: the least mass; where no finite scales reach it, the bound that they come close to.
        scales: the scales that reach it, for `rescale`; where none do, finite ones that balance
            what can be balanced, and under which there is no more mass than before.
        gap: certified bound on ``(minimum - true minimum) / minimum``.
        iterations: balancing sweeps and Newton steps.
        dead: units without incoming or without outgoing weight; their scale is one.
        attained: whether finite scales reach the minimum. They do not where weights only lead to
            or only come from units that nothing balances, such as those before a head of zeros.
        excess: mass above the minimum, in percent of it.
    """

    mass: Float64[Tensor, "*members"]
    minimum: Float64[Tensor, "*members"]
    scales: tuple[Float64[Tensor, "*members _units"], ...] = field(repr=False)
    gap: Float64[Tensor, "*members"]
    iterations: int
    dead: Int[Tensor, "*members"]
    attained: Bool[Tensor, "*members"]

    @property
    def excess(self) -> Tensor:
        """Mass above the minimum, in percent of the minimum; infinite above a minimum of zero."""
        nothing = (self.mass == 0) & (self.minimum == 0)
        return torch.where(nothing, 0, 100 * (self.mass / self.minimum - 1))


def min_mass(
    params: Params,
    sym: Symmetries,
    solver: Literal["balance", "cvxpy"] = "balance",
    *,
    start: Sequence[Tensor] | None = None,
    tolerance: float = 1e-10,
    max_iterations: int = 200,
) -> MinMass:
    """Find the scales of least mass (P1, the min-mass problem).

    Args:
        params: one network or a stack.
        sym: what `discover` returned.
        solver: ``"balance"`` is exact and fast; ``"cvxpy"`` is the paper's way, for one small
            network.
        start: scales to start from, such as those of the step before.
        tolerance: certified relative gap at which to stop.
        max_iterations: sweeps and Newton steps after which to stop in any case.
    """
    if solver not in ("balance", "cvxpy"):
        raise ValueError(f"`solver` must be 'balance' or 'cvxpy', got {solver!r}.")
    if tolerance <= 0 or max_iterations < 1:
        raise ValueError(
            "`tolerance` must be positive and `max_iterations` at least 1, "
            f"got {tolerance} and {max_iterations}."
        )
    stacked = check_params(params, sym)
    check_finite(params, sym)
    whole = mass_problem(params, sym)
    u = torch.zeros_like(whole.plus)
    before = whole.value(u)
    dead = (~_alive(whole, u)).sum(-1)
    problem, attained, floating = without_vanishing_terms(whole)
    alive = _alive(problem, u) & ~floating.pinned()
    if start is not None:
        u = _join(start, u) * alive
    if solver == "cvxpy":
        u, iterations = _by_cvxpy(params, sym, problem, alive, attained), 1
    else:
        u, iterations = _balance(problem, u, alive, tolerance, max_iterations)
    u = floating.centred(u)
    after = problem.value(u)
    gap = torch.where(after > 0, _newton_direction(problem.flow(u), alive)[1] / after, 0)
    if bool((dead > 0).any()):
        _log.info(
            "min_mass: %d units without incoming or outgoing weight keep their scale.",
            int(dead.max()),
        )
    u = _no_worse(whole, u, floating.fall, before)
    scales = [s if stacked else s[0] for s in torch.exp(u).split(problem.sizes, -1)]
    parts = (t if stacked else t[0] for t in (before, after, gap, dead, attained))
    total, least, bound, lost, reached = parts
    return MinMass(total, least, tuple(scales), bound, iterations, lost, reached)


def _no_worse(problem: MassProblem, u: Tensor, fall: Tensor, before: Tensor) -> Tensor:
    """Go along a direction in which mass vanishes until there is no more than at first."""
    length = torch.zeros_like(before)
    for _ in range(10):
        worse = problem.value(u + length[:, None] * fall) > before * (1 + 1e-12)
        if not bool((worse & (fall != 0).any(-1)).any()):
            break
        length = torch.where(worse, (2 * length).clamp_min(0.5), length)
    return u + length[:, None] * fall


def _by_cvxpy(
    params: Params, sym: Symmetries, problem: MassProblem, alive: Tensor, attained: Tensor
) -> Tensor:
    if not problem.variables:
        return torch.zeros_like(problem.plus)
    if not bool(attained.all()):
        raise ValueError(
            "`solver='cvxpy'` needs a least mass that finite scales reach, and this network has "
            "none (see `MinMass.attained`); use solver='balance'."
        )
    return solve_by_cvxpy(params, sym, alive)


def _alive(problem: MassProblem, u: Tensor) -> Tensor:
    """Units that mass both enters and leaves."""
    flow = problem.flow(u)
    return (flow.inflow > 0) & (flow.outflow > 0)


def _join(scales: Sequence[Tensor], like: Tensor) -> Tensor:
    return torch.cat([s.to(like).log().expand(like.shape[0], s.shape[-1]) for s in scales], -1)


# ------------------------------------------------------------ balancing
def _balance(
    problem: MassProblem, u: Tensor, alive: Tensor, tolerance: float, most: int
) -> tuple[Tensor, int]:
    """Sweeps while they converge fast, then Newton steps."""
    sweep = _Sweep(problem, alive)
    if sweep.coupled:
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
    """All groups at once, each product of factors bounded by a sum of squares: half a step."""
    flow = problem.flow(u)
    return u + _ratio(flow.inflow, flow.outflow, alive).log() / 8


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

    def _use(self, own: Tensor, other: Tensor, squares: Tensor, group: int) -> _Use:
        flat, n = own.reshape(-1), self.problem.variables
        start, stop = self.spans[group]
        at = torch.nonzero(self.owner.to(flat.device)[flat] == group)[:, 0]
        slot = flat[at]
        slot = torch.where(slot < n, slot - start, slot - n - 1 - start + (stop - start))
        everything = len(at) == len(flat)
        return _Use(own, other, squares, None if everything else at, slot)

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

    own: Tensor
    other: Tensor
    squares: Tensor
    at: Tensor | None
    slot: Tensor

    def mass(self, f: Tensor) -> Tensor:
        """Mass at the positions of the group, ``(members, positions)``."""
        mass = f[:, self.own] * torch.matmul(self.squares, f[:, self.other][..., None])[..., 0]
        mass = mass.flatten(1)
        return mass if self.at is None else mass[:, self.at]


# ------------------------------------------------------------ Newton
def _newton(
    problem: MassProblem, u: Tensor, alive: Tensor, tolerance: float, most: int, iteration: int
) -> tuple[Tensor, int]:
    last = torch.inf
    while iteration < most:
        t, gap = _newton_direction(problem.flow(u), alive)
        value = problem.value(u)
        worst = float(torch.where(value > 0, gap / value, 0).max())
        if worst <= tolerance or 1e-12 > worst > last / 2:  # done, or down to rounding
            break
        last = worst
        iteration += 1
        u = _line_search(problem, u, t / 2, value)
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


def _newton_direction(flow: Flow, alive: Tensor) -> tuple[Tensor, Tensor]:
    r"""Solve the Laplacian system and bound what is left to gain.

    With y the flow, g its excess at the units and L t = -g, the flow :math:`y (1 + \delta)` with
    :math:`\delta = a \cdot t` is conserved. It is a point of the dual problem, whose value there is
    :math:`\sum y (1 + \delta)(1 - \log(1 + \delta))`. So

    .. math:: m - m^* \le \frac{1}{2} \frac{t^T L t}{1 - \max|\delta|} + 2 |L t + g|_1,

    the last term for what conjugate gradients leave open.
    """
    g = (flow.inflow - flow.outflow) * alive
    t, residual = _conjugate_gradients(flow, -g, alive)
    widest = 2 * t.abs().amax(-1) if t.shape[-1] else torch.zeros_like(g.sum(-1))
    quadratic = (t * flow.hessian(t)).sum(-1) / 2
    gap = torch.where(widest < 1, quadratic / (1 - widest).clamp_min(1e-300), torch.inf)
    return t, gap + 2 * residual.abs().sum(-1)


def _conjugate_gradients(flow: Flow, b: Tensor, alive: Tensor) -> tuple[Tensor, Tensor]:
    """Jacobi-preconditioned, all members at once, until the slowest is done."""
    diagonal = torch.where(alive, flow.inflow + flow.outflow, 1)
    x, r = torch.zeros_like(b), b
    z = r / diagonal
    p, rz = z, (r * z).sum(-1)
    stop = 1e-26 * rz.clamp_min(1e-300) + 1e-36 * diagonal.sum(-1)
    for _ in range(4 * b.shape[-1] + 10):
        if not bool((rz > stop).any()):
            break
        hp = flow.hessian(p) * alive
        alpha = rz / (p * hp).sum(-1).clamp_min(1e-300)
        alpha = torch.where(rz > stop, alpha, 0)
        x, r = x + alpha[:, None] * p, r - alpha[:, None] * hp
        z = r / diagonal
        new = (r * z).sum(-1)
        p, rz = z + (new / rz.clamp_min(1e-300))[:, None] * p, new
    return x, r

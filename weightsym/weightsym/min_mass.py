"""The least mass over all rescalings, or its limit where none reaches it, with a certificate."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float64, Int
from torch import Tensor

from weightsym.groups import Symmetries
from weightsym.joint_mass import solve_jointly
from weightsym.mass_problem import mass, mass_problem
from weightsym.params import Params
from weightsym.recession import minimise, no_worse
from weightsym.validation import check_finite, check_params, check_scales, check_some

__all__ = ["MinMass", "excess", "mass", "min_mass"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class MinMass:
    r"""The least mass over all rescalings, of one network or of every member of a stack.

    .. math:: \text{excess} = 100\, (M / M_{min} - 1)

    Attributes:
        mass: mass of the network as it is.
        minimum: the least mass; where no finite scales reach it, the bound that they come close to.
        scales: the scales that reach it, for `rescale`; where none do, finite ones that balance
            what can be balanced, and under which there is no more mass than before.
        gap: certified bound on ``(minimum - true minimum) / minimum``; with ``mixing`` it holds
            where no log scale is farther than one from its best.
        iterations: Newton steps; with ``mixing``, rounds of scales and matrices.
        dead: units without incoming or without outgoing weight; their scale is one.
        attained: whether finite scales reach the minimum. They do not where weights only lead to
            or only come from units that nothing balances, such as those before a head of zeros.
        matrices: with ``mixing``, the matrices that reach it together with the scales, for `mix`;
            near it where none does.
        excess: mass above the minimum, in percent of it.

    >>> from weightsym import params as P
    >>> from torch import nn
    >>> from weightsym import discover, min_mass
    >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    >>> least = min_mass(P.populate(net, 5), discover(net, torch.randn(8, 2)))
    >>> bool((least.gap < 1e-9).all()), bool((least.excess > 0).all()), least.minimum.shape
    (True, True, torch.Size([5]))
    """

    mass: Float64[Tensor, "*members"]
    minimum: Float64[Tensor, "*members"]
    scales: tuple[Float64[Tensor, "*members _units"], ...] = field(repr=False)
    gap: Float64[Tensor, "*members"]
    iterations: int
    dead: Int[Tensor, "*members"]
    attained: Bool[Tensor, "*members"]
    matrices: tuple[Tensor, ...] = field(default=(), repr=False)

    @property
    def excess(self) -> Tensor:
        """Mass above the minimum, in percent of it, and infinite above a minimum of zero."""
        return excess(self.mass, self.minimum)


def excess(mass: Tensor, minimum: Tensor) -> Tensor:
    """The distance of masses above a minimum, in percent of it, and zero between zeros.

    >>> excess(torch.tensor([3.0, 0.0, 1.0]), torch.tensor([2.0, 0.0, 0.0]))
    tensor([50.,  0., inf])
    """
    nothing = (mass == 0) & (minimum == 0)
    return torch.where(nothing, 0, 100 * (mass / minimum - 1))


def min_mass(
    params: Params,
    sym: Symmetries,
    *,
    mixing: bool | Literal["only"] = False,
    start: Sequence[Tensor] | None = None,
    tolerance: float = 1e-10,
    max_iterations: int = 200,
) -> MinMass:
    r"""Find the scales of least mass (P1, the min-mass problem), or scales and matrices.

    .. math:: \min_{s > 0} M(s \cdot \theta)

    Args:
        params: one network or a stack.
        sym: what `discover` returned.
        mixing: also over the matrices that mix the channels of heads and adapters (``sym.linear``);
            ``"only"`` for these alone, with no other scale. Rotations do not change the mass.
        start: scales to start from, such as those of the step before.
        tolerance: certified relative gap at which to stop.
        max_iterations: steps or rounds after which to stop in any case.

    >>> from weightsym import params as P
    >>> from torch import nn
    >>> from weightsym import discover, mass, min_mass, rescale
    >>> net = nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1))
    >>> w = P.of(net) | {"0.weight": torch.tensor([[4.0]]), "2.weight": torch.tensor([[1.0]])}
    >>> sym = discover(net, torch.randn(8, 1))
    >>> least = min_mass(w, sym)  # at s = 1/2, both weights are 2
    >>> least.mass.item(), round(least.minimum.item(), 4), least.scales[0].round(decimals=4)
    (17.0, 8.0, tensor([0.5000], dtype=torch.float64))
    >>> torch.allclose(mass(rescale(w, sym, least.scales), sym), least.minimum)
    True
    """
    if not tolerance > 0 or max_iterations < 1:
        raise ValueError(
            "`tolerance` must be positive and `max_iterations` at least 1, "
            f"got {tolerance} and {max_iterations}."
        )
    if mixing not in (False, True, "only"):
        raise ValueError(f"`mixing` must be True, False or 'only', got {mixing!r}.")
    stacked = check_params(params, sym)
    check_some(params, sym)
    members = len(next(iter(params.values()))) if stacked else None
    start = None if start is None else check_scales(start, sym, members, "start")
    if mixing is False:
        solution = _over_scales(params, sym, start, tolerance, max_iterations)
    else:
        check_finite(params, sym)
        only = mixing == "only"
        solution = MinMass(*solve_jointly(params, sym, only, start, tolerance, max_iterations))
    if stacked:
        return solution
    return replace(solution, **{n: _first(v) for n, v in vars(solution).items()})


def _over_scales(
    params: Params,
    sym: Symmetries,
    start: Sequence[Tensor] | None,
    tolerance: float,
    most: int,
) -> MinMass:
    whole = mass_problem(params, sym)
    u = torch.zeros_like(whole.inflow)
    dead = ((whole.inflow == 0) | (whole.outflow == 0)).sum(-1)
    if bool((dead > 0).any()):
        _log.info(
            "min_mass: %d units without incoming or outgoing weight keep their scale.",
            int(dead.max()),
        )
    u = u if start is None else _join(start, u)
    solution = minimise(whole, u, tolerance, most)
    scales = no_worse(whole, solution).exp().split([g.units for g in sym.scalings], -1)
    reached = solution.gap, solution.steps, dead, solution.attained
    return MinMass(whole.value, solution.value, scales, *reached)


def _first(value: Any) -> Any:
    """The value of the first member, where there are members."""
    if isinstance(value, tuple):
        return tuple(t[0] for t in value)
    return value[0] if isinstance(value, Tensor) else value


def _join(scales: Sequence[Tensor], like: Tensor) -> Tensor:
    return torch.cat([s.to(like).log().expand(like.shape[0], s.shape[-1]) for s in scales], -1)

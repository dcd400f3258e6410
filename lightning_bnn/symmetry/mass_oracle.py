"""The min-mass problem as P1 states it, one exponential per weight, solved by cvxpy."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from lightning_bnn.extras import needed
from lightning_bnn.params import Params, is_stacked
from lightning_bnn.symmetry.actions import multiply
from lightning_bnn.symmetry.groups import Symmetries

__all__ = ["solve_by_cvxpy"]


def solve_by_cvxpy(params: Params, sym: Symmetries) -> Tensor:
    """Log scales of least mass, ``(1, scales)``, by cvxpy's default solver.

    The powers of the scales in every weight are read off from what `rescale` does to ones, so that
    nothing is shared with the other solver.
    """
    with needed("`solver='cvxpy'`"):
        import cvxpy as cp

    if is_stacked(params, sym.shapes):
        raise ValueError("`solver='cvxpy'` takes one network, not a stack.")
    names = [name for name in sym.weights if name in params]
    like = torch.zeros(1, sym.scaling_dof, dtype=torch.float64, device=params[names[0]].device)
    if not sym.scalings:
        return like
    scales = torch.eye(sym.scaling_dof, dtype=torch.float64).exp()
    ones = {n: torch.ones(len(scales), *params[n].shape, dtype=torch.float64) for n in names}
    ones = multiply(ones, sym, {"scalings": scales.split([g.units for g in sym.scalings], -1)})
    powers = torch.cat([ones[name].log().round().flatten(1) for name in names], 1).T.numpy()
    squares = torch.cat([params[n].detach().double().cpu().square().flatten() for n in names])
    masses = (squares / squares.sum()).numpy()
    there = (masses > 0) & (powers != 0).any(1)
    u = cp.Variable(like.shape[1])
    terms = cp.multiply(masses[there], cp.exp(2 * powers[there] @ u))
    with warnings.catch_warnings():  # `min_mass` certifies the result itself
        warnings.filterwarnings("ignore", message="Solution may be inaccurate")
        cp.Problem(cp.Minimize(cp.sum(terms))).solve()
    if u.value is None:
        raise RuntimeError("cvxpy found no solution.")
    return torch.as_tensor(u.value).to(like)[None]

"""The min-mass problem as P1 states it, one exponential per weight, solved by cvxpy."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from scipy.sparse import coo_matrix, csr_matrix, vstack
from torch import Tensor

from lightning_bnn.extras import needed
from lightning_bnn.params import Params, is_stacked
from lightning_bnn.symmetry.groups import Symmetries

__all__ = ["solve_by_cvxpy"]


def solve_by_cvxpy(params: Params, sym: Symmetries, alive: Tensor) -> Tensor:
    """Log scales of least mass, ``(1, scales)``, by cvxpy's default solver.

    The terms are built from the groups alone, without the aggregation that balancing uses, so that
    the two can be compared.
    """
    with needed("`solver='cvxpy'`"):
        import cvxpy as cp

    if is_stacked(params, sym.shapes):
        raise ValueError("`solver='cvxpy'` takes one network, not a stack.")
    squares, exponents = _terms(params, sym)
    u = cp.Variable(sym.scaling_dof)
    fixed = np.flatnonzero(~alive[0].cpu().numpy())
    constraints = [u[fixed] == 0] if len(fixed) else []
    mass = cp.sum(cp.multiply(squares / squares.sum(), cp.exp(2 * (exponents @ u))))
    with warnings.catch_warnings():  # `min_mass` certifies the result itself
        warnings.filterwarnings("ignore", message="Solution may be inaccurate")
        cp.Problem(cp.Minimize(mass), constraints).solve()
    if u.value is None:
        raise RuntimeError("cvxpy found no solution.")
    return torch.as_tensor(u.value, dtype=torch.float64, device=alive.device)[None]


def _terms(params: Params, sym: Symmetries) -> tuple[Any, csr_matrix]:
    """Squared weights, summed over kernel positions, and the exponents of the scales in them."""
    starts = np.cumsum([0, *(g.units for g in sym.scalings)])
    squares, rows = [], []
    for name in sym.weights:
        w = params[name].detach().double().cpu().square()
        places = [
            (a, starts[g], place)
            for a, on_axis in sym.placements_by_axis("scalings").items()
            for g, place in on_axis
            if sym.axes[a].tensor == name
        ]
        if not places:
            continue
        followed = {sym.axes[a].dim for a, _, _ in places}
        if None not in followed and max(d for d in followed if d is not None) < 2 <= w.ndim:
            w = w.flatten(2).sum(-1) if w.ndim > 2 else w
        total = sum(_exponents(sym, a, start, place, w.shape) for a, start, place in places)
        squares.append(w.reshape(-1).numpy())
        rows.append(total)
    values = np.concatenate(squares)
    matrix = vstack(rows).tocsr()
    return values[values > 0], matrix[values > 0]


def _exponents(sym: Symmetries, axis: int, start: Any, place: Any, shape: torch.Size) -> csr_matrix:
    """For each entry of a matrix of squares, the scale that one placement puts on it."""
    blocks, size, dim = sym.axes[axis].blocks, sym.axes[axis].size, sym.axes[axis].dim or 0
    index = np.arange(blocks * size)
    if sym.axes[axis].dim is None:
        entry = index
    elif blocks > 1:
        rows = np.repeat(index.reshape(blocks, size), shape[0] // blocks, 0)
        view = [shape[0], *(size if d == dim else 1 for d in range(1, len(shape)))]
        entry = np.broadcast_to(rows.reshape(view), shape)
    else:
        view = [size if d == dim else 1 for d in range(len(shape))]
        entry = np.broadcast_to(index.reshape(view), shape)
    units, repeats = place.positions.shape
    columns = np.repeat(start + np.arange(units), repeats)
    powers = np.full(columns.size, float(place.exponent))
    positions = place.positions.numpy().reshape(-1)
    acts = coo_matrix((powers, (positions, columns)), (index.size, sym.scaling_dof)).tocsr()
    return acts[entry.reshape(-1)]

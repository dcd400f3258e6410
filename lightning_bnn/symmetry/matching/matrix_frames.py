"""Networks in one frame by permutations and matrices: each to the mean of the others."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_bnn.params import Params, unstack
from lightning_bnn.params import stack as stack_networks
from lightning_bnn.symmetry.groups import Symmetries
from lightning_bnn.symmetry.matching.alignment import Alignment, AlignMethod, distance_to_mean
from lightning_bnn.symmetry.matching.match_all import match_all

__all__ = ["align_with_matrices"]


def align_with_matrices(
    stack: Params, sym: Symmetries, method: AlignMethod, sweeps: int, seed: int
) -> Alignment:
    """All to the first; then each to the mean of the others, where that brings all closer."""
    members = unstack(stack)
    found = match_all(stack, members[0], sym)
    parts = [_member(found.permutations, found.matrices, m) for m in range(len(members))]
    moved = unstack(found.apply(stack, sym))
    spread = [_spread(members, sym), _spread(moved, sym)]
    generator = torch.Generator().manual_seed(seed)
    for _ in range(sweeps if method == "joint" and len(members) > 1 else 0):
        for m in torch.randperm(len(members), generator=generator).tolist():
            new = match_all(members[m], _mean([*moved[:m], *moved[m + 1 :]]), sym)
            tried = [*moved[:m], new.apply(members[m], sym), *moved[m + 1 :]]
            if _spread(tried, sym) < _spread(moved, sym) * (1 - 1e-9):
                moved, parts[m] = tried, (list(new.permutations), list(new.matrices))
        spread.append(_spread(moved, sym))
        if not spread[-1] < spread[-2] * (1 - 1e-6):
            break
    permutations, matrices = (_stacked([part[k] for part in parts]) for k in (0, 1))
    return Alignment(permutations, tuple(spread), method, matrices=matrices)


def _member(
    permutations: Sequence[Tensor], matrices: Sequence[Tensor], m: int
) -> tuple[list[Tensor], list[Tensor]]:
    return [p[m] for p in permutations], [g[m] for g in matrices]


def _stacked(parts: Sequence[Sequence[Tensor]]) -> tuple[Tensor, ...]:
    return tuple(torch.stack(rows) for rows in zip(*parts, strict=True))


def _mean(networks: Sequence[Params]) -> Params:
    first = networks[0]
    return {
        n: torch.stack([w[n] for w in networks]).mean(0) if t.is_floating_point() else t
        for n, t in first.items()
    }


def _spread(networks: Sequence[Params], sym: Symmetries) -> float:
    return distance_to_mean(stack_networks(networks), sorted(sym.touched))

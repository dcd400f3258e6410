"""Networks in one frame by permutations and matrices: each to the mean of the others."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_bnn.params import Params, unstack, weighted_mean
from lightning_bnn.params import stack as stack_networks
from lightning_bnn.symmetry.groups import Symmetries
from lightning_bnn.symmetry.matching.alignment import Alignment, AlignMethod, distance_to_mean
from lightning_bnn.symmetry.matching.match_all import match_all

__all__ = ["align_with_matrices"]


def align_with_matrices(
    stack: Params,
    sym: Symmetries,
    method: AlignMethod,
    sweeps: int,
    seed: int,
    counts: Tensor | None = None,
) -> Alignment:
    """All to the first; then each to the mean of the others, where that brings all closer.

    Args:
        stack: networks of one kind.
        sym: what `discover` returned.
        method: ``"reference"`` stops after the first round.
        sweeps: rounds over all networks at most.
        seed: of the order of the networks.
        counts: how often each network counts in the mean; by default once.
    """
    members = unstack(stack)
    found = match_all(stack, members[0], sym)
    parts = [_member(found.permutations, found.matrices, m) for m in range(len(members))]
    moved = unstack(found.apply(stack, sym))
    spread = [_spread(members, sym, counts), _spread(moved, sym, counts)]
    generator = torch.Generator().manual_seed(seed)
    for _ in range(sweeps if method == "joint" and len(members) > 1 else 0):
        for m in torch.randperm(len(members), generator=generator).tolist():
            mean = _mean_without(m, moved, counts)
            if mean is None:
                continue
            new = match_all(members[m], mean, sym)
            tried = [*moved[:m], new.apply(members[m], sym), *moved[m + 1 :]]
            if _spread(tried, sym, counts) < _spread(moved, sym, counts) * (1 - 1e-9):
                moved, parts[m] = tried, (list(new.permutations), list(new.matrices))
        spread.append(_spread(moved, sym, counts))
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


def _mean_without(m: int, networks: Sequence[Params], counts: Tensor | None) -> Params | None:
    """The mean of all networks but one; nothing where no other counts."""
    others = [*networks[:m], *networks[m + 1 :]]
    left = None if counts is None else torch.cat([counts[:m], counts[m + 1 :]])
    if left is not None and not float(left.sum()) > 0:
        return None
    return weighted_mean(stack_networks(others), left)


def _spread(networks: Sequence[Params], sym: Symmetries, counts: Tensor | None) -> float:
    return distance_to_mean(stack_networks(networks), sorted(sym.touched), counts)

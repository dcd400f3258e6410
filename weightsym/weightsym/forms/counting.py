"""Comparison of orders: ranks, transpositions, Kendall's tau."""

from __future__ import annotations

import torch
from jaxtyping import Float64, Int, Real
from torch import Tensor


def ranks(permutation: Int[Tensor, "*batch units"]) -> Int[Tensor, "*batch units"]:
    r"""Return the position of every unit in a sorting permutation: its inverse.

    .. math:: r_{p(k)} = k

    >>> ranks(torch.tensor([2, 0, 1]))
    tensor([1, 2, 0])
    """
    return permutation.argsort(-1)


def transpositions(permutation: Int[Tensor, "*batch units"]) -> Int[Tensor, "*batch"]:
    r"""Return the least number of swaps in a permutation: its length minus its number of cycles.

    .. math:: n - \#\text{cycles of } p

    Leading dimensions are batched.

    References:
        A Compact Representation for BNNs by Removing Permutation Symmetry (Xiao, Liu, Bamler, 2023)

    >>> transpositions(torch.tensor([3, 0, 4, 1, 2]))
    tensor(3)
    """
    if not isinstance(permutation, Tensor):
        raise ValueError(
            f"`permutation` must be a tensor of indices, got a {type(permutation).__name__}."
        )
    n = permutation.shape[-1]
    units = torch.arange(n, device=permutation.device).expand_as(permutation)
    if not bool((permutation.sort(-1).values == units).all()):
        raise ValueError("`permutation` must hold every index from 0 to n - 1 exactly once.")
    smallest, jump = torch.minimum(units, permutation), permutation
    for _ in range(
        max(n - 1, 1).bit_length()
    ):  # the least member of each cycle, by pointer doubling
        smallest = torch.minimum(smallest, smallest.gather(-1, jump))
        jump = jump.gather(-1, jump)
    return n - (smallest == units).sum(-1)


def kendall_tau(
    a: Real[Tensor, "*#batch units"], b: Real[Tensor, "*#batch units"]
) -> Float64[Tensor, "*batch"]:
    r"""Return Kendall's tau-b of two orders, with batch dimensions, in :math:`O(n^{1.5})`.

    .. math:: \tau = \frac{C - D}{\sqrt{(n_0 - n_a) (n_0 - n_b)}}, \quad n_0 = n (n - 1) / 2

    Pass the `ranks` of sorting permutations, not the permutations: their tau would depend on the
    numbering of the units.

    >>> kendall_tau(torch.tensor([0, 1, 2, 3]), torch.tensor([0, 2, 1, 3]))
    tensor(0.6667, dtype=torch.float64)
    """
    if a.shape[-1] != b.shape[-1] or a.shape[-1] < 2:
        raise ValueError(
            f"`a` and `b` must order the same two or more units, got {a.shape[-1]} and "
            f"{b.shape[-1]}."
        )
    a, b = (dense_ranks(x) for x in torch.broadcast_tensors(a, b))
    n = a.shape[-1]
    pairs = n * (n - 1) // 2
    joint = dense_ranks(a * n + b)
    tied_a, tied_b, tied_both = (_tied_pairs(x) for x in (a, b, joint))
    by_a = b.gather(-1, joint.argsort(-1))
    discordant = inversions(by_a.argsort(dim=-1, stable=True).argsort(-1))
    concordant_minus = pairs - tied_a - tied_b + tied_both - 2 * discordant
    scale = ((pairs - tied_a).double() * (pairs - tied_b).double()).sqrt()
    return concordant_minus.double() / scale


def dense_ranks(key: Tensor, within: Tensor | float = 0) -> Tensor:
    """Return the rank of every number among the distinct ones.

    Neighbours at most ``within`` apart count as equal.

    >>> dense_ranks(torch.tensor([0.5, 2.0, 0.5, 1.0]))
    tensor([0, 2, 0, 1])
    """
    values, order = key.sort(dim=-1, stable=True)
    new = values.diff(dim=-1) > within
    places = torch.cat([torch.zeros_like(order[..., :1]), new.cumsum(-1)], -1)
    return torch.empty_like(order).scatter_(-1, order, places)


def count_ranks(ranks: Tensor) -> Tensor:
    """Return the number of units of each rank."""
    return torch.zeros_like(ranks).scatter_add_(-1, ranks, torch.ones_like(ranks))


def _tied_pairs(ranks: Tensor) -> Tensor:
    counts = count_ranks(ranks)
    return (counts * (counts - 1) // 2).sum(-1)


def inversions(permutation: Int[Tensor, "*batch units"]) -> Int[Tensor, "*batch"]:
    """Count the pairs of a permutation in the wrong order, in n^1.5 steps of a few kernels.

    Pairs within blocks of about the root of n are compared. For pairs of different blocks, a table
    counts the values up to v in the earlier blocks.

    >>> inversions(torch.tensor([2, 0, 1]))
    tensor(2)
    """
    n = permutation.shape[-1]
    if n <= 32:  # all pairs in fewer kernels
        return (permutation[..., :, None] > permutation[..., None, :]).triu(1).sum((-1, -2))
    width = 1 << max(2, (n.bit_length() + 1) // 2)
    count = -(-n // width)
    tail = torch.arange(n, count * width, device=permutation.device)
    x = torch.cat([permutation, tail.expand(*permutation.shape[:-1], -1)], -1)
    blocks = x.unflatten(-1, (count, width))
    above = torch.ones(width, width, dtype=torch.bool, device=x.device).triu(1)
    within = ((blocks[..., :, None] > blocks[..., None, :]) & above).sum((-1, -2, -3))
    first = torch.arange(count, device=x.device)[:, None]
    before = x.argsort(-1)[..., None, :] < first * width
    smaller = before.cumsum(-1, dtype=torch.int32).gather(-1, blocks)
    return within + (first * width - smaller).sum((-1, -2))

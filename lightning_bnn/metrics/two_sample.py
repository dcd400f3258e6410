"""Could both sets of networks be samples of one distribution? A permutation test over all kernels.

The test aggregates over layers and kernels as MMDAgg does: every one has its own p-value, and the
smallest of them, weighted, is compared with what it is when the networks are shuffled.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_bnn.metrics.distances import join
from lightning_bnn.metrics.kernels import KernelGrid, kernel_bandwidths, kernel_values
from lightning_bnn.metrics.reference import MMDReference, as_reference
from lightning_bnn.metrics.sources import WeightSource
from lightning_bnn.params import Params

__all__ = ["TwoSampleTest", "permutation_test"]

_CHUNK = 2**25


@dataclass(frozen=True)
class TwoSampleTest:
    """Result of a permutation test.

    Attributes:
        p_value: of all layers and kernels together.
        layer_p_values: of all kernels of a layer together.
        layers: their names.
        mmd2: the statistics, ``(layers, kernels)``.

    >>> from lightning_bnn.metrics import permutation_test
    >>> x = {"w": torch.randn(20, 3, generator=torch.Generator().manual_seed(0))}
    >>> test = permutation_test(x, {"w": x["w"][:10] + 3}, permutations=200)
    >>> test.layers, test.mmd2.shape, test.reject(0.05)
    (('w',), torch.Size([1, 20]), True)
    """

    p_value: float
    layer_p_values: Tensor
    layers: tuple[str, ...]
    mmd2: Tensor

    def reject(self, level: float = 0.05) -> bool:
        """Whether the two sets differ at a level."""
        return self.p_value <= level


def permutation_test(
    x: Params | WeightSource | MMDReference,
    y: Params | WeightSource,
    permutations: int = 2000,
    grid: KernelGrid | None = None,
    generator: torch.Generator | None = None,
) -> TwoSampleTest:
    r"""Test whether two stacks of networks come from one distribution.

    .. math:: p = \frac{1}{B + 1} \sum_{b = 0}^B \Big[\min_k \frac{p_k^b}{w_k}
        \leq \min_k \frac{p_k^0}{w_k}\Big], \quad k \text{ layers and kernels}

    Bandwidths are those of the given split, as in MMDAgg.

    Args:
        x: the reference: a stack, a `WeightSource` or an `MMDReference`.
        y: the other stack.
        permutations: random shuffles of the networks; p-values are multiples of 1 / (this + 1).
        grid: the rule for bandwidths.
        generator: draws the shuffles; by default seeded with 0.

    References:
        | MMD Aggregated Two-Sample Test (Schrab et al., 2023)
        | https://www.jmlr.org/papers/v24/21-1289.html

    >>> x = {"w": torch.randn(20, 3, generator=torch.Generator().manual_seed(0))}
    >>> permutation_test(x, {"w": x["w"][:10] + 3}).p_value < 0.01
    True
    """
    if permutations < 1:
        raise ValueError(f"`permutations` must be at least 1, got {permutations}.")
    reference = as_reference(x, grid)
    other = reference.other(y)
    m, n = reference.source.rows, other.rows
    generator = generator or torch.Generator().manual_seed(0)
    shuffles = [torch.arange(m + n)]
    shuffles += [torch.randperm(m + n, generator=generator) for _ in range(permutations)]
    in_first = torch.stack([(order.argsort() < m).double() for order in shuffles])
    statistics = torch.stack(
        [_statistics(reference, name, other, in_first) for name in reference.layers]
    )
    sizes = torch.tensor([reference.source.shapes[k].numel() for k in reference.layers])
    p_values = _ranks(statistics)
    weights = (sizes.double() / sizes.sum())[:, None, None] / statistics.shape[1]
    return TwoSampleTest(
        _aggregated((p_values / weights).flatten(0, 1)).item(),
        torch.stack([_aggregated(layer) for layer in p_values]),
        reference.layers,
        statistics[..., 0],
    )


def _statistics(
    reference: MMDReference, name: str, other: WeightSource, in_first: Tensor
) -> Tensor:
    """MMD^2 of one layer for every kernel and shuffle, the given split first."""
    m, n = reference.source.rows, other.rows
    blocks = reference.blocks(name, other)
    bandwidths = kernel_bandwidths(blocks.xy, reference.grid)
    pooled = join(blocks, (m, n))
    first = in_first.to(bandwidths.device)
    size = max(1, _CHUNK // (m + n) ** 2)
    grids = zip(*(b.split(size) for b in bandwidths.chunk(2)), strict=True)
    halves = [_shuffled(kernel_values(pooled, torch.cat(g)), first, m, n).chunk(2) for g in grids]
    return torch.cat([torch.cat(parts) for parts in zip(*halves, strict=True)]).cpu()


def _shuffled(kernels: Tensor, first: Tensor, m: int, n: int) -> Tensor:
    """Unbiased MMD^2 for kernels ``(kernels, N, N)`` and memberships ``(shuffles, N)``."""
    within = torch.einsum("sj,ksj->ks", first, first @ kernels) - m
    row = kernels.sum(-1) @ first.T  # pairs with at least one in the first set, by row
    across = row - within - m
    outside = kernels.sum((-1, -2))[:, None] - within - m - 2 * across - n
    return within / (m * (m - 1)) + outside / (n * (n - 1)) - 2 * across / (m * n)


def _ranks(statistics: Tensor) -> Tensor:
    """The p-value that every shuffle would have had, from its rank among all of them."""
    count = statistics.shape[-1]
    ordered = statistics.sort(-1).values
    tolerance = 1e-12 * statistics.abs().amax(-1, keepdim=True)
    below = torch.searchsorted(ordered, (statistics - tolerance).contiguous())
    return (count - below) / count


def _aggregated(p_values: Tensor) -> Tensor:
    """P-value of the smallest of several p-values, ``(several, shuffles)``, the real one first."""
    smallest = p_values.amin(0)
    return (smallest <= smallest[0] * (1 + 1e-12)).double().mean()

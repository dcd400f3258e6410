"""A reference posterior that remembers its distances: each further comparison costs its own part.

Memory: chunks of features of both sides, as they are laid out for the processor, take ``memory``
bytes; distances of N networks up to 60 N^2 bytes while a layer is computed, of which 8 N^2 are kept
per layer for the reference.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm.auto import tqdm

from lightning_bnn.metrics.distances import Blocks, Distances, distance_blocks, pairs, square
from lightning_bnn.metrics.kernels import (
    KernelGrid,
    kernel_bandwidths,
    mmd2_by_kernel,
    unbiased_mmd2,
)
from lightning_bnn.metrics.modes import Modes, ModesMMD, kernel_sums, mmd_of_modes
from lightning_bnn.metrics.sources import WeightSource, as_source
from lightning_bnn.params import Params

__all__ = ["LayerMMD", "LayerModes", "MMDReference", "as_reference"]

_PROGRESS_FROM = 1e12
_log = logging.getLogger(__name__)


class LayerMMD(NamedTuple):
    """MMD^2 of one layer for every kernel, Laplace kernels first, and their bandwidths.

    >>> from lightning_bnn.metrics import MMDReference
    >>> reference = MMDReference({"w": torch.eye(4), "b": torch.eye(4)[:, :1]})
    >>> layers = list(reference.compare({"w": torch.eye(4) + 1, "b": torch.zeros(4, 1)}))
    >>> [(layer.name, layer.size, layer.values.shape) for layer in layers]
    [('w', 4, torch.Size([20])), ('b', 1, torch.Size([20]))]
    """

    name: str
    size: int
    values: Tensor
    bandwidths: Tensor


class LayerModes(NamedTuple):
    """MMD^2 of one layer between laws and of mixtures, by kernel, see `ModesMMD`."""

    name: str
    size: int
    values: ModesMMD


class MMDReference:
    """A reference posterior, to be compared with any number of approximations.

    Its weights must not change in place afterwards: the distances between them are kept.

    Args:
        x: a stack of networks, or a `WeightSource` that reads them in slices.
        grid: the rule for bandwidths.
        layers: names of the tensors to compare; by default all weights.
        device: where distances are computed; by default where the weights are.
        memory: bytes that a chunk of features may take.
        progress: whether to show a progress bar; by default when it will take long.
        chains: for every network the chain that it is from, if they are draws of chains;
            `compare_modes` then uses pairs of different chains only.

    >>> reference = MMDReference({"w": torch.eye(3)})
    >>> [layer.values.shape for layer in reference.compare({"w": torch.ones(2, 3)})]
    [torch.Size([20])]
    """

    def __init__(
        self,
        x: Params | WeightSource,
        grid: KernelGrid | None = None,
        *,
        layers: Sequence[str] | None = None,
        device: str | torch.device | None = None,
        memory: int = 2**28,
        progress: bool | None = None,
        chains: Sequence[int] | Tensor | None = None,
    ) -> None:
        if memory < 1:
            raise ValueError(f"`memory` must be a number of bytes, got {memory}.")
        self.source = as_source(x, layers)
        self.layers = tuple(layers if layers is not None else self.source.shapes)
        self.grid = grid or KernelGrid()
        self._device, self._memory, self._progress = device, memory, progress
        self._within: dict[str, Distances] = {}
        _check_rows(self.source, "x")
        self.chains = Modes.of(chains, self.source.rows, "chains")
        if len(self.chains) < 2:
            raise ValueError("`chains` must name at least two chains: pairs of one are no law.")

    def compare(
        self, y: Params | WeightSource, layers: Sequence[str] | None = None
    ) -> Iterator[LayerMMD]:
        """MMD^2 to another posterior, layer by layer.

        Args:
            y: a stack of networks, or a `WeightSource`.
            layers: only these layers.
        """
        for name, size, blocks in self._layers_beside(y, layers):
            bandwidths = kernel_bandwidths(blocks.xy, self.grid)
            yield LayerMMD(name, size, unbiased_mmd2(blocks, bandwidths), bandwidths)

    def compare_parts(self, y: Params | WeightSource, parts: Sequence[Tensor]) -> Tensor:
        """MMD^2 to several parts of another posterior, whose distances are computed once.

        Args:
            y: a stack of networks, or a `WeightSource`.
            parts: for each part, its rows in ``y``, two at least.

        Returns:
            ``(parts, layers, kernels)``.

        >>> reference = MMDReference({"w": torch.eye(3)})
        >>> y = {"w": torch.eye(3)[[0, 1, 2, 0]] + 1}
        >>> reference.compare_parts(y, [torch.tensor([0, 1]), torch.arange(4)]).shape
        torch.Size([2, 1, 20])
        """
        other = self.other(y)
        layers = []
        for name in self._with_progress(self.layers, other.rows):
            blocks = self.blocks(name, other)
            within = blocks.yy.map(lambda d: square(d, other.rows))
            values = [mmd2_by_kernel(_with_rows(blocks, within, rows), self.grid) for rows in parts]
            layers.append(torch.stack(values).cpu())
        return torch.stack(layers, 1)

    def compare_modes(
        self, y: Params | WeightSource, modes: Modes, layers: Sequence[str] | None = None
    ) -> Iterator[LayerModes]:
        """MMD^2 to the law, and to the mixture, of the modes of another posterior.

        Args:
            y: a stack of networks, or a `WeightSource`.
            modes: which of them belong together.
            layers: only these layers.

        >>> reference = MMDReference({"w": torch.eye(3)})
        >>> y = {"w": torch.eye(3)[[0, 1, 2, 0]] + 1}
        >>> [layer] = reference.compare_modes(y, Modes.of([0, 0, 1, 1], 4))
        >>> layer.values.law.shape, layer.values.single.shape
        (torch.Size([4, 20]), torch.Size([2, 20]))
        """
        for name, size, blocks in self._layers_beside(y, layers, least=1):
            bandwidths = kernel_bandwidths(self._spread(blocks.xy), self.grid)
            sums = kernel_sums(blocks, self.chains, modes, bandwidths)
            yield LayerModes(name, size, mmd_of_modes(sums, self.chains, modes))

    def _layers_beside(
        self, y: Params | WeightSource, layers: Sequence[str] | None, least: int = 2
    ) -> Iterator[tuple[str, int, Blocks]]:
        """Name, size and distances of every layer; networks on both sides are warned of."""
        names = self._names(layers)
        other = self.other(y, names, least)
        same: Tensor | None = None
        for name in self._with_progress(names, other.rows):
            blocks = self.blocks(name, other)
            same = blocks.xy.l1 == 0 if same is None else same & (blocks.xy.l1 == 0)
            yield name, math.prod(self.source.shapes[name]), blocks
        _warn_about_duplicates(same, len(names) == len(self.layers))

    def _spread(self, across: Distances) -> Distances:
        """Rows and columns from all over: the first ones may be of a single chain or mode."""
        most = self.grid.max_samples
        rows, columns = (
            torch.linspace(0, n - 1, min(n, most)).round().long() for n in across.l1.shape
        )
        return across.map(lambda d: d[rows.to(d.device)][:, columns.to(d.device)])

    def blocks(self, name: str, other: WeightSource | None = None) -> Blocks:
        """Distances of one layer within the reference, across, and within another source."""
        rows = self.source.rows, 0 if other is None else other.rows
        size = math.prod(self.source.shapes[name])
        chunks = self._chunks(name, size, other)
        blocks = distance_blocks(chunks, rows, size, self._within.get(name))
        if not all(bool(block.l1.isfinite().all()) for block in blocks):
            raise ValueError(f"Layer {name!r} holds NaN or infinite weights.")
        self._within[name] = blocks.xx
        return blocks

    def other(
        self, y: Params | WeightSource, layers: Sequence[str] | None = None, least: int = 2
    ) -> WeightSource:
        """Another posterior of so many networks at least as a source, once it is sure to fit."""
        names = self.layers if layers is None else layers
        source = as_source(y, names if isinstance(y, dict) else None)
        _check_fit(self.source, source, names, least)
        return source

    def noise_floor(
        self,
        samples: int | None = None,
        repeats: int = 20,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """MMD^2 between random parts of the reference itself: how far samples of one law scatter.

        Args:
            samples: networks in the one part, by default half of them; the others are the other.
            repeats: number of random splits.
            generator: draws the splits; by default seeded with 0.

        Returns:
            ``(repeats, layers, kernels)``; around zero, so look at the spread.
        """
        rows = self.source.rows
        samples = rows // 2 if samples is None else samples
        if not 2 <= samples <= rows - 2:
            raise ValueError(f"`samples` must be in 2..{rows - 2}, got {samples}.")
        generator = generator or torch.Generator().manual_seed(0)
        orders = [torch.randperm(rows, generator=generator) for _ in range(repeats)]
        layers = [self._splits(name, orders, rows - samples) for name in self.layers]
        return torch.stack(layers, 1)

    def _splits(self, name: str, orders: Sequence[Tensor], first: int) -> Tensor:
        """MMD^2 of one layer between the first and the remaining rows of every order."""
        if name not in self._within:
            self.blocks(name)
        full = self._within[name].map(lambda d: square(d, self.source.rows))
        splits = [_between(full, order[:first], order[first:]) for order in orders]
        return torch.stack([mmd2_by_kernel(blocks, self.grid) for blocks in splits]).cpu()

    def _names(self, layers: Sequence[str] | None) -> Sequence[str]:
        unknown = [n for n in layers or () if n not in self.layers]
        if unknown:
            raise ValueError(f"`layers` names {unknown[0]!r}, which the reference does not have.")
        return self.layers if layers is None else layers

    def _chunks(
        self, name: str, size: int, other: WeightSource | None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """The same features of both sides, as many at a time as the memory allows."""
        rows = self.source.rows + (0 if other is None else other.rows)
        step = max(1, self._memory // (8 * rows))
        for start in range(0, size, step):
            columns = slice(start, min(start + step, size))
            x = self.source.read(name, slice(0, self.source.rows), columns)
            y = x[:0] if other is None else other.read(name, slice(0, other.rows), columns)
            device = self._device or x.device
            dtype = torch.promote_types(x.dtype, y.dtype)
            yield x.to(device, dtype), y.to(device, dtype)

    def _with_progress(self, names: Sequence[str], rows: int) -> Iterable[str]:
        total = sum(math.prod(self.source.shapes[n]) for n in names) * (self.source.rows + rows)
        long = total * self.source.rows > _PROGRESS_FROM
        shown = long if self._progress is None else self._progress
        return tqdm(names, desc="MMD", unit="layer", disable=not shown)


def as_reference(
    x: Params | WeightSource | MMDReference, grid: KernelGrid | None = None, **options: Any
) -> MMDReference:
    """A reference, made of weights; one that is given keeps its own grid and options."""
    if not isinstance(x, MMDReference):
        return MMDReference(x, grid, **options)
    if options or grid not in (None, x.grid):
        raise ValueError("An `MMDReference` has its own `grid` and options: give them there.")
    return x


def _with_rows(blocks: Blocks, within: Distances, rows: Tensor) -> Blocks:
    """Distances to some of the networks of the other source, whose distances are ``within``."""
    rows = rows.to(within.l1.device)
    return Blocks(blocks.xx, blocks.xy.map(lambda d: d[:, rows]), _among(within, rows))


def _between(full: Distances, a: Tensor, b: Tensor) -> Blocks:
    """Distances between two sets of rows of one source."""
    a, b = a.to(full.l1.device), b.to(full.l1.device)
    return Blocks(_among(full, a), full.map(lambda d: d[a][:, b]), _among(full, b))


def _among(full: Distances, rows: Tensor) -> Distances:
    return full.map(lambda d: pairs(d[rows][:, rows]))


def _check_rows(source: WeightSource, name: str, least: int = 2) -> None:
    if source.rows < least:
        wanted = f"{least} networks" if least > 1 else "1 network"
        raise ValueError(f"`{name}` must hold at least {wanted}, got {source.rows}.")
    if not source.shapes:
        raise ValueError(f"`{name}` has no layer of weights.")


def _check_fit(source: WeightSource, other: WeightSource, names: Sequence[str], least: int) -> None:
    _check_rows(other, "y", least)
    for name in names:
        shape = other.shapes.get(name)
        if shape is None:
            raise ValueError(f"`y` has no layer {name!r}.")
        if tuple(shape) != tuple(source.shapes[name]):
            raise ValueError(
                f"Layer {name!r} has shape {tuple(source.shapes[name])} in `x` and "
                f"{tuple(shape)} in `y` (without the leading dimension of the stack)."
            )


def _warn_about_duplicates(same: Tensor | None, all_layers: bool) -> None:
    if all_layers and same is not None and bool(same.any()):
        _log.warning(
            "%d networks of `y` are also in `x`: a network in both sets biases the MMD.",
            int(same.any(0).sum()),
        )

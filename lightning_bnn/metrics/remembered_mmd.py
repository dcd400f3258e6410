"""A reference posterior that stores its distances, and sources of weights.

Weights are a stack in memory, or any source that reads a layer in slices. Each comparison computes
its own distances only. Chunks of features of both sides, as laid out for the processor, take
``memory`` bytes. Distances of N networks take up to 60 N^2 bytes while a layer is computed, of
which 16 N^2 per layer are stored for the reference.
"""

from __future__ import annotations

import logging
import math
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from lightning_bnn.metrics.distances import Blocks, Distances, distance_blocks
from lightning_bnn.metrics.kernels import (
    KernelGrid,
    Modes,
    ModesMMD,
    kernel_bandwidths,
    kernel_sums,
    mmd2_by_kernel,
    mmd_of_modes,
)
from weightsym.params import Networks, Params, check_memory, is_weight, stack, stack_size

__all__ = ["MMDReference", "Transformed"]

_PROGRESS_FROM = 1e12
_log = logging.getLogger(__name__)
RowTransform = Callable[[str, Tensor, slice], Tensor]
"""From a layer's name, some of its rows ``(rows, *shape)`` and which rows these are to the same
rows transformed, such as `weightsym.Element.rows`."""


@runtime_checkable
class WeightSource(Protocol):
    """A stack of networks that is read layer by layer, in slices.

    >>> from lightning_bnn.metrics import mmd
    >>> class Shifted:
    ...     def __init__(self, stack):
    ...         self.stack, self.rows = stack, len(stack["w"])
    ...         self.shapes = {name: t.shape[1:] for name, t in stack.items()}
    ...     def read(self, name, rows, columns):
    ...         return self.stack[name].flatten(1)[rows, columns] + 1
    >>> stack = {"w": torch.eye(4)}
    >>> torch.equal(mmd(stack, Shifted(stack)), mmd(stack, {"w": torch.eye(4) + 1}))
    True
    """

    @property
    def rows(self) -> int:
        """The number of networks."""

    @property
    def shapes(self) -> Mapping[str, torch.Size]:
        """The layers of one network: every tensor of weights, no buffers."""

    def read(self, name: str, rows: slice, columns: slice) -> Tensor:
        """Read some features of one flattened layer of some networks, ``(rows, columns)``."""


class StackSource:
    """A stack of networks in memory.

    Args:
        params: the stack.
        layers: names of the tensors to compare; by default all floating ones that are not BatchNorm
            statistics.

    >>> source = StackSource({"w": torch.arange(12.0).reshape(2, 3, 2)})
    >>> source.read("w", slice(0, 2), slice(1, 3))
    tensor([[1., 2.],
            [7., 8.]])
    """

    def __init__(self, params: Params, layers: Sequence[str] | None = None) -> None:
        self.rows = stack_size(params)
        names = layers if layers is not None else [n for n, t in params.items() if is_weight(n, t)]
        missing = [n for n in names if n not in params]
        if missing:
            raise ValueError(f"`layers` names {missing[0]!r}, but the stack does not have it.")
        self.shapes = {name: params[name].shape[1:] for name in names}
        sizes = {name: math.prod(shape) for name, shape in self.shapes.items()}
        self._tensors = {n: params[n].detach().reshape(self.rows, sizes[n]) for n in names}

    def read(self, name: str, rows: slice, columns: slice) -> Tensor:
        """Read some features of one flattened layer of some networks."""
        return self._tensors[name][rows, columns]


class Transformed:
    """A source whose rows are transformed layer by layer, for example to remove symmetries.

    A transform may permute features, so a layer is transformed as a whole, some rows at a time. The
    transformed layer is stored in memory if it is small, else in a temporary file.

    Args:
        source: the networks.
        transform: see `RowTransform`.
        memory: bytes for a transformed layer in memory; rows transformed at once take at most a
            quarter of it.

    >>> source = StackSource({"w": torch.ones(2, 3)})
    >>> Transformed(source, lambda name, w, rows: 2 * w).read("w", slice(0, 1), slice(0, 3))
    tensor([[2., 2., 2.]])
    """

    def __init__(
        self, source: Networks | WeightSource, transform: RowTransform, memory: int = 2**30
    ) -> None:
        self._source, self._transform, self._memory = as_source(source), transform, memory
        self.rows, self.shapes = self._source.rows, self._source.shapes
        self._name: str | None = None
        self._layer = torch.empty(0)

    def read(self, name: str, rows: slice, columns: slice) -> Tensor:
        """Read some features of one transformed, flattened layer of some networks."""
        if name != self._name:
            self._layer = torch.empty(0)  # frees the layer before
            self._layer, self._name = self._transformed(name), name
        return self._layer[rows, columns]

    def _transformed(self, name: str) -> Tensor:
        shape, result = self.shapes[name], torch.empty(0)
        size = math.prod(shape)
        step = max(1, self._memory // 4 // max(1, 4 * size))
        for start in range(0, self.rows, step):
            block = slice(start, min(start + step, self.rows))
            values = self._source.read(name, block, slice(0, size)).reshape(-1, *shape)
            values = self._transform(name, values, block).reshape(-1, size)
            result = result if start else self._room(size, values)
            result[block] = values
        return result

    def _room(self, size: int, like: Tensor) -> Tensor:
        if self.rows * size * like.element_size() <= self._memory or like.device.type != "cpu":
            return like.new_empty(self.rows, size)
        with tempfile.TemporaryDirectory(prefix="lightning_bnn_") as folder:  # unlinked, still open
            path = str(Path(folder) / "layer")
            flat = torch.from_file(path, shared=True, size=self.rows * size, dtype=like.dtype)
        return flat.reshape(self.rows, size)


STACKS = dict, list, tuple, nn.ModuleList
"""Types that `weightsym.params.stack` accepts."""


def as_source(
    weights: Networks | WeightSource, layers: Sequence[str] | None = None
) -> WeightSource:
    """Wrap a stack or a list of networks as a source, and return sources as they are.

    >>> as_source({"w": torch.ones(2, 3)}).rows
    2
    """
    if isinstance(weights, STACKS):
        return StackSource(stack(weights), layers)
    if not isinstance(weights, WeightSource):
        raise ValueError(
            "Weights must be a stack (a dict of tensors with a leading dimension for networks), a "
            "list of networks, or "
            f"have `rows`, `shapes` and `read`, got {type(weights).__name__}."
        )
    return weights


# ------------------------------------------------------------ the reference


class LayerMMD(NamedTuple):
    """MMD^2 of one layer for every kernel, Laplace kernels first.

    >>> from lightning_bnn.metrics import MMDReference
    >>> reference = MMDReference({"w": torch.eye(4), "b": torch.eye(4)[:, :1]})
    >>> layers = list(reference.compare({"w": torch.eye(4) + 1, "b": torch.zeros(4, 1)}))
    >>> [(layer.name, layer.size, layer.values.shape) for layer in layers]
    [('w', 4, torch.Size([20])), ('b', 1, torch.Size([20]))]
    """

    name: str
    size: int
    values: Tensor


class LayerModes(NamedTuple):
    """MMD^2 of one layer between laws and of mixtures, by kernel, see `ModesMMD`."""

    name: str
    size: int
    values: ModesMMD


class MMDReference:
    """A reference posterior for comparisons with any number of approximations.

    Its weights must not change in place afterwards, since the distances between them are stored.

    Args:
        x: a stack or a list of networks, or a `WeightSource` that reads them in slices.
        grid: the rule for bandwidths.
        layers: names of the tensors to compare; by default all weights.
        device: device of the computation; by default that of the weights.
        memory: bytes for a chunk of features.
        chains: index of the chain of every network, if they are draws of chains; `compare_modes`
            then uses pairs of different chains only.

    >>> reference = MMDReference({"w": torch.eye(3)})
    >>> [layer.values.shape for layer in reference.compare({"w": torch.ones(2, 3)})]
    [torch.Size([20])]
    """

    def __init__(
        self,
        x: Networks | WeightSource,
        grid: KernelGrid | None = None,
        *,
        layers: Sequence[str] | None = None,
        device: str | torch.device | None = None,
        memory: int = 2**28,
        chains: Sequence[int] | Tensor | None = None,
    ) -> None:
        if memory < 1:
            raise ValueError(f"`memory` must be a number of bytes, got {memory}.")
        x = stack(x) if isinstance(x, (list, tuple, nn.ModuleList)) else x
        self.source = as_source(x, layers)
        self.layers = tuple(layers if layers is not None else self.source.shapes)
        self.grid = grid or KernelGrid()
        self._is_whole = layers is None
        self._device, self._memory = device, memory
        self._within: dict[str, Distances] = {}
        _check_rows(self.source, "x")
        where = device or next(iter(x.values())).device if isinstance(x, dict) else device or "cpu"
        description = f"Distances of {self.source.rows} networks in {len(self.layers)} layers"
        size = 16 * self.source.rows**2 * len(self.layers)
        check_memory(
            size, torch.device(where), description, "compare fewer of them, or some `layers`"
        )
        self.chains = Modes.of(chains, self.source.rows, "chains")
        if len(self.chains) < 2:
            raise ValueError(
                "`chains` must name at least two chains, since pairs within one do not "
                "represent a law."
            )

    def compare(
        self, y: Networks | WeightSource, layers: Sequence[str] | None = None
    ) -> Iterator[LayerMMD]:
        """Compute MMD^2 to another posterior, layer by layer.

        Args:
            y: a stack of networks, or a `WeightSource`.
            layers: names of the layers to compare.
        """
        for name, size, blocks in self._layers_beside(y, layers):
            yield LayerMMD(name, size, mmd2_by_kernel(blocks, self.grid))

    def compare_parts(self, y: Networks | WeightSource, parts: Sequence[Tensor]) -> Tensor:
        """Compute MMD^2 to several parts of another posterior, with distances computed once.

        Args:
            y: a stack of networks, or a `WeightSource`.
            parts: rows of each part in ``y``, two at least.

        Returns:
            ``(parts, layers, kernels)``.

        >>> reference = MMDReference({"w": torch.eye(3)})
        >>> y = {"w": torch.eye(3)[[0, 1, 2, 0]] + 1}
        >>> reference.compare_parts(y, [torch.tensor([0, 1]), torch.arange(4)]).shape
        torch.Size([2, 1, 20])
        """
        beside, layers = self.other(y), []
        for name in self._with_progress(self.layers, beside.rows):
            xx, xy, yy = self.blocks(name, beside)
            indices = [rows.to(xy.l1.device) for rows in parts]
            splits = [
                Blocks(xx, xy.map(lambda d: d[:, k]), yy.map(lambda d: d[k][:, k]))  # noqa: B023
                for k in indices
            ]
            layers.append(torch.stack([mmd2_by_kernel(split, self.grid) for split in splits]).cpu())
        return torch.stack(layers, 1)

    def compare_modes(
        self, y: Networks | WeightSource, modes: Modes, layers: Sequence[str] | None = None
    ) -> Iterator[LayerModes]:
        """Compute MMD^2 to the law and to the mixture of the modes of another posterior.

        Args:
            y: a stack of networks, or a `WeightSource`.
            modes: index of the mode of every network.
            layers: names of the layers to compare.

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
        self, y: Networks | WeightSource, layers: Sequence[str] | None, least: int = 2
    ) -> Iterator[tuple[str, int, Blocks]]:
        """Yield name, size and distances of every layer, and warn of networks on both sides."""
        names = self._names(layers)
        beside = self.other(y, names, least)
        same: Tensor | None = None
        for name in self._with_progress(names, beside.rows):
            blocks = self.blocks(name, beside)
            same = blocks.xy.l1 == 0 if same is None else same & (blocks.xy.l1 == 0)
            yield name, math.prod(self.source.shapes[name]), blocks
        _warn_about_duplicates(same, len(names) == len(self.layers))

    def _spread(self, across: Distances) -> Distances:
        """Select rows and columns evenly, since the first ones may be of a single chain or mode."""
        most = self.grid.max_samples
        rows, columns = (
            torch.linspace(0, n - 1, min(n, most)).round().long() for n in across.l1.shape
        )
        return across.map(lambda d: d[rows.to(d.device)][:, columns.to(d.device)])

    def blocks(self, name: str, beside: WeightSource | None = None) -> Blocks:
        """Return distances of one layer within the reference, across, and within another source."""
        rows = self.source.rows, 0 if beside is None else beside.rows
        size = math.prod(self.source.shapes[name])
        chunks = self._chunks(name, size, beside)
        blocks = distance_blocks(chunks, rows, self._within.get(name))
        if not bool(torch.stack([block.l1.isfinite().all() for block in blocks]).all()):
            raise ValueError(f"Layer {name!r} holds NaN or infinite weights.")
        self._within[name] = blocks.xx
        return blocks

    def other(
        self, y: Networks | WeightSource, layers: Sequence[str] | None = None, least: int = 2
    ) -> WeightSource:
        """Return another posterior as a source, and require enough networks that fit."""
        y = stack(y) if isinstance(y, STACKS) else y
        names = self.layers if layers is None else layers
        if self._is_whole and tuple(names) == self.layers and isinstance(y, dict):
            _check_sides(n for n, t in y.items() if is_weight(n, t) and n not in self.layers)
        source = as_source(y, None if isinstance(y, WeightSource) else names)
        _check_fit(self.source, source, names, least)
        return source

    def noise_floor(
        self,
        samples: int | None = None,
        repeats: int = 20,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Compute MMD^2 between random parts of the reference, to show the scatter of one law.

        Args:
            samples: number of networks in the first part, by default half of them; the second part
                has the others.
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
        """Compute MMD^2 of one layer between the first and the remaining rows of every order."""
        if name not in self._within:
            self.blocks(name)
        splits = [_between(self._within[name], o[:first], o[first:]) for o in orders]
        return torch.stack([mmd2_by_kernel(blocks, self.grid) for blocks in splits]).cpu()

    def _names(self, layers: Sequence[str] | None) -> Sequence[str]:
        unknown = [n for n in layers or () if n not in self.layers]
        if unknown:
            raise ValueError(f"`layers` names {unknown[0]!r}, but the reference does not have it.")
        return self.layers if layers is None else layers

    def _chunks(
        self, name: str, size: int, beside: WeightSource | None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield chunks of features that fit into memory, the same features for both sides."""
        rows = self.source.rows + (0 if beside is None else beside.rows)
        step = max(1, self._memory // (8 * rows))
        for start in range(0, size, step):
            columns = slice(start, min(start + step, size))
            x = self.source.read(name, slice(0, self.source.rows), columns)
            y = x[:0] if beside is None else beside.read(name, slice(0, beside.rows), columns)
            device = self._device or x.device
            dtype = torch.promote_types(x.dtype, y.dtype)
            yield x.to(device, dtype), y.to(device, dtype)

    def _with_progress(self, names: Sequence[str], rows: int) -> Iterable[str]:
        total = sum(math.prod(self.source.shapes[n]) for n in names) * (self.source.rows + rows)
        short = total * self.source.rows <= _PROGRESS_FROM
        return tqdm(names, desc="MMD", unit="layer", disable=short)


def as_reference(
    x: Networks | WeightSource | MMDReference,
    grid: KernelGrid | None = None,
    layers: Sequence[str] | None = None,
    **options: Any,
) -> MMDReference:
    """Make a reference of weights, or return an existing one with its grid, layers and options."""
    if not isinstance(x, MMDReference):
        return MMDReference(x, grid, layers=layers, **options)
    if options or grid not in (None, x.grid):
        raise ValueError(
            "An `MMDReference` has its own `grid` and options: set them in its constructor."
        )
    return x


def layers_that_differ(x: Params, y: Params) -> list[str] | None:
    """Return the names of the weights that differ between any networks of two stacks.

    Equal tensors carry no information, but would count by their size: buffers that a stack cannot
    tell from weights, or fixed layers. Returns None if all weights are equal.

    Args:
        x: a stack.
        y: another one.
    """
    for name, side in {"x": x, "y": y}.items():
        _check_rows(StackSource(side), name)
    names = [n for n, t in x.items() if is_weight(n, t) and n in y]

    def differs(name: str) -> bool:
        a, b = x[name], y[name]
        others = (b[:1], a, b) if a.shape[1:] == b.shape[1:] else ()  # the first mostly tells
        return not others or any(bool((t != a[:1].to(t)).any()) for t in others)

    differ = [name for name in names if differs(name)]
    _check_sides(n for n, t in (x | y).items() if is_weight(n, t) and n not in names)
    return differ or None


def _check_sides(odd: Iterable[str]) -> None:
    for name in odd:
        raise ValueError(
            f"{name!r} is in the networks of one side only: set `layers` to compare others."
        )


def _between(full: Distances, a: Tensor, b: Tensor) -> Blocks:
    """Return distances between two sets of rows of one source."""
    a, b = a.to(full.l1.device), b.to(full.l1.device)
    pairs = ((a, a), (a, b), (b, b))
    return Blocks(*(full.map(lambda d: d[rows][:, columns]) for rows, columns in pairs))  # noqa: B023


def _check_rows(source: WeightSource, name: str, least: int = 2) -> None:
    if source.rows < least:
        wanted = f"{least} networks" if least > 1 else "1 network"
        raise ValueError(f"`{name}` must hold at least {wanted}, got {source.rows}.")
    if not source.shapes:
        raise ValueError(f"`{name}` has no layers of weights.")


def _check_fit(
    source: WeightSource, beside: WeightSource, names: Sequence[str], least: int
) -> None:
    _check_rows(beside, "y", least)
    for name in names:
        shape = beside.shapes.get(name)
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

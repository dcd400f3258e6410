"""MMD between posteriors of several modes: of their laws, and of their mixtures as they are.

A method that is run several times gives several modes, and each gives networks. What all of them
together are depends on the question. The *law* of the method is the distribution of its networks
over runs and draws: its estimate takes pairs of different modes only and is unbiased for any number
of modes and draws. The *mixture* of the K modes that are there is another distribution. That of K
single networks is K atoms: even if they are drawn from the law of the reference, it lies a *floor*
away from it, which falls as 1/K.

`MMD` is the metric of both, and of pooled networks; its layers may come from many processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from lightning_bnn.metrics.base import ExactMetric, collected
from lightning_bnn.metrics.kernels import KernelGrid, Modes, left_out_parts
from lightning_bnn.metrics.mmd import Estimate, MMDTable, Reduction, mmd_table
from lightning_bnn.metrics.reference import MMDReference, WeightSource, as_reference, as_source
from lightning_bnn.metrics.validation import check_choice
from weightsym.params import Params
from weightsym.randomness import key_of

__all__ = ["MMD", "law_mmd", "mixture_mmd"]

Kind = Literal["pooled", "law", "mixture"]


class ModesTables(NamedTuple):
    """Tables of the law, the mixture, its floor, and of each mode alone.

    >>> from lightning_bnn.metrics.laws import modes_table
    >>> table = modes_table({"w": torch.eye(4)}, {"w": torch.eye(4) + 1}, [0, 0, 1, 1])
    >>> table.law.layers, table.law.left_out, table.single.reduce().shape
    (('w',), (0, 4), torch.Size([2]))
    """

    law: MMDTable
    mixture: MMDTable
    floor: MMDTable
    single: MMDTable


# ------------------------------------------------------------ functions
def modes_table(
    x: Params | WeightSource | MMDReference,
    y: Params | WeightSource,
    modes: Sequence[int] | Tensor | None,
    grid: KernelGrid | None = None,
    layers: Sequence[str] | None = None,
    **options: Any,
) -> ModesTables:
    """MMD^2 of laws and mixtures of every layer and kernel. The arguments are those of `law_mmd`.

    >>> table = modes_table({"w": torch.eye(4)}, {"w": torch.eye(4) + 1}, [0, 0, 1, 1])
    >>> table.law.values.shape, table.single.values.shape
    (torch.Size([5, 1, 20]), torch.Size([2, 1, 20]))
    """
    reference = as_reference(x, grid, layers, **options)
    grouped = Modes.of(modes, as_source(y).rows)
    compared = list(reference.compare_modes(y, grouped, layers))
    names = tuple(layer.name for layer in compared)
    sizes = torch.tensor([layer.size for layer in compared])
    columns = zip(*(layer.values for layer in compared), strict=True)
    left_out = left_out_parts(reference.chains, grouped)
    return ModesTables(
        *(MMDTable(names, sizes, torch.stack(v, 1).cpu(), left_out) for v in columns)
    )


def law_mmd(
    x: Params | WeightSource | MMDReference,
    y: Params | WeightSource,
    modes: Sequence[int] | Tensor | None,
    reduction: Reduction = "median",
    **options: Any,
) -> Estimate:
    r"""Unbiased MMD^2 between the reference and the law of a method, from pairs of different modes.

    .. math:: \mathbb{E}\, k(x, x') + \mathbb{E}_{a \neq b}\, k(y_a, y_b) - 2\, \mathbb{E}\, k(x, y)

    Modes must be independent runs. More of them make the error smaller, more draws of each hardly.

    Args:
        x: the reference: a stack, a `WeightSource`, or an `MMDReference`, which remembers its own
            distances. Pass ``chains`` if its networks are draws of chains.
        y: networks of the method.
        modes: the mode of every network of ``y``; None if each is a mode of its own.
        reduction: over the twenty kernels.
        **options: ``grid`` and those of `MMDReference`: ``chains``, ``layers``, ``device``, ...

    >>> x, y = {"w": torch.eye(4)}, {"w": torch.eye(4) + 1}
    >>> law_mmd(x, y, [0, 0, 1, 1])
    Estimate(value=tensor(0.4658, dtype=torch.float64), error=tensor(nan, dtype=torch.float64))
    """
    return modes_table(x, y, modes, **options).law.estimate(reduction)


def mixture_mmd(
    x: Params | WeightSource | MMDReference,
    y: Params | WeightSource,
    modes: Sequence[int] | Tensor | None,
    reduction: Reduction = "median",
    **options: Any,
) -> tuple[Estimate, Estimate]:
    r"""MMD^2 between the reference and the mixture of the modes as they are, and its floor.

    .. math:: \mathbb{E}\, k(x, x') + \mathbb{E}_{a, b}\, k(y_a, y_b)
        - 2\, \mathbb{E}\, k(x, y), \quad \text{floor} = \frac{1 - \mathbb{E}\, k(x, x')}{K}

    A mode of several networks counts as the density that they are drawn from, a mode of one network
    as an atom. The floor is what as many single networks of the reference's own law would have.
    The arguments are those of `law_mmd`.

    >>> x, y = {"w": torch.eye(4)}, {"w": torch.eye(4) + 1}
    >>> mixture, floor = mixture_mmd(x, y, None)
    >>> bool(mixture.value > floor.value)
    True
    """
    tables = modes_table(x, y, modes, **options)
    return tables.mixture.estimate(reduction), tables.floor.estimate(reduction)


# ------------------------------------------------------------ the metric


class MMD(ExactMetric):
    """Unbiased MMD^2 between two posteriors over weights, see `mmd`, `law_mmd` and `mixture_mmd`.

    One update compares two stacks, on any part of the layers; layers may come in several updates
    and from several processes. A layer that several processes have compared counts once.

    Args:
        reduction: over the twenty kernels.
        grid: the rule for bandwidths.
        of: what is compared with the reference: all networks ``"pooled"``; the ``"law"`` of a
            method, of which ``modes`` are independent runs; the ``"mixture"`` of these modes.
        **kwargs: what every ``torchmetrics.Metric`` takes.

    >>> metric = MMD("mean")
    >>> metric.update({"w": torch.eye(3)}, {"w": torch.eye(3)[:2] + 1})
    >>> metric.compute()
    tensor(0.3119, dtype=torch.float64)
    """

    higher_is_better = False
    rows: list[Tensor]

    def __init__(
        self,
        reduction: Reduction = "median",
        grid: KernelGrid | None = None,
        of: Kind = "pooled",
        **kwargs: Any,
    ) -> None:
        super().__init__(grid, of, **kwargs)
        self.reduction = check_choice("reduction", reduction, get_args(Reduction))
        self.of = check_choice("of", of, get_args(Kind))
        self.grid = grid or KernelGrid()
        self.add_list("rows")

    def update(
        self,
        x: Params | WeightSource | MMDReference,
        y: Params | WeightSource,
        layers: Sequence[str] | None = None,
        modes: Sequence[int] | Tensor | None = None,
    ) -> None:
        """Compare two stacks.

        Args:
            x: the reference; an `MMDReference` remembers its own distances, knows its chains, and
                has options for large stacks.
            y: the approximation.
            layers: only these, where several processes share the work.
            modes: the mode of every network of ``y``; None if each is a mode of its own.
        """
        if self.of == "pooled" and modes is not None:
            raise ValueError("`modes` belong to a law or a mixture: pass `of='law'` to the metric.")
        if self.of == "pooled":
            table = mmd_table(x, y, self.grid, layers)
        else:
            table = getattr(modes_table(x, y, modes, self.grid, layers), self.of)
        values = table.values.reshape(-1, *table.values.shape[-2:])
        for k, name in enumerate(table.layers):
            head = [*table.left_out, key_of(name) >> 10, int(table.sizes[k])]
            row = torch.tensor(head, dtype=torch.float64, device=self.device)
            self.rows.append(torch.cat([row, values[:, k].flatten().to(row)]))

    def compute(self) -> Tensor:
        """MMD^2, or NaN before the first layer."""
        return self._estimate().value

    def estimate(self) -> Estimate:
        """MMD^2 with the jackknife's error over modes and chains. Pooled networks have none.

        As for `compute`, all processes must ask, and get that of all layers.
        """
        with self.sync_context(dist_sync_fn=self.dist_sync_fn, should_sync=self._to_sync):
            return self._estimate()

    def _estimate(self) -> Estimate:
        rows = collected(self.rows)
        if not len(rows):
            nothing = self._nan("it has compared no layer")
            return Estimate(nothing, nothing)
        of_modes, of_chains = (int(count) for count in rows[:2])
        width = _HEAD + (1 + of_modes + of_chains) * 2 * self.grid.n_bandwidths
        if len(rows) % width or bool((rows.reshape(-1, width)[:, :2] != rows[:2]).any()):
            raise ValueError(
                "Layers have been compared by different modes: call `reset()` between comparisons."
            )
        rows = _once(rows.reshape(-1, width))
        values = rows[:, _HEAD:].reshape(len(rows), 1 + of_modes + of_chains, -1).transpose(0, 1)
        table = MMDTable((), rows[:, _HEAD - 1].long(), values, (of_modes, of_chains))
        return table.estimate(self.reduction)


_HEAD = 4
"""Numbers before the values of a layer: what was left out, a key of its name, and its size."""


def _once(rows: Tensor) -> Tensor:
    """The first row of every layer, on which all processes must agree."""
    first: dict[float, Tensor] = {}
    for row in rows:
        earlier = first.setdefault(float(row[_HEAD - 2]), row)
        if not torch.allclose(earlier, row, rtol=1e-4, atol=1e-6, equal_nan=True):
            raise ValueError(
                "A layer has been compared twice with different weights: call `reset()` between "
                "comparisons."
            )
    return torch.stack(list(first.values()))

"""Predictions of members that processes share: each counts as often as it would in one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from lightning_bnn.params import Params
from lightning_bnn.posteriors import Empirical, Posterior, Predictor
from lightning_bnn.posteriors.empirical import spread

__all__ = ["Part", "even_share", "nothing_like", "part_of_mixture"]


class Part(NamedTuple):
    """What one process predicts, None if nothing; the order of the draws of all, if it matters."""

    predictor: Predictor | None
    order: Tensor | None = None


def part_of_mixture(
    modes: Sequence[Posterior],
    before: int,
    total: int,
    n: int,
    generator: torch.Generator,
    chunk_size: int | None,
) -> Part:
    """The draws of some components of a mixture, which are those of the whole mixture.

    Args:
        modes: components that are here.
        before: how many come before them.
        total: how many there are everywhere.
        n: how many networks all of them draw.
        generator: the same on all processes.
        chunk_size: networks that run at once.
    """
    if total == 1:
        return Part(modes[0].predictor(n, generator, chunk_size) if modes else None)
    counts, generators, order = spread(n, torch.ones(total), generator)
    parts = [
        mode.predictor(counts[k], generators[k], chunk_size)
        for k, mode in enumerate(modes, start=before)
        if counts[k]
    ]

    def predict(model: nn.Module, *x: Any) -> Any:
        return tree_map(lambda *ts: torch.cat(ts), *[part(model, *x) for part in parts])

    return Part(predict if parts else None, order)


def even_share(n: int, before: int, here: int, total: int) -> int:
    """Of n draws that members take in turns, those of some successive members.

    >>> [even_share(7, first, count, 3) for first, count in ((0, 1), (1, 2))]
    [3, 4]
    """
    each, more = divmod(n, total)
    return here * each + min(max(more - before, 0), here)


def nothing_like(networks: Params, chunk_size: int | None) -> Predictor:
    """Outputs of no network, in the shape of those of the first of a stack."""
    one = Empirical({name: t[:1].detach() for name, t in networks.items()})
    run = one.predictor(1, None, chunk_size)
    return lambda *args: tree_map(lambda t: t[:0], run(*args))

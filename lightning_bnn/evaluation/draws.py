"""Networks drawn from the modes of a posterior, and their predictions."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bnn.posteriors import Empirical, Posterior, Predictor
from lightning_bnn.predictions import kind_of
from weightsym import params as P
from weightsym.params import Params, keyed_generator, keyed_randomness

Batches = Iterable[tuple[Any, Tensor]]
"""Inputs, as networks take them, and targets."""


def draw(mode: Posterior, count: int, *key: int | str) -> Params:
    """Draw networks of a mode in random order, or all if it has fewer.

    Args:
        mode: draws the networks.
        count: how many are wanted.
        *key: decides the draw.

    >>> mode = Empirical({"w": torch.arange(5.0)})
    >>> torch.equal(draw(mode, 3, 0, "test")["w"], draw(mode, 3, 0, "test")["w"])
    True
    >>> draw(mode, 20, 0)["w"].sort().values
    tensor([0., 1., 2., 3., 4.])
    """
    count = min(count, mode.size) if isinstance(mode, Empirical) else count
    return {n: t.detach() for n, t in mode.sample(count, keyed_generator(*key, "drawn")).items()}


@torch.no_grad()
def predictions_of_mode(
    mode: Posterior,
    model: nn.Module,
    likelihood: nn.Module,
    sets: Sequence[Batches],
    counts: Sequence[int],
    *key: int | str,
    device: str | torch.device = "cpu",
) -> list[list[Any]]:
    """Predict every data set by the first networks of a mode, for several numbers of them.

    Args:
        mode: draws networks, or predicts in a way of its own.
        model: gives the computation; it is left where it is.
        likelihood: says what outputs mean.
        sets: the data sets.
        counts: numbers of networks.
        *key: decides the draws; `draw` gives the same networks for the same key.
        device: where it is computed.

    >>> from lightning_bnn.likelihoods import Categorical
    >>> from lightning_bnn.models import mlp
    >>> net, x, y = mlp(2, [8], 3), torch.randn(10, 2), torch.randint(3, (10,))
    >>> mode = Empirical(P.populate(net, 20))
    >>> ((few, many),) = predictions_of_mode(mode, net, Categorical(), [[(x, y)]], (5, 20), 0)
    >>> few.probs.shape, many.probs.shape
    (torch.Size([10, 3]), torch.Size([10, 3]))
    >>> mean = P.apply(net, mode.networks, x).double().softmax(-1).mean(0)
    >>> torch.allclose(many.probs, mean)
    True
    """
    model, mode = copy.deepcopy(model).to(device).eval(), mode.to(device)
    predict = predictor_of(mode, max(counts), *key)
    predictions = []
    for number, batches in enumerate(sets):
        parts: list[list[Any]] = []
        for index, (inputs, targets) in enumerate(batches):
            with keyed_randomness(*key, "predict", number, index, device=device):
                outputs = predict(model, inputs.to(device)).cpu()
            each = kind_of(likelihood, targets).of_each(likelihood, outputs, targets)
            parts.append([each.modes(slice(count)).mean() for count in counts])
        counted = zip(*parts, strict=True)
        predictions.append([of_count[0].joined(of_count) for of_count in counted])
    mode.to("cpu")
    return predictions


def predictor_of(mode: Posterior, count: int, *key: int | str) -> Predictor:
    """Return a predictor with networks in the random order of `draw`.

    Args:
        mode: draws networks, or predicts in a way of its own.
        count: how many networks.
        *key: decides the draw.
    """
    if isinstance(mode, Empirical):
        networks = draw(mode, count, *key)
        return lambda model, *x: P.apply(model, networks, *x)
    return mode.predictor(count, keyed_generator(*key, "drawn"))

"""Predictions of thousands of networks on a data set, in bounded memory."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from lightning_bnn.bank import CheckpointBank
from lightning_bnn.metrics.diversity import pairwise_sum
from weightsym import params as P
from weightsym.params import Params

__all__ = ["stream_predictions"]

_BYTES = 8
_AT_ONCE = 64
"""Number of networks that predict together, without pairs."""


class StreamedPredictions(NamedTuple):
    """The joint predictions of thousands of networks, and the quality of each.

    ``mean`` holds probabilities ``(examples, classes)``; ``total``, ``expected`` and ``epistemic``
    (the mutual information) are in nats per example; ``accuracy`` and ``nll`` have one number per
    network; ``pairs`` is the mean mutual information of every pair of networks, if requested.

    >>> from lightning_bnn.models import mlp
    >>> from lightning_bnn.posteriors import stream_predictions
    >>> net, data = mlp(2, [8], 3), [(torch.randn(20, 2), torch.randint(3, (20,)))]
    >>> found = stream_predictions(net, P.populate(net, 50), data, pairs=True)
    >>> found.epistemic.shape, found.accuracy.shape, found.pairs.shape
    (torch.Size([20]), torch.Size([50]), torch.Size([50, 50]))
    >>> torch.allclose(found.total, found.expected + found.epistemic)
    True
    """

    mean: Tensor
    total: Tensor
    expected: Tensor
    epistemic: Tensor
    accuracy: Tensor
    nll: Tensor
    pairs: Tensor | None


@torch.no_grad()
def stream_predictions(
    model: nn.Module,
    networks: Params | CheckpointBank | str | os.PathLike[str],
    batches: Iterable[Any],
    pairs: bool = False,
    memory: int = 2**30,
    progress: bool = False,
) -> StreamedPredictions:
    r"""Run every network of a stack or a bank on a data set of classes, block by block.

    .. math:: \text{total} = H\big(\tfrac1M \textstyle\sum_m p_m\big), \quad
        \text{expected} = \tfrac1M \textstyle\sum_m H(p_m), \quad
        \text{epistemic} = \text{total} - \text{expected}

    Sums are in float64, so that the information is exact. Pairs require the predictions of all
    networks on some examples at a time. A bank is read once per block of examples that fits into
    the memory.

    Args:
        model: gives the computation.
        networks: a stack, or a bank or its folder.
        batches: inputs of the network, and class indices; for loaders of this package
            ``data.prepared(data.test_dataloader()[0])``.
        pairs: whether to compute the matrix of pairs.
        memory: bytes for predictions, and for networks of a bank.
        progress: whether to show a progress bar.

    >>> from lightning_bnn.models import mlp
    >>> net, x, y = mlp(2, [8], 3), torch.randn(20, 2), torch.randint(3, (20,))
    >>> networks = P.populate(net, 50)
    >>> found = stream_predictions(net, networks, [(x[:10], y[:10]), (x[10:], y[10:])])
    >>> mean = P.apply(net, networks, x).softmax(-1).mean(0)
    >>> torch.allclose(found.mean.float(), mean, atol=1e-5)
    True
    """
    model = copy.deepcopy(model).eval()
    if isinstance(networks, (str, os.PathLike)):
        networks = CheckpointBank(networks, "r")
    members = _members(networks)
    if members == 0:
        raise ValueError("`networks` is empty.")
    if memory < 1:
        raise ValueError(f"`memory` must be at least 1, got {memory}.")
    information = torch.zeros(members, members, dtype=torch.float64)
    right, nll = torch.zeros(2, members, dtype=torch.float64)
    parts, examples = [], 0
    with tqdm(disable=not progress, desc="examples", unit="") as bar:
        for inputs, targets, classes in _joined(batches, model, networks, pairs, memory):
            logs = _predictions(model, networks, inputs, memory, len(targets) * classes)
            uncertainty, is_right, loss, predictions_kept = _at_examples(
                logs, targets, members, pairs
            )
            parts.append(uncertainty)
            right, nll = right + is_right, nll + loss
            if pairs:
                information += pairwise_sum(torch.cat(predictions_kept)).cpu()
            examples += len(targets)
            bar.update(len(targets))
    if not parts:
        raise ValueError("`batches` has no examples.")
    mean, total, expected, epistemic = (
        torch.cat(piece).cpu() for piece in zip(*parts, strict=True)
    )
    accuracy, nll = right / examples, nll / examples
    matrix = information / examples if pairs else None
    return StreamedPredictions(mean, total, expected, epistemic, accuracy, nll, matrix)


def _at_examples(
    predictions: Iterable[Tensor], targets: Tensor, members: int, keep: bool
) -> tuple[tuple[Tensor, ...], Tensor, Tensor, list[Tensor]]:
    """Return mean, total, expected and epistemic uncertainty of all networks at some examples.

    Return also the number of correct classes and the summed loss of each network, and its
    predictions if they are stored.
    """
    mean = expected = torch.zeros((), dtype=torch.float64, device=targets.device)
    right, nll, predictions_kept = [], [], []
    for logs in predictions:
        right.append((logs.argmax(-1) == targets).sum(-1).cpu())
        nll.append(-logs[:, range(len(targets)), targets].sum(-1).cpu())
        probs = logs.exp()
        mean = mean + probs.sum(0)
        expected = expected + torch.special.entr(probs).sum((0, -1))
        predictions_kept += [probs] if keep else []
    mean, expected = mean / members, expected / members
    total = torch.special.entr(mean).sum(-1)
    epistemic = (total - expected).clamp_min(0)
    return (mean, total, expected, epistemic), torch.cat(right), torch.cat(nll), predictions_kept


def _predictions(
    model: nn.Module, networks: Params | CheckpointBank, inputs: Tensor, memory: int, numbers: int
) -> Iterator[Tensor]:
    """Yield log-probabilities of some networks at a time, with a given size per network."""
    for block in _blocks(networks, memory, numbers):
        yield P.apply(model, _on(block, inputs), inputs).double().log_softmax(-1)


def _blocks(networks: Params | CheckpointBank, memory: int, numbers: int) -> Iterator[Params]:
    """Yield stacks whose predictions fit into the memory."""
    size = max(1, memory // (_BYTES * numbers))
    whole = networks.blocks(memory) if isinstance(networks, CheckpointBank) else [networks]
    for block in whole:
        for start in range(0, P.stack_size(block), size):
            yield {name: t[start : start + size] for name, t in block.items()}


def _on(block: Params, inputs: Tensor) -> Params:
    return {name: t.to(inputs.device) for name, t in block.items()}


def _joined(
    batches: Iterable[Any],
    model: nn.Module,
    networks: Params | CheckpointBank,
    pairs: bool,
    memory: int,
) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Join batches up to the number of examples in memory (a bank is read anew for each)."""
    waiting: list[tuple[Tensor, Tensor]] = []
    most = classes = 0
    for batch in batches:
        inputs, targets = _pair(batch)
        if not len(targets):
            continue
        if not most:
            classes = _classes(model, networks, inputs[:1])
            together = _members(networks) if pairs else min(_AT_ONCE, _members(networks))
            most = max(1, memory // (_BYTES * classes * together))
        _check(targets, classes)
        for piece in zip(inputs.split(most), targets.split(most), strict=True):
            if waiting and sum(len(t) for _, t in waiting) + len(piece[1]) > most:
                yield *_cat(waiting), classes
                waiting = []
            waiting.append(piece)
    if waiting:
        yield *_cat(waiting), classes


def _pair(batch: Any) -> tuple[Tensor, Tensor]:
    if isinstance(batch, (tuple, list)) and [isinstance(t, Tensor) for t in batch] == [True] * 2:
        return batch[0], batch[1]
    raise ValueError(
        "`batches` must be pairs of a tensor of inputs and one of class indices, got "
        f"{type(batch).__name__}; for loaders of this package use `data.prepared(loader)`."
    )


def _check(targets: Tensor, classes: int) -> None:
    indices = targets.ndim == 1 and not targets.is_floating_point()
    if not indices or classes < 2 or int(targets.min()) < 0 or int(targets.max()) >= classes:
        raise ValueError(
            "`batches` must be inputs and class indices, for a network with one output "
            f"per class; got {classes} outputs, and targets of type {targets.dtype} and "
            f"shape {tuple(targets.shape)}, {targets.min()} to {targets.max()}."
        )


def _members(networks: Params | CheckpointBank) -> int:
    return len(networks) if isinstance(networks, CheckpointBank) else P.stack_size(networks)


def _classes(model: nn.Module, networks: Params | CheckpointBank, inputs: Tensor) -> int:
    first = networks[0:1] if isinstance(networks, CheckpointBank) else networks
    network = {name: t[0] for name, t in first.items()}
    return P.apply(model, _on(network, inputs), inputs).shape[-1]


def _cat(pairs: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    return torch.cat([x for x, _ in pairs]), torch.cat([y for _, y in pairs])

"""Every metric class with data in uneven batches: every law is tested on all of them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from lightning_bnn import metrics as M
from lightning_bnn.metrics.regression import PITCalibration

SIZES = (5, 1, 7, 3, 2)  # uneven batches


@dataclass(frozen=True)
class MetricCase:
    name: str
    build: Callable[[], Any]
    batches: tuple[tuple[Any, ...], ...]
    function: Callable[[], Any] | None = None
    constant: bool = True
    """Whether the state does not grow with the data."""


def _generator():
    return torch.Generator().manual_seed(0)


def _cut(tensor, dim=0):
    return tensor.split(SIZES, dim)


N = sum(SIZES)
PROBS = (2 * torch.randn(N, 4, generator=_generator())).softmax(-1)
REFERENCE = (torch.randn(N, 4, generator=_generator()) + PROBS).softmax(-1)
LABELS = torch.randint(4, (N,), generator=_generator())
SAMPLES = torch.randn(3, N, 4, generator=_generator()).softmax(-1)
SCORES = torch.randn(N, generator=_generator())
IS_OOD = torch.arange(N) % 3 == 0
MEANS = torch.randn(3, N, 2, generator=_generator())
STDS = torch.rand(3, N, 2, generator=_generator()) + 0.2
TARGETS = torch.randn(N, 2, generator=_generator())
WEIGHTS = (
    {f"layer{k}": torch.randn(8, k + 2, generator=_generator()) for k in range(5)},
    {f"layer{k}": torch.randn(5, k + 2, generator=_generator()) + 0.5 for k in range(5)},
)


def _predictive(cls, function, *args):
    batches = tuple(zip(_cut(PROBS), _cut(LABELS), strict=True))
    name = cls.__name__ + "".join(map(str, args))
    return MetricCase(
        name, lambda: cls(*args), batches, lambda: function(PROBS, LABELS, *args), cls is not M.ACE
    )


def _compared(cls, function):
    batches = tuple(zip(_cut(PROBS), _cut(REFERENCE), strict=True))
    return MetricCase(cls.__name__, cls, batches, lambda: function(PROBS, REFERENCE))


def _several(cls, function, *args):
    batches = tuple((b,) for b in _cut(SAMPLES, 1))
    name = cls.__name__ + "".join(map(str, args))
    return MetricCase(name, lambda: cls(*args), batches, lambda: function(SAMPLES).double().mean(0))


def _ranking(cls, function, **options):
    batches = tuple(zip(_cut(SCORES), _cut(IS_OOD), strict=True))
    name = cls.__name__ + "".join(options.values())
    whole = lambda: function(SCORES, IS_OOD, **options)  # noqa: E731
    return MetricCase(name, lambda: cls(**options), batches, whole, False)


def _detection():
    sets = (None, "b", "a", None, "a")
    batches = tuple(zip(_cut(PROBS), sets, strict=True))
    return MetricCase(
        "OODDetection", lambda: M.OODDetection("entropy", ["a", "b"]), batches, None, False
    )


METRICS = [
    _predictive(M.ECE, M.ece),
    _predictive(M.ECE, M.ece, 7),
    _predictive(M.ACE, M.ace),
    _predictive(M.NLL, M.nll),
    _predictive(M.BrierScore, M.brier_score),
    _compared(M.Agreement, M.agreement),
    _compared(M.TotalVariation, M.total_variation),
    _several(M.MutualInformation, M.mutual_information),
    _several(M.MutualInformation, lambda p: M.decompose_uncertainty(p).total, "total"),
    _several(M.Disagreement, M.disagreement),
    MetricCase(
        "CRPS",
        M.CRPS,
        tuple(zip(_cut(MEANS, 1), _cut(STDS, 1), _cut(TARGETS), strict=True)),
        lambda: M.crps(MEANS, STDS, TARGETS),
    ),
    MetricCase(
        "PITCalibration",
        PITCalibration,
        tuple((u,) for u in _cut(M.pit(MEANS, STDS, TARGETS))),
        lambda: M.quantile_calibration(MEANS, STDS, TARGETS),
        False,
    ),
    _ranking(M.AUROC, M.auroc),
    _ranking(M.AUPR, M.aupr),
    _ranking(M.AUPR, M.aupr, positive="id"),
    _ranking(M.FPR95, M.fpr95),
    _ranking(M.FPR95, M.fpr95, positive="id"),
    _detection(),
    MetricCase(
        "MMD",
        M.MMD,
        tuple((*WEIGHTS, [f"layer{k}"]) for k in range(5)),
        lambda: M.mmd(*WEIGHTS),
        True,
    ),
]

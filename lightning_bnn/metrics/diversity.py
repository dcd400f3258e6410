r"""Diversity: the disagreement of the networks of a posterior about an input.

Predictions have shape ``(samples, batch, classes)``; information is in nats.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, get_args

import torch
from jaxtyping import Float64
from torch import Tensor

from lightning_bnn.metrics.base import PredictionMean
from lightning_bnn.metrics.validation import (
    PerExample,
    SampledProbs,
    check_choice,
    check_samples,
    probabilities,
)

__all__ = [
    "Disagreement", "MutualInformation",
    "decompose_uncertainty", "disagreement", "mutual_information", "pairwise_mutual_information",
]  # fmt: skip

Component = Literal["epistemic", "total", "expected"]
_CHUNK = (2**16, 2**26)
"""Entries per chunk in the comparison of pairs: on a CPU, on a GPU."""


class Uncertainty(NamedTuple):
    """Uncertainty of every example in nats: total = expected + epistemic.

    >>> from lightning_bnn.metrics import decompose_uncertainty
    >>> parts = decompose_uncertainty(torch.tensor([[[1.0, 0.0]], [[0.5, 0.5]]]))
    >>> torch.allclose(parts.total, parts.expected + parts.epistemic)
    True
    """

    total: Tensor
    expected: Tensor
    epistemic: Tensor


# ------------------------------------------------------------ functions
def mutual_information(probs: SampledProbs, from_logits: bool = False) -> PerExample:
    r"""Information about the network in each prediction, never negative.

    .. math::
        H(\bar p) - \frac1S \sum_s H(p_s) = \frac1S \sum_{s,c} \bar p_c\,
        \varphi\!\left(\frac{p_{sc} - \bar p_c}{\bar p_c}\right),
        \quad \varphi(d) = (1 + d) \log(1 + d) - d \ge 0

    The difference of entropies cancels in float32 when networks nearly agree; the right-hand side
    is a sum of non-negative terms.

    Args:
        probs: ``(samples, batch, classes)`` probabilities, or logits with ``from_logits``.
        from_logits: whether ``probs`` are logits; never guessed.

    Returns:
        One number per example.

    References:
        | Bayesian Active Learning for Classification and Preference Learning (Houlsby et al., 2011)
        | https://arxiv.org/abs/1112.5745

    >>> mutual_information(torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]]))
    tensor([0.6931])
    """
    probs = _samples(probs, from_logits)
    mean = probs.mean(0)
    relative = (probs - mean) / mean.clamp_min(torch.finfo(mean.dtype).tiny)
    return (mean * _phi(relative)).sum(-1).mean(0)


def decompose_uncertainty(probs: SampledProbs, from_logits: bool = False) -> Uncertainty:
    r"""Decompose the entropy of the mean prediction into mean entropy and mutual information.

    .. math:: H\big(\tfrac1S \textstyle\sum_s p_s\big) = \tfrac1S \textstyle\sum_s H(p_s) + I

    Args:
        probs: ``(samples, batch, classes)`` probabilities, or logits with ``from_logits``.
        from_logits: whether ``probs`` are logits; never guessed.

    >>> decompose_uncertainty(torch.tensor([[[1.0, 0.0]], [[0.5, 0.5]]])).expected
    tensor([0.3466])
    """
    probs = _samples(probs, from_logits)
    return Uncertainty(
        torch.special.entr(probs.mean(0)).sum(-1),
        torch.special.entr(probs).sum(-1).mean(0),
        mutual_information(probs),
    )


def pairwise_mutual_information(
    probs: SampledProbs, from_logits: bool = False
) -> Float64[Tensor, "samples samples"]:
    r"""Mutual information of every pair of networks, the mean over examples.

    .. math:: I_{s t} = H\big(\tfrac12 (p_s + p_t)\big) - \tfrac12 \big(H(p_s) + H(p_t)\big)

    Laurent et al. (2024, Section 5.1) show the histogram of this symmetric matrix.

    Args:
        probs: ``(samples, batch, classes)`` probabilities, or logits with ``from_logits``.
        from_logits: whether ``probs`` are logits; never guessed.

    >>> pairwise_mutual_information(torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])).round(decimals=4)
    tensor([[0.0000, 0.6931],
            [0.6931, 0.0000]], dtype=torch.float64)
    """
    probs = _samples(probs, from_logits)
    return pairwise_sum(probs) / probs.shape[1]


def disagreement(probs: SampledProbs, from_logits: bool = False) -> PerExample:
    r"""Fraction of the pairs of networks that predict different classes, per example.

    .. math:: \frac{2}{S (S - 1)} \sum_{s < t} [\hat y_s \neq \hat y_t]

    Args:
        probs: ``(samples, batch, classes)`` probabilities, or logits with ``from_logits``.
        from_logits: whether ``probs`` are logits; never guessed.

    >>> disagreement(torch.eye(2)[[0, 0, 1]][:, None])
    tensor([0.6667], dtype=torch.float64)
    """
    probs = _samples(probs, from_logits)
    samples, _, classes = probs.shape
    votes = torch.nn.functional.one_hot(probs.argmax(-1), classes).sum(0).double()
    return 1 - (votes * (votes - 1)).sum(-1) / (samples * (samples - 1))


def _samples(probs: Tensor, from_logits: bool) -> Tensor:
    check_samples(probs)
    return probabilities(probs, from_logits)


def _phi(d: Tensor) -> Tensor:
    return torch.special.xlog1py(1 + d, d) - d


def pairwise_sum(probs: Tensor) -> Tensor:
    """Sum the mutual information of every pair over examples, in chunks that fit the cache.

    For two networks it is the sum over classes of (p log p + q log q) / 2 - m log m with their mean
    m. In float64 the difference is precise enough, and only m needs a logarithm for every pair.
    """
    flat = probs.flatten(1).double()
    single = torch.special.xlogy(flat, flat).sum(-1) / 2
    result = flat.new_zeros(len(flat), len(flat))
    size = max(1, _CHUNK[probs.device.type != "cpu"] // max(1, flat.shape[1]))
    tiny = torch.finfo(flat.dtype).tiny
    for row in range(len(flat)):
        for start in range(row + 1, len(flat), size):
            middle = (flat[start : start + size] + flat[row]).mul_(0.5)
            logs = middle.clamp_min(tiny).log_()
            result[row, start : start + size] = -(middle * logs).sum(-1)
        result[row, row + 1 :] += single[row + 1 :] + single[row]
    return (result + result.T).clamp_min_(0)


# ------------------------------------------------------------ classes
class MutualInformation(PredictionMean):
    """Mean over examples of the mutual information, or of another part of the uncertainty.

    Args:
        component: ``"epistemic"`` (the mutual information), ``"total"`` (entropy of the mean
            prediction) or ``"expected"`` (mean entropy of the networks).
        from_logits: whether `update` is given logits; never guessed.
        **kwargs: arguments of every ``torchmetrics.Metric``.

    >>> MutualInformation()(torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]]))
    tensor(0.6931, dtype=torch.float64)
    """

    plot_lower_bound = 0.0

    def __init__(
        self, component: Component = "epistemic", from_logits: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(from_logits, shape=(3,), **kwargs)
        self.component = check_choice("component", component, get_args(Component))

    def update(self, probs: Tensor) -> None:
        """Add a batch of predictions ``(samples, batch, classes)``."""
        self.add(torch.stack(decompose_uncertainty(probs, self.from_logits), -1))

    def compute(self) -> Tensor:
        """Return the chosen component, or NaN without examples."""
        return super().compute()[Uncertainty._fields.index(self.component)]


class Disagreement(PredictionMean):
    """Mean over examples of the fraction of pairs of networks that predict different classes.

    Args:
        from_logits: whether `update` is given logits; never guessed.
        **kwargs: arguments of every ``torchmetrics.Metric``.

    >>> Disagreement()(torch.eye(2)[[0, 0, 1]][:, None])
    tensor(0.6667, dtype=torch.float64)
    """

    plot_lower_bound, plot_upper_bound = 0.0, 1.0

    def update(self, probs: Tensor) -> None:
        """Add a batch of predictions ``(samples, batch, classes)``."""
        self.add(disagreement(probs, self.from_logits))

    def compute(self) -> Tensor:
        """Return the mean, or NaN without examples and for one network."""
        value = super().compute()
        if self.count > 0 and value.isnan():
            return self._nan("one network has no pairs")
        return value

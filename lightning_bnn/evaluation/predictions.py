"""Predictions of networks on examples, averaged over networks: classes, Gaussians, or densities.

Mean predictions can be averaged again, over modes or over all modes but one, so that every number
of one mode, of all, and of the jackknife comes from one pass.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lightning_bnn.likelihoods import Bernoulli, Categorical, Gaussian
from lightning_bnn.posteriors import Empirical, Posterior, Predictor
from weightsym import params as P
from weightsym.params import Params, keyed_generator, keyed_randomness, precise, where_precise

One = TypeVar("One", bound="_Predictions")


@dataclass(frozen=True)
class _Predictions:
    """Predictions of some examples as tensors, whose leading dimensions may count networks."""

    def tensors(self) -> dict[str, Tensor]:
        """Those that there are, by name."""
        return {name: t for name, t in vars(self).items() if t is not None}

    def __getitem__(self: One, which: Any) -> One:
        return type(self)(**{name: t[which] for name, t in self.tensors().items()})

    @classmethod
    def stacked(cls: type[One], parts: Sequence[One]) -> One:
        """Several modes along a new first dimension."""
        return cls._together(torch.stack, parts)

    @classmethod
    def joined(cls: type[One], parts: Sequence[One]) -> One:
        """Several batches as one set of examples."""
        return cls._together(torch.cat, parts)

    @classmethod
    def _together(cls: type[One], how: Callable[..., Tensor], parts: Sequence[One]) -> One:
        names = parts[0].tensors()
        return cls(**{name: how([each.tensors()[name] for each in parts]) for name in names})


@dataclass(frozen=True)
class GaussianPredictions(_Predictions):
    r"""Equally weighted mixtures of the Gaussians that networks predict.

    .. math:: p(y) = \tfrac1S \textstyle\sum_s N(y;\; \mu_s, \sigma_s^2)

    Attributes:
        means: ``(..., examples, targets, networks)``, in float64.
        stds: standard deviations of the same shape.
        whitening: of correlated targets, ``(..., examples, targets, targets, networks)``, see
            `lightning_bnn.likelihoods.Gaussian`.

    >>> from lightning_bnn.likelihoods import Gaussian
    >>> outputs = torch.zeros(4, 10, 1)  # of four networks
    >>> mixture = GaussianPredictions.of_each(Gaussian(), outputs).mean()
    >>> mixture.examples, mixture.means.shape, mixture.components()[0].shape
    (10, torch.Size([10, 1, 4]), torch.Size([4, 10, 1]))
    """

    means: Tensor
    stds: Tensor
    whitening: Tensor | None = None

    @classmethod
    def of_each(cls, likelihood: Any, outputs: Tensor) -> GaussianPredictions:
        """The prediction of every single network, ``(networks, examples, targets, 1)``."""
        tensors = likelihood.moments(precise(outputs.detach()))
        if (white := likelihood.whitening) is not None:
            tensors = *tensors, white.expand(*outputs.shape[:2], *white.shape)
        return cls(*(where_precise(t.detach()).double()[..., None] for t in tensors))

    @property
    def examples(self) -> int:
        """The number of examples that are predicted."""
        return self.means.shape[-3]

    def components(self) -> tuple[Tensor, Tensor]:
        """Means and standard deviations as metrics take them, ``(networks, examples, targets)``."""
        return self.means.movedim(-1, 0), self.stds.movedim(-1, 0)

    def mean(self) -> GaussianPredictions:
        """The mixture over the first dimension: all of its networks with equal weights."""
        parts = self.tensors().items()
        return GaussianPredictions(**{name: t.movedim(0, -2).flatten(-2) for name, t in parts})

    @classmethod
    def stacked(cls, parts: Sequence[GaussianPredictions]) -> GaussianPredictions:
        """Several modes along a new first dimension, with equally many networks: the first ones."""
        count = min(each.means.shape[-1] for each in parts)
        return super().stacked([p[..., :count] for p in parts])


@dataclass(frozen=True)
class LogDensities(_Predictions):
    r"""Log-densities of targets, for likelihoods of which nothing else is known.

    .. math:: \log \tfrac1S \textstyle\sum_s p_s(y)

    Attributes:
        values: ``(..., examples)``, in float64.

    >>> networks = LogDensities(torch.tensor([[0.2], [0.4]]).log())  # of two networks
    >>> networks.mean().values.exp()  # the density of their mixture
    tensor([0.3000])
    """

    values: Tensor

    @classmethod
    def of_each(cls, likelihood: Any, outputs: Tensor, targets: Tensor) -> LogDensities:
        """The density of every single network, whose outputs are ``(networks, examples, ...)``."""
        return cls(where_precise(likelihood.log_prob(outputs.detach(), targets)).double())

    @property
    def examples(self) -> int:
        """The number of examples that are predicted."""
        return self.values.shape[-1]

    def mean(self) -> LogDensities:
        """The density of the mixture over the first dimension."""
        return LogDensities(self.values.logsumexp(0) - math.log(len(self.values)))


Batches = Iterable[tuple[Any, Tensor]]
"""Inputs, as networks take them, and targets."""


@dataclass(frozen=True)
class ClassPredictions(_Predictions):
    r"""Predictions of classes on some examples, averaged over networks.

    .. math:: \bar p = \tfrac1S \textstyle\sum_s p_s, \quad
        \bar H = \tfrac1S \sum_s H(p_s), \quad I = H(\bar p) - \bar H

    Attributes:
        probs: ``(..., examples, classes)``, in float64.
        entropy: mean entropy of the networks' predictions, ``(..., examples)``, in nats.

    >>> outputs = torch.tensor([[[50.0, 0.0]], [[0.0, 50.0]]])  # two networks that disagree
    >>> averages = ClassPredictions.of(Categorical(), outputs)
    >>> averages.probs, averages.information().round(decimals=4)
    (tensor([[0.5000, 0.5000]], dtype=torch.float64), tensor([0.6931], dtype=torch.float64))
    """

    probs: Tensor
    entropy: Tensor

    @classmethod
    def of(cls, likelihood: nn.Module, outputs: Tensor) -> ClassPredictions:
        """The mean over networks, whose outputs are ``(networks, examples, ...)``."""
        return cls.of_each(likelihood, outputs).mean()

    @classmethod
    def of_each(cls, likelihood: nn.Module, outputs: Tensor) -> ClassPredictions:
        """The prediction of every single network, not averaged yet."""
        logits = where_precise(outputs).double()
        if isinstance(likelihood, Bernoulli):
            logits = torch.cat([torch.zeros_like(logits), logits], -1)
        probs = logits.softmax(-1)
        return cls(probs, torch.special.entr(probs).sum(-1))

    @property
    def examples(self) -> int:
        """The number of examples that are predicted."""
        return self.entropy.shape[-1]

    def mean(self) -> ClassPredictions:
        """The mean over the first dimension."""
        return ClassPredictions(self.probs.mean(0), self.entropy.mean(0))

    def information(self) -> Tensor:
        """Mutual information of prediction and network: what the networks disagree about."""
        return (torch.special.entr(self.probs).sum(-1) - self.entropy).clamp_min(0)


def has_classes(likelihood: nn.Module) -> bool:
    """Tell whether outputs are classes, so that they have averages."""
    return isinstance(likelihood, (Categorical, Bernoulli))


def predictions_of_each(likelihood: Any, outputs: Tensor, targets: Tensor) -> Any:
    """Predict by every single network: classes, Gaussians, or only the density of targets.

    All three can be chosen from, averaged, stacked and joined in the same way. Of examples with
    classes at several positions it is the density of all together.

    Args:
        likelihood: says what outputs mean.
        outputs: ``(networks, examples, ...)``.
        targets: of the examples; only needed where the likelihood is unknown.
    """
    if has_classes(likelihood) and targets.ndim == 1:
        return ClassPredictions.of_each(likelihood, outputs)
    if isinstance(likelihood, Gaussian):
        return GaussianPredictions.of_each(likelihood, outputs)
    return LogDensities.of_each(likelihood, outputs, targets)


def draw(mode: Posterior, count: int, *key: int | str) -> Params:
    """Draw networks of a mode in random order, or all of a mode that is made of fewer.

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
def predictions_of_stack(
    model: nn.Module, networks: Params, likelihood: nn.Module, batches: Batches
) -> ClassPredictions:
    """Predict by all networks of a stack, or by a single network.

    Args:
        model: gives the computation.
        networks: a stack, or one network.
        likelihood: what outputs say about classes.
        batches: the data set.

    >>> from lightning_bnn.models import mlp
    >>> net, x, y = mlp(2, [8], 3), torch.randn(10, 2), torch.randint(3, (10,))
    >>> networks = P.populate(net, 20)
    >>> batches = [(x[:5], y[:5]), (x[5:], y[5:])]
    >>> averages = predictions_of_stack(net, networks, Categorical(), batches)
    >>> mean = P.apply(net, networks, x).softmax(-1).mean(0)
    >>> torch.allclose(averages.probs.float(), mean, atol=1e-5)
    True
    """
    stacked = P.is_stacked(networks, P.of(model))
    outputs = (P.apply(model.eval(), networks, inputs) for inputs, _ in batches)
    return ClassPredictions.joined(
        [ClassPredictions.of(likelihood, o if stacked else o[None]) for o in outputs]
    )


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
    """For every data set and every count, predictions of the first so many networks of a mode.

    They are `ClassPredictions` of classes, `GaussianPredictions` of Gaussians, else `LogDensities`.

    Args:
        mode: draws networks, or predicts in a way of its own.
        model: gives the computation; it is left where it is.
        likelihood: what outputs say about targets.
        sets: the data sets.
        counts: numbers of networks.
        *key: decides the draws; `draw` gives the same networks for the same key.
        device: where it is computed.

    >>> from lightning_bnn.models import mlp
    >>> net, x, y = mlp(2, [8], 3), torch.randn(10, 2), torch.randint(3, (10,))
    >>> mode = Empirical(P.populate(net, 20))
    >>> ((few, many),) = predictions_of_mode(mode, net, Categorical(), [[(x, y)]], (5, 20), 0)
    >>> few.probs.shape, many.probs.shape
    (torch.Size([10, 3]), torch.Size([10, 3]))
    >>> every = predictions_of_stack(net, mode.networks, Categorical(), [(x, y)])
    >>> torch.allclose(many.probs, every.probs)
    True
    """
    model, mode = copy.deepcopy(model).to(device).eval(), mode.to(device)
    predict = predictor_of(mode, max(counts), *key)
    averages = []
    for number, batches in enumerate(sets):
        parts: list[list[Any]] = []
        for index, (inputs, targets) in enumerate(batches):
            with keyed_randomness(*key, "predict", number, index, device=device):
                outputs = predict(model, inputs.to(device)).cpu()
            each = predictions_of_each(likelihood, outputs, targets)
            parts.append([each[:count].mean() for count in counts])
        counted = zip(*parts, strict=True)
        averages.append([type(of_count[0]).joined(of_count) for of_count in counted])
    mode.to("cpu")
    return averages


def predictor_of(mode: Posterior, count: int, *key: int | str) -> Predictor:
    """Networks predict in the random order of `draw`, so that the first few are like all.

    Args:
        mode: draws networks, or predicts in a way of its own.
        count: how many networks.
        *key: decides the draw.
    """
    if isinstance(mode, Empirical):
        networks = draw(mode, count, *key)
        return lambda model, *x: P.apply(model, networks, *x)
    return mode.predictor(count, keyed_generator(*key, "drawn"))

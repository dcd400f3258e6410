"""Likelihoods of targets given outputs of a network, and priors over weights.

A likelihood gives log-densities per example and turns the outputs of several networks into one
prediction. Leading dimensions of outputs (members, samples) are kept.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch._C._functorch import is_batchedtensor

from weightsym.params import (
    Params,
    at_least_single,
    check_count,
    check_integer,
    check_positive,
    check_tensors,
    is_weight,
    where_precise,
)

__all__ = [
    "Bernoulli",
    "Categorical",
    "Gaussian",
    "GaussianPrediction",
    "IsotropicGaussianPrior",
    "Likelihood",
    "SequenceScores",
]

Noise = Literal["fixed", "learned", "correlated", "heteroscedastic"]
FEW_CLASSES = 32
"""With so many classes at most the examples go last while probabilities are normalised."""
_LOG_2PI = math.log(2 * math.pi)


# ------------------------------------------------------------ outputs
class Likelihood(nn.Module, ABC):
    r"""The interface of likelihoods, which any module may have, derived from this class or not.

    Laplace approximations also need ``curvature_root(outputs)``, matrices ``(batch, k, r)`` with
    :math:`R R^T` the expected second derivatives of ``-log_prob`` at outputs ``(batch, k)``.

    >>> class Poisson(Likelihood):
    ...     def log_prob(self, outputs, targets):
    ...         return torch.distributions.Poisson(outputs.exp()).log_prob(targets).sum(-1)
    ...     def predictive(self, outputs):
    ...         return outputs.exp().mean(0)
    >>> Poisson().log_prob(torch.zeros(4, 3, 1), torch.zeros(3, 1)).unique()  # at rate one
    tensor([-1.])
    >>> Poisson().predictive(torch.zeros(4, 3, 1)).shape
    torch.Size([3, 1])
    """

    @abstractmethod
    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Log-density of every target, ``(..., batch)``."""

    @abstractmethod
    def predictive(self, outputs: Tensor) -> Any:
        """One prediction of several networks, whose outputs are ``(samples, batch, ...)``."""


class SequenceScores(NamedTuple):
    r"""Scores of the classes of whole sequences under several networks, one number per sequence.

    .. math:: \log p(y) = \log \tfrac1S \textstyle\sum_s \prod_t p_s(y_t)
        = \sum_t \log \sum_s \pi_{st}\, p_s(y_t), \quad \pi_{st} \propto \prod_{u < t} p_s(y_u)

    A network that has predicted the first tokens well counts more at the next: the product of mean
    probabilities is another number. The information is the sum over tokens of that between a token
    and the network, given the tokens before. Its mean over sequences that the networks generate is
    the mutual information of sequence and network.

    Attributes:
        log_prob: of the mixture of all networks.
        information: that the tokens hold about which network is right, in nats, never negative.
        disagreement: share of the pairs of networks whose likeliest classes differ somewhere, 0 of
            one network.
        tokens: how many count.

    References:
        | Uncertainty Estimation in Autoregressive Structured Prediction (Malinin and Gales, 2021)
        | https://arxiv.org/abs/2002.07650

    >>> logits = torch.tensor([[50.0, 0.0], [0.0, 50.0]])[:, None, None].expand(2, 1, 3, 2)
    >>> scores = Categorical().sequences(logits, torch.tensor([[0, 0, 0]]))  # of two networks
    >>> [round(score.item(), 4) for score in scores]  # the first token says which: log 2
    [-0.6931, 0.6931, 1.0, 3]
    """

    log_prob: Tensor
    information: Tensor
    disagreement: Tensor
    tokens: Tensor


class Categorical(Likelihood):
    r"""Outputs are logits ``(..., batch, classes)``, targets class indices ``(batch,)``.

    .. math:: \log p(y \mid z) = z_y - \log \textstyle\sum_c e^{z_c}

    Examples may have several positions, such as tokens or pixels, with a class at each. Then the
    log-density of an example is the sum over those that count, and scores are of positions.

    Args:
        classes: where they are in the outputs of several positions: ``"last"``, ``(..., batch,
            positions, classes)``, as in transformers, or ``"first"``, ``(..., batch, classes,
            height, width)``, as convolutions have them.
        ignore_index: positions with this target do not count; by default all do. Transformers take
            -100.
        next_token: whether the outputs at a position are of the target of the next, as those of
            causal language models.

    >>> Categorical().log_prob(torch.zeros(1, 2), torch.tensor([0]))
    tensor([-0.6931])
    >>> tokens = Categorical(ignore_index=-100)
    >>> tokens.log_prob(torch.zeros(1, 3, 2), torch.tensor([[0, 1, -100]]))  # twice as much
    tensor([-1.3863])
    """

    def __init__(
        self,
        classes: Literal["last", "first"] = "last",
        ignore_index: int | None = None,
        next_token: bool = False,
    ) -> None:
        super().__init__()
        if classes not in ("last", "first"):
            raise ValueError(f"`classes` must be 'last' or 'first', got {classes!r}.")
        check_integer("ignore_index", ignore_index, optional=True)
        self.classes, self.ignore_index, self.next_token = classes, ignore_index, next_token

    def extra_repr(self) -> str:
        """The options that ``print`` shows in brackets."""
        defaults = {"classes": "last", "ignore_index": None, "next_token": False}
        chosen = {name: getattr(self, name) for name in defaults}
        return ", ".join(f"{n}={v!r}" for n, v in chosen.items() if v != defaults[n])

    @property
    def of_sequences(self) -> bool:
        """True if examples are sequences: of next tokens, or with some that do not count."""
        return self.next_token or self.ignore_index is not None

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Log-probability of the targets of every example, ``(..., batch)``."""
        logits, targets = self.aligned(outputs, targets)
        counts = None if self.ignore_index is None else targets != self.ignore_index
        targets = targets if counts is None else targets.masked_fill(~counts, 0)
        _check_range(targets, logits.shape[-1])
        index = targets.long().expand(logits.shape[:-1])[..., None]
        if logits.shape[-1] > FEW_CLASSES or targets.ndim > 1:
            logs = logits.log_softmax(-1).gather(-1, index)[..., 0]
        else:  # examples last: several times as fast for many networks
            logs = logits.mT.log_softmax(-2).gather(-2, index.mT)[..., 0, :]
        logs = logs if counts is None else logs.where(counts, 0)
        return logs if targets.ndim == 1 else logs.flatten(1 - targets.ndim).sum(-1)

    def predictive(self, outputs: Tensor) -> Tensor:
        """Mean of the probabilities of several networks, ``(samples, batch, ...)``."""
        return outputs.softmax(-1 if self.classes == "last" else 2).mean(0)

    def curvature_root(self, outputs: Tensor) -> Tensor:
        """R with R R^T = diag(p) - p p^T, the curvature of the cross-entropy at the logits."""
        p = outputs.softmax(-1)
        return torch.diag_embed(p.sqrt()) - p[:, :, None] * p.sqrt()[:, None, :]

    def every_row(self, outputs: Tensor) -> Tensor:
        """Outputs of networks at all positions, ``(samples, rows, classes)``."""
        logits = outputs if self.classes == "last" else outputs.movedim(2, -1)
        return (logits[..., :-1, :] if self.next_token else logits).flatten(1, -2)

    def rows(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs at all positions that count, ``(..., rows, classes)``, and their targets.

        Args:
            outputs: of networks, ``(..., batch, ...)``.
            targets: of the examples.

        >>> logits, targets = torch.zeros(5, 2, 3, 7), torch.tensor([[0, -100, 6], [1, 2, -100]])
        >>> rows, classes = Categorical(ignore_index=-100).rows(logits, targets)
        >>> rows.shape, classes
        (torch.Size([5, 4, 7]), tensor([0, 6, 1, 2]))
        """
        logits, targets = self.aligned(outputs, targets)
        logits, targets = logits.flatten(-1 - targets.ndim, -2), targets.flatten()
        if self.ignore_index is None:
            return logits, targets
        counts = targets != self.ignore_index
        return logits[..., counts, :], targets[counts]

    def sequences(self, outputs: Tensor, targets: Tensor) -> SequenceScores:
        """Score the classes of whole sequences, or of all pixels of images, in float64.

        Args:
            outputs: of networks, ``(samples, batch, ...)``; of causal language models given the
                tokens before each.
            targets: of the examples. Where there are none, draw some from every network, at each
                position by itself where outputs do not depend on them. Causal language models
                generate theirs: take the outputs of all networks given these, too.

        Returns:
            Numbers ``(batch,)``.

        >>> logits = torch.tensor([[50.0, 0.0], [0.0, 50.0]])[:, None, :, None].expand(2, 1, 2, 3)
        >>> of_each = [torch.distributions.Categorical(logits=z.movedim(1, -1)) for z in logits]
        >>> draws = [law.sample() for law in of_each]  # (batch, positions), where classes go last
        >>> images = Categorical("first")
        >>> [round(images.sequences(logits, y).information.item(), 4) for y in draws]
        [0.6931, 0.6931]
        """
        logits, targets = self.aligned(outputs.detach(), targets)
        if logits.ndim != targets.ndim + 2:
            raise ValueError(
                f"`outputs` must be those of networks, (samples, batch, ...), got "
                f"{tuple(outputs.shape)} for targets {tuple(targets.shape)}."
            )
        if 0 in logits.shape[:2]:
            networks, examples = logits.shape[:2]
            raise ValueError(f"`outputs` are those of {networks} networks for {examples} examples.")
        each = [self._sequence(*p) for p in zip(logits.unbind(1), targets, strict=True)]
        return SequenceScores(*map(torch.stack, zip(*each, strict=True)))

    def _sequence(self, logits: Tensor, targets: Tensor) -> SequenceScores:
        """Scores of one example, given logits ``(samples, ..., classes)``."""
        counts = torch.ones_like(targets) > 0
        if self.ignore_index is not None:
            counts = targets != self.ignore_index
        classes = where_precise(targets[counts]).long()
        _check_range(classes, logits.shape[-1])
        logs = where_precise(logits[:, counts]).double().log_softmax(-1)
        of_targets = logs.gather(-1, classes.expand(logs.shape[:-1])[..., None])[..., 0]
        before = of_targets.cumsum(1).roll(1, 1)
        before[:, :1] = 0
        weights, each = before.softmax(0), torch.special.entr(logs.exp()).sum(-1)
        mixed = torch.special.entr((weights[..., None] * logs.exp()).sum(0)).sum(-1)
        guesses, size = logs.argmax(-1), len(logs)
        alike = (guesses[:, None] == guesses).all(-1).sum()
        return SequenceScores(
            of_targets.sum(1).logsumexp(0) - math.log(size),
            (mixed - (weights * each).sum(0)).clamp_min(0).sum(),
            (size**2 - alike) / alike.new_tensor(max(1, size * (size - 1))).double(),
            counts.sum(),
        )

    def aligned(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Logits ``(..., batch, positions, classes)``, and what they are of."""
        check_tensors(outputs=outputs, targets=targets)
        positions = targets.ndim - 1
        logits = outputs
        if self.classes == "first" and 0 < positions < outputs.ndim - 1:
            logits = outputs.movedim(-1 - positions, -1)
        dims = targets.ndim
        fits = 0 < dims < logits.ndim and logits.shape[-1 - dims : -1] == targets.shape
        if targets.is_floating_point() or not fits:
            wanted = f"class indices for outputs {tuple(outputs.shape)}, classes {self.classes}"
            if positions == 0 and 2 <= outputs.ndim <= 3:
                wanted = f"{outputs.shape[-2]} class indices"
            raise ValueError(
                f"`targets` must be {wanted}, got {targets.dtype} {tuple(targets.shape)}."
            )
        if self.next_token:
            if positions != 1:
                raise ValueError(
                    f"`next_token` is for targets (batch, tokens), got {tuple(targets.shape)}."
                )
            return logits[..., :-1, :], targets[:, 1:]
        return logits, targets


def _check_range(targets: Tensor, classes: int) -> None:
    """Refuse classes that a network does not know, where that can be seen without waiting."""
    if _can_be_seen(targets) and targets.numel():
        low, high = (int(t) for t in targets.aminmax())
        if low < 0 or high >= classes:
            raise ValueError(
                f"`targets` must be between 0 and {classes - 1}, as the network has {classes} "
                f"outputs; they go from {low} to {high}."
            )


def _can_be_seen(targets: Tensor) -> bool:
    """Whether values are there without waiting, as they are not on devices or inside of a vmap."""
    return targets.device.type == "cpu" and not is_batchedtensor(targets)


class Bernoulli(Likelihood):
    r"""Outputs are one logit ``(..., batch, 1)``, targets are classes 0 and 1, ``(batch,)``.

    .. math:: \log p(y \mid z) = \log \sigma\big((2 y - 1)\, z\big)

    >>> Bernoulli().log_prob(torch.zeros(1, 1), torch.tensor([1]))
    tensor([-0.6931])
    """

    def log_prob(self, outputs: Float[Tensor, "*lead batch 1"], targets: Tensor) -> Tensor:
        """Log-probability of every target, ``(..., batch)``."""
        check_tensors(outputs=outputs, targets=targets)
        if outputs.shape[-1] != 1 or targets.shape != outputs.shape[-2:-1]:
            raise ValueError(
                "`outputs` must be one logit for each target, got "
                f"{tuple(outputs.shape)} for targets {tuple(targets.shape)}."
            )
        if _can_be_seen(targets) and bool(((targets != 0) & (targets != 1)).any()):
            raise ValueError("`targets` must be 0 or 1.")
        signed = torch.where(targets == 1, 1, -1) * outputs[..., 0]
        return nn.functional.logsigmoid(signed)

    def predictive(self, outputs: Float[Tensor, "samples batch 1"]) -> Tensor:
        """Mean of the probabilities of several networks, of both classes, ``(batch, 2)``."""
        probability = outputs[..., 0].sigmoid().mean(0)
        return torch.stack([1 - probability, probability], -1)

    def curvature_root(self, outputs: Tensor) -> Tensor:
        """Root of p (1 - p)."""
        return torch.diag_embed((outputs.sigmoid() * (-outputs).sigmoid()).sqrt())


class GaussianPrediction(NamedTuple):
    r"""Mean and variance of a prediction. The variance has the parts of noise and of weights.

    .. math:: \mu = \tfrac1S \textstyle\sum_s \mu_s, \quad
        \text{noise} = \tfrac1S \sum_s \sigma_s^2, \quad
        \text{epistemic} = \tfrac1S \sum_s (\mu_s - \mu)^2

    >>> outputs = torch.tensor([[[1.0]], [[3.0]]])  # of two networks
    >>> prediction = Gaussian(std=2.0).predictive(outputs)
    >>> [round(part.item(), 4) for part in (*prediction, prediction.variance)]
    [2.0, 4.0, 1.0, 5.0]
    """

    mean: Tensor
    noise: Tensor
    epistemic: Tensor

    @property
    def variance(self) -> Tensor:
        """Of a new target: the sum of both parts."""
        return self.noise + self.epistemic


class Gaussian(Likelihood):
    r"""Outputs are means ``(..., batch, targets)``, or means and raw scales side by side.

    .. math:: \log p(y \mid \mu, \sigma) = -\textstyle\sum_t
        \Big(\tfrac12 (y_t - \mu_t)^2 / \sigma_t^2 + \log \sigma_t + \tfrac12 \log 2 \pi\Big)

    Args:
        noise: ``"fixed"`` standard deviation; ``"learned"``, one parameter for each target;
            ``"correlated"``, a whole covariance of the targets, learned as the regression of the
            error of each on those before it; ``"heteroscedastic"``, the second half of the
            outputs, through a softplus.
        std: the standard deviation, or where learning it starts.
        targets: how many there are, for ``"learned"`` and ``"correlated"``.
        least: added to heteroscedastic standard deviations.

    >>> Gaussian(std=2.0).log_prob(torch.zeros(1, 1), torch.zeros(1, 1))
    tensor([-1.6121])
    """

    def __init__(
        self, noise: Noise = "fixed", std: float = 1.0, targets: int = 1, least: float = 1e-3
    ) -> None:
        super().__init__()
        if noise not in get_args(Noise):
            raise ValueError(f"`noise` must be one of {', '.join(get_args(Noise))}, got {noise!r}.")
        check_positive("std", std)
        check_positive("least", least)
        check_count("targets", targets)
        self.noise, self.least = noise, least
        learns = noise in ("learned", "correlated")
        log_std = torch.full((targets if learns else 1,), math.log(std))
        self.log_std = nn.Parameter(log_std, requires_grad=learns)
        if noise == "correlated":
            self.regression = nn.Parameter(torch.zeros(targets, targets))

    def extra_repr(self) -> str:
        """The options that ``print`` shows in brackets."""
        return self.noise

    @property
    def whitening(self) -> Tensor | None:
        """The matrix that makes correlated errors independent, each of variance one."""
        if self.noise != "correlated":
            return None
        rows, log_std = at_least_single(self.regression), at_least_single(self.log_std)
        return (torch.eye(len(rows)).to(rows) - rows.tril(-1)) * (-log_std).exp()[:, None]

    def moments(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of the targets."""
        learns = self.noise in ("learned", "correlated")
        if learns and len(self.log_std) != outputs.shape[-1]:
            raise ValueError(
                f"`outputs` has {outputs.shape[-1]} columns, the likelihood {len(self.log_std)} "
                "standard deviations: say `targets=...`."
            )
        if self.noise != "heteroscedastic":
            white = self.whitening
            if white is None:
                std = self.log_std.exp()
            else:
                one = torch.eye(len(white)).to(white)
                std = torch.linalg.solve_triangular(white, one, upper=False).norm(dim=-1)
            return outputs, std.to(outputs).expand_as(outputs)
        if outputs.shape[-1] % 2:
            raise ValueError(
                "`outputs` must be means and raw scales side by side, got an odd number, "
                f"{outputs.shape[-1]}."
            )
        mean, raw = outputs.chunk(2, -1)
        return mean, nn.functional.softplus(raw) + self.least

    def log_prob(self, outputs: Float[Tensor, "*lead batch outputs"], targets: Tensor) -> Tensor:
        """Log-density of every example's targets ``(batch, targets)``, ``(..., batch)``."""
        check_tensors(outputs=outputs, targets=targets)
        mean, std = self.moments(outputs)
        if targets.shape != mean.shape[-2:]:
            raise ValueError(
                f"`targets` must have shape {tuple(mean.shape[-2:])}, got {tuple(targets.shape)}"
                + (": add a dimension, `targets[:, None]`." if targets.ndim == 1 else ".")
            )
        white = self.whitening
        if white is None:
            z, log_scale = (targets - mean) / std, std.log()
        else:
            errors = at_least_single(targets - mean)
            z, log_scale = errors @ white.mT.to(errors), self.log_std.to(errors)
        return -(z.square() / 2 + log_scale + _LOG_2PI / 2).sum(-1)

    def predictive(self, outputs: Float[Tensor, "samples batch outputs"]) -> GaussianPrediction:
        """Moments of the mixture of several networks: mean noise, and variance of means."""
        mean, std = self.moments(outputs)
        return GaussianPrediction(mean.mean(0), std.square().mean(0), mean.var(0, correction=0))

    def curvature_root(self, outputs: Tensor) -> Tensor:
        """Roots of 1 / std^2 at a mean, and of 2 (dstd / draw)^2 / std^2 at a raw scale."""
        white, std = self.whitening, self.moments(outputs)[1]
        if white is not None:
            return white.mT.to(outputs).expand(len(outputs), -1, -1)
        if self.noise != "heteroscedastic":
            return torch.diag_embed(1 / std)
        slope = outputs.chunk(2, -1)[1].sigmoid()
        return torch.diag_embed(torch.cat([1 / std, 2**0.5 * slope / std], -1))


# ------------------------------------------------------------ weights
class IsotropicGaussianPrior(nn.Module):
    r"""Independent Gaussians around zero, the same for every weight: no permutation changes it.

    .. math:: \log p(w) = -\frac{\|w\|^2}{2 \sigma^2} - \frac{d}{2} \log(2 \pi \sigma^2)

    Args:
        std: of every weight.

    >>> IsotropicGaussianPrior(1.0).log_prob({"w": torch.zeros(2)})
    tensor(-1.8379)
    """

    def __init__(self, std: float = 1.0) -> None:
        super().__init__()
        check_positive("std", std)
        self.std = std

    def extra_repr(self) -> str:
        """The options that ``print`` shows in brackets."""
        return f"std={self.std:g}"

    def log_prob(
        self, params: Params, names: Sequence[str] | None = None, stacked: bool = False
    ) -> Tensor:
        """Log-density of a network, or of every network of a stack.

        Args:
            params: one network or a stack.
            names: what counts as weights, by default all floating tensors but BatchNorm statistics.
            stacked: whether the first dimension counts networks.
        """
        chosen = [n for n, t in params.items() if is_weight(n, t)] if names is None else names
        lead = 1 if stacked else 0
        rows = [params[name].reshape(*params[name].shape[:lead], -1) for name in chosen]
        squares = torch.stack([at_least_single(row).square().sum(-1) for row in rows]).sum(0)
        count = sum(row.shape[-1] for row in rows)
        return -squares / (2 * self.std**2) - count * (math.log(self.std) + _LOG_2PI / 2)

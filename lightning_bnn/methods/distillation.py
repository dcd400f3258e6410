"""Distillation: one network that predicts as a whole posterior does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_bnn.likelihoods import Bernoulli, Categorical, Dirichlet, Gaussian
from lightning_bnn.methods.method import Fit
from lightning_bnn.methods.networks import DeepEnsemble, Networks
from lightning_bnn.methods.run import Batch, Run
from weightsym.params import check_positive, widest

__all__ = ["Distillation"]


@dataclass(eq=False)
class Distillation(DeepEnsemble):
    r"""One network that is trained on the predictions of a posterior, the teacher.

    .. math:: L = -\frac{1}{B} \sum_i \mathbb{E}_{y \sim p_T(\cdot | x_i)} \log p(y | x_i, \omega)

    The mixture of the teacher's networks, :math:`p_T`, takes the place of the targets, so that
    inputs need no labels. A ``Categorical`` network learns the mean probabilities. A `Dirichlet`
    network also learns how much of the entropy is due to disagreement, so that it has the mutual
    information of the teacher. A heteroscedastic `Gaussian` learns mean and variance.

    Args:
        teacher: the fitted module of the posterior. Its ``eval_samples`` networks predict every
            batch. It is not part of checkpoints, and only needed for training.
        softening: temperature of both softmaxes in the loss of a ``Categorical`` or ``Bernoulli``
            network.

    References:
        | Distilling the Knowledge in a Neural Network (Hinton, Vinyals and Dean, 2015)
        | https://arxiv.org/abs/1503.02531
        | Ensemble Distribution Distillation (Malinin, Mlodozeniec and Gales, 2020)
        | https://arxiv.org/abs/1905.00076

    >>> import torch
    >>> from lightning_bnn import methods, params
    >>> from lightning_bnn.models import mlp
    >>> from lightning_bnn.modules import DeepEnsemble
    >>> net, x = mlp(2, [8], 3), torch.randn(50, 2)
    >>> teacher = DeepEnsemble(net, members=5)
    >>> method, run = methods.Distillation(teacher=teacher), methods.Run(net)
    >>> state, batch = method.init(net, params.populate(net, 1)), methods.Batch((x,), x[:, 0])
    >>> optimizer = torch.optim.Adam(state.parameters(), 0.05)
    >>> for _ in range(100):
    ...     optimizer.zero_grad()
    ...     method.losses(state, batch, run)["loss"].sum().backward()
    ...     optimizer.step()
    >>> probs = params.apply(net, state.stack(), x).softmax(-1)[0]
    >>> bool((probs - teacher(x)).abs().mean() < 0.05)
    True
    """

    teacher: nn.Module | None = None
    softening: float = 1.0

    needs_targets = False
    unfitted = "its network has not learned from the teacher"

    def __post_init__(self) -> None:
        check_positive("softening", self.softening)
        if self.teacher is not None and not hasattr(self.teacher, "outputs"):
            raise ValueError(
                "`teacher` must be a fitted module of lightning_bnn.modules, got a "
                f"{type(self.teacher).__name__}."
            )
        super().__post_init__()

    def configure_optimizer(self, state: Networks, optimizer: Any, run: Run, *fit: Any) -> Any:
        """Check that network and teacher predict the same kind of targets."""
        _check_kinds(run.likelihood, self._teacher().likelihood, self.softening)
        return super().configure_optimizer(state, optimizer, run, *fit)

    def before_fit(self, state: Networks, fit: Fit, run: Run) -> None:
        """Draw the networks of the teacher, for all batches."""
        super().before_fit(state, fit, run)
        self._teacher().to(next(state.parameters()).device).begin_predicting()

    def after_fit(self, state: Networks, run: Run) -> None:
        """Release them."""
        self._teacher().end_predicting()

    def losses(self, state: Networks, batch: Batch, run: Run) -> dict[str, Tensor]:
        """Return the cross-entropy to the teacher, with the prior's share per example."""
        targets = self.targets(batch)
        imitation = Imitation(run.likelihood, self.softening)
        quiet = Run(run.network, imitation, run.num_data, run.chunk_size)
        moments = Batch(batch.inputs, targets, batch.per_member, batch.number)
        losses = super().losses(state, moments, quiet)
        run.evaluated += quiet.evaluated
        return losses

    @torch.no_grad()
    def targets(self, batch: Batch) -> Tensor:
        """Return what the teacher says of every example, see `moments_of`."""
        teacher: Any = self._teacher()
        inputs = batch.inputs
        device = next(x.device for x in inputs if isinstance(x, Tensor))
        if teacher.device != device:
            teacher.to(device)
        if not batch.per_member:
            return moments_of(teacher.likelihood, teacher.outputs(inputs), self.softening)
        flat = tuple(x.flatten(0, 1) if isinstance(x, Tensor) else x for x in inputs)
        rows = moments_of(teacher.likelihood, teacher.outputs(flat), self.softening)
        return rows.unflatten(0, batch.targets.shape[:2])

    def _teacher(self) -> Any:
        if self.teacher is None:
            raise ValueError("`teacher` is missing: pass the fitted module of a posterior.")
        return self.teacher


def _check_kinds(likelihood: Any, of_teacher: Any, softening: float) -> None:
    kinds = (Categorical, Bernoulli, Gaussian)
    if not any(isinstance(likelihood, k) and isinstance(of_teacher, k) for k in kinds):
        raise ValueError(
            f"A network with the likelihood {type(likelihood).__name__} cannot learn from a "
            f"teacher with {type(of_teacher).__name__}: both must be Categorical, Bernoulli or "
            "Gaussian."
        )
    if softening != 1 and isinstance(likelihood, Gaussian | Dirichlet):
        raise ValueError(
            f"`softening` applies to Categorical and Bernoulli, not {type(likelihood).__name__}."
        )


# ------------------------------------------------------------ what is learned
def moments_of(likelihood: Any, outputs: Tensor, softening: float = 1.0) -> Tensor:
    r"""Return the statistics of the teachers' outputs that determine a student's loss.

    For numbers these are mean and variance of the mixture; for classes its probabilities and, last,
    the mutual information between class and network.

    Args:
        likelihood: of the teacher.
        outputs: of its networks, ``(networks, examples, ...)``.
        softening: temperature of the softmax.

    >>> moments_of(Gaussian(std=2.0), torch.tensor([[[1.0]], [[3.0]]]))
    tensor([[2., 5.]])
    >>> moments_of(Categorical(), torch.tensor([[[99.0, 0.0]], [[0.0, 99.0]]]))  # log 2
    tensor([[0.5000, 0.5000, 0.6931]])
    """
    if isinstance(likelihood, Gaussian):
        prediction = likelihood.predictive(outputs)
        return torch.cat([prediction.mean, prediction.variance], -1)
    if isinstance(likelihood, Bernoulli):
        return (outputs / softening).sigmoid().mean(0)
    logits = _classes_last(likelihood, outputs) / softening
    entropy = likelihood.class_entropy(logits).mean(0)
    probs = logits.softmax(-1).mean(0)
    information = (torch.special.entr(probs).sum(-1) - entropy).clamp_min(0)
    return torch.cat([probs, information[..., None]], -1)


def _classes_last(likelihood: Categorical, outputs: Tensor) -> Tensor:
    return outputs if likelihood.classes == "last" else outputs.movedim(2, -1)


class Imitation(nn.Module):
    """Expected log-densities of a teacher's targets, as a likelihood.

    Args:
        likelihood: of the network that learns.
        softening: temperature of the softmax.

    >>> imitation = Imitation(Gaussian(), 1.0)  # of a mean and a variance of two
    >>> imitation.log_prob(torch.zeros(1, 1), torch.tensor([[0.0, 2.0]]))
    tensor([-1.9189])
    """

    def __init__(self, likelihood: Any, softening: float) -> None:
        super().__init__()
        self.likelihood, self.softening = likelihood, softening

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the expected log-density for every example, ``(..., batch)``.

        Args:
            outputs: of the network that learns.
            targets: as `moments_of` returns them.
        """
        likelihood, softening = self.likelihood, self.softening
        if isinstance(likelihood, Gaussian):
            mean, variance = targets.chunk(2, -1)
            spread = variance / likelihood.moments(outputs)[1].square()
            return likelihood.log_prob(outputs, mean) - spread.sum(-1) / 2
        if isinstance(likelihood, Bernoulli):
            logits = outputs / softening
            logs = targets * F.logsigmoid(logits) + (1 - targets) * F.logsigmoid(-logits)
            return softening**2 * logs[..., 0]
        logits = _classes_last(likelihood, outputs) / softening
        probs, information = targets[..., :-1], targets[..., -1]
        logs = softening**2 * (probs * logits.log_softmax(-1)).sum(-1)
        if isinstance(likelihood, Dirichlet):
            logs = logs + _log_share(likelihood, logits, probs, information)
        return logs.flatten(2 - targets.ndim).sum(-1) if targets.ndim > 2 else logs


def _log_share(likelihood: Dirichlet, logits: Tensor, probs: Tensor, information: Tensor) -> Tensor:
    r"""Cross-entropy of the share of the entropy that is mutual information, times the entropy.

    .. math:: I_T \log \tfrac{I}{H} + (H_T - I_T) \log\big(1 - \tfrac{I}{H}\big)

    It is largest where both shares are equal, and moves the concentration alone.
    """
    logits = logits.to(widest(logits.device))
    mean = logits.log_softmax(-1).detach()
    alone = mean + logits.logsumexp(-1, keepdim=True)
    entropy = torch.special.entr(mean.exp()).sum(-1)
    share = 1 - likelihood.class_entropy(alone) / entropy.clamp_min(torch.finfo(mean.dtype).tiny)
    share = share.clamp(1e-9, 1 - 1e-9)
    remainder = (torch.special.entr(probs).sum(-1) - information).clamp_min(0)
    return (information * share.log() + remainder * (-share).log1p()).to(probs.dtype)

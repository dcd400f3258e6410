"""Evidence on a posterior: the posterior, examples, and what was seen while it was trained."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_bnn.evaluation.draws import predictor_of
from lightning_bnn.likelihoods import Categorical, Gaussian
from lightning_bnn.metrics.convergence import LEAST
from lightning_bnn.metrics.gaussian_mixture import log_mean_exp
from lightning_bnn.posteriors import Posterior
from lightning_bnn.posteriors.sources import network_of
from lightning_bnn.predictions import ClassPredictions, Predictions, kind_of
from weightsym import params as P
from weightsym.params import Params, first_line, keyed_generator

_TIMES, _INPUTS = 100, 64
"""Networks of a chain, and examples for them, at most."""


class NotPossible(Exception):
    """Raised where a check cannot be made, with a message that says why, after a colon.

    >>> from lightning_bnn.doctor import Evidence
    >>> from lightning_bnn.likelihoods import Categorical
    >>> evidence = Evidence(nn.Linear(2, 3), Categorical(), [], [])
    >>> try:
    ...     evidence.on_held_out
    ... except NotPossible as reason:
    ...     print(reason)
    there are no validation data
    """


class Examples(NamedTuple):
    """Inputs as the network takes them, and targets.

    >>> examples = Examples((torch.zeros(8, 2),), torch.zeros(8))
    >>> len(examples.inputs), len(examples.targets)
    (1, 8)
    """

    inputs: tuple[Any, ...]
    targets: Tensor


@dataclass(frozen=True)
class Settings:
    """The settings of a run, as far as they are known.

    Attributes:
        num_data: the number of training examples that the objective assumes.
        seen: the number of training examples that there are.
        temperature: of the posterior.
        kl_weight: factor of the KL term.
        prior_std: of a Gaussian prior.
        weight_decay: of the optimizer.
        sampled: whether the networks are draws of chains.
        wanted_energy_variance: per weight, that microcanonical chains aim at.

    >>> from weightsym import params as P
    >>> from lightning_bnn.doctor import Evidence, examine
    >>> from lightning_bnn.likelihoods import Categorical
    >>> from lightning_bnn.posteriors import Empirical
    >>> net = nn.Linear(2, 3)
    >>> modes = [Empirical(P.populate(net, 1))]
    >>> settings = Settings(prior_std=1.0, weight_decay=0.01)
    >>> report = examine(Evidence(net, Categorical(), modes, modes, settings=settings))
    >>> "not_the_posterior_of_bayes" in report.names()
    True
    """

    num_data: int | None = None
    seen: int | None = None
    temperature: float = 1.0
    kl_weight: float = 1.0
    prior_std: float | None = None
    weight_decay: float = 0.0
    sampled: bool = False
    wanted_energy_variance: float | None = None


@dataclass
class Evidence:
    """A posterior, examples and curves of its training, and results that several checks share.

    Attributes:
        network: gives the computation.
        likelihood: what outputs say about targets.
        modes: to draw weights from.
        predictors: for each mode, what predicts as it does.
        training: some training examples.
        held_out: some that were not trained on.
        settings: of the run.
        curves: numbers of every epoch: ``loss``, ``kinetic_temperature``, ``acceptance``,
            ``energy_variance``.
        chains: networks of chains in order, ``(chains, times, ...)``; empty if there are none.
        left_out: number of diverged members that were left out.
        draws: number of networks of each mode that predict.
        alone: whether this is one trained network rather than a posterior.

    >>> from weightsym import params as P
    >>> from lightning_bnn.likelihoods import Categorical
    >>> from lightning_bnn.models import mlp
    >>> from lightning_bnn.posteriors import Empirical
    >>> net, x = mlp(2, [8], 3), torch.randn(50, 2)
    >>> modes = [Empirical(P.populate(net, 1)) for _ in range(4)]
    >>> held_out = Examples((x,), torch.randint(3, (50,)))
    >>> evidence = Evidence(net, Categorical(), modes, modes, held_out=held_out)
    >>> evidence.classes, len(evidence.on_held_out), evidence.on_held_out[0].shape
    (True, 4, torch.Size([1, 50, 3]))
    """

    network: nn.Module
    likelihood: nn.Module
    modes: Sequence[Posterior]
    predictors: Sequence[Posterior]
    training: Examples | None = None
    held_out: Examples | None = None
    settings: Settings = field(default_factory=Settings)
    curves: Mapping[str, Sequence[float]] = field(default_factory=dict)
    chains: Params = field(default_factory=dict)
    left_out: int = 0
    draws: int = 20
    alone: bool = False

    @classmethod
    def of(
        cls,
        source: Any,
        network: nn.Module | None = None,
        likelihood: nn.Module | None = None,
        **facts: Any,
    ) -> Evidence:
        """Collect what is known of a list of modules, or of whatever `Posterior.of` takes.

        Args:
            source: holds the networks.
            network: a module of their kind, by default the first.
            likelihood: what outputs say about targets, by default `Categorical`.
            **facts: other fields, such as ``held_out``.
        """
        modes = Posterior.of(source, network).modes()
        alone = len(modes) == 1 and getattr(modes[0], "size", 0) == 1
        network = network or network_of([source])
        return cls(network, likelihood or Categorical(), modes, modes, **{"alone": alone, **facts})

    def training_examples(self) -> Examples:
        """Return the training examples, without which a check is not possible."""
        if self.training is None:
            raise NotPossible("no training data were seen")
        return self.training

    def held_out_examples(self) -> Examples:
        """Return the held-out examples, without which a check is not possible."""
        if self.held_out is None:
            raise NotPossible("there are no validation data")
        return self.held_out

    def at_one_position(self) -> Evidence:
        """Reduce every example to one random position, since others would say the same.

        Examples with a single class stay as they are.
        """
        likelihood = self.likelihood
        examples = [e for e in (self.training, self.held_out) if e is not None]
        if not isinstance(likelihood, Categorical) or all(e.targets.ndim == 1 for e in examples):
            return self
        network = copy.copy(self.network)  # of the same weights
        network.forward = partial(_forward_at, network.forward, likelihood)
        training = _one_of_each(self.training, likelihood)
        held_out = _one_of_each(self.held_out, likelihood)
        return replace(
            self, network=network, likelihood=Categorical(), training=training, held_out=held_out
        )

    @cached_property
    def classes(self) -> bool:
        """True if the targets are classes."""
        return kind_of(self.likelihood) is ClassPredictions

    @property
    def class_count(self) -> int | None:
        """The number of classes, two for a single logit, or None for numbers."""
        outputs = self.on_training if self.held_out is None else self.on_held_out
        return max(2, outputs[0].shape[-1]) if self.classes else None

    @cached_property
    def numbers(self) -> bool:
        """True if the targets are numbers with Gaussian noise."""
        return isinstance(self.likelihood, Gaussian)

    @cached_property
    def on_held_out(self) -> list[Tensor]:
        """Outputs of the networks of every mode, ``(networks, examples, outputs)``, in float64."""
        return self._outputs(self.held_out_examples())

    @cached_property
    def on_training(self) -> list[Tensor]:
        """The same for training examples."""
        return self._outputs(self.training_examples())

    @cached_property
    def finite_chains(self) -> Params:
        """The networks of chains that are finite, at most a hundred of each chain."""
        chains = self.chains
        times = next(iter(chains.values())).shape[1] if chains else 0
        if times < LEAST:
            raise NotPossible(f"there are no chains with at least {LEAST} networks")
        finite = torch.stack([t.flatten(1).isfinite().all(1) for t in chains.values()]).all(0)
        if not bool(finite.any()):
            raise NotPossible("no chain is finite")
        rows = torch.linspace(0, times - 1, min(times, _TIMES)).round().long()
        return {name: t[finite.to(t.device)][:, rows.to(t.device)] for name, t in chains.items()}

    @cached_property
    def on_chains(self) -> tuple[Tensor, Tensor]:
        """Outputs ``(chains, times, examples, ...)`` of these for some examples, and targets."""
        examples, chains = self.held_out or self.training_examples(), self.finite_chains
        shape = next(iter(chains.values())).shape[:2]
        inputs = tuple(x[:_INPUTS] if isinstance(x, Tensor) else x for x in examples.inputs)
        with torch.no_grad():
            stack = {n: t.flatten(0, 1) for n, t in chains.items()}
            outputs = P.apply(self.network, stack, *inputs)
        return outputs.double().unflatten(0, shape), examples.targets[:_INPUTS]

    def log_density(self, outputs: Sequence[Tensor], targets: Tensor) -> Tensor:
        """Log-density of every target under the mean prediction of all modes."""
        return log_mean_exp(self.log_densities(outputs, targets))

    def log_densities(self, outputs: Sequence[Tensor], targets: Tensor) -> Tensor:
        """The same for the mean prediction of each mode, ``(modes, examples)``."""
        modes = [Predictions.of(self.likelihood, o, targets) for o in outputs]
        return torch.stack([mode.log_densities() for mode in modes])

    def together(self, outputs: Sequence[Tensor], targets: Tensor) -> Any:
        """The prediction of all modes: mean probabilities, or one Gaussian with their moments."""
        modes = [Predictions.of(self.likelihood, o, targets).matched() for o in outputs]
        return modes[0].stacked(modes).mean().matched()

    def gain(self, outputs: Sequence[Tensor], examples: Examples) -> Tensor:
        """Log-density of every example minus that of the best constant prediction, in nats."""
        training = (self.training or examples).targets
        constant = constant_log_density(training, examples.targets, self.class_count)
        return self.log_density(outputs, examples.targets) - constant

    @torch.no_grad()
    def _outputs(self, examples: Examples) -> list[Tensor]:
        every = []
        for number, mode in enumerate(self.predictors):
            predict = predictor_of(mode, self.draws, "doctor", number)
            try:
                outputs = predict(self.network, *examples.inputs)
            except (RuntimeError, TypeError, IndexError) as error:  # of the network's own forward
                reason = first_line(error)
                raise NotPossible(f"the network cannot take these inputs: {reason}") from None
            if not isinstance(outputs, Tensor) or outputs.ndim < 2:
                raise NotPossible("the network's outputs are not one tensor")
            every.append(outputs.double())
        return every


def _one_of_each(examples: Examples | None, likelihood: Categorical) -> Examples | None:
    """Add a random position that counts to the inputs of every example, and select its class."""
    if examples is None:
        return None
    targets = examples.targets[:, 1:] if likelihood.next_token else examples.targets
    targets = targets.flatten(1)
    chances = torch.rand(targets.shape, generator=keyed_generator("positions")).to(targets.device)
    if likelihood.ignore_index is not None:
        chances[targets == likelihood.ignore_index] = -1
    best, position = chances.max(1)
    inputs = (*examples.inputs, position)
    return Examples(
        tuple(x[best >= 0] if isinstance(x, Tensor) else x for x in inputs),
        targets.gather(1, position[:, None])[best >= 0, 0],
    )


def _forward_at(forward: Callable[..., Any], likelihood: Categorical, *inputs: Any) -> Tensor:
    """Outputs at one position of every example, whose number is the last input."""
    outputs, position = forward(*inputs[:-1]), inputs[-1]
    logits = likelihood.every_row(getattr(outputs, "logits", outputs)[None])[0]
    every = logits.unflatten(0, (len(position), -1))
    return every[torch.arange(len(position), device=position.device), position]


def constant_log_density(training_targets: Tensor, targets: Tensor, classes: int | None) -> Tensor:
    """Log-density of every target under the best constant prediction.

    Args:
        training_targets: the ones that it is fitted to.
        targets: the ones that are predicted.
        classes: how many, each counted once more than it was seen; None for numbers, which are
            taken for Gaussian.

    >>> constant_log_density(torch.tensor([0, 0]), torch.tensor([0, 1]), 2).exp()
    tensor([0.7500, 0.2500], dtype=torch.float64)
    """
    if classes is not None:
        labels = training_targets.long().flatten()
        counts = torch.bincount(labels, minlength=classes)[:classes].double() + 1
        return (counts / counts.sum()).log()[targets.long()]
    mean, std = training_targets.double().mean(0), training_targets.double().std(0).clamp_min(1e-12)
    logs = torch.distributions.Normal(mean, std).log_prob(targets.double())
    return logs.reshape(len(targets), -1).sum(1)

"""Monte Carlo dropout."""

from __future__ import annotations

import copy
from typing import Any, get_args

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_bnn.arguments import share
from lightning_bnn.metrics.validation import option
from lightning_bnn.modules.ensemble import DeepEnsemble
from lightning_bnn.modules.predictive import Predictive
from lightning_bnn.modules.sharing import Part, even_share
from lightning_bnn.modules.templates import has_dropout
from lightning_bnn.posteriors import Dropout
from lightning_bnn.posteriors.dropout import Layers
from lightning_bnn.posteriors.dropout_sites import dropout_sites
from lightning_bnn.randomness import keyed_generator

__all__ = ["LinearAfterDropout", "MCDropout", "with_dropout"]


class MCDropout(DeepEnsemble):
    """A network with dropout that goes on when it predicts; with members, several such networks.

    Dropout is that of the network, modules and functions alike, or it is put into it with ``p``.
    Nothing else is active in evaluation: BatchNorm uses its statistics.

    Args:
        network: gives the computation; it is copied, not changed.
        members: how many networks.
        p: put dropout of this rate before linear layers of a network that has none.
        layers: where dropout is active in evaluation, and where ``p`` puts it: before ``"all"``
            linear layers but the first layer of the network, or before the ``"last"``.
        prior_std: standard deviation of a Gaussian prior over all weights; None leaves
            regularisation to the optimizer's weight decay.
        **kwargs: what every module takes, see `BayesianModule`.

    References:
        | Dropout as a Bayesian Approximation (Gal and Ghahramani, 2016)
        | https://arxiv.org/abs/1506.02142
    """

    takes_samplers = False

    def __init__(
        self,
        network: nn.Module,
        members: int = 1,
        p: float | None = None,
        layers: Layers = "all",
        prior_std: float | None = None,
        **kwargs: Any,
    ) -> None:
        option("layers", layers, get_args(Layers))
        given = network if p is None else with_dropout(network, p, layers)
        super().__init__(given, members=members, prior_std=prior_std, **kwargs)
        self.layers = layers
        if any(isinstance(m, nn.RNNBase) and m.dropout > 0 for m in self.template.modules()):
            rank_zero_warn("Dropout inside recurrent layers stays off in predictions.")

    @property
    def judged_samples(self) -> int:
        """How often dropout is drawn."""
        return self.eval_samples

    def posterior(self) -> Dropout:
        """The members, with units dropped; an example of the inputs must be known."""
        example = self.example()
        if not example:
            raise ValueError(
                "Which weights read the units that are dropped is seen on an example of the "
                "inputs: train first, or set `example_input_array`."
            )
        own = next(self.template.parameters(), torch.empty(0))
        inputs = [_like(x, own) if isinstance(x, Tensor) else x for x in example]
        sites = dropout_sites(self.template, inputs)
        if not sites:
            raise ValueError(
                f"`network` {type(self.template).__name__} has no dropout: pass `p` to put it "
                "before its linear layers."
            )
        return Dropout(self._members().networks, sites, self.layers)

    def judged_posterior(self) -> Dropout:
        """The members; what is dropped is seen when they predict."""
        return Dropout(self._members().networks, layers=self.layers)

    def part_of_predictions(self, before: int, total: int) -> Part:
        """Draws are spread over members evenly."""
        here = int(self._well().sum())
        count = even_share(self.judged_samples, before, here, total)
        return Part(
            self.judged_posterior().predictor(count, None, self.chunk_size) if count else None
        )

    def predictive(self, samples: int | None = None) -> Predictive:
        """Samples of weights as a plain module; they drop the same units for all inputs."""
        count = self.judged_samples if samples is None else samples
        networks = self.posterior().sample(count, keyed_generator(self.seed, "judged"))
        return Predictive(self.template, networks, self.likelihood)


def _like(value: Tensor, own: Tensor) -> Tensor:
    """An input in the device and the precision of the template."""
    return value.to(own if value.is_floating_point() else own.device)


class LinearAfterDropout(nn.Linear):
    """A linear layer that drops some of its inputs in training.

    Args:
        *args: of the linear layer.
        p: how many.
        **kwargs: of the linear layer.
    """

    def __init__(self, *args: Any, p: float = 0.5, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.p = p

    def forward(self, input: Tensor) -> Tensor:
        """Drop, then multiply."""
        return super().forward(F.dropout(input, self.p, self.training))

    def extra_repr(self) -> str:
        """Shown by ``print``."""
        return f"{super().extra_repr()}, p={self.p:g}"


def with_dropout(network: nn.Module, p: float, layers: Layers) -> nn.Module:
    """A copy of a network with dropout before its linear layers; its names stay.

    Args:
        network: without dropout.
        p: the rate.
        layers: ``"all"`` but a first layer of the network, or the ``"last"``.
    """
    share("p", p)
    result = copy.deepcopy(network)
    if has_dropout(result):
        raise ValueError("`network` has dropout: leave `p` out, or take a network without it.")
    weighted = [name for name, m in result.named_modules() if hasattr(m, "weight")]
    linear = [n for n in weighted if type(result.get_submodule(n)) is nn.Linear]
    chosen = linear[-1:] if layers == "last" else [n for n in linear if n != weighted[0]]
    if not chosen or chosen == [""]:
        raise ValueError("`network` has no linear layer that dropout could come before.")
    for name in chosen:
        old = result.get_submodule(name)
        assert isinstance(old, nn.Linear)
        new = LinearAfterDropout(old.in_features, old.out_features, old.bias is not None, p=p)
        new.weight, new.bias = old.weight, old.bias
        path, _, leaf = name.rpartition(".")
        setattr(result.get_submodule(path), leaf, new.train(old.training))
    return result

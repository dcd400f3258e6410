"""Monte Carlo dropout: a network whose dropout stays active in predictions."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

from torch import Tensor, nn
from torch.nn import functional as F

from lightning_bnn.methods.method import AS_IT_IS, Fit, Purpose
from lightning_bnn.methods.networks import Networks, PenalisedTraining
from lightning_bnn.methods.run import Run
from lightning_bnn.metrics.validation import check_choice
from lightning_bnn.posteriors import Dropout
from lightning_bnn.posteriors.dropout import DropoutSite, Layers, dropout_sites, drops_units
from weightsym.params import Params, check_fraction

__all__ = ["MCDropout"]


class DroppedNetworks(Networks):
    """Networks, and their dropout sites, once an example of the inputs is known."""

    sites: list[DropoutSite] | None = None


@dataclass(eq=False)
class MCDropout(PenalisedTraining):
    r"""A network whose dropout stays active in predictions, or several of them.

    .. math:: p(y | x) = \frac1S \sum_s p(y | x, \omega, z_s), \quad z_s \sim \text{dropout}

    The dropout is that of the network, modules and functions alike, or is inserted with ``p``.
    Nothing else is active in evaluation: BatchNorm uses its stored statistics.

    Args:
        p: rate of dropout to insert before the linear layers of a network without dropout, except
            before its first layer, so that inputs are not dropped.
        layers: position of the dropout that is active in evaluation, or inserted with ``p``: before
            ``"all"`` linear layers but the first layer of the network, or before the ``"last"``.

    References:
        | Dropout as a Bayesian Approximation (Gal and Ghahramani, 2016)
        | https://arxiv.org/abs/1506.02142

    >>> import torch
    >>> from lightning_bnn import methods, params
    >>> layers = torch.nn.Linear(2, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 2)
    >>> net, x = torch.nn.Sequential(*layers), torch.randn(5, 2)
    >>> method, run = methods.MCDropout(), methods.Run(net, rows=(x,))
    >>> state = method.init(net, params.populate(net, members=2))
    >>> columns = method.posterior(state, run).sample(10)["2.weight"].abs().sum(1)
    >>> columns.shape, bool((columns == 0).any())
    (torch.Size([10, 8]), True)
    """

    p: float | None = None
    layers: Layers = "all"

    def __post_init__(self) -> None:
        if self.p is not None:
            check_fraction("p", self.p)
        check_choice("layers", self.layers, get_args(Layers))
        super().__post_init__()

    def prepare(self, network: nn.Module) -> nn.Module:
        return network if self.p is None else with_dropout(network, self.p, self.layers)

    def before_fit(self, state: DroppedNetworks, fit: Fit, run: Run) -> None:
        if any(isinstance(m, nn.RNNBase) and m.dropout > 0 for m in run.network.modules()):
            run.warn("Dropout inside recurrent layers stays off in predictions.")

    def init(self, network: nn.Module, stack: Params) -> DroppedNetworks:
        return DroppedNetworks(network, stack, self.max_loss)

    def posterior(self, state: DroppedNetworks, run: Run, purpose: Purpose = AS_IT_IS) -> Dropout:
        """Return the members, with dropout. Predictions find the dropout sites themselves."""
        if state.sites is None and not purpose.predicts:
            state.sites = _sites(run)
        return Dropout(state.members().networks, state.sites, self.layers)


def _sites(run: Run) -> list[DropoutSite]:
    """Find the dropped units, by an example of the inputs."""
    example = run.example()
    if not example:
        raise ValueError(
            "An example of the inputs is needed to find the weights that read dropped "
            "units: train first, or set `example_input_array`."
        )
    return dropout_sites(run.network, example)


def has_dropout(network: nn.Module, example: Sequence[Any] = ()) -> bool:
    """Return whether modules or functions of a network drop units in training, on an example."""
    layers = (m for m in network.modules() if isinstance(m, nn.modules.dropout._DropoutNd))
    return any(layer.p > 0 for layer in layers) or (
        len(example) > 0 and drops_units(network, example)
    )


class LinearAfterDropout(nn.Linear):
    """A linear layer that drops some of its inputs in training.

    Args:
        *args: arguments of the linear layer.
        p: rate of dropout.
        **kwargs: arguments of the linear layer.
    """

    def __init__(self, *args: Any, p: float = 0.5, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.p = p

    def forward(self, input: Tensor) -> Tensor:
        """Drop some of the inputs in training, then apply the layer."""
        return super().forward(F.dropout(input, self.p, self.training))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, p={self.p:g}"


def with_dropout(network: nn.Module, p: float, layers: Layers) -> nn.Module:
    """Return a copy of a network, under its own names, with dropout before its linear layers.

    Args:
        network: without dropout.
        p: the rate.
        layers: ``"all"`` but the first layer of the network, or the ``"last"``.
    """
    check_fraction("p", p)
    result = copy.deepcopy(network)
    if has_dropout(result):
        raise ValueError("`network` has dropout: omit `p`, or pass a network without dropout.")
    weighted = [name for name, m in result.named_modules() if hasattr(m, "weight")]
    linear = [n for n in weighted if type(result.get_submodule(n)) is nn.Linear]
    chosen = linear[-1:] if layers == "last" else [n for n in linear if n != weighted[0]]
    if not chosen or chosen == [""]:
        raise ValueError("`network` has no linear layer to put dropout before.")
    for name in chosen:
        old = result.get_submodule(name)
        assert isinstance(old, nn.Linear)
        new = LinearAfterDropout(old.in_features, old.out_features, old.bias is not None, p=p)
        new.weight, new.bias = old.weight, old.bias
        path, _, leaf = name.rpartition(".")
        setattr(result.get_submodule(path), leaf, new.train(old.training))
    return result

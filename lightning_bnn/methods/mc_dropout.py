"""Monte Carlo dropout: a network with dropout that goes on when it predicts.

References:
    | Dropout as a Bayesian Approximation (Gal and Ghahramani, 2016)
    | https://arxiv.org/abs/1506.02142
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor, nn

from lightning_bnn.methods.batch import Batch
from lightning_bnn.methods.method import AS_IT_IS, Method, Purpose
from lightning_bnn.methods.networks import Networks, gaussian_prior, penalised_losses
from lightning_bnn.methods.run import Run
from lightning_bnn.metrics.validation import check_choice
from lightning_bnn.params import Params
from lightning_bnn.posteriors import Dropout
from lightning_bnn.posteriors.dropout import Layers
from lightning_bnn.posteriors.dropout_sites import DropoutSite, dropout_sites

__all__ = ["DroppedNetworks", "MCDropout"]


class DroppedNetworks(Networks):
    """Networks, and where they drop units, once an example of the inputs was seen."""

    sites: list[DropoutSite] | None = None


@dataclass(eq=False)
class MCDropout(Method):
    r"""Networks that drop units in training and in prediction; BatchNorm uses its statistics.

    .. math:: p(y | x) = \frac1S \sum_s p(y | x, \omega, z_s), \quad z_s \sim \text{dropout}

    Args:
        layers: where dropout is active in evaluation, and where ``p`` puts it: before ``"all"``
            linear layers but the first layer of the network, or before the ``"last"``.
        prior_std: standard deviation of a Gaussian prior over all weights; None leaves
            regularisation to the optimizer's weight decay.
        max_loss: members above it are left out, see `DeepEnsemble`.
        restarts: how often a member that has diverged begins anew, see `DeepEnsemble`.

    >>> import torch
    >>> from lightning_bnn import methods, params
    >>> layers = torch.nn.Linear(2, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 2)
    >>> net, x = torch.nn.Sequential(*layers), torch.randn(5, 2)
    >>> method, run = methods.MCDropout(), methods.Run(net, example=lambda: (x,))
    >>> state = method.init(net, params.populate(net, members=2))
    >>> columns = method.posterior(state, run).sample(10)["2.weight"].abs().sum(1)
    >>> columns.shape, bool((columns == 0).any())
    (torch.Size([10, 8]), True)
    """

    layers: Layers = "all"
    prior_std: float | None = None
    max_loss: float | None = None
    restarts: int = 0

    can_be_shared = True

    def __post_init__(self) -> None:
        check_choice("layers", self.layers, get_args(Layers))
        self.prior = gaussian_prior(self.prior_std)

    def init(self, network: nn.Module, stack: Params) -> DroppedNetworks:
        return DroppedNetworks(network, stack, self.max_loss, self.restarts)

    def losses(self, state: DroppedNetworks, batch: Batch, run: Run) -> dict[str, Tensor]:
        return penalised_losses(state, batch, run, self.prior)

    def posterior(self, state: DroppedNetworks, run: Run, purpose: Purpose = AS_IT_IS) -> Dropout:
        """The members, with units dropped; predictions themselves see what is dropped."""
        if state.sites is None and not purpose.predicts:
            state.sites = _sites(run)
        return Dropout(state.members().networks, state.sites, self.layers)


def _sites(run: Run) -> list[DropoutSite]:
    """Where an example of the inputs shows that units are dropped."""
    example = run.example()
    if not example:
        raise ValueError(
            "Which weights read the units that are dropped is seen on an example of the "
            "inputs: train first, or set `example_input_array`."
        )
    weight = next(run.network.parameters(), torch.empty(0))
    sites = dropout_sites(run.network, [_like(x, weight) for x in example])
    if not sites:
        raise ValueError(
            f"`network` {type(run.network).__name__} has no dropout: pass `p` to put it "
            "before its linear layers."
        )
    return sites


def _like(value: Any, weight: Tensor) -> Any:
    """An input on the device and in the precision of a weight."""
    if not isinstance(value, Tensor):
        return value
    return value.to(weight if value.is_floating_point() else weight.device)

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
from lightning_bnn.methods.method import Choice, Method
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

    Arguments are those of `lightning_bnn.modules.MCDropout`.

    >>> import torch
    >>> from lightning_bnn import methods, params
    >>> layers = torch.nn.Linear(2, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 2)
    >>> net, x = torch.nn.Sequential(*layers), torch.randn(5, 2)
    >>> method, run = methods.MCDropout(), methods.Run(net)
    >>> state = method.init(net, params.populate(net, members=2))
    >>> method.set_example(state, (x,), run)  # finds the weights that read what is dropped
    >>> columns = method.posterior(state).sample(10)["2.weight"].abs().sum(1)
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

    def set_example(self, state: DroppedNetworks, example: tuple[Any, ...], run: Run) -> None:
        weight = next(run.network.parameters(), torch.empty(0))
        inputs = [_like(x, weight) if isinstance(x, Tensor) else x for x in example]
        state.sites = dropout_sites(run.network, inputs)
        if not state.sites:
            raise ValueError(
                f"`network` {type(run.network).__name__} has no dropout: pass `p` to put it "
                "before its linear layers."
            )

    def posterior(self, state: DroppedNetworks) -> Dropout:
        """The members, with units dropped; an example of the inputs must have been seen."""
        if state.sites is None:
            raise ValueError(
                "Which weights read the units that are dropped is seen on an example of the "
                "inputs: train first, or set `example_input_array`."
            )
        return Dropout(state.members().networks, state.sites, self.layers)

    def judged(
        self, state: DroppedNetworks, choose: Choice = list, fitting: bool = False
    ) -> Dropout:
        """The members; what is dropped is seen when they predict."""
        return Dropout(state.members().networks, layers=self.layers)

    def exported(
        self, state: DroppedNetworks, choose: Choice = list, fitting: bool = False
    ) -> Dropout:
        """Samples of weights; they drop the same units for all inputs."""
        return self.posterior(state)


def _like(value: Tensor, weight: Tensor) -> Tensor:
    """An input on the device and in the precision of a weight."""
    return value.to(weight if value.is_floating_point() else weight.device)

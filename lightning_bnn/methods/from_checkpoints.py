"""A posterior made of networks that are already trained."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from lightning_bnn.bank import read_networks
from lightning_bnn.methods.method import AS_IT_IS, Method, Purpose, State
from lightning_bnn.methods.run import Batch, Run
from lightning_bnn.metrics.validation import check_choice
from lightning_bnn.posteriors import (
    DiagonalGaussian,
    Empirical,
    LowRankGaussian,
    Posterior,
)
from lightning_bnn.posteriors.empirical import mixture_of
from weightsym.params import Params, check_count, check_not_negative, keyed_generator

__all__ = ["FromCheckpoints"]

Kind = Literal["networks", "diagonal", "low_rank"]
NOTHING_TO_TRAIN = "FromCheckpoints has nothing to train: call `validate`, `test` or `predict`."


class Collected(State):
    """A fixed posterior."""

    def __init__(self, posterior: Posterior) -> None:
        super().__init__()
        self.collected = posterior

    def stack(self) -> Params:
        """Return the networks, or one draw of every mode."""
        if isinstance(self.collected, Empirical):
            return self.collected.networks
        draws = [mode.sample(1, keyed_generator("mode", k)) for k, mode in enumerate(self.modes())]
        return {name: torch.cat([draw[name] for draw in draws]) for name in draws[0]}

    def modes(self) -> list[Posterior]:
        """Return the Gaussian or the networks of each member."""
        return self.collected.modes()


@dataclass(eq=False, kw_only=True)
class FromCheckpoints(Method):
    """Posterior made of the networks of a bank or of a folder of checkpoints, without training.

    If a bank holds networks of several members of a module, each member has a Gaussian of its own.
    Networks drawn from a Gaussian get BatchNorm statistics from one pass over the training data.
    (`Laplace` with ``start_from`` fits its curvature without training, too.)

    Args:
        source: folder of a bank, folder of checkpoints, or one checkpoint.
        kind: ``"networks"`` for the networks themselves, ``"diagonal"`` for a Gaussian with their
            means and standard deviations, or ``"low_rank"`` for SWAG's Gaussian through a
            trajectory.
        last: number of networks to use, counted from the end.
        rank: number of deviations in the low-rank Gaussian, at most 20 by default.
        scale: multiplies its covariance.
        prefix: prefix of the network's names in checkpoints, such as ``"net."``.

    >>> import tempfile
    >>> from lightning_bnn import methods, params
    >>> from lightning_bnn.bank import CheckpointBank
    >>> from lightning_bnn.models import mlp
    >>> net, bank = mlp(2, [8], 3), CheckpointBank(tempfile.mkdtemp())
    >>> bank.extend(params.populate(net, 6), [{"member": m} for m in (0, 1, 0, 1, 0, 1)])
    >>> method = methods.FromCheckpoints(source=str(bank.path), kind="diagonal")
    >>> posterior = method.posterior(method.init(net, {}), methods.Run(net))
    >>> type(posterior).__name__, len(posterior.modes())
    ('Mixture', 2)
    """

    source: str
    kind: Kind = "networks"
    last: int | None = None
    rank: int | None = None
    scale: float = 1.0
    prefix: str | None = None

    trains = False
    refreshes_statistics = True

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, get_args(Kind))
        check_count("last", self.last, optional=True)
        check_count("rank", self.rank, 2, optional=True)
        check_not_negative("scale", self.scale)

    def prepare(self, network: nn.Module) -> nn.Module:
        """Return a copy of the network with the fixed weights of the source."""
        return copy.deepcopy(network)

    def init(self, network: nn.Module, stack: Params) -> Collected:
        networks, records = read_networks(self.source, network, self.last, self.prefix)
        chains = [record.get("member", 0) for record in records]
        if self.kind == "networks":
            return Collected(Empirical(networks, chains if len(set(chains)) > 1 else None))
        rows = [[k for k, c in enumerate(chains) if c == chain] for chain in sorted(set(chains))]
        modes = [self._gaussian({n: t[indices] for n, t in networks.items()}) for indices in rows]
        return Collected(mixture_of(modes))

    def _gaussian(self, stack: Params) -> Posterior:
        """Fit a Gaussian to the networks of one member."""
        if self.kind == "diagonal":
            return DiagonalGaussian.fit(stack)
        return LowRankGaussian.fit(stack, self.rank, self.scale)

    def losses(self, state: Collected, batch: Batch, run: Run) -> dict[str, Tensor]:
        raise ValueError(NOTHING_TO_TRAIN)

    def configure_optimizer(self, state: Collected, optimizer: Any, run: Run, *fit: Any) -> Any:
        raise ValueError(NOTHING_TO_TRAIN)

    def posterior(self, state: Collected, run: Run, purpose: Purpose = AS_IT_IS) -> Posterior:
        networks = state.collected
        if not isinstance(networks, Empirical):
            return networks
        rows = purpose.choose(list(range(networks.size)))
        stack = {name: t[rows] for name, t in networks.networks.items()}
        return Empirical(stack, [networks.chains[row] for row in rows])

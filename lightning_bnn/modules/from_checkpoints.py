"""A posterior out of networks that are trained already: to be validated, tested, predicted with."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Literal, get_args

from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn

from lightning_bnn import _compat
from lightning_bnn.arguments import count, not_negative
from lightning_bnn.bank import read_networks
from lightning_bnn.metrics.validation import option
from lightning_bnn.modules.refreshing import Refreshing
from lightning_bnn.params import Params
from lightning_bnn.posteriors import (
    DiagonalGaussian,
    Empirical,
    LowRankGaussian,
    Mixture,
    Posterior,
)

__all__ = ["FromCheckpoints"]

Kind = Literal["networks", "diagonal", "low_rank"]
_NOTHING_TO_TRAIN = "FromCheckpoints has nothing to train: validate, test or predict with it."


class FromCheckpoints(Refreshing):
    """The networks of a bank or of a folder of checkpoints as a posterior; nothing is trained.

    If a bank holds networks of several members of a module, each member has a Gaussian of its own.
    Networks that are drawn from a Gaussian get BatchNorm statistics from one pass over the training
    data. (`Laplace` with ``start_from`` fits its curvature without training, too.)

    Args:
        network: gives the computation; it is copied, not changed.
        source: folder of a bank, folder of checkpoints, or one checkpoint.
        kind: the ``"networks"`` themselves; a ``"diagonal"`` Gaussian with their means and standard
            deviations; or ``"low_rank"``, SWAG's Gaussian through a trajectory.
        last: only the last so many networks.
        rank: deviations of the low-rank Gaussian, by default 20 or all that there are.
        scale: multiplies its covariance.
        prefix: what stands before the names of the network in checkpoints, such as ``"net."``.
        likelihood: what the outputs say about targets, by default ``Categorical``.
        eval_samples: how many networks predict.
        chunk_size: networks that run at once, by default chosen by their size.
        seed: of the draws.
    """

    def __init__(
        self,
        network: nn.Module,
        source: str,
        kind: Kind = "networks",
        last: int | None = None,
        rank: int | None = None,
        scale: float = 1.0,
        prefix: str | None = None,
        likelihood: nn.Module | None = None,
        eval_samples: int = 20,
        chunk_size: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(network, likelihood, eval_samples, chunk_size, seed)
        ignore = () if _compat.made_by_cli() else ("network", "likelihood")
        self.save_hyperparameters(ignore=ignore, frame=inspect.currentframe())
        fits: dict[str, Callable[[Params], Posterior]] = {
            "diagonal": DiagonalGaussian.fit,
            "low_rank": lambda stack: LowRankGaussian.fit(stack, rank, scale),
        }
        option("kind", kind, get_args(Kind))
        for name, number, least in (("last", last, 1), ("rank", rank, 2)):
            if number is not None:
                count(name, number, least)
        not_negative("scale", scale)
        stack, records = read_networks(source, self.template, last, prefix)
        members = [record.get("member", 0) for record in records]
        self.kind = kind
        self.collected = self._fitted(stack, members, fits.get(kind))
        rank_zero_info(f"FromCheckpoints: {len(records)} networks of {source}.")

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """There is none."""
        raise ValueError(_NOTHING_TO_TRAIN)

    def configure_optimizers(self) -> None:
        """There is none."""
        raise ValueError(_NOTHING_TO_TRAIN)

    def _fitted(
        self, stack: Params, members: list[Any], fit: Callable[[Params], Posterior] | None
    ) -> Posterior:
        """One posterior, or a mixture of one for each member."""
        if fit is None:
            return Empirical(stack, members if len(set(members)) > 1 else None)
        if len(set(members)) == 1:
            return fit(stack)
        rows = [[k for k, m in enumerate(members) if m == own] for own in sorted(set(members))]
        return Mixture([fit({n: t[own] for n, t in stack.items()}) for own in rows])

    @property
    def judged_samples(self) -> int:
        """As many as are asked for; of networks, as many as there are."""
        if isinstance(self.collected, Empirical):
            return min(self.eval_samples, self.collected.size)
        return self.eval_samples

    def posterior(self) -> Posterior:
        """What the networks have become."""
        return self.collected

    def judged_posterior(self) -> Posterior:
        """Networks that were drawn get statistics of their own."""
        return self.collected if self.kind == "networks" else self.refreshed(self.collected)

"""A posterior out of networks that are trained already: to be validated, tested, predicted with."""

from __future__ import annotations

from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn

from lightning_bnn import methods
from lightning_bnn.arguments import check_count
from lightning_bnn.bank import read_networks
from lightning_bnn.methods.from_checkpoints import Kind
from lightning_bnn.modules.bayesian import Bayesian
from lightning_bnn.modules.templates import template_of

__all__ = ["FromCheckpoints"]


class FromCheckpoints(Bayesian):
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

    >>> import tempfile
    >>> from lightning_bnn import params as P
    >>> from lightning_bnn.bank import CheckpointBank
    >>> from lightning_bnn.models import mlp
    >>> net, bank = mlp(2, [8], 3), CheckpointBank(tempfile.mkdtemp())
    >>> bank.extend(P.populate(net, 6))
    >>> FromCheckpoints(net, str(bank.path), last=4).posterior().size
    4
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
        if last is not None:
            check_count("last", last)
        networks, records = read_networks(source, template_of(network), last, prefix)
        chains = [record.get("member", 0) for record in records]
        super().__init__(
            network=network,
            method=methods.FromCheckpoints(networks, chains, kind, rank, scale),
            likelihood=likelihood,
            eval_samples=eval_samples,
            chunk_size=chunk_size,
            seed=seed,
        )
        rank_zero_info(f"FromCheckpoints: {len(records)} networks of {source}.")

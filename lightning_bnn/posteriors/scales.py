"""Networks whose rows of some matrices are scaled by independent Gaussian numbers."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from lightning_bnn.named_tensors import NamedTensors
from lightning_bnn.posteriors.base import Posterior, check_count, standard_normal, with_constants
from weightsym.params import Params

__all__ = ["GaussianScales"]


class GaussianScales(Posterior):
    r"""One network, with Gaussian scales on the rows of some of its matrices.

    .. math:: A = \mathrm{diag}(s)\, V, \qquad s \sim N\big(\mu,\; \mathrm{diag}(\sigma^2)\big)

    A row has one random number, so that a low-rank adapter of rank r has r.

    Args:
        network: with the matrices V.
        rows: number of rows of each matrix that is scaled, in the order of the scales.
        mean: of all scales, one after the other.
        std: their standard deviations.

    >>> posterior = GaussianScales(
    ...     {"a": torch.tensor([[1.0, 2.0]])}, {"a": 1}, torch.tensor([3.0]), torch.tensor([0.5])
    ... )
    >>> draws = posterior.sample(20_000, torch.Generator().manual_seed(0))["a"].detach()
    >>> draws.mean(0).round(decimals=1), draws.std(0).round(decimals=1)
    (tensor([[3., 6.]]), tensor([[0.5000, 1.0000]]))
    """

    def __init__(self, network: Params, rows: Mapping[str, int], mean: Tensor, std: Tensor) -> None:
        super().__init__()
        wrong = [n for n, count in rows.items() if n not in network or len(network[n]) != count]
        if wrong or {len(mean), len(std)} != {sum(rows.values())}:
            raise ValueError("`rows` must count the rows of matrices of `network`, and all scales.")
        if not bool((std > 0).all() & std.isfinite().all()):
            raise ValueError("`std` must be positive and finite.")
        self.rows, self.order = dict(rows), tuple(network)
        self.constants = NamedTensors(dict(network))
        self.mean = nn.Parameter(mean.detach().clone())
        self.log_std = nn.Parameter(std.detach().log())

    def extra_repr(self) -> str:
        """Return the description that ``print`` shows in parentheses."""
        return f"{len(self.mean)} scales of {len(self.rows)} matrices"

    @property
    def centre(self) -> Params:
        """The network with the means of its scales."""
        network = self.constants.tensors()
        means = {n: t[0] for n, t in self._scaled(self.mean.detach()[None]).items()}
        return {name: means.get(name, network[name]) for name in self.order}

    def sample(self, n: int, generator: torch.Generator | None = None) -> Params:
        """Draw a stack of n networks. Gradients flow to means and standard deviations."""
        check_count(n)
        noise = standard_normal((n, len(self.mean)), self.mean, generator)
        scaled = self._scaled(self.mean + self.log_std.exp() * noise)
        rest = {k: t for k, t in self.constants.tensors().items() if k not in scaled}
        return with_constants(scaled, rest, self.order)

    def _scaled(self, scales: Tensor) -> Params:
        network = self.constants.tensors()
        return scaled_rows({n: network[n][None] for n in self.rows}, self.rows, scales)


def scaled_rows(stack: Mapping[str, Tensor], rows: Mapping[str, int], scales: Tensor) -> Params:
    """Multiply the rows of some matrices of a stack by scales ``(members, all rows)``.

    Args:
        stack: holds the matrices, with a leading dimension of members, or of one for all.
        rows: number of rows of each matrix.
        scales: of all rows, one matrix after the other.
    """
    parts = scales.split(list(rows.values()), -1)
    return {
        name: stack[name] * part.to(stack[name]).reshape(*part.shape, *[1] * (stack[name].ndim - 2))
        for name, part in zip(rows, parts, strict=True)
    }

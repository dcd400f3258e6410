"""Agreement, effective sizes and errors of chains as torchmetrics classes.

>>> import torch
>>> metric = RHat()
>>> metric.update(torch.randn(2, 100))  # two chains from here
>>> metric.update(torch.randn(1, 100))  # one more, perhaps on another process
>>> metric.compute() < 1.2
tensor(True)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_bnn.metrics import chains
from lightning_bnn.metrics.base import ExactMetric, collected

__all__ = [
    "EffectiveSampleSize", "MCSEMean", "MCSEQuantile", "MCSESd", "RHat", "TailEffectiveSampleSize",
]  # fmt: skip


class _OfChains(ExactMetric):
    """Keeps the draws of all chains; the value has the shape of what is drawn.

    Updates and processes add chains, of equal length; the order of chains does not matter.
    """

    chain_draws: list[Tensor]
    chain_shape: list[Tensor]
    statistic: ClassVar[Callable[..., Tensor]]
    higher_is_better, plot_lower_bound = False, 0.0

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_list("chain_draws")
        self.add_list("chain_shape")

    def update(self, draws: Tensor) -> None:
        """Add chains, ``(chains, samples, *numbers)``, with their draws in order."""
        chains.check_draws(draws)
        shape = torch.tensor([draws.ndim - 1, *draws.shape[1:]], device=draws.device).double()
        if self.chain_shape and not torch.equal(self.chain_shape[0][: len(shape)], shape):
            raise ValueError(
                f"`draws` must have the shape (chains, {', '.join(map(str, self._shape()))}), as "
                f"those before, got {tuple(draws.shape)}."
            )
        self.chain_draws.append(draws.detach().double().flatten())
        self.chain_shape.append(shape)

    def compute(self) -> Tensor:
        """The numbers; NaN without chains."""
        draws = collected(self.chain_draws)
        if draws.numel() == 0:
            return self._nan("it has seen no chain")
        return type(self).statistic(draws.reshape(-1, *self._shape()), **self._options()).double()

    def _options(self) -> dict[str, float]:
        """Arguments of the statistic besides the draws."""
        return {}

    def _shape(self) -> list[int]:
        """Samples and numbers of a chain, as the first update has noted them."""
        dims, *shape = collected(self.chain_shape).long().tolist()
        return shape[:dims]


class RHat(_OfChains):
    """Potential scale reduction, see `rhat`.

    >>> draws = torch.randn(2, 200, generator=torch.Generator().manual_seed(0))
    >>> together, apart = RHat(), RHat()
    >>> together.update(draws)
    >>> apart.update(draws + torch.tensor([[0.0], [5.0]]))
    >>> bool(together.compute() < 1.05), bool(apart.compute() > 1.5)
    (True, True)
    """

    statistic = staticmethod(chains.rhat)


class EffectiveSampleSize(_OfChains):
    """Independent draws that estimate a mean as well, see `effective_sample_size`.

    >>> metric = EffectiveSampleSize()
    >>> metric.update(torch.randn(4, 100, generator=torch.Generator().manual_seed(0)))
    >>> bool((metric.compute() - 400).abs() < 150)  # draws that are independent count in full
    True
    """

    statistic = staticmethod(chains.effective_sample_size)
    higher_is_better = True


class MCSEMean(_OfChains):
    """Monte Carlo standard error of the mean, see `mcse_mean`.

    >>> metric = MCSEMean()
    >>> metric.update(torch.randn(4, 2500, generator=torch.Generator().manual_seed(0)))
    >>> round(metric.compute().item(), 3)  # 1 / sqrt(10 000)
    0.01
    """

    statistic = staticmethod(chains.mcse_mean)


class MCSESd(_OfChains):
    """Monte Carlo standard error of the standard deviation, see `mcse_sd`.

    >>> metric = MCSESd()
    >>> metric.update(torch.randn(4, 2500, generator=torch.Generator().manual_seed(0)))
    >>> round(metric.compute().item(), 3)  # 1 / sqrt(2) / sqrt(10 000)
    0.007
    """

    statistic = staticmethod(chains.mcse_sd)


class _AtAProbability(_OfChains):
    """A number of chains that is about a quantile.

    Args:
        probability: of the quantile, or of one tail.
        **kwargs: as for every torchmetrics metric.
    """

    def __init__(self, probability: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        chains.check_probability(probability)
        self.probability = probability

    def _options(self) -> dict[str, float]:
        return {"probability": self.probability}


class TailEffectiveSampleSize(_AtAProbability):
    """Independent draws that estimate both tails as well, see `tail_effective_sample_size`.

    >>> metric = TailEffectiveSampleSize()
    >>> metric.update(torch.randn(4, 500, generator=torch.Generator().manual_seed(0)))
    >>> bool(metric.compute() > 1000)
    True
    """

    statistic = staticmethod(chains.tail_effective_sample_size)
    higher_is_better = True

    def __init__(self, probability: float = 0.05, **kwargs: Any) -> None:
        super().__init__(probability, **kwargs)


class MCSEQuantile(_AtAProbability):
    """Monte Carlo standard error of a quantile, see `mcse_quantile`.

    >>> metric = MCSEQuantile(probability=0.5)
    >>> metric.update(torch.rand(4, 2500, generator=torch.Generator().manual_seed(0)))
    >>> round(metric.compute().item(), 3)  # 1 / 2 / sqrt(10 000), of a uniform law
    0.005
    """

    statistic = staticmethod(chains.mcse_quantile)

    def __init__(self, probability: float = 0.5, **kwargs: Any) -> None:
        super().__init__(probability, **kwargs)

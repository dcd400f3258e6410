"""Step sizes that keep the variance of energy errors where it should be, and lengths of memory."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from torch import Tensor

__all__ = ["Tuning", "memory_length"]

_FADE, _TRUST, _ORDER = 99 / 101, 9.0, 6
_SHRINK = 0.8
_LEAST_TRACE = 16


@dataclass
class Tuning:
    """What a sampler knows of the steps of every chain, each field ``(chains,)`` and float64.

    Attributes:
        sizes: of steps.
        largest: that have not failed yet.
        weighted: faded sum of squared errors over the sixth power of their step sizes, each with
            a weight that trusts outliers less.
        weights: faded sum of these weights.
        lengths: after which directions are forgotten.
        squares: sum of squared errors over the number of weights, since the adaptation.
        steps: how many they are of.
        failed: how many more were undone since, as something was not finite.
    """

    sizes: Tensor
    largest: Tensor
    weighted: Tensor
    weights: Tensor
    lengths: Tensor
    squares: Tensor
    steps: Tensor
    failed: Tensor

    @classmethod
    def start(cls, chains: int, size: float, length: float, device: torch.device) -> Tuning:
        """Of chains that know nothing yet.

        Args:
            chains: how many.
            size: of their steps.
            length: after which directions are forgotten.
            device: where the tensors are.
        """
        first = [size, torch.inf, 0.0, 0.0, length, 0.0, 0.0, 0.0]
        return cls(*(torch.full((chains,), v, dtype=torch.float64, device=device) for v in first))

    @classmethod
    def from_lists(cls, lists: dict[str, list[float]], device: torch.device) -> Tuning:
        """What `as_lists` has made, exactly.

        Args:
            lists: of every field.
            device: where the tensors are.
        """
        numbers = {n: torch.tensor(v, dtype=torch.float64) for n, v in lists.items()}
        return cls(**{n: t.to(device) for n, t in numbers.items()})

    def as_lists(self) -> dict[str, list[float]]:
        """Plain numbers, which checkpoints keep in double precision."""
        return {name: tensor.tolist() for name, tensor in asdict(self).items()}

    def adapt(self, errors: Tensor, wanted: float) -> None:
        """Take the errors of one step into account, and choose the sizes of the next.

        A step that failed makes all later ones of its chain smaller.

        Args:
            errors: squares over the number of weights; not finite where a step has failed.
            wanted: their mean.
        """
        well = errors.isfinite()
        ratio = torch.where(well, errors, wanted) / wanted + 1e-8
        trust = torch.where(well, (-0.5 * (ratio.log() / _TRUST).square()).exp(), 0.0)
        fade = torch.where(well, _FADE, 1.0)
        self.weighted = fade * self.weighted + trust * ratio / self.sizes**_ORDER
        self.weights = fade * self.weights + trust
        self.largest = torch.where(well, self.largest, _SHRINK * self.sizes)
        found = (self.weighted / self.weights) ** (-1 / _ORDER)
        found = torch.where(self.weights > 0, found, self.sizes)
        self.sizes = torch.minimum(found, self.largest)

    def watch(self, errors: Tensor) -> None:
        """Count the errors of one step of the sampling.

        Args:
            errors: as in `adapt`.
        """
        well = errors.isfinite()
        self.squares = self.squares + torch.where(well, errors, 0.0)
        self.steps = self.steps + well
        self.failed = self.failed + ~well


def memory_length(trace: Tensor, sizes: Tensor) -> Tensor:
    r"""How far chains should go before they forget their direction.

    That is :math:`0.4\,\epsilon` times the mean number of steps for an independent draw.

    Args:
        trace: numbers after every step, ``(chains, steps, numbers)``.
        sizes: of the steps, ``(chains,)``.

    Returns:
        ``(chains,)``; NaN where the trace is too short or constant.
    """
    from lightning_bnn.metrics.chains import effective_sample_size

    chains, steps, _ = trace.shape
    if steps < _LEAST_TRACE:
        return torch.full_like(sizes, torch.nan)
    series = trace.transpose(0, 1)[None].double()
    apart = steps / effective_sample_size(series)
    return 0.4 * sizes * apart.to(sizes.device).reshape(chains, -1).nanmean(1)

"""Small problems with posteriors that can be plotted."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_bnn.datamodules.base import DataModule, Examples, Splits
from weightsym.params import check_count, check_not_negative, keyed_generator

__all__ = ["NoisySine", "TractableReLU", "TwoGaussians"]

_DRAWS = 10_000


class TwoGaussians(DataModule):
    r"""Two classes of points in the plane, around (-2, -2) and (2, 2), with unit covariance.

    .. math:: x \mid c \sim N\big((4 c - 2)\, (1, 1)^T,\; I\big), \quad c \in \{0, 1\}

    Training points are drawn again until a line separates the classes with a gap, so that a small
    network can reach a loss of zero. Targets are class indices. A ring around both classes is out
    of distribution.

    Args:
        batch_size: number of examples in a training batch of one process.
        eval_batch_size: number of examples in a batch of test.
        seed: determines the points and their order.
        size: number of points per class.
        gap: smallest distance between the classes, along the best line.
        orders: number of members with training batches of their own, see `DataModule`.

    References:
        | A Symmetry-Aware Exploration of Bayesian Neural Network Posteriors (2024), appendix A
        | https://openreview.net/forum?id=FOSBQuXgAq

    >>> data = TwoGaussians(gap=1.0)
    >>> points, labels = data.load().train
    >>> points.shape, labels.bincount().tolist(), separation(points, labels) >= 1.0
    (torch.Size([400, 2]), [200, 200], True)
    """

    def __init__(
        self,
        batch_size: int = 10,
        eval_batch_size: int = 512,
        seed: int = 0,
        size: int = 200,
        gap: float = 1.0,
        orders: int | Sequence[int] | None = None,
    ) -> None:
        super().__init__(batch_size, eval_batch_size, seed, orders)
        if not 0 <= gap <= 1.5:
            raise ValueError(f"`gap` must be at least 0 and at most 1.5, got {gap}.")
        self.size, self.gap = size, gap

    def load(self) -> Splits:
        """Draw points until the classes are separated."""
        generator = keyed_generator(self.seed, "two Gaussians")
        draws = (self._points(generator) for _ in range(_DRAWS))
        train = next((points for points in draws if separation(*points) >= self.gap), None)
        if train is None:
            raise ValueError(
                f"None of {_DRAWS} draws of {self.size} points per class had a `gap` of "
                f"{self.gap}: set a smaller `gap` or `size`."
            )
        angle = 2 * torch.pi * torch.rand(self.size, generator=generator)
        ring = 12 * torch.stack([angle.cos(), angle.sin()], 1)
        test = self._points(generator)
        return Splits(train, None, test, {"ring": (ring, torch.zeros(self.size).long())})

    def _points(self, generator: torch.Generator) -> Examples:
        labels = torch.arange(2).repeat_interleave(self.size)
        centres = torch.where(labels[:, None] == 1, 2.0, -2.0)
        return centres + torch.randn(2 * self.size, 2, generator=generator), labels


def separation(points: Tensor, labels: Tensor) -> float:
    """Return the width of the widest empty strip between two classes, or 0 if they overlap.

    This is the distance of their convex hulls, the smallest norm of a difference of two convex
    combinations, found by quadratic programming.
    """
    from scipy.optimize import nnls

    machine, two = (points[labels == k].double() for k in (0, 1))
    # Nearest points of two hulls: minimise |A'a - B'b| with a, b >= 0 and both of sum one. A heavy
    # weight on the sums turns that into least squares over the positive numbers.
    heavy = 1e4 * float(points.abs().max())
    sums = torch.zeros(2, len(points), dtype=torch.float64)
    sums[0, : len(machine)] = sums[1, len(machine) :] = heavy
    system = torch.cat([torch.cat([machine, -two]).T, sums])
    wanted = torch.tensor([0.0, 0.0, heavy, heavy], dtype=torch.float64)
    shares, _ = nnls(system.numpy(), wanted.numpy())
    return float((system[:2] @ torch.from_numpy(shares)).norm())


class TractableReLU(DataModule):
    r"""Targets :math:`\alpha |x|`, which two ReLU units without biases can represent in two ways.

    Args:
        alpha: the slope, which determines the two modes of the posterior.
        batch_size: number of examples in a training batch of one process.
        eval_batch_size: number of examples in a batch of test.
        seed: determines the inputs and their order.
        size: number of training examples, and of test examples.
        orders: number of members with training batches of their own, see `DataModule`.

    References:
        | Variational Inference Failures Under Model Symmetries (2024), section 5.1
        | https://arxiv.org/abs/2408.05496

    >>> x, y = TractableReLU(alpha=0.1).load().train
    >>> torch.equal(y, 0.1 * x.abs()), bool(x.abs().max() <= 10)
    (True, True)
    """

    def __init__(
        self,
        alpha: float = 0.1,
        batch_size: int = 10,
        eval_batch_size: int = 512,
        seed: int = 0,
        size: int = 100,
        orders: int | Sequence[int] | None = None,
    ) -> None:
        super().__init__(batch_size, eval_batch_size, seed, orders)
        self.alpha, self.size = alpha, size

    def load(self) -> Splits:
        """Draw inputs between -10 and 10."""
        generator = keyed_generator(self.seed, "tractable")
        x = 20 * torch.rand(2 * self.size, 1, generator=generator) - 10
        train, test = ((chunk, self.alpha * chunk.abs()) for chunk in x.split(self.size))
        return Splits(train, None, test)


class NoisySine(DataModule):
    r"""Values of :math:`\sin 2x` for x between -2 and 2, with Gaussian noise.

    .. math:: y = \sin 2 x + \sigma \epsilon, \quad x \sim U(-2, 2), \quad \epsilon \sim N(0, 1)

    Out of distribution are inputs between 2 and 4 on both sides (``outside``).

    Args:
        batch_size: number of examples in a training batch of one process.
        eval_batch_size: number of examples in a batch of test.
        seed: determines inputs, noise and order.
        size: number of training examples.
        test_size: number of test examples.
        noise: standard deviation of the noise.
        orders: number of members with training batches of their own, see `DataModule`.

    >>> x, y = NoisySine(size=1000, noise=0.1).load().train
    >>> round((y - (2 * x).sin()).std().item(), 1)
    0.1
    """

    def __init__(
        self,
        batch_size: int = 10,
        eval_batch_size: int = 512,
        seed: int = 0,
        size: int = 40,
        test_size: int = 200,
        noise: float = 0.3,
        orders: int | Sequence[int] | None = None,
    ) -> None:
        super().__init__(batch_size, eval_batch_size, seed, orders)
        check_count("size", size)
        check_count("test_size", test_size)
        check_not_negative("noise", noise)
        self.size, self.test_size, self.noise = size, test_size, noise

    def load(self) -> Splits:
        """Draw inputs and noise from the seed."""
        generator = keyed_generator(self.seed, "sine")
        train, test = (self._points(n, generator) for n in (self.size, self.test_size))
        inputs, targets = self._points(self.test_size, generator)
        outside = inputs + 2 * inputs.sign()
        return Splits(train, None, test, {"outside": (outside, targets)})

    def _points(self, number: int, generator: torch.Generator) -> Examples:
        x = 4 * torch.rand(number, 1, generator=generator) - 2
        return x, (2 * x).sin() + self.noise * torch.randn(number, 1, generator=generator)

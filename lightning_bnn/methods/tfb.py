"""TFB: noise around trained adapters, as large as the loss allows."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from lightning_bnn.methods.method import AS_IT_IS, Fit, Progress, Purpose
from lightning_bnn.methods.networks import Networks, PenalisedTraining
from lightning_bnn.methods.run import Batch, Run
from lightning_bnn.named_tensors import NamedTensors
from lightning_bnn.posteriors import LaplaceGaussian, Posterior
from lightning_bnn.posteriors.empirical import mixture_of
from lightning_bnn.posteriors.laplace import CurvatureBlock
from weightsym import Symmetries, discover
from weightsym.params import Params, check_count, check_positive, keyed_generator, widest

__all__ = ["TFB"]

_NO_PRIOR = torch.finfo(torch.float32).tiny
"""Precision of a prior without effect."""
_FLAT = 1e-12
"""Squared singular values, relative to the largest, of directions that a factor does not read."""
_FIRST, _FACTOR, _LARGEST, _PRECISION = 1e-2, 4.0, 1e6, 1.02
"""Search for a scale: start, factor, limit and precision."""


class NoisyNetworks(Networks):
    """Networks and the noise around each, once its scale is known."""

    def __init__(self, network: nn.Module, stack: Params, max_loss: float | None) -> None:
        super().__init__(network, stack, max_loss)
        self.fitted = NamedTensors()

    @property
    def lacks(self) -> str:  # type: ignore[override]  # it changes
        """The part that is missing, the scale of the noise, or an empty string."""
        return "" if self.fitted.tensors() else "scale of the noise"

    def member(self, index: int) -> Params:
        """Return the weights of one member."""
        return {name: t[index] for name, t in self.stack().items()}

    def gaussian(self, index: int) -> LaplaceGaussian:
        """Return the noise around one member."""
        tensors, start = self.fitted.tensors(), f"{index}/values/"
        names = [name.removeprefix(start) for name in tensors if name.startswith(start)]
        blocks = [
            CurvatureBlock(
                (name,),
                tensors[start + name],
                tensors.get(f"{index}/left/{name}"),
                tensors.get(f"{index}/right/{name}"),
            )
            for name in names
        ]
        scale = float(tensors[f"{index}/scale"])
        return LaplaceGaussian(self.member(index), blocks, _NO_PRIOR, scale**2, "network")


@dataclass(eq=False)
class TFB(PenalisedTraining):
    r"""Noise around a trained adapter, isotropic in the directions in which it moves the network.

    .. math:: A \sim N\big(\hat A,\; \sigma^2 (B^T B)^{-1} \otimes I\big), \quad
        B (A - \hat A) = \sigma U Z

    Here :math:`U` are the left singular vectors of B and Z is standard normal, so that the
    distribution of the product :math:`B A` does not depend on its factors. The scale is the largest
    at which the mean loss on anchor examples grows by at most a tolerance. Nothing is trained:
    ``Trainer.test`` of a trained network finds the scale first. Pairs of factors are found by the
    symmetry that exchanges a matrix between them, in any network. Without trained pairs, every
    trained matrix has its own noise, :math:`W \sim N(\hat W, \sigma^2 I)`.

    Args:
        tolerance: largest increase of the mean loss of draws, in nats per example.
        anchors: number of training examples for the loss.
        draws: number of networks for the mean loss.

    References:
        | Training-Free Bayesianization for Low-Rank Adapters (Shi et al., 2025)
        | https://arxiv.org/abs/2412.05723

    >>> import torch
    >>> from lightning_bnn import methods, params
    >>> pair = torch.nn.Linear(4, 2, bias=False), torch.nn.Linear(2, 3, bias=False)
    >>> net, x, y = torch.nn.Sequential(*pair), torch.randn(30, 4), torch.arange(30) % 3
    >>> method, run = methods.TFB(tolerance=0.1), methods.Run(net)
    >>> state = method.init(net, params.populate(net, members=1))
    >>> method.at_end(state, [methods.Batch((x,), y)], run)
    >>> stack = method.posterior(state, run).sample(100)
    >>> bool(stack["0.weight"].std(0).min() > 0), bool(stack["1.weight"].std(0).max() == 0)
    (True, True)
    """

    tolerance: float = 0.01
    anchors: int = 512
    draws: int = 10

    keeps_networks = True

    def __post_init__(self) -> None:
        check_positive("tolerance", self.tolerance)
        check_count("anchors", self.anchors)
        check_count("draws", self.draws)
        super().__post_init__()

    def init(self, network: nn.Module, stack: Params) -> NoisyNetworks:
        return NoisyNetworks(network, stack, self.max_loss)

    def before_fit(self, state: NoisyNetworks, fit: Fit, run: Run) -> None:
        """Discard the noise scale of earlier weights."""
        state.fitted.hold({})

    def after_step(self, state: NoisyNetworks, progress: Progress, run: Run) -> bool:
        state.fitted.hold({})
        return False

    def at_end(self, state: NoisyNetworks, data: Iterable[Batch], run: Run) -> None:
        """Find the scale of every healthy member."""
        anchors = list(_first(data, self.anchors))
        fitted: Params = {}
        with torch.inference_mode(False), torch.no_grad():
            network = copy.deepcopy(run.network).eval()
            quiet = Run(network, run.likelihood, run.num_data, run.chunk_size)
            example = tree_map(_usable, anchors[0].example())
            factors = adapter_factors(network, discover(network, *example))
            for m in state.healthy().tolist():
                member = {n: t.clone() for n, t in state.member(m).items()}
                blocks = noise_blocks(network, member, factors)
                batches = [batch.of(m) if batch.per_member else batch for batch in anchors]
                scale = self._scale(quiet, member, blocks, batches, run.inform, m)
                fitted[f"{m}/scale"] = torch.tensor(scale, dtype=torch.float32)
                for block in blocks:
                    parts = {"values": block.eigenvalues, "left": block.left, "right": block.right}
                    stored = {k: t for k, t in parts.items() if t is not None}
                    fitted |= {f"{m}/{k}/{block.names[0]}": t for k, t in stored.items()}
        state.fitted.hold(fitted)

    def _scale(
        self,
        run: Run,
        member: Params,
        blocks: list[CurvatureBlock],
        anchors: list[Batch],
        inform: Callable[[str], None],
        m: int,
    ) -> float:
        """Return the largest scale whose loss grows by at most the tolerance."""
        unit = LaplaceGaussian(member, blocks, _NO_PRIOR, 1.0, "network")
        device = next(iter(member.values())).device
        noise = unit.deviations(self.draws, keyed_generator("tfb", m, device=device))
        examples = sum(batch.examples for batch in anchors)

        def loss(scale: float) -> float:
            stack = {
                n: t + scale * noise[n] if n in noise else t.expand(self.draws, *t.shape)
                for n, t in member.items()
            }
            of_batches = (run.losses(stack, b).double().mean() * b.examples for b in anchors)
            return float(sum(of_batches)) / examples

        before = loss(0.0)
        scale, grown = largest_scale(loss, before + self.tolerance)
        inform(
            f"TFB, member {m}: noise of scale {scale:.3g} takes the loss on {examples} anchors "
            f"from {before:.4g} to {grown:.4g}."
        )
        return scale

    def posterior(self, state: NoisyNetworks, run: Run, purpose: Purpose = AS_IT_IS) -> Posterior:
        """Return the noise, or the mixture of the members' noise; before the fit, the members."""
        if state.lacks:
            return state.members()
        return mixture_of([state.gaussian(m) for m in state.healthy().tolist()])


def _first(data: Iterable[Batch], count: int) -> Iterator[Batch]:
    """Yield the first batches, up to a number of examples."""
    for batch in data:
        yield batch
        count -= batch.examples
        if count <= 0:
            return


def _usable(value: Any) -> Any:
    """Return a tensor that can be differentiated, even if it was made in inference mode."""
    return value.clone() if isinstance(value, Tensor) else value


def largest_scale(loss: Callable[[float], float], most: float) -> tuple[float, float]:
    """Find the largest scale whose loss is at most a bound, by bisection.

    Args:
        loss: function of the scale, increasing for large scales.
        most: the bound.

    Returns:
        The scale, within two percent, and its loss.

    >>> scale, grown = largest_scale(lambda s: 1 + s * s, 1.25)
    >>> round(scale, 1), 1.23 < grown <= 1.25
    (0.5, True)
    """
    if not math.isfinite(most):
        raise ValueError("The loss of the network on the anchors is not finite.")
    values: dict[float, float] = {}

    def fits(scale: float) -> bool:
        values[scale] = loss(scale)
        return values[scale] <= most  # not where it is NaN

    low, small = _FIRST, fits(_FIRST)
    step = _FACTOR if small else 1 / _FACTOR
    while fits(low * step) == small:
        low *= step
        if not 1 / _LARGEST < low < _LARGEST:
            raise ValueError(
                "The loss stays within `tolerance` for any noise: the network was not "
                "trained, or its outputs do not depend on the adapter."
                if small
                else "The least noise changes the loss by more than `tolerance`."
            )
    low, high = sorted([low, low * step])
    while high > _PRECISION * low:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low, values[low]


# ------------------------------------------------------------ factors
@dataclass(frozen=True)
class Factors:
    """Two factors of a network that allow any invertible matrix between them.

    Attributes:
        writer: name of the factor that acts first, and has noise.
        rows: whether its rows are the inner channels, not its columns.
        readers: names of the following factors, and their dimensions of inner channels.
    """

    writer: str
    rows: bool
    readers: tuple[tuple[str, int], ...]

    def block(self, network: Params) -> CurvatureBlock | None:
        """Return the precision of the writer's noise of scale one, or None without readers."""
        parts = [network[name].movedim(dim, -1).flatten(0, -2) for name, dim in self.readers]
        columns = torch.cat([piece.to(widest(piece.device)) for piece in parts])
        values, turn = torch.linalg.eigh(columns.mT @ columns)
        most = values.max()
        if most == 0:
            return None
        values = torch.where(values > _FLAT * most, values, most / _FLAT)
        others = network[self.writer].numel() // len(values)
        if self.rows:
            return CurvatureBlock((self.writer,), values[:, None].repeat(1, others), left=turn)
        return CurvatureBlock((self.writer,), values.repeat(others, 1), right=turn)


def adapter_factors(network: nn.Module, sym: Symmetries) -> list[Factors]:
    """Find products of trained matrices on which a network depends only through the product.

    Args:
        network: with the weights that are trained.
        sym: its symmetries.

    >>> adapter = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 4))
    >>> adapter_factors(adapter, discover(adapter, torch.randn(8, 4)))
    [Factors(writer='0.weight', rows=True, readers=(('1.weight', 1),))]
    """
    trained = {name for name, p in network.named_parameters() if p.requires_grad}
    factors = []
    for group in sym.linear:
        places = [(sym.axes[p.axis], p) for p in group.placements]
        whole = all(
            axis.tensor in trained
            and axis.dim is not None
            and axis.length == group.size
            and position.is_range
            for axis, position in places
        )
        if group.kind != "general" or not whole:
            continue
        sides: dict[int, list[tuple[str, int]]] = {1: [], -1: []}
        for axis, position in places:
            if len(sym.shapes[axis.tensor]) > 1 and axis.dim is not None:
                sides[position.exponent].append((axis.tensor, axis.dim))
        (*writers,), (*readers,) = sides[1], sides[-1]
        if (
            len(writers) == 1
            and readers
            and writers[0][1] in (0, len(sym.shapes[writers[0][0]]) - 1)
        ):
            name, dim = writers[0]
            factors.append(Factors(name, dim == 0, tuple(readers)))
    return factors


def noise_blocks(
    network: nn.Module, member: Params, factors: list[Factors]
) -> list[CurvatureBlock]:
    """Return the precision of unit noise: on adapters, or on all trained matrices.

    Args:
        network: with the weights that are trained.
        member: its weights.
        factors: of adapters, if there are any.
    """
    blocks = [block for each in factors if (block := each.block(member)) is not None]
    if factors and not blocks:
        raise ValueError("Every adapter is zero: TFB requires a network with trained adapters.")
    if blocks:
        return blocks
    trained = [n for n, p in network.named_parameters() if p.requires_grad and p.ndim > 1]
    if not trained:
        raise ValueError(
            "`network` has no trained matrices: load its adapter with `is_trainable=True`."
        )
    return [CurvatureBlock((n,), torch.ones_like(member[n]).flatten(1)) for n in trained]

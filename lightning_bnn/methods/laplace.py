"""Laplace approximations: Gaussians around trained networks, from the curvature of their loss."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch
from torch import nn

from lightning_bnn.likelihoods import Categorical
from lightning_bnn.methods.method import AS_IT_IS, Fit, Progress, Purpose
from lightning_bnn.methods.networks import Networks, PenalisedTraining
from lightning_bnn.methods.run import Batch, Run
from lightning_bnn.metrics.validation import check_choice
from lightning_bnn.named_tensors import NamedTensors
from lightning_bnn.posteriors import LaplaceGaussian, Posterior
from lightning_bnn.posteriors.curvature import (
    MappedBatches,
    Structure,
    curvature,
    last_layer_name,
    likeliest_precision,
)
from lightning_bnn.posteriors.dropout import Layers
from lightning_bnn.posteriors.empirical import mixture_of
from lightning_bnn.posteriors.gauss_newton import curvature_root
from lightning_bnn.posteriors.kronecker import without_factors
from lightning_bnn.posteriors.laplace import CurvatureBlock, Prediction
from weightsym import params as P
from weightsym.params import Params, check_not_negative, check_positive, widest

__all__ = ["Laplace"]


class CurvedNetworks(Networks):
    """Networks, and the curvature around each.

    Args:
        network: gives the computation.
        stack: the members.
        method: declares the structure of the curvature.
        last_layer: name of the layer whose weights are random; None for all layers.
    """

    def __init__(
        self, network: nn.Module, stack: Params, method: Laplace, last_layer: str | None
    ) -> None:
        super().__init__(network, stack, method.max_loss)
        self.last_layer = last_layer
        prefix = f"{last_layer}." if last_layer else ""
        trained = [n for n, p in network.named_parameters() if p.requires_grad]
        names = [n for n in trained if last_layer is None or n.startswith(prefix)]
        if not names:
            raise ValueError(
                f"The last layer, {last_layer!r}, has no trained weights of its own: set "
                "`layers='all'`."
                if last_layer is not None
                else "`network` has no trained weights."
            )
        self.blocks = [(n,) for n in names] if method.structure == "kron" else [tuple(names)]
        self.fitted = NamedTensors()

    @property
    def lacks(self) -> str:  # type: ignore[override]  # it changes
        """The part that is missing, the curvature, or an empty string."""
        return "" if self.fitted.tensors() else "curvature"

    def member(self, index: int) -> Params:
        """Return the weights of one member."""
        return {name: t[index] for name, t in self.stack().items()}

    def gaussian(self, index: int, temperature: float, prediction: Prediction) -> LaplaceGaussian:
        """Return the Gaussian around one member."""
        tensors = self.fitted.tensors()
        blocks = [
            CurvatureBlock(
                names,
                tensors[f"{index}/{k}/eigenvalues"],
                tensors.get(f"{index}/{k}/left"),
                tensors.get(f"{index}/{k}/right"),
            )
            for k, names in enumerate(self.blocks)
        ]
        precision = float(tensors[f"{index}/precision"])
        return LaplaceGaussian(
            self.member(index), blocks, precision, temperature, prediction, self.last_layer
        )


@dataclass(eq=False)
class Laplace(PenalisedTraining):
    r"""A Gaussian at a posterior mode, with the inverse curvature as covariance.

    .. math:: \omega \sim N\big(\hat\omega,\; T (H + \lambda I)^{-1}\big)

    H is the generalised Gauss-Newton matrix of the summed negative log-likelihood on the training
    data. It is computed after the last epoch, so that checkpoints from the end hold it, or before a
    test of networks without one. During training, validation evaluates the members themselves. With
    several members, the posterior is a mixture.

    Args:
        structure: of the curvature: a ``"full"`` matrix, Kronecker factors of each layer
            (``"kron"``), or the ``"diag"`` alone.
        layers: random weights: those of ``"all"`` layers or of the ``"last"`` linear layer; by
            default all, or the last for Kronecker factors of a network with layers that have none
            (BatchNorm).
        prior_precision: :math:`\lambda`; by default it maximises the marginal likelihood.
        temperature: T.
        prediction: by ``"linearised"`` networks, or by the ``"network"`` itself.

    References:
        | Laplace Redux (Daxberger et al., 2021)
        | https://arxiv.org/abs/2106.14806

    >>> import torch
    >>> from lightning_bnn import methods, params
    >>> from lightning_bnn.models import mlp
    >>> net, x, y = mlp(2, [8], 2), torch.randn(50, 2), torch.arange(50) % 2
    >>> method, run = methods.Laplace("diag", prior_precision=4.0), methods.Run(net, num_data=50)
    >>> state = method.init(net, params.populate(net, members=1))
    >>> method.at_end(state, [methods.Batch((x,), y)], run)
    >>> deviations = method.posterior(state, run).sample(1000)["1.weight"].std(0)
    >>> bool((deviations < 0.6).all())  # the data only narrow the prior, whose deviation is 1/2
    True
    """

    structure: Structure = "kron"
    layers: Layers | None = None
    prior_precision: float | None = None
    temperature: float = 1.0
    prediction: Prediction = "linearised"

    keeps_networks = True
    unfitted = "the curvature is computed around the given networks"

    def __post_init__(self) -> None:
        check_choice("structure", self.structure, get_args(Structure))
        if self.layers is not None:
            check_choice("layers", self.layers, get_args(Layers))
        check_choice("prediction", self.prediction, get_args(Prediction))
        check_positive("prior_precision", self.prior_precision, optional=True)
        check_not_negative("temperature", self.temperature)
        super().__post_init__()

    def init(self, network: nn.Module, stack: Params) -> CurvedNetworks:
        layers = self.layers or ("last" if self.lacking_factors(network) else "all")
        last_layer = last_layer_name(network) if layers == "last" else None
        return CurvedNetworks(network, stack, self, last_layer)

    def lacking_factors(self, network: nn.Module) -> list[str]:
        """List the layers without Kronecker factors, if the last layer has them."""
        has_linear = any(isinstance(m, nn.Linear) for m in network.modules())
        return without_factors(network) if self.structure == "kron" and has_linear else []

    def configure_optimizer(
        self, state: CurvedNetworks, optimizer: Any, run: Run, *fit: Any
    ) -> Any:
        curvature_root(run.likelihood)
        return super().configure_optimizer(state, optimizer, run, *fit)

    # ------------------------------------------------------------ the curvature
    def before_fit(self, state: CurvedNetworks, fit: Fit, run: Run) -> None:
        """Discard the curvature of other weights, and rehearse the computation of a new one."""
        state.fitted.hold({})
        lacking = [] if self.layers else self.lacking_factors(run.network)
        if lacking:
            run.inform(
                f"Laplace: {', '.join(lacking)} of {type(run.network).__name__} has no "
                "Kronecker factors, so only the last layer has a curvature "
                "(`layers='last'`)."
            )
        example = fit.example()
        if example:
            self._rehearse(state, example, run)

    def _rehearse(self, state: CurvedNetworks, example: tuple[Any, ...], run: Run) -> None:
        """Compute the curvature of two made-up examples, to fail before the training."""
        with torch.inference_mode(False), torch.no_grad():
            network = {n: t.clone() for n, t in state.member(0).items()}
            outputs = P.apply(copy.deepcopy(run.network).eval(), network, *example)
        targets = torch.zeros_like(outputs)
        if isinstance(run.likelihood, Categorical):
            targets = outputs.argmax(-1 if run.likelihood.classes == "last" else 1)
        self._curvature(state, network, _pairs([Batch(example, targets)]), run, False)

    def after_step(self, state: CurvedNetworks, progress: Progress, run: Run) -> bool:
        state.fitted.hold({})
        return False

    def at_end(self, state: CurvedNetworks, data: Iterable[Batch], run: Run) -> None:
        """Compute the curvature of every healthy member."""
        fitted: Params = {}
        pairs = _pairs(data)
        with torch.inference_mode(False):
            for m in state.healthy().tolist():
                network = {n: t.clone() for n, t in state.member(m).items()}
                blocks = self._curvature(state, network, pairs, run, run.shows_progress)
                share = (run.num_data or pairs.examples) / pairs.examples
                blocks = [replace(b, eigenvalues=share * b.eigenvalues) for b in blocks]
                fitted |= self._tensors(m, network, blocks, run)
        if run.num_data is not None and pairs.examples != run.num_data:
            run.warn(
                f"The train loader yields {pairs.examples} examples of {run.num_data} "
                "(`drop_last`, a sampler?): their curvature is multiplied by "
                f"{run.num_data / pairs.examples:.3g}."
            )
        state.fitted.hold(fitted)

    def _curvature(
        self, state: CurvedNetworks, network: Params, pairs: MappedBatches, run: Run, bar: bool
    ) -> list[CurvatureBlock]:
        return curvature(
            run.network, network, pairs, run.likelihood, self.structure, state.last_layer, bar
        )

    def _tensors(self, m: int, network: Params, blocks: list[CurvatureBlock], run: Run) -> Params:
        """Name the tensors that store the curvature of a member."""
        precision = self.prior_precision
        if precision is None:
            precision = likeliest_precision(blocks, network)
            run.inform(f"Laplace, member {m}: prior precision {precision:.4g}.")
        device = blocks[0].eigenvalues.device
        parts = {
            f"{m}/{k}/{field}": getattr(block, field)
            for k, block in enumerate(blocks)
            for field in ("eigenvalues", "left", "right")
        }
        named = {f"{m}/precision": torch.tensor(precision, dtype=widest(device), device=device)}
        return {**named, **{name: t for name, t in parts.items() if t is not None}}

    # ------------------------------------------------------------ the posterior
    def posterior(self, state: CurvedNetworks, run: Run, purpose: Purpose = AS_IT_IS) -> Posterior:
        """Return the Gaussian or the mixture of Gaussians; before the fit, the members."""
        if state.lacks:
            return state.members()
        members = state.healthy().tolist()
        settings = self.temperature, self.prediction
        return mixture_of([state.gaussian(m, *settings) for m in members])


def _pairs(data: Iterable[Batch]) -> MappedBatches:
    return MappedBatches(data, lambda batch: (batch.inputs, batch.targets))

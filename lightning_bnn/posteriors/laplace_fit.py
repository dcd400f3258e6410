"""The curvature of a trained network's loss, and the prior that it speaks for."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from scipy.optimize import minimize_scalar
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lightning_bnn import params as P
from lightning_bnn.metrics.validation import check_choice
from lightning_bnn.params import Params
from lightning_bnn.posteriors.gauss_newton import Batch, gauss_newton, inputs_of
from lightning_bnn.posteriors.kronecker import kronecker_factors, without_factors
from lightning_bnn.posteriors.laplace import CurvatureBlock, features_of
from lightning_bnn.posteriors.output_curvature import curvature_root, noise_factor

__all__ = [
    "Structure",
    "curvature",
    "last_layer_name",
    "likeliest_precision",
    "log_marginal_likelihood",
    "without_factors",
]

Structure = Literal["full", "kron", "diag"]
_LARGEST = 20_000
"""Weights of a full matrix; its eigenvectors take 3 GB."""


def last_layer_name(model: nn.Module) -> str:
    """Name of the last linear layer of a network."""
    names = [name for name, m in model.named_modules() if isinstance(m, nn.Linear)]
    if not names:
        raise ValueError(f"{type(model).__name__} has no linear layer that could be its last.")
    return names[-1]


def curvature(
    model: nn.Module,
    params: Params,
    batches: Iterable[Batch],
    likelihood: nn.Module,
    structure: Structure = "kron",
    last_layer: str | None = None,
    progress: bool = False,
) -> list[CurvatureBlock]:
    """Generalised Gauss-Newton matrix of the negative log-likelihood, summed over the data.

    Args:
        model: gives the computation; weights that do not require gradients are left out.
        params: one network.
        batches: the training data, inputs (one, or a tuple of several) and targets; they are asked
            for several times.
        likelihood: ``Categorical``, ``Bernoulli`` or ``Gaussian``; for Kronecker factors
            ``Categorical``, or ``Gaussian`` with one standard deviation.
        structure: ``"full"`` matrix, Kronecker factors of every layer (``"kron"``), or ``"diag"``.
        last_layer: only that of this layer, which must be linear and the last.
        progress: show a bar.
    """
    check_choice("structure", structure, get_args(Structure))
    curvature_root(likelihood)
    if structure == "kron":
        noise_factor(likelihood)
    runner = copy.deepcopy(model)
    runner.load_state_dict({n: t.clone() for n, t in params.items()}, strict=False)
    runner.eval()
    prefix = ""
    if last_layer is not None:
        batches = [_features(runner, last_layer, *batch) for batch in batches]
        runner = runner.get_submodule(last_layer)
        prefix = f"{last_layer}." if last_layer else ""
    if next(runner.parameters()).dtype in (torch.float16, torch.bfloat16):
        runner, batches = runner.float(), _SinglePrecision(batches)
    blocks = _blocks(runner, batches, likelihood, structure, progress)
    if not all(bool(block.eigenvalues.isfinite().all()) for block in blocks):
        raise ValueError("The curvature is not finite: look for NaN in the data and the weights.")
    return [replace(block, names=tuple(prefix + n for n in block.names)) for block in blocks]


def _blocks(
    model: nn.Module,
    batches: Iterable[Batch],
    likelihood: nn.Module,
    structure: Structure,
    progress: bool,
) -> list[CurvatureBlock]:
    names = tuple(n for n, p in model.named_parameters() if p.requires_grad)
    size = sum(model.get_parameter(n).numel() for n in names)
    if structure == "full" and size > _LARGEST:
        raise ValueError(
            f"A full curvature of {size} weights takes {size**2 * 8 / 1e9:.0f} GB: take "
            "`structure='kron'` or 'diag', or `layers='last'`."
        )
    try:
        if structure == "kron":
            return kronecker_factors(model, names, batches, likelihood, progress)
        root = curvature_root(likelihood)
        matrix = gauss_newton(model, names, batches, root, structure == "diag", progress)
    except (NotImplementedError, RuntimeError, ValueError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        unusual = f" (it has {', '.join(without_factors(model))})" if without_factors(model) else ""
        raise ValueError(
            f"Laplace cannot compute a curvature `structure={structure!r}` of "
            f"{type(model).__name__}{unusual}: {first}. Take `layers='last'`, or another structure."
        ) from error
    if structure == "diag":
        return [CurvatureBlock(names, matrix[:, None])]
    values, vectors = torch.linalg.eigh(matrix.double())
    return [CurvatureBlock(names, values.clamp(min=0)[:, None].to(matrix), vectors.to(matrix))]


@dataclass
class _SinglePrecision:
    """Batches whose inputs are in single precision."""

    batches: Iterable[Batch]

    def __iter__(self) -> Iterator[Batch]:
        for x, y in self.batches:
            yield tree_map_only(Tensor, lambda t: t.float() if t.is_floating_point() else t, x), y


@torch.no_grad()
def _features(model: nn.Module, layer: str, x: Any, y: Tensor) -> Batch:
    features, outputs = features_of(model, P.of(model), layer, *inputs_of(x))
    last = model.get_submodule(layer)(features)
    if last.shape != outputs.shape or not torch.allclose(last, outputs, rtol=1e-4, atol=1e-5):
        raise ValueError(f"The layer {layer!r} is not the last: what it returns is changed.")
    return features, y


# ------------------------------------------------------------ the prior
def log_marginal_likelihood(
    blocks: Sequence[CurvatureBlock], mean: Params, prior_precision: float
) -> float:
    r"""Log evidence of a prior, without the log-likelihood at the mean.

    .. math:: -\frac12 \Big(\lambda \|\hat\omega\|^2
        + \sum_i \log \frac{h_i + \lambda}{\lambda}\Big)

    Args:
        blocks: the curvature.
        mean: one network.
        prior_precision: :math:`\lambda`.
    """
    values = torch.cat([block.eigenvalues.flatten() for block in blocks]).double()
    square = sum(mean[n].double().square().sum() for block in blocks for n in block.names)
    ratios = torch.log1p(values / prior_precision)
    return float(-(prior_precision * square + ratios.sum()) / 2)


def likeliest_precision(blocks: Sequence[CurvatureBlock], mean: Params) -> float:
    """The prior precision of largest marginal likelihood."""
    best = minimize_scalar(
        lambda log: -log_marginal_likelihood(blocks, mean, math.exp(log)),
        bounds=(-12.0, 16.0),
        method="bounded",
    )
    return math.exp(best.x)

"""The curvature of a trained network's loss, and the prior that it speaks for."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal, get_args

import torch
from scipy.optimize import minimize_scalar
from torch import Tensor, nn

from lightning_bnn import params as P
from lightning_bnn.likelihoods import Categorical
from lightning_bnn.metrics.validation import option
from lightning_bnn.params import Params
from lightning_bnn.posteriors.curvature_data import (
    Batch,
    InputsByName,
    Loader,
    SinglePrecision,
    inputs_of,
)
from lightning_bnn.posteriors.gauss_newton import gauss_newton
from lightning_bnn.posteriors.laplace import CurvatureBlock, features_of
from lightning_bnn.posteriors.output_curvature import Root, curvature_root, noise_factor

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
    option("structure", structure, get_args(Structure))
    root, factor = curvature_root(likelihood), 1.0
    if structure == "kron":
        factor = noise_factor(likelihood)
    runner = copy.deepcopy(model)
    runner.load_state_dict({n: t.clone() for n, t in params.items()}, strict=False)
    runner.eval()
    prefix = ""
    if last_layer is not None:
        batches = [_features(runner, params, last_layer, *batch) for batch in batches]
        runner = runner.get_submodule(last_layer)
        prefix = f"{last_layer}." if last_layer else ""
    names = [n for n, p in runner.named_parameters() if p.requires_grad]
    size = sum(runner.get_parameter(n).numel() for n in names)
    if structure == "full" and size > _LARGEST:
        raise ValueError(
            f"A full curvature of {size} weights takes {size**2 * 8 / 1e9:.0f} GB: take "
            "`structure='kron'` or 'diag', or `layers='last'`."
        )
    dtype = next(runner.parameters()).dtype
    if dtype in (torch.float16, torch.bfloat16):
        runner, batches = runner.float(), SinglePrecision(batches)
    found = None
    if structure != "kron":
        found = _jacobians(runner, names, batches, root, structure == "diag", progress)
    if found is None:
        kind = "classification" if isinstance(likelihood, Categorical) else "regression"
        factor = noise_factor(likelihood)
        found = _fitted(runner, kind, structure, batches, progress)
    blocks = [_renamed(block, prefix) for block in _blocks(found, structure, names, factor)]
    if not all(bool(block.eigenvalues.isfinite().all()) for block in blocks):
        raise ValueError("The curvature is not finite: look for NaN in the data and the weights.")
    return blocks


def _jacobians(
    model: nn.Module,
    names: Sequence[str],
    batches: Iterable[Batch],
    root: Root,
    *options: bool,
) -> Tensor | None:
    """The curvature by `gauss_newton`; None of networks that vmap cannot run."""
    try:
        return gauss_newton(model, names, batches, root, *options)
    except (RuntimeError, NotImplementedError, IndexError):
        return None


def _fitted(
    model: nn.Module, kind: str, structure: Structure, batches: Iterable[Batch], progress: bool
) -> Any:
    """The curvature as laplace-torch holds it."""
    from laplace import Laplace

    fit: Any = Laplace(
        InputsByName(model), kind, subset_of_weights="all", hessian_structure=structure,
        **Loader.options,
    )  # fmt: skip
    try:
        with torch.enable_grad():
            fit.fit(Loader(batches), progress_bar=progress)
    except (NotImplementedError, RuntimeError, ValueError, SystemExit) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise ValueError(
            f"laplace-torch cannot compute a curvature `structure={structure!r}` of "
            f"{type(model).__name__}{_with_unusual(model)}: {first}. Take `layers='last'`, or "
            "another structure."
        ) from error
    return fit.H


def without_factors(model: nn.Module) -> list[str]:
    """Names of the layers with trained weights that Kronecker factors are not made for."""
    usual = (nn.Linear, nn.modules.conv._ConvNd)
    found = {
        type(m).__name__
        for m in model.modules()
        if not isinstance(m, usual) and any(p.requires_grad for p in m.parameters(recurse=False))
    }
    return sorted(found)


def _with_unusual(model: nn.Module) -> str:
    found = ", ".join(without_factors(model))
    return f" (it has {found})" if found else ""


def _blocks(
    found: Any, structure: Structure, names: Sequence[str], factor: float
) -> list[CurvatureBlock]:
    if structure == "diag":
        return [CurvatureBlock(tuple(names), _positive(found.detach() * factor)[:, None])]
    if structure == "full":
        values, vectors = torch.linalg.eigh(found.detach().double())
        values = _positive(values * factor)[:, None]
        return [CurvatureBlock(tuple(names), values.to(found), vectors.to(found))]
    blocks = []
    for name, vectors, values in zip(names, found.eigenvectors, found.eigenvalues, strict=True):
        rows = _positive(values[0].detach())
        columns = _positive(values[1].detach()) if len(values) > 1 else torch.ones_like(rows[:1])
        right = vectors[1].detach() if len(values) > 1 else None
        product = factor * torch.outer(rows, columns)
        blocks.append(CurvatureBlock((name,), product, vectors[0].detach(), right))
    return blocks


def _positive(values: Tensor) -> Tensor:
    """Eigenvalues of a matrix that has no negative ones, apart from rounding."""
    return values.clamp(min=0)


def _renamed(block: CurvatureBlock, prefix: str) -> CurvatureBlock:
    names = tuple(prefix + name for name in block.names)
    return CurvatureBlock(names, block.eigenvalues, block.left, block.right)


@torch.no_grad()
def _features(model: nn.Module, params: Params, layer: str, x: Any, y: Tensor) -> Batch:
    features, outputs = features_of(model, P.of(model), layer, *inputs_of(x))
    found = model.get_submodule(layer)(features)
    if found.shape != outputs.shape or not torch.allclose(found, outputs, rtol=1e-4, atol=1e-5):
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
    found = minimize_scalar(
        lambda log: -log_marginal_likelihood(blocks, mean, math.exp(log)),
        bounds=(-12.0, 16.0),
        method="bounded",
    )
    return math.exp(found.x)

"""The curvature of a trained network's loss, and the prior precision that it suggests."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from scipy.optimize import minimize_scalar
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lightning_bnn.likelihoods import Categorical
from lightning_bnn.metrics.validation import check_choice
from lightning_bnn.posteriors.gauss_newton import (
    Batch,
    curvature_root,
    gauss_newton,
    inputs_of,
)
from lightning_bnn.posteriors.kronecker import (
    factored_blocks,
    is_linear,
    kronecker_factors,
    without_factors,
)
from lightning_bnn.posteriors.laplace import CurvatureBlock, features_of
from weightsym import params as P
from weightsym.params import Params, check_memory, first_line, precise

Structure = Literal["full", "kron", "diag"]
_LARGEST = 20_000
"""Largest number of weights of a full matrix, whose eigenvectors take 3 GB."""


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
    """Return the Gauss-Newton matrix of the negative log-likelihood, summed over the data.

    Args:
        model: gives the computation; weights that do not require gradients are left out.
        params: one network.
        batches: the training data, inputs (one, or a tuple of several) and targets, iterated
            several times.
        likelihood: ``Categorical``, ``Bernoulli``, ``Gaussian``, or one with a `curvature_root`.
        structure: ``"full"`` matrix, Kronecker factors of every layer (``"kron"``), or ``"diag"``.
        last_layer: name of a linear last layer, to which the curvature is restricted.
        progress: whether to show a progress bar.
    """
    check_choice("structure", structure, get_args(Structure))
    curvature_root(likelihood)
    in_rows = last_layer is None and is_linear(model) and structure != "full"
    batches = MappedBatches(
        batches, functools.partial(_rows, likelihood) if in_rows else lambda batch: batch
    )
    runner = copy.deepcopy(model)
    runner.load_state_dict({n: t.clone() for n, t in params.items()}, strict=False)
    runner.eval()
    prefix = ""
    if last_layer is not None:
        batches = [_features(runner, last_layer, likelihood, *batch) for batch in batches]
        runner = runner.get_submodule(last_layer)
        prefix = f"{last_layer}." if last_layer else ""
    if any(p.dtype in (torch.float16, torch.bfloat16) for p in runner.parameters()):
        runner, batches = runner.float(), MappedBatches(batches, _in_single_precision)
    blocks = _blocks(runner, batches, likelihood, structure, progress)
    if not all(bool(block.eigenvalues.isfinite().all()) for block in blocks):
        raise ValueError("The curvature is not finite: check the data and the weights for NaN.")
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
            f"A full curvature of {size} weights takes {size**2 * 8 / 1e9:.0f} GB: set "
            "`structure='kron'` or 'diag', or `layers='last'`."
        )
    if structure == "kron":  # of the rows and of the columns of every weight, and their bases
        weights = [t for n in names if (t := model.get_parameter(n)).ndim > 1]
        numbers = 2 * sum(len(t) ** 2 + (t.numel() / len(t)) ** 2 for t in weights)
        instead = "set `structure='diag'`, or `layers='last'`"
        device = next(model.parameters()).device
        check_memory(4 * numbers, device, "A curvature in Kronecker factors", instead)
    try:
        if is_linear(model) and structure != "full":
            return _of_linear(model, names, batches, likelihood, structure == "diag")
        if structure == "kron":
            return kronecker_factors(model, batches, likelihood, progress)
        matrix = gauss_newton(model, names, batches, likelihood, structure == "diag", progress)
    except (NotImplementedError, RuntimeError, ValueError, KeyError) as error:
        first = first_line(error).rstrip(".")
        unusual = f" (it has {', '.join(without_factors(model))})" if without_factors(model) else ""
        raise ValueError(
            f"Laplace cannot compute a curvature `structure={structure!r}` of "
            f"{type(model).__name__}{unusual}: {first}. Set `layers='last'`, or another "
            "structure."
        ) from error
    if structure == "diag":
        return [CurvatureBlock(names, matrix[:, None])]
    values, vectors = torch.linalg.eigh(precise(matrix))
    return [CurvatureBlock(names, values.clamp(min=0)[:, None].to(matrix), vectors.to(matrix))]


@torch.no_grad()
def _of_linear(
    layer: nn.Linear, names: Sequence[str], batches: Iterable[Batch], likelihood: nn.Module,
    diagonal: bool,
) -> list[CurvatureBlock]:  # fmt: skip
    r"""Compute in closed form the curvature of a linear layer that returns the network's outputs.

    .. math:: \textstyle\sum_i \mathrm{diag}(\Lambda_i) (\phi_i^2)^T \quad \text{or} \quad
        \sum_i \Lambda_i \otimes \tfrac1n \sum_i \phi_i \phi_i^T
    """
    inner, of_outputs, examples = torch.zeros(()), torch.zeros(()), 0
    for x, _ in batches:
        (features,) = inputs_of(x)
        summed, variances = _summed_curvature(likelihood, layer(features), diagonal)
        left, right = (variances, features.square()) if diagonal else (features, features)
        inner, of_outputs = inner.to(features) + left.T @ right, of_outputs.to(features) + summed
        examples += len(features)
    if diagonal:
        parts = {"weight": inner.flatten(), "bias": of_outputs}
        return [CurvatureBlock(tuple(names), torch.cat([parts[n] for n in names])[:, None])]
    blocks = factored_blocks("", of_outputs, inner / examples)
    return [blocks[name] for name in names]


def _summed_curvature(
    likelihood: nn.Module, outputs: Tensor, diagonal: bool
) -> tuple[Tensor, Tensor]:
    """Sum the curvature at the outputs over examples, as a diagonal or a matrix.

    Return also the diagonal for every example.
    """
    if isinstance(likelihood, Categorical):
        p = outputs.softmax(-1)
        variances, overlap = p * (1 - p), None if diagonal else p.T @ p
        summed = variances.sum(0) if overlap is None else torch.diag(p.sum(0)) - overlap
        return summed, variances
    roots = curvature_root(likelihood)(outputs)
    variances = roots.square().sum(-1)
    return variances.sum(0) if diagonal else torch.einsum("bir,bjr->ij", roots, roots), variances


@dataclass
class MappedBatches:
    """Batches with a function applied to each, any number of times.

    Attributes:
        batches: an iterable that can be read several times.
        function: of a batch, returns inputs and targets.
        examples: number of examples in the last pass.
    """

    batches: Iterable[Any]
    function: Callable[[Any], tuple[Any, Tensor]]
    examples: int = 0

    def __iter__(self) -> Iterator[tuple[Any, Tensor]]:
        examples = 0
        for batch in map(self.function, self.batches):
            examples += len(batch[1])
            yield batch
        self.examples = examples
        if examples == 0:
            raise ValueError("The training data are empty: a stream can be read only once.")


def _in_single_precision(batch: Batch) -> Batch:
    x, y = batch
    return tree_map_only(Tensor, lambda t: t.float() if t.is_floating_point() else t, x), y


@torch.no_grad()
def _features(model: nn.Module, layer: str, likelihood: Any, x: Any, y: Tensor) -> Batch:
    features, outputs = features_of(model, P.of(model), layer, *inputs_of(x))
    last = model.get_submodule(layer)(features)
    if last.shape != outputs.shape or not torch.allclose(last, outputs, rtol=1e-4, atol=1e-5):
        raise ValueError(f"The layer {layer!r} is not the last: its outputs are processed further.")
    return _rows(likelihood, (features, y))


def _rows(likelihood: Any, batch: Batch) -> Batch:
    """Return the inputs of a linear layer at the positions with targets, and their examples."""
    x, y = batch
    (features,) = inputs_of(x)
    rows: Batch = (
        likelihood.rows(features, y) if isinstance(likelihood, Categorical) else (features, y)
    )
    return rows


# ------------------------------------------------------------ the prior
def log_marginal_likelihood(
    blocks: Sequence[CurvatureBlock], mean: Params, prior_precision: float
) -> float:
    r"""Return the log evidence of a prior, without the log-likelihood at the mean.

    .. math:: -\frac12 \Big(\lambda \|\hat\omega\|^2
        + \sum_i \log \frac{h_i + \lambda}{\lambda}\Big)

    Args:
        blocks: the curvature.
        mean: one network.
        prior_precision: :math:`\lambda`.
    """
    values = precise(torch.cat([block.eigenvalues.flatten() for block in blocks]))
    square = sum(precise(mean[n]).square().sum() for block in blocks for n in block.names)
    ratios = torch.log1p(values / prior_precision)
    return float(-(prior_precision * square + ratios.sum()) / 2)


def likeliest_precision(blocks: Sequence[CurvatureBlock], mean: Params) -> float:
    """Return the prior precision that maximises the marginal likelihood."""
    best = minimize_scalar(
        lambda log: -log_marginal_likelihood(blocks, mean, math.exp(log)),
        bounds=(-12.0, 16.0),
        method="bounded",
    )
    return math.exp(best.x)

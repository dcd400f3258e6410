r"""The curvature of a trained network's loss, and the prior that it speaks for.

.. math:: H = \sum_i J_i^T \Lambda_i J_i, \quad
    \Lambda(f) = E_{y \sim p(y | f)}\big[\nabla_f \log p(y | f) \nabla_f \log p(y | f)^T\big]

This is the Hessian of the cross-entropy and of the squared error at the outputs, whatever the
targets are. Where the Hessian depends on them and may be indefinite, as that of a Gaussian whose
noise is an output, it is the expected one.
"""

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
from torch.func import functional_call, vjp, vmap
from torch.utils._pytree import tree_map_only
from tqdm import tqdm

from lightning_bnn.likelihoods import Categorical, Gaussian
from lightning_bnn.metrics.validation import check_choice
from lightning_bnn.posteriors.laplace import CurvatureBlock, features_of
from weightsym import params as P
from weightsym.devices import check_memory, precise
from weightsym.extras import needed
from weightsym.params import Params

__all__ = [
    "MappedBatches",
    "Structure",
    "curvature",
    "curvature_root",
    "gauss_newton",
    "kronecker_factors",
    "last_layer_name",
    "likeliest_precision",
    "log_marginal_likelihood",
    "noise_factor",
    "without_factors",
]

Root = Callable[[Tensor], Tensor]
r"""From outputs ``(batch, k)`` to matrices ``(batch, k, r)`` with :math:`R R^T = \Lambda`."""


def curvature_root(likelihood: nn.Module) -> Root:
    """A root of the curvature at the outputs.

    Args:
        likelihood: ``Categorical``, ``Bernoulli``, ``Gaussian``, or one that has such a method.
    """
    method: Root | None = getattr(likelihood, "curvature_root", None)
    if method is None:
        raise ValueError(
            "`likelihood` must have a `curvature_root`, as Categorical, Bernoulli and Gaussian "
            f"have, {type(likelihood).__name__} has none."
        )

    def root(outputs: Tensor) -> Tensor:
        found = method(outputs)
        if found.ndim != 3 or found.shape[:2] != outputs.shape:
            raise ValueError(
                f"`{type(likelihood).__name__}.curvature_root` must return (batch, k, r) for "
                f"outputs {tuple(outputs.shape)}, got {tuple(found.shape)}"
            )
        return found

    return root


def noise_factor(likelihood: nn.Module) -> float:
    """Compute the factor of the curvature of half the squared error, or of the cross-entropy.

    Args:
        likelihood: one that laplace-torch knows, as it does for Kronecker factors.
    """
    if isinstance(likelihood, Categorical):
        return 1.0
    if isinstance(likelihood, Gaussian) and likelihood.noise != "heteroscedastic":
        stds = likelihood.log_std.detach().exp()
        if len(stds) == 1:
            return float(stds[0]) ** -2
    got = f"{type(likelihood).__name__}({likelihood.extra_repr()})"
    raise ValueError(
        "`likelihood` must be Categorical, or Gaussian with one standard deviation of noise for "
        f"all targets, for Kronecker factors and for networks that vmap cannot run, got {got}: "
        "take `structure='diag'` or 'full'."
    )


Batch = tuple[Any, Tensor]
"""The input, or a tuple of several; and the targets."""
_BYTES = 2**26
"""Size of the gradients that are in memory at a time, apart from those of a single example."""


def inputs_of(x: Any) -> tuple[Any, ...]:
    """The inputs of a batch by position."""
    return x if isinstance(x, tuple) else (x,)


@torch.no_grad()
def gauss_newton(
    model: nn.Module,
    names: Sequence[str],
    batches: Iterable[Batch],
    likelihood: nn.Module,
    diagonal: bool,
    progress: bool = False,
) -> Tensor:
    """The Gauss-Newton matrix of the summed negative log-likelihood.

    Args:
        model: in evaluation mode.
        names: the weights, which require gradients.
        batches: inputs and targets.
        likelihood: what outputs say about targets.
        diagonal: only the diagonal.
        progress: show a bar.
    """
    weights: Params = {name: model.get_parameter(name) for name in names}
    size = sum(t.numel() for t in weights.values())
    like = next(iter(weights.values()))
    total = like.new_zeros(size) if diagonal else like.new_zeros(size, size)
    for x, y in tqdm(batches, "curvature", disable=not progress, leave=False):
        inputs = inputs_of(x)
        roots = _columns(likelihood, model(*inputs), y)
        at_once = max(1, _BYTES // (roots.shape[1] * size * like.element_size()))
        for start, columns in zip(range(0, len(roots), at_once), roots.split(at_once), strict=True):
            rows = [t[start : start + at_once] if isinstance(t, Tensor) else t for t in inputs]
            gradients = _pulled_back(model, weights, rows, columns)
            total += gradients.square().sum(0) if diagonal else gradients.T @ gradients
    return total


def _columns(likelihood: Any, outputs: Tensor, targets: Tensor) -> Tensor:
    """Columns of the roots for every example, ``(batch, r, ...)`` with the shape of its outputs.

    Of several positions each has columns of its own, which are zero at the others.
    """
    root = curvature_root(likelihood)
    if outputs.ndim == 2 and getattr(likelihood, "ignore_index", None) is None:
        return root(outputs).mT
    if not isinstance(likelihood, Categorical):
        raise ValueError(f"outputs must be (batch, numbers), not {tuple(outputs.shape)}")
    logits, targets = likelihood.aligned(outputs, targets)
    positions, flat = logits.shape[1:-1], logits.flatten(0, -2)
    size = len(logits) * positions.numel() ** 2 * logits.shape[-1] ** 2 * logits.element_size()
    check_memory(size, logits.device, "A curvature of all outputs", "take `layers='last'`")
    roots = root(flat)
    if likelihood.ignore_index is not None:
        roots = roots * (targets != likelihood.ignore_index).flatten()[:, None, None]
    if not positions:
        return roots.mT
    apart = torch.diag_embed(roots.unflatten(0, (len(logits), -1)).movedim(1, -1))
    columns = apart.permute(0, 3, 2, 4, 1).flatten(1, 2)  # (batch, r, positions, classes)
    if likelihood.next_token:  # nothing is said after the last
        columns = nn.functional.pad(columns, (0, 0, 0, 1))
    if likelihood.classes == "first":
        return columns.unflatten(2, positions).movedim(-1, 2)
    return columns.unflatten(2, outputs.shape[1:-1])


def _pulled_back(
    model: nn.Module, weights: Params, inputs: Sequence[Any], columns: Tensor
) -> Tensor:
    """Gradients of all weights, a row for each column ``(batch, r, outputs)`` of the roots."""
    try:
        return _at_once(model, weights, inputs, columns)
    except (RuntimeError, NotImplementedError, IndexError):  # vmap cannot run some networks
        return _one_by_one(model, weights, inputs, columns)


def _at_once(model: nn.Module, weights: Params, inputs: Sequence[Any], columns: Tensor) -> Tensor:
    def of_example(cotangents: Tensor, *example: Any) -> Tensor:
        batch = tuple(t[None] if isinstance(t, Tensor) else t for t in example)
        pull_back = vjp(lambda values: functional_call(model, values, batch)[0], weights)[1]
        (gradients,) = vmap(pull_back)(cotangents)
        return torch.cat([t.flatten(1) for t in gradients.values()], 1)

    dims = [0 if isinstance(t, Tensor) else None for t in inputs]
    return vmap(of_example, (0, *dims))(columns, *inputs).flatten(0, 1)


@torch.enable_grad()
def _one_by_one(
    model: nn.Module, weights: Params, inputs: Sequence[Any], columns: Tensor
) -> Tensor:
    rows = []
    for k, cotangents in enumerate(columns):
        output = model(*(t[k : k + 1] if isinstance(t, Tensor) else t for t in inputs))[0]
        for cotangent in cotangents:
            gradients = torch.autograd.grad(
                output, list(weights.values()), cotangent, retain_graph=True, materialize_grads=True
            )
            rows.append(torch.cat([t.flatten() for t in gradients]))
    return torch.stack(rows)


def without_factors(model: nn.Module) -> list[str]:
    """Names of the layers with trained weights that Kronecker factors are not made for."""
    others = {
        type(m).__name__
        for m in model.modules()
        if not isinstance(m, (nn.Linear, nn.Conv2d))
        and any(p.requires_grad for p in m.parameters(recurse=False))
    }
    return sorted(others)


@torch.enable_grad()
def kronecker_factors(
    model: nn.Module,
    names: Sequence[str],
    batches: Iterable[Batch],
    likelihood: nn.Module,
    progress: bool = False,
) -> list[CurvatureBlock]:
    """A block for every weight and bias, of the summed negative log-likelihood.

    Args:
        model: in evaluation mode.
        names: the weights, which require gradients.
        batches: inputs and targets.
        likelihood: ``Categorical``, or ``Gaussian`` with one standard deviation.
        progress: show a bar.
    """
    with needed("A Laplace approximation with Kronecker factors"):
        from curvlinops import FisherType, KFACLinearOperator  # type: ignore[import-untyped]  # it has no types

    classes = isinstance(likelihood, Categorical)
    loss = (nn.CrossEntropyLoss if classes else nn.MSELoss)(reduction="sum")
    factor = noise_factor(likelihood) / (1 if classes else 2)  # second derivative of a square
    uses = sum(p.requires_grad for m in model.modules() for p in m.parameters(recurse=False))
    if uses > len(names):
        raise ValueError("there are no Kronecker factors of weights that layers share")
    counted = MappedBatches(batches, lambda batch: batch)
    data = MappedBatches(counted, functools.partial(_by_name, likelihood))
    operator = KFACLinearOperator(
        _RunByName(model, likelihood), loss, [model.get_parameter(name) for name in names], data,
        progressbar=progress, check_deterministic=False, fisher_type=FisherType.TYPE2,
        num_data=1, num_per_example_loss_terms=1, batch_size_fn=len,
    )  # fmt: skip
    operator.compute_kronecker_factors()
    factors = operator.state_dict()
    blocks = []
    for name in names:
        layer, _, parameter = f"model.{name}".rpartition(".")
        rows, left = torch.linalg.eigh(factors["gradient_covariances"][layer])
        columns, right = torch.ones_like(rows[:1]), None
        if parameter == "weight":
            columns, right = torch.linalg.eigh(
                factors["input_covariances"][layer] / counted.examples
            )
        values = factor * torch.outer(rows.clamp(min=0), columns.clamp(min=0))
        blocks.append(CurvatureBlock((name,), values, left, right))
    return blocks


class _RunByName(nn.Module):
    """Runs a network on the inputs of a dict, in order, at whose end are the targets."""

    def __init__(self, model: nn.Module, likelihood: nn.Module) -> None:
        super().__init__()
        self.model, self.likelihood = model, likelihood

    def forward(self, x: dict[str, Any]) -> Any:
        *inputs, targets = x.values()
        outputs = self.model(*inputs)
        if isinstance(self.likelihood, Categorical):
            return self.likelihood.rows(outputs, targets)[0]
        return outputs


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
            of several layers ``Categorical``, or ``Gaussian`` with one standard deviation.
        structure: ``"full"`` matrix, Kronecker factors of every layer (``"kron"``), or ``"diag"``.
        last_layer: only that of this layer, which must be linear and the last.
        progress: show a bar.
    """
    check_choice("structure", structure, get_args(Structure))
    curvature_root(likelihood)
    if structure == "kron" and not (last_layer or isinstance(model, nn.Linear)):
        noise_factor(likelihood)
    runner = copy.deepcopy(model)
    runner.load_state_dict({n: t.clone() for n, t in params.items()}, strict=False)
    runner.eval()
    prefix = ""
    if last_layer is not None:
        batches = [_features(runner, last_layer, likelihood, *batch) for batch in batches]
        runner = runner.get_submodule(last_layer)
        prefix = f"{last_layer}." if last_layer else ""
    if next(runner.parameters()).dtype in (torch.float16, torch.bfloat16):
        runner, batches = runner.float(), MappedBatches(batches, _in_single_precision)
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
    if structure == "kron":  # of the rows and of the columns of every weight, and their bases
        weights = [t for n in names if (t := model.get_parameter(n)).ndim > 1]
        numbers = 2 * sum(len(t) ** 2 + (t.numel() / len(t)) ** 2 for t in weights)
        instead = "take `structure='diag'`, or `layers='last'`"
        device = next(model.parameters()).device
        check_memory(4 * numbers, device, "A curvature in Kronecker factors", instead)
    try:
        if isinstance(model, nn.Linear) and structure != "full":
            return _of_linear(model, names, batches, likelihood, structure == "diag")
        if structure == "kron":
            return kronecker_factors(model, names, batches, likelihood, progress)
        matrix = gauss_newton(model, names, batches, likelihood, structure == "diag", progress)
    except (NotImplementedError, RuntimeError, ValueError, KeyError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        unusual = f" (it has {', '.join(without_factors(model))})" if without_factors(model) else ""
        raise ValueError(
            f"Laplace cannot compute a curvature `structure={structure!r}` of "
            f"{type(model).__name__}{unusual}: {first}. Take `layers='last'`, or another structure."
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
    r"""The curvature of a linear layer whose outputs are those of the network, in closed form.

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
    if examples == 0:
        raise ValueError("The training data are empty: a stream can be read only once.")
    if diagonal:
        parts = {"weight": inner.flatten(), "bias": of_outputs}
        return [CurvatureBlock(tuple(names), torch.cat([parts[n] for n in names])[:, None])]
    rows, left = torch.linalg.eigh(of_outputs)
    columns, right = torch.linalg.eigh(inner / examples)
    rows, columns = rows.clamp(min=0), columns.clamp(min=0)
    blocks = {
        "weight": CurvatureBlock(("weight",), torch.outer(rows, columns), left, right),
        "bias": CurvatureBlock(("bias",), rows[:, None], left),
    }
    return [blocks[name] for name in names]


def _summed_curvature(
    likelihood: nn.Module, outputs: Tensor, diagonal: bool
) -> tuple[Tensor, Tensor]:
    """The curvature at the outputs, summed over examples: a diagonal or a matrix.

    Also the diagonal for every example.
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
    """Batches with a function applied to each, as often as they are asked for.

    Attributes:
        batches: anything that can be iterated several times.
        function: from a batch to inputs and targets.
        examples: how many there were when they were last read.
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


def _by_name(likelihood: nn.Module, batch: Batch) -> tuple[dict[str, Any], Tensor]:
    """As curvlinops takes a batch, whose inputs are in a dict."""
    x, y = batch
    inputs = {str(k): value for k, value in enumerate((*inputs_of(x), y))}
    if isinstance(likelihood, Categorical):
        y = likelihood.rows(y.unsqueeze(-1 if likelihood.classes == "last" else 1), y)[1]
    return inputs, y


@torch.no_grad()
def _features(model: nn.Module, layer: str, likelihood: Any, x: Any, y: Tensor) -> Batch:
    features, outputs = features_of(model, P.of(model), layer, *inputs_of(x))
    last = model.get_submodule(layer)(features)
    if last.shape != outputs.shape or not torch.allclose(last, outputs, rtol=1e-4, atol=1e-5):
        raise ValueError(f"The layer {layer!r} is not the last: what it returns is changed.")
    rows: Batch = (
        likelihood.rows(features, y) if isinstance(likelihood, Categorical) else (features, y)
    )
    return rows


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
    values = precise(torch.cat([block.eigenvalues.flatten() for block in blocks]))
    square = sum(precise(mean[n]).square().sum() for block in blocks for n in block.names)
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

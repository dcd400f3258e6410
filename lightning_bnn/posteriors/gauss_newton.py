r"""The Gauss-Newton matrix of a network, from roots of the curvature at its outputs.

.. math:: H = \sum_i J_i^T \Lambda_i J_i, \quad
    \Lambda(f) = E_{y \sim p(y | f)}\big[\nabla_f \log p(y | f) \nabla_f \log p(y | f)^T\big]

This is the Hessian of the cross-entropy and of the squared error at the outputs, whatever the
targets are. Where the Hessian depends on them and may be indefinite, as that of a Gaussian whose
noise is an output, it is the expected one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from tqdm import tqdm

from lightning_bnn.likelihoods import Categorical
from weightsym.params import Params, check_memory

Root = Callable[[Tensor], Tensor]
r"""From outputs ``(batch, k)`` to matrices ``(batch, k, r)`` with :math:`R R^T = \Lambda`."""


def curvature_root(likelihood: nn.Module) -> Root:
    """Return a root of the curvature at the outputs.

    Args:
        likelihood: ``Categorical``, ``Bernoulli``, ``Gaussian``, or one that has such a method.
    """
    method: Root | None = getattr(likelihood, "curvature_root", None)
    if method is None:
        raise ValueError(
            "`likelihood` must have a `curvature_root`, like Categorical, Bernoulli and "
            f"Gaussian, but {type(likelihood).__name__} has none."
        )

    def root(outputs: Tensor) -> Tensor:
        root = method(outputs)
        if root.ndim != 3 or root.shape[:2] != outputs.shape:
            raise ValueError(
                f"`{type(likelihood).__name__}.curvature_root` must return (batch, k, r) for "
                f"outputs {tuple(outputs.shape)}, got {tuple(root.shape)}"
            )
        return root

    return root


Batch = tuple[Any, Tensor]
"""The input, or a tuple of several; and the targets."""
_BYTES = 2**26
"""Size of the gradients that are in memory at a time, apart from those of a single example."""


def inputs_of(x: Any) -> tuple[Any, ...]:
    """Return the inputs of a batch by position."""
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
    """Return the Gauss-Newton matrix of the summed negative log-likelihood.

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
    """Return columns of the roots for every example, ``(batch, r, ...)`` in the outputs' shape.

    Each of several positions has columns of its own, which are zero at the others.
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
    """Return gradients of all weights, a row for each column ``(batch, r, outputs)`` of roots."""
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

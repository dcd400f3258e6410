r"""The generalised Gauss-Newton matrix of a network's loss, from the gradients of every example.

.. math:: H = \sum_i J_i^T \Lambda_i J_i = \sum_i (R_i^T J_i)^T (R_i^T J_i)

The columns of :math:`R_i` are pulled back one example at a time, and the Jacobian itself is never
formed. curvlinops multiplies the whole matrix with the identity instead, which takes fifty times
longer on convolutions, and knows fewer likelihoods.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from tqdm import tqdm

from lightning_bnn.params import Params
from lightning_bnn.posteriors.output_curvature import Root

__all__ = ["Batch", "gauss_newton", "inputs_of"]

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
    root: Root,
    diagonal: bool,
    progress: bool = False,
) -> Tensor:
    """The Gauss-Newton matrix of the summed negative log-likelihood.

    Args:
        model: in evaluation mode.
        names: the weights, which require gradients.
        batches: inputs and targets.
        root: of the curvature at the outputs.
        diagonal: only the diagonal.
        progress: show a bar.
    """
    weights: Params = {name: model.get_parameter(name) for name in names}
    size = sum(t.numel() for t in weights.values())
    like = next(iter(weights.values()))
    total = like.new_zeros(size) if diagonal else like.new_zeros(size, size)
    for x, _ in tqdm(batches, "curvature", disable=not progress, leave=False):
        inputs = inputs_of(x)
        outputs = model(*inputs)
        if outputs.ndim != 2:
            raise ValueError(f"outputs must be (batch, numbers), not {tuple(outputs.shape)}")
        roots = root(outputs).mT
        at_once = max(1, _BYTES // (roots.shape[1] * size * like.element_size()))
        for start, columns in zip(range(0, len(roots), at_once), roots.split(at_once), strict=True):
            rows = [t[start : start + at_once] if isinstance(t, Tensor) else t for t in inputs]
            gradients = _pulled_back(model, weights, rows, columns)
            total += gradients.square().sum(0) if diagonal else gradients.T @ gradients
    return total


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

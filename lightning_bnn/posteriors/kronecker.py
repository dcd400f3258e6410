"""Kronecker factors of the curvature of every linear layer and convolution, by curvlinops."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bnn.extras import needed
from lightning_bnn.likelihoods import Categorical
from lightning_bnn.posteriors.gauss_newton import Batch, inputs_of
from lightning_bnn.posteriors.laplace import CurvatureBlock
from lightning_bnn.posteriors.output_curvature import noise_factor

__all__ = ["kronecker_factors", "without_factors"]


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
    data = _ByName(batches)
    operator = KFACLinearOperator(
        _RunByName(model), loss, [model.get_parameter(name) for name in names], data,
        progressbar=progress, check_deterministic=False, fisher_type=FisherType.TYPE2,
        num_data=1, num_per_example_loss_terms=1, batch_size_fn=len,
    )  # fmt: skip
    operator.compute_kronecker_factors()
    factors = operator.state_dict()
    blocks = []
    for name in names:
        layer, _, kind = f"model.{name}".rpartition(".")
        rows, left = torch.linalg.eigh(factors["gradient_covariances"][layer])
        columns, right = torch.ones_like(rows[:1]), None
        if kind == "weight":
            columns, right = torch.linalg.eigh(factors["input_covariances"][layer] / data.examples)
        values = factor * torch.outer(rows.clamp(min=0), columns.clamp(min=0))
        blocks.append(CurvatureBlock((name,), values, left, right))
    return blocks


class _ByName:
    """Batches as curvlinops takes them, whose inputs are in a dict; they are counted."""

    def __init__(self, batches: Iterable[Batch]) -> None:
        self.batches, self.examples = batches, 0

    def __iter__(self) -> Iterator[tuple[dict[str, Any], Tensor]]:
        self.examples = 0
        for x, y in self.batches:
            self.examples += len(y)
            yield {str(k): value for k, value in enumerate(inputs_of(x))}, y


class _RunByName(nn.Module):
    """Runs a network on the inputs of a dict, in order."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: dict[str, Any]) -> Any:
        return self.model(*x.values())

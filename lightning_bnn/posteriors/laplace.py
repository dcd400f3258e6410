r"""A Gaussian whose precision is a curvature plus that of the prior.

.. math:: \omega \sim N\big(\hat\omega,\; T (H + \lambda I)^{-1}\big)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map

from lightning_bnn.metrics.validation import check_choice
from lightning_bnn.named_tensors import NamedTensors
from lightning_bnn.posteriors.base import (
    Posterior,
    Predictor,
    check_count,
    joined,
    standard_normal,
)
from weightsym import params as P
from weightsym.params import Params, keyed_generator

__all__ = ["LaplaceGaussian"]

_LOG_2PI = math.log(2 * math.pi)
_LARGEST_LAYERS = 2**30
"""Largest size of drawn last layers, in bytes."""
Prediction = Literal["linearised", "network"]


@dataclass(frozen=True)
class CurvatureBlock:
    r"""Curvature of the matrix W of some weights: eigenvalues, and rotations.

    The coordinates are :math:`L^T W R`, where a missing rotation is the identity.

    Args:
        names: of the tensors that form the rows and columns of W, in order.
        eigenvalues: one for every coordinate, ``(rows, columns)``.
        left: rotation of the rows.
        right: rotation of the columns.

    >>> turn = torch.tensor([[0.0, -1.0], [1.0, 0.0]])
    >>> block = CurvatureBlock(("w",), torch.tensor([[4.0], [9.0]]), left=turn)
    >>> block.rotated(torch.tensor([[[1.0], [0.0]]])).tolist()  # where the first axis points
    [[0.0, 1.0]]
    >>> block.coordinates(torch.tensor([[0.0, 1.0]])).flatten().tolist()
    [1.0, 0.0]
    """

    names: tuple[str, ...]
    eigenvalues: Tensor
    left: Tensor | None = None
    right: Tensor | None = None

    def rotated(self, coordinates: Tensor) -> Tensor:
        """Rotate coordinates ``(n, rows, columns)`` to rows of weights ``(n, numbers)``."""
        values = coordinates if self.left is None else _times(self.left, coordinates)
        values = values if self.right is None else values @ self.right.mT
        return values.flatten(1)

    def coordinates(self, rows: Tensor) -> Tensor:
        """Return the coordinates of rows of weights, the inverse of `rotated`."""
        values = rows.view(len(rows), *self.eigenvalues.shape)
        values = values if self.left is None else _times(self.left.mT, values)
        return values if self.right is None else values @ self.right


def _times(matrix: Tensor, values: Tensor) -> Tensor:
    """Multiply a matrix by each of ``(n, rows, columns)``, with few columns as one product."""
    few = values.shape[2] <= 8
    return torch.einsum("ij,njk->nik", matrix, values) if few else matrix @ values


class LaplaceGaussian(Posterior):
    r"""A Gaussian over the weights of some blocks, with all other weights fixed.

    .. math:: w \sim N\big(\hat w,\; T (H + \lambda I)^{-1}\big)

    Args:
        mean: one network, a mode of the posterior.
        blocks: curvature of the negative log-likelihood, summed over the data.
        prior_precision: of a Gaussian prior around zero.
        temperature: factor of the covariance.
        prediction: ``"linearised"`` networks, whose predictions match a Gaussian from second
            derivatives of the loss and first derivatives of the network; or the ``"network"``
            itself.
        last_layer: name of the linear last layer to which all blocks belong, if any. Its inputs are
            computed once for all networks, and both kinds of prediction are equal.

    References:
        | Laplace Redux (Daxberger et al., 2021)
        | https://arxiv.org/abs/2106.14806

    >>> block = CurvatureBlock(("w",), torch.tensor([[3.0], [24.0]]))
    >>> posterior = LaplaceGaussian({"w": torch.zeros(2), "b": torch.ones(1)}, [block])
    >>> networks = posterior.sample(20_000, torch.Generator().manual_seed(0))
    >>> networks["w"].std(0).round(decimals=2)  # 1 / sqrt(3 + 1), 1 / sqrt(24 + 1)
    tensor([0.5000, 0.2000])
    >>> networks["b"].unique()
    tensor([1.])
    """

    prior_precision: Tensor

    def __init__(
        self,
        mean: Params,
        blocks: Sequence[CurvatureBlock],
        prior_precision: float = 1.0,
        temperature: float = 1.0,
        prediction: Prediction = "linearised",
        last_layer: str | None = None,
    ) -> None:
        super().__init__()
        check_choice("prediction", prediction, get_args(Prediction))
        if not prior_precision > 0:
            raise ValueError(f"`prior_precision` must be positive, got {prior_precision}.")
        if not temperature >= 0:
            raise ValueError(f"`temperature` must not be negative, got {temperature}.")
        self.register_buffer("prior_precision", torch.tensor(prior_precision).double())
        self.temperature = temperature
        self.prediction, self.last_layer = prediction, last_layer
        self.constants = NamedTensors(mean)
        self._names = [block.names for block in blocks]
        parts: Params = {}
        for k, block in enumerate(blocks):
            pieces = {"values": block.eigenvalues, "left": block.left, "right": block.right}
            present = {name: t for name, t in pieces.items() if t is not None}
            parts |= {f"{k}.{name}": t.contiguous() for name, t in present.items()}  # as files are
        self.curvature = NamedTensors(parts)

    def extra_repr(self) -> str:
        """Return the description that ``print`` shows in parentheses."""
        names = [name for block in self._names for name in block]
        return f"{len(names)} tensors, {self.prediction} prediction"

    # -------------------------------------------------------- the Gaussian
    @property
    def is_linearised(self) -> bool:
        """True if its predictions differ from those of its samples, run as networks."""
        return self.prediction == "linearised" and self.last_layer is None

    @property
    def blocks(self) -> list[CurvatureBlock]:
        """The curvature of the posterior."""
        parts = self.curvature.tensors()
        return [
            CurvatureBlock(
                names, parts[f"{k}.values"], parts.get(f"{k}.left"), parts.get(f"{k}.right")
            )
            for k, names in enumerate(self._names)
        ]

    def deviations(self, n: int, generator: torch.Generator | None = None) -> Params:
        """Draw n differences from the mean, of the weights that vary, as a stack.

        Noise is drawn for weights, not for coordinates, since the coordinates of equal eigenvalues
        (such as those of unused weights) are arbitrary, and differ between machines.
        """
        check_count(n)
        mean = self.constants.tensors()
        stack: Params = {}
        for block in self.blocks:
            size = block.eigenvalues.numel()
            noise = standard_normal((n, size), block.eigenvalues, generator)
            turned = block.coordinates(noise) * self.precision(block).rsqrt()
            stack |= P.unravel(block.rotated(turned), P.ravel(mean, block.names)[1])
        return {name: t.to(mean[name]) for name, t in stack.items()}

    def sample(self, n: int, generator: torch.Generator | None = None) -> Params:
        """Draw a stack of n networks."""
        moved = self.deviations(n, generator)
        return {
            name: t + moved[name] if name in moved else t.expand(n, *t.shape).clone()
            for name, t in self.constants.tensors().items()
        }

    def log_prob(self, params: Params) -> Tensor:
        """Return the log-density of the weights that vary, for every network of a stack."""
        mean = self.constants.tensors()
        total = torch.zeros(())
        for block in self.blocks:
            centre, spec = P.ravel(mean, block.names)
            moved = joined(params, spec, "params", stacked=True) - centre
            precision = self.precision(block)
            density = (
                precision.log()
                - precision * block.coordinates(moved.to(block.eigenvalues)).square()
                - _LOG_2PI
            )
            total = total + density.flatten(1).sum(1) / 2
        return total

    def precision(self, block: CurvatureBlock) -> Tensor:
        """The precision of every coordinate of a block."""
        values = block.eigenvalues
        return (values + self.prior_precision.to(values)) / self.temperature

    # -------------------------------------------------------- predictions
    def predictor(
        self, n: int, generator: torch.Generator | None = None, chunk_size: int | None = None
    ) -> Predictor:
        """Predict with the same n networks, or with draws of the outputs of a wide last layer.

        If n last layers take more than a gigabyte, as with very many classes, outputs are drawn
        instead of weights. They are exact for every example, and independent between examples.
        """
        if self.last_layer is None or n * 4 * self._varying <= _LARGEST_LAYERS:
            return super().predictor(n, generator, chunk_size)
        device = "cpu" if generator is None else generator.device
        seed = int(torch.randint(2**62, (), generator=generator, device=device))
        return _output_predictor(self, n, seed)

    @property
    def _varying(self) -> int:
        return sum(block.eigenvalues.numel() for block in self.blocks)

    def drawn_predictor(
        self, n: int, generator: torch.Generator | None = None, chunk_size: int | None = None
    ) -> Predictor:
        """Predict with n networks held in memory, or with their linearisations."""
        if self.last_layer is None and self.prediction == "network":
            return super().drawn_predictor(n, generator, chunk_size)
        mean, moved = self.constants.tensors(), self.deviations(n, generator)
        if self.last_layer is not None:
            return _last_layer_predictor(mean, moved, self.last_layer)
        return _linearised_predictor(mean, moved, chunk_size)


def _last_layer_predictor(mean: Params, moved: Params, name: str) -> Predictor:
    """Predict with networks that differ in their last layer only."""
    prefix = f"{name}." if name else ""
    weight, bias = moved.get(f"{prefix}weight"), moved.get(f"{prefix}bias")

    def predict(model: nn.Module, *x: Any) -> Tensor:
        features, outputs = features_of(model, mean, name, *x)
        drawn = outputs[None]
        if weight is not None:
            drawn = drawn + torch.einsum("...d,ncd->n...c", features, weight.to(features))
        if bias is not None:
            drawn = drawn + bias.to(drawn).unflatten(0, (-1, *(1,) * (outputs.ndim - 1)))
        return drawn

    return predict


def _output_predictor(posterior: LaplaceGaussian, n: int, seed: int) -> Predictor:
    r"""Predict with drawn outputs of a last layer.

    .. math:: f = W \phi + b + L \sqrt{v} \odot z, \quad
        v_i = \textstyle\sum_j (R^T \phi)_j^2 / p_{ij}
    """
    mean, name = posterior.constants.tensors(), str(posterior.last_layer)
    blocks = [(b, posterior.precision(b).reciprocal()) for b in posterior.blocks]
    if any(b.left is not None and len(b.names) > 1 for b, _ in blocks):
        raise ValueError("A full curvature of this size cannot be sampled: use 'kron' or 'diag'.")

    def predict(model: nn.Module, *x: Any) -> Tensor:
        features, outputs = features_of(model, mean, name, *x)
        drawn = outputs.expand(n, *outputs.shape).clone()
        generator = keyed_generator(seed, device=outputs.device)
        for block, variances in blocks:
            rotated = features if block.right is None else features @ block.right.to(features)
            parts = P.unravel(variances.flatten(), P.ravel(mean, block.names)[1])
            for key, variance in parts.items():
                shared = torch.ones_like(rotated[..., :1])
                squares = rotated.square() if key.endswith("weight") else shared
                matrix = variance.to(features).reshape(-1, squares.shape[-1])
                noise = standard_normal(drawn.shape, outputs, generator)
                noise *= (squares @ matrix.mT).sqrt()
                drawn += noise if block.left is None else noise @ block.left.mT.to(noise)
        return drawn

    return predict


def _linearised_predictor(mean: Params, moved: Params, chunk_size: int | None) -> Predictor:
    """Predict with first-order expansions of a network around the mean."""
    fixed = {name: t for name, t in mean.items() if name not in moved}
    base = {name: mean[name] for name in moved}

    def predict(model: nn.Module, *x: Any) -> Any:
        def run(weights: Params) -> Any:
            return functional_call(model, {**fixed, **weights}, x)

        def expansion(direction: Params) -> Any:
            value, slope = jvp(run, (base,), (direction,))[:2]
            return tree_map(torch.add, value, slope)

        with _differentiable_attention(), _no_inference_mode():
            if P.runs_at_once(model, chunk_size):
                return torch.vmap(expansion, chunk_size=chunk_size)(moved)
            outputs = [expansion(direction) for direction in P.unstack(moved)]
            return tree_map(lambda *parts: torch.stack(parts), *outputs)

    return predict


@contextmanager
def _differentiable_attention() -> Iterator[None]:
    """Disable fused attention, which has no forward derivative."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@contextmanager
def _no_inference_mode() -> Iterator[None]:
    """Leave inference mode, in which older torch has no batched forward derivatives."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


def features_of(model: nn.Module, params: Params, layer: str, *x: Any) -> tuple[Tensor, Any]:
    """Return the inputs of a layer of a network, and the outputs of the network.

    Args:
        model: gives the computation.
        params: one network.
        layer: name of the layer.
        *x: inputs.
    """
    inputs_seen: list[Tensor] = []
    module = model.get_submodule(layer)
    with module.register_forward_pre_hook(lambda _, inputs: inputs_seen.append(inputs[0])):
        outputs = functional_call(model, params, x)
    if len(inputs_seen) != 1:
        raise ValueError(
            f"The layer {layer!r} is used {len(inputs_seen)} times, but must be used once."
        )
    return inputs_seen[0], outputs

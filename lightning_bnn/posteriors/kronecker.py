r"""Kronecker factors of the curvature of layers `Linear` and `Conv2d`.

.. math:: \sum_i J_i^T \Lambda_i J_i \approx \sum_{i,t} g_{it} g_{it}^T
    \otimes \tfrac1m \sum_{i,t} a_{it} a_{it}^T

Inputs :math:`a` of a layer and pulled-back roots :math:`g` of :math:`\Lambda` at its outputs are
counted wherever it is used, m times in all: for every example, token, and place of an image.

References:
    | Optimizing Neural Networks with Kronecker-factored Approximate Curvature (Martens & Grosse,
      2015)
    | Kronecker-Factored Approximate Curvature for Modern Neural Network Architectures
      (Eschenhagen et al., 2023), where this is the setting "expand"
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional as F
from tqdm import tqdm

from lightning_bnn.likelihoods import Categorical
from lightning_bnn.posteriors.gauss_newton import Batch, curvature_root, inputs_of
from lightning_bnn.posteriors.laplace import CurvatureBlock
from weightsym.params import check_memory

_BYTES = 2**24
"""Size of the gradients in memory at a time, apart from those of a single column."""


def without_factors(model: nn.Module) -> list[str]:
    """Return the names of layers with trained weights that have no Kronecker factors."""
    return sorted({type(m).__name__ for m in _trained(model).values() if not _has_factors(m)})


def _has_factors(module: nn.Module) -> bool:
    """Return whether a module is a layer of torch itself, not a subclass with its own forward."""
    is_convolution = type(module).forward is nn.Conv2d.forward
    return is_linear(module) or (is_convolution and getattr(module, "groups", 1) == 1)


def is_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Return whether a module is a linear layer of torch itself."""
    return type(module).forward is nn.Linear.forward


def _trained(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules with weights that require gradients."""
    modules = model.named_modules()
    return {n: m for n, m in modules if any(p.requires_grad for p in m.parameters(recurse=False))}


@torch.enable_grad()
def kronecker_factors(
    model: nn.Module, batches: Iterable[Batch], likelihood: nn.Module, progress: bool = False
) -> list[CurvatureBlock]:
    """Compute a block for every weight and bias, of the summed negative log-likelihood.

    Roots at all positions of an example are pulled back at once, with random signs, so that
    products of two positions vanish in the mean.

    Args:
        model: in evaluation mode.
        batches: inputs and targets.
        likelihood: what outputs say about targets.
        progress: show a bar.
    """
    if without_factors(model):
        raise ValueError("only linear layers and ungrouped 2D convolutions have Kronecker factors")
    layers = {name: _Layer(m) for name, m in _trained(model).items()}
    names = [n for n, p in model.named_parameters() if p.requires_grad]
    weights = [p for x in layers.values() for p in x.module.parameters() if p.requires_grad]
    if len(weights) > len(names):
        raise ValueError("weights that layers share have no Kronecker factors")
    signs = torch.Generator().manual_seed(0)
    hooks = [x.module.register_forward_hook(x.see, with_kwargs=True) for x in layers.values()]
    try:
        for x, y in tqdm(batches, "curvature", disable=not progress, leave=False):
            counted = _counted(likelihood, y)
            for layer in layers.values():
                layer.counted = counted
            rows, columns = _columns(likelihood, model(*inputs_of(x)), y, signs)
            _check_uses(rows, layers)
            _add(rows, columns, list(layers.values()))
    finally:
        for hook in hooks:
            hook.remove()
    blocks: dict[str, CurvatureBlock] = {}
    for name, layer in layers.items():
        prefix = f"{name}." if name else ""
        blocks |= factored_blocks(prefix, layer.of_outputs, layer.of_inputs / max(1, layer.uses))
    return [blocks[name] for name in names]


def factored_blocks(prefix: str, outputs: Tensor, inputs: Tensor) -> dict[str, CurvatureBlock]:
    """Return the blocks of a layer's weight and bias, from the factors of outputs and inputs."""
    rows, left = torch.linalg.eigh(outputs)
    columns, right = torch.linalg.eigh(inputs)
    rows, columns = rows.clamp(min=0), columns.clamp(min=0)
    weight, bias = f"{prefix}weight", f"{prefix}bias"
    return {
        weight: CurvatureBlock((weight,), torch.outer(rows, columns), left, right),
        bias: CurvatureBlock((bias,), rows[:, None], left),
    }


class _Layer:
    """Sums of the factors of a layer.

    Attributes:
        uses: number of inputs.
        outputs: of the calls since the last pull-back, with their numbers of entries.
        counted: mask of the positions with targets, ``(batch, positions)``; None for all.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module, self.uses = module, 0
        weight = module.weight
        assert isinstance(weight, Tensor)
        size = weight[0].numel()
        self.of_inputs = weight.new_zeros(size, size)
        self.of_outputs = weight.new_zeros(len(weight), len(weight))
        self.outputs: list[tuple[GradientEdge, int]] = []
        self.counted: Tensor | None = None

    @torch.no_grad()
    def see(
        self, module: nn.Module, args: tuple[Tensor, ...], named: dict[str, Tensor], output: Tensor
    ) -> None:
        """Add the inputs of a call to the input factor."""
        (x,) = (*args, *named.values())
        if isinstance(module, nn.Conv2d):
            around: Any = module._reversed_padding_repeated_twice
            mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
            padded = F.pad(x if x.ndim == 4 else x[None], around, mode)
            x = F.unfold(padded, module.kernel_size, module.dilation, stride=module.stride).mT
        elif self.counted is not None and x.shape[:-1] == self.counted.shape:
            x = x[self.counted]
        rows = x.reshape(-1, len(self.of_inputs))
        self.of_inputs += rows.T @ rows
        self.uses += len(rows)
        self.outputs.append((get_gradient_edge(output), output.numel()))

    def add(self, gradients: Tensor) -> None:
        """Add gradients at the outputs of a call, ``(columns, ...)``."""
        if isinstance(self.module, nn.Conv2d):
            gradients = gradients.flatten(-2).flatten(0, -3)
            if gradients.shape[2] > gradients.shape[1]:  # products are smaller than a copy
                self.of_outputs += (gradients @ gradients.mT).sum(0)
                return
            gradients = gradients.mT
        rows = gradients.reshape(-1, gradients.shape[-1])
        self.of_outputs += rows.T @ rows


def _counted(likelihood: Any, targets: Tensor) -> Tensor | None:
    """Return the mask of the positions with targets."""
    index = getattr(likelihood, "ignore_index", None)
    counted = torch.ones_like(targets, dtype=torch.bool) if index is None else targets != index
    if getattr(likelihood, "next_token", False) and targets.ndim == 2:
        return F.pad(counted[:, 1:], (0, 1))
    return None if index is None else counted


def _check_uses(rows: Tensor, layers: Mapping[str, _Layer]) -> None:
    """Refuse weights that are used without a call of their layer."""
    for name, layer in layers.items():
        weights = [p for p in layer.module.parameters() if p.requires_grad]
        if not layer.outputs and rows.requires_grad:
            used = torch.autograd.grad(rows.sum(), weights, retain_graph=True, allow_unused=True)
            if any(g is not None for g in used):
                raise ValueError(f"the layer {name!r} is not called, but its weights are used")


def _columns(
    likelihood: Any, outputs: Tensor, targets: Tensor, signs: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return rows of outputs ``(m, k)`` with targets, and columns of their roots ``(r, m, k)``."""
    has_positions = isinstance(likelihood, Categorical) and outputs.ndim > 2
    selects = has_positions or getattr(likelihood, "ignore_index", None) is not None
    rows = likelihood.rows(outputs, targets)[0] if selects else outputs
    if rows.ndim != 2:
        raise ValueError(f"outputs must be (batch, numbers), not {tuple(outputs.shape)}")
    size = rows.numel() * rows.shape[1] * rows.element_size()
    check_memory(size, rows.device, "A root of the curvature", "take smaller batches")
    columns = curvature_root(likelihood)(rows.detach()).movedim(-1, 0)
    if has_positions:
        heads = torch.rand(len(rows), 1, generator=signs) < 0.5
        columns = columns.where(heads.to(columns.device), -columns)
    return rows, columns.detach()


def _add(rows: Tensor, columns: Tensor, layers: Sequence[_Layer]) -> None:
    """Pull columns back to the outputs of all layers."""
    calls = [(layer, *call) for layer in layers for call in layer.outputs]
    for layer in layers:
        layer.outputs.clear()
    if not calls or not len(rows):
        return
    used, edges, sizes = zip(*calls, strict=True)
    at_once = max(1, _BYTES // (sum(sizes) * columns.element_size()))
    for some in columns.split(at_once):
        for layer, gradients in zip(used, _pulled_back(rows, edges, some), strict=True):
            if gradients is not None:
                layer.add(gradients)


def _pulled_back(
    rows: Tensor, edges: Sequence[GradientEdge], columns: Tensor
) -> Sequence[Tensor | None]:
    """Return gradients at the outputs of all calls, ``(columns, ...)``, or None without any."""
    options: Any = {"retain_graph": True, "allow_unused": True}
    if len(columns) > 1:
        try:
            return torch.autograd.grad(rows, edges, columns, is_grads_batched=True, **options)
        except (RuntimeError, NotImplementedError):  # vmap cannot run some networks
            pass
    one_by_one = [torch.autograd.grad(rows, edges, column, **options) for column in columns]
    return [None if g[0] is None else torch.stack(g) for g in zip(*one_by_one, strict=True)]

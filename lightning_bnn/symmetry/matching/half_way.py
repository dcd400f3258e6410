"""How far the network half way between two is from doing what both do in the mean, on inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves

from lightning_bnn.params import Params
from lightning_bnn.symmetry.forward import in_precision_of, structural_copy
from lightning_bnn.symmetry.matching.interpolation import interpolate

__all__ = ["HalfWay"]


class HalfWay:
    r"""Half way between a reference and a network, without labels.

    .. math:: \sum_x \| f_{(a + b) / 2}(x) - \tfrac12 f_a(x) - \tfrac12 f_b(x) \|^2

    Args:
        model: gives the computation; it runs in evaluation mode.
        reference: one network.
        inputs: one batch each.
    """

    def __init__(self, model: nn.Module, reference: Params, inputs: Sequence[Any]) -> None:
        self.network, self.reference = structural_copy(model).eval(), reference
        self.inputs = inputs

    def to(self, params: Params) -> Callable[[Params], float]:
        """The misfit as a function of this network in other coordinates."""
        ends = zip(self._outputs(self.reference), self._outputs(params), strict=True)
        goals = [(a + b) / 2 for a, b in ends]

        def misfit(moved: Params) -> float:
            outputs = self._outputs(interpolate(self.reference, moved, 0.5))
            pairs = zip(outputs, goals, strict=True)
            return sum(float((y - goal).square().sum()) for y, goal in pairs)

        return misfit

    @torch.no_grad()
    def _outputs(self, params: Params) -> list[Tensor]:
        every = (
            functional_call(self.network, params, (in_precision_of(params, x),))
            for x in self.inputs
        )
        leaves = (leaf for outputs in every for leaf in tree_leaves(outputs))
        return [y.double() for y in leaves if isinstance(y, Tensor) and y.is_floating_point()]

"""The code of one stage: forward, gradients of weights and inputs, for members and examples.

Activations lie as ``(members, blocks, channels, rows, columns, lanes)``, a lane being an example,
so that every place is a constant away from the first one of its window. Lanes beyond the last
example hold zeros, whatever the weights are.
"""

from __future__ import annotations

from lightning_bnn.stacks.fused.forward_code import forward
from lightning_bnn.stacks.fused.gradient_code import before_backward, input_gradient
from lightning_bnn.stacks.fused.stage import Stage
from lightning_bnn.stacks.fused.vector_code import VectorCode
from lightning_bnn.stacks.fused.weight_gradient_code import weight_gradient

__all__ = ["FUNCTIONS", "code_of"]

FUNCTIONS = {
    "forward": forward,
    "before_backward": before_backward,
    "weight_gradient": weight_gradient,
    "input_gradient": input_gradient,
}
POINTERS = ("x", "weight", "bias", "out", "notes")
"""Gradients stand where that of which they are the gradient stands."""


def code_of(stage: Stage, function: str, kind: str, lanes: int) -> str:
    """What LLVM compiles.

    Args:
        stage: the sizes.
        function: a name in ``FUNCTIONS``.
        kind: ``"float"`` or ``"double"``.
        lanes: examples in a block.
    """
    code = VectorCode(function, POINTERS, kind, lanes)
    FUNCTIONS[function](code, stage)
    return code.text()

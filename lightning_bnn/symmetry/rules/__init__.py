"""How operations treat channels: one family per file."""

from lightning_bnn.symmetry.rules.elementwise import (
    RULES,
    Rule,
    even,
    homogeneous,
    nonlinear,
    odd,
    passthrough,
    softmax,
)

__all__ = ["RULES", "Rule", "even", "homogeneous", "nonlinear", "odd", "passthrough", "softmax"]

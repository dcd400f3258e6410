"""How operations treat channels: one family per file, all of their names in `table`.

For rules of your own (`discover(..., rules={"mylib.op": homogeneous})`): the rules of common
operations, and what a rule is given and returns.
"""

from lightning_bnn.symmetry.rules.arithmetic import softmax
from lightning_bnn.symmetry.rules.constraints import Constraints, Rule
from lightning_bnn.symmetry.rules.elementwise import even, homogeneous, nonlinear, odd, passthrough
from lightning_bnn.symmetry.rules.labels import Constant, Unsupported, Value, Weight
from lightning_bnn.symmetry.rules.table import RULES

__all__ = [
    "RULES",
    "Constant",
    "Constraints",
    "Rule",
    "Unsupported",
    "Value",
    "Weight",
    "even",
    "homogeneous",
    "nonlinear",
    "odd",
    "passthrough",
    "softmax",
]

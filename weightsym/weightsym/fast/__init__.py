"""Chains of convolutions, rectifiers, pooling and linear layers: machine code of their own sizes.

A network goes one way through this folder: `dispatch` asks `reading` what it computes, a chain
of `stage`s; `running` runs them for all members by `machine_code`. Others know of
this folder by `params.prediction`, which asks it before it runs a stack in another way, and by
those who plan many gradients of one stack.
"""

from weightsym.fast.chains import Unsuitable
from weightsym.fast.dispatch import chain_of, fused_outputs, plan_of
from weightsym.fast.machine_code import Program
from weightsym.fast.running import Plan, adding

__all__ = [
    "Plan", "Program", "Unsuitable", "adding", "chain_of", "fused_outputs", "plan_of"
]  # fmt: skip

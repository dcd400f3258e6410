"""Chains of convolutions, rectifiers, pooling and linear layers: machine code of their own sizes.

A network goes one way through this folder: `dispatch` asks `reading` what it computes, a chain
of `stage`s; `running` runs them for all members by `machine_code`. Nothing else knows of
this folder than `params.prediction`, which asks it before it runs a stack in another way.
"""

from weightsym.fast.dispatch import chain_of, fused_outputs

__all__ = ["chain_of", "fused_outputs"]

"""Chains of convolutions, rectifiers, pooling and linear layers: machine code of their own sizes.

A network goes one way through this folder: `dispatch` asks `reading` what it computes, a chain
of `stage`s; `running` runs them for all members, by the `machine_code` of `stage_code`.
"""

from lightning_bnn.stacks.fused.dispatch import chain_of, fused_outputs

__all__ = ["chain_of", "fused_outputs"]

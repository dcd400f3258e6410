"""From a module to its symmetries: trace its graphs, follow its channels, solve, check.

`discover` calls `trace_graphs` (what the network computes), `follow_channels` (what the rules of
its operations say about channels), `symmetries_of` (the groups that follow) and `refute` (what the
network itself says about them).
"""

from lightning_bnn.symmetry.discovery.discover import discover

__all__ = ["discover"]

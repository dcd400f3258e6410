"""From a module to its symmetries: trace its graphs, read their units, verify the result.

`discover` calls `trace_graphs` (what the network computes), `symmetries_of` (what its formulas say
about units, by `dimensions`) and `refute` (what the network itself says about the groups).
"""

from weightsym.discovery.discover import discover

__all__ = ["discover"]

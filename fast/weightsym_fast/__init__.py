"""Machine code, planned chains and CUDA graphs: engines of `weightsym`, known by entry points.

`outputs` asks `reading` what a network computes, a chain of `chains`; `running` runs it for all
members by `machine_code`, which is written by `forward_code` and `gradient_code`. `planned_chains`
plans many gradients of one stack with the same code. `graphs` repeats what torch does on a GPU.
"""

__version__ = "0.1.0"

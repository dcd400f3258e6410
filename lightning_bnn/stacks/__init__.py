"""How the members of a stack run: at once or one by one, in chunks and threads, and fast."""

from lightning_bnn.stacks.choices import fitting_chunk, remember_loop, runs_at_once
from lightning_bnn.stacks.fast_layers import FastLayers
from lightning_bnn.stacks.fused import chain_of, fused_outputs
from lightning_bnn.stacks.memory import keep_freed_memory
from lightning_bnn.stacks.running import remember_vmap, run_network, undoing
from lightning_bnn.stacks.threads import in_threads, threads_for

__all__ = [
    "FastLayers",
    "chain_of",
    "fitting_chunk",
    "fused_outputs",
    "in_threads",
    "keep_freed_memory",
    "remember_loop",
    "remember_vmap",
    "run_network",
    "runs_at_once",
    "threads_for",
    "undoing",
]

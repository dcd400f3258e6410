"""Stacks of networks run at once or one by one, in chunks and threads."""

from lightning_bnn.stacks.choices import fitting_chunk, remember_loop, runs_at_once
from lightning_bnn.stacks.process import keep_freed_memory
from lightning_bnn.stacks.running import FastLayers, remember_vmap, run_network, undoing
from lightning_bnn.stacks.threads import in_threads, threads_for

__all__ = [
    "FastLayers",
    "fitting_chunk",
    "in_threads",
    "keep_freed_memory",
    "remember_loop",
    "remember_vmap",
    "run_network",
    "runs_at_once",
    "threads_for",
    "undoing",
]

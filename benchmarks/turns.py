"""Contestants in turns, so that a busy neighbour is fair to all of them."""

import statistics
import time

import torch


def in_turns(functions, rounds, device):
    """Median seconds of every function."""
    seconds = {name: [] for name in functions}
    for k in range(rounds + 2):
        for name, function in functions.items():
            synchronise(device)
            start = time.perf_counter()
            function()
            synchronise(device)
            if k >= 2:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def synchronise(device):
    if device == "cuda":
        torch.cuda.synchronize()

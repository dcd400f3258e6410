"""A run that is killed at random moments and resumed, again and again: python killed_runs.py DIR N.

A process of its own, since a process that has used autograd cannot be forked.
"""

import os
import random
import signal
import sys
import time
import warnings
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from runs import Plain, built, fit

from lightning_bnn.bank import CheckpointBank
from lightning_bnn.callbacks import CheckpointHarvester


class Slow(L.Callback):
    def on_train_batch_end(self, *_):
        time.sleep(0.005)


def train(folder):
    """Resume from the last checkpoint and keep one at every second step, for ever."""
    last = folder / "last.ckpt"
    keep = ModelCheckpoint(
        folder, every_n_train_steps=2, save_last=True, save_top_k=0, enable_version_counter=False
    )
    fit(
        built(Plain, 0.0),
        CheckpointHarvester(folder / "bank", every_n_steps=1),
        Slow(),
        keep,
        enable_checkpointing=True,
        ckpt_path=last if last.exists() else None,
        max_epochs=10**4,
    )


def steps(folder):
    if not (folder / "bank" / "manifest.jsonl").exists():
        return []
    return [r["step"] for r in CheckpointBank(folder / "bank", "r").records]


def killed(folder, seconds):
    """One run, killed some time after it has written something new."""
    before, child = len(steps(folder)), os.fork()
    if not child:
        try:
            train(folder)
        finally:
            os._exit(1)
    deadline = time.time() + 30
    while len(steps(folder)) == before:
        assert os.waitpid(child, os.WNOHANG) == (0, 0), "the run has ended by itself"
        assert time.time() < deadline, "the run does not start"
        time.sleep(0.01)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    found = steps(folder)
    assert found == list(range(1, len(found) + 1)), found


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dice = random.Random(0)
    for _ in range(int(sys.argv[2])):
        killed(Path(sys.argv[1]), dice.random() * 0.1)

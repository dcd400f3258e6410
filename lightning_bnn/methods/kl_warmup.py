"""How much of the complexity terms counts while a run of variational inference warms up."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_bnn.arguments import check_not_negative
from lightning_bnn.methods.method import Fit, Progress

__all__ = ["KLWarmup"]


@dataclass(frozen=True)
class KLWarmup:
    """A share that rises from 0 to 1 in the first epochs of a run, linearly by steps.

    Where the number of steps of an epoch is not known (streams), it rises at the end of each.

    Args:
        epochs: how long it rises; 0 for a share that is always 1.

    >>> warmup = KLWarmup(4)
    >>> [warmup.share(Progress(step, step // 2, step % 2 == 0), 2) for step in (1, 4, 9)]
    [0.125, 0.5, 1.0]
    """

    epochs: int | float = 0

    def __post_init__(self) -> None:
        check_not_negative("kl_warmup", self.epochs)

    def share(self, progress: Progress, epoch_steps: int | float) -> float:
        """What the next step is to count.

        Args:
            progress: after the last step.
            epoch_steps: of an epoch; infinite if that is not known.
        """
        done = progress.step / epoch_steps or progress.epoch + progress.epoch_ends
        return 1.0 if done >= self.epochs else float(done / self.epochs)

    def advice(self, fit: Fit) -> str:
        """What is wrong with it in a fit; nothing if it ends before."""
        if not 0 < fit.epochs <= self.epochs or fit.trial:
            return ""
        return (
            f"`kl_warmup` {self.epochs} is as long as the run of {fit.epochs} epochs, which never "
            "trains on the whole objective: take a shorter one."
        )

"""What an average of a run consists of, and what it has cost."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["AverageReport"]


@dataclass(frozen=True)
class AverageReport:
    """What an average consists of, and what it has cost.

    Attributes:
        networks: how many were averaged.
        looks: for how many distances to the mean could not tell that nothing has moved.
        matches: how many were matched anew.
        moved_units: units of the last network in other places, or flipped, than in the average.
        seconds: wall time of all of it, without validation.

    >>> report = AverageReport(networks=20, looks=2, matches=1, moved_units=3, seconds=0.25)
    >>> str(report).partition(";")[0]
    '20 networks in 0.25 s'
    """

    networks: int
    looks: int
    matches: int
    moved_units: int
    seconds: float

    def __str__(self) -> str:
        """One line for the log."""
        return (
            f"{self.networks} networks in {self.seconds:.3g} s; assignments solved for "
            f"{self.looks}, matched anew {self.matches}; {self.moved_units} units of the last one "
            "are elsewhere than in the average"
        )

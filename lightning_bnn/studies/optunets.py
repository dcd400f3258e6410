"""P1's posteriors of OptuNet on MNIST, trained once: the paper's recipes with fewer networks."""

from __future__ import annotations

from pathlib import Path

from lightning_bnn.quiet_runs import one_thread
from lightning_bnn.studies.runs import Job, Run, run_jobs

__all__ = ["optunet_jobs", "optunets"]

_REFERENCE, _METHODS = "ensemble", ("laplace", "swag", "dropout", "mfvi", "sghmc")
_NETWORKS, _MODES = 40, 5


def optunet_jobs() -> list[Job]:
    """An ensemble, for the reference and for comparison with it, and five other methods."""
    members = {_REFERENCE: _NETWORKS, **dict.fromkeys(_METHODS, _MODES)}
    return [
        Job(name, f"mnist_p1_{name}", {"model.init_args.members": count})
        for name, count in members.items()
    ]


def optunets(out: str) -> dict[str, Run]:
    """Train them; hours on two cores. What is trained already is not trained again.

    Args:
        out: folder of the runs.
    """
    with one_thread():
        return run_jobs(optunet_jobs(), Path(out))

"""P1's posteriors of OptuNet on MNIST, trained once by the paper's recipes."""

from __future__ import annotations

from pathlib import Path

from lightning_bnn.quiet_runs import one_thread
from lightning_bnn.studies.runs import Job, Run, run_jobs

__all__ = ["optunet_jobs", "optunets"]

_METHODS, _MODES = ("laplace", "swag", "sghmc", "dropout", "mfvi"), 10


def optunet_jobs() -> list[Job]:
    """Five methods. The reference and the ensemble are networks of the bank `mnist_optunets`."""
    modes = {"model.init_args.members": _MODES}
    return [Job(name, f"mnist_p1_{name}", modes) for name in _METHODS]


def optunets(out: str) -> dict[str, Run]:
    """Train them in about an hour of one core, but for those that are trained already.

    Args:
        out: folder of the runs.
    """
    with one_thread():
        return run_jobs(optunet_jobs(), Path(out))

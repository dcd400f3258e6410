"""Execution of jobs in this process, on a Ray cluster, or on a Slurm cluster.

This file knows nothing of the jobs. A job writes its result to a disk that all machines see, and
does nothing if the result exists, so that it can be retried.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_bnn.extras import needed

__all__ = ["CLUSTERS", "Work", "run_here", "run_on_ray", "run_on_slurm"]

Task = Callable[[Any, Callable[[], None]], None]
"""Does a job, and calls a given function periodically."""

_RETRIES = 3
_POLL = 0.5
_RAY = {"num_cpus": 1, "max_retries": _RETRIES, "retry_exceptions": True}
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Work:
    """A task, its jobs, and settings of their execution.

    Attributes:
        task: does a job.
        jobs: arguments of the task, one after the other.
        watch: called periodically.
        workers: number of concurrent jobs.
        folder: for files of the cluster.
        options: of the cluster.

    >>> work = Work(print, [1, 2, 3], lambda: None, workers=2, folder=Path("runs"), options={})
    >>> len(work.jobs), sorted(CLUSTERS)
    (3, ['local', 'ray', 'slurm'])
    """

    task: Task
    jobs: Sequence[Any]
    watch: Callable[[], None]
    workers: int
    folder: Path
    options: Mapping[str, Any]


def run_here(work: Work) -> None:
    """Run jobs one after the other in this process. There are no options.

    >>> done = []
    >>> def task(job, watch):
    ...     done.append(job**2)
    >>> run_here(Work(task, [1, 2, 3], lambda: None, workers=1, folder=Path("runs"), options={}))
    >>> done
    [1, 4, 9]
    """
    if work.workers != 1 or work.options:
        raise ValueError("`workers` and `options` require `cluster` ray or slurm.")
    for job in work.jobs:
        work.task(job, work.watch)
        work.watch()


def run_on_ray(work: Work) -> None:
    """Run jobs on a Ray cluster, each as a remote task, with retries if a worker dies.

    Options are ``address`` of a running cluster (``auto`` finds it; without it one is started on
    this machine), and those of a Ray task, such as ``num_cpus`` and ``num_gpus``.
    """
    with needed("`cluster='ray'`"):
        import ray
    options = dict(work.options)
    address = options.pop("address", None)
    is_ours = not ray.is_initialized()
    with _checking_options("Ray", work.options):
        remote = ray.remote(**{**_RAY, **options})(_alone)
        cpus = math.ceil(work.workers * options.get("num_cpus", 1))
        size = {} if address else {"num_cpus": max(1, cpus), "include_dashboard": False}
        if is_ours:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **size)
    try:
        waiting = [remote.remote(work.task, job, os.getcwd()) for job in work.jobs]
        while waiting:
            done, waiting = ray.wait(waiting, timeout=_POLL)
            work.watch()
            for finished in done:
                _result(functools.partial(ray.get, finished))
    finally:
        if is_ours:
            ray.shutdown()


def run_on_slurm(work: Work) -> None:
    """Run jobs on a Slurm cluster, as an array. Failed jobs are submitted again.

    Options are arguments of submitit's executor, such as ``timeout_min``, ``gpus_per_node`` and
    ``slurm_partition``. With ``cluster: local`` processes run on this machine.
    """
    with needed("`cluster='slurm'`"):
        import submitit
    options = dict(work.options)
    with _checking_options("submitit", work.options):
        cluster = options.pop("cluster", None)
        executor = submitit.AutoExecutor(work.folder / "slurm", cluster=cluster)
        if executor.cluster == "slurm":
            options = {"slurm_array_parallelism": work.workers, **options}
        executor.update_parameters(**options)
    jobs = list(work.jobs)
    folders = [os.getcwd()] * len(jobs)
    tried = dict.fromkeys(range(len(jobs)), 1)
    running = dict(enumerate(executor.map_array(_alone, [work.task] * len(jobs), jobs, folders)))
    try:
        while running:
            time.sleep(_POLL)
            work.watch()
            for k, job in [(k, job) for k, job in running.items() if job.done()]:
                del running[k]
                if job.exception() is not None and tried[k] <= _RETRIES:
                    tried[k] += 1
                    _log.warning("A job has failed and is submitted again (%s).", job.exception())
                    running[k] = executor.submit(_alone, work.task, jobs[k], os.getcwd())
                else:
                    _result(job.result)
    finally:  # the same command goes on with them
        for job in running.values():
            job.cancel(check=False)


CLUSTERS: dict[str, Callable[[Work], None]] = {
    "local": run_here,
    "ray": run_on_ray,
    "slurm": run_on_slurm,
}


@contextmanager
def _checking_options(whom: str, options: Mapping[str, Any]) -> Iterator[None]:
    """Convert a cluster's errors about its options to one sentence."""
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"`options`: {whom} does not take {dict(options)}: {reason}") from error


def _alone(task: Task, job: Any, folder: str) -> None:
    """Run a job in another process, with the same relative paths and classes."""
    if os.path.isdir(folder):
        os.chdir(folder)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    task(job, lambda: None)


def _result(get: Callable[[], Any]) -> None:
    """Wait for a job, and convert its error to one sentence with the last line of its message."""
    try:
        get()
    except Exception as error:
        last = [line for line in str(error).splitlines() if line.strip()][-1:]
        raise ValueError(f"A job has failed repeatedly: {''.join(last) or error!r}.") from error

"""Engines: alternatives to torch for the computation of a job, registered by entry points."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

from torch import Tensor, nn

from weightsym.networks.threads import known_of

GROUP = "weightsym.engines"
"""The group of entry points by which distributions name their engines."""
_log = logging.getLogger("weightsym.params")


# ------------------------------------------------------------ jobs
@dataclass(frozen=True, eq=False)
class StackJob:
    """A computation for all members of a stack.

    Attributes:
        network: gives the computation.
        stack: weights and buffers of the members.
        by_torch: computes the same from a job of this kind, by operations of torch.
        notes: what an engine that takes the job has found out, for its run.
    """

    network: nn.Module
    stack: dict[str, Tensor]
    by_torch: Callable[[Any], Any]
    notes: dict[str, Any] = field(default_factory=dict, kw_only=True)


@dataclass(frozen=True, eq=False)
class Outputs(StackJob):
    """A job for differentiable outputs ``(members, ...)``.

    Attributes:
        inputs: of the networks, by position.
        own_inputs: whether the leading dimension of the inputs counts members.
        chunk_size: members that shall run at once, if that was chosen.
    """

    inputs: tuple[Any, ...]
    own_inputs: bool = False
    chunk_size: int | None = None


Formula = Literal["cross-entropy", "squares", "fixed", "unknown"]


class Memory(dict[Any, Any]):
    """A cache that engines attach to tensors. Copies are empty.

    >>> import copy
    >>> copy.deepcopy(Memory(graph=1))
    {}
    """

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(self), ()


@dataclass(frozen=True, eq=False)
class Loss:
    """A loss of outputs, and the known properties of its formula.

    Attributes:
        mean: from outputs ``(members, examples, ...)`` and targets to one number per member.
        parameters: tensors that it depends on besides these.
        formula: ``"cross-entropy"`` of logits, ``"squares"`` of differences times a number and plus
            another, ``"fixed"`` if the same operations compute it every time.
        memory: of engines.

    >>> import torch
    >>> squares = Loss(lambda z, y: (z - y).square().sum(-1).mean(-1), (), "squares")
    >>> squares.mean(torch.ones(3, 5, 2), torch.zeros(5, 2))
    tensor([2., 2., 2.])
    """

    mean: Callable[[Any, Tensor], Tensor]
    parameters: tuple[Tensor, ...] = ()
    formula: Formula = "unknown"
    memory: Memory = field(default_factory=Memory)


@dataclass(frozen=True, eq=False)
class Losses(StackJob):
    """A job for differentiable losses ``(members,)`` of a batch.

    Attributes:
        inputs: see `Outputs`.
        targets: of the examples.
        loss: of the outputs.
        own_inputs: see `Outputs`, also of the targets.
        chunk_size: see `Outputs`.
    """

    inputs: tuple[Any, ...]
    targets: Tensor
    loss: Loss
    own_inputs: bool = False
    chunk_size: int | None = None


@dataclass(frozen=True, eq=False)
class Energies(StackJob):
    r"""A job for a `Field` of energies, for repeated evaluation.

    .. math:: U(\omega) = n L(\omega) + \tfrac\lambda2 |\omega|^2

    By torch, the energies and the gradients of all tensors that move, where they are.

    Attributes:
        moving: weights of the stack that move, by name.
        batches: inputs and targets.
        loss: of the outputs.
        precision: :math:`\lambda`, of the prior.
        count: is told how many gradients of all members were taken.
        own_inputs: see `Losses`.
    """

    moving: Mapping[str, Tensor]
    batches: Sequence[tuple[tuple[Any, ...], Tensor]]
    loss: Loss
    precision: float
    count: Callable[[int], None]
    own_inputs: bool = False


@runtime_checkable
class Field(Protocol):
    """Energies at given weights, computed without the parameters of a module."""

    def look(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return precise energies and their gradients, which are valid until the next call.

        Args:
            rows: the numbers of every chain, ``(chains, numbers)``.
        """

    def slope(self, rows: Tensor) -> Tensor:
        """Return the gradients alone."""

    def leapfrog(self, x: Tensor, momenta: Tensor, steps: int, size: float, kick: float) -> None:
        """Repeat leapfrog steps: add ``kick`` times gradients, then ``size`` times momenta."""


# ------------------------------------------------------------ engines
@runtime_checkable
class Engine(Protocol):
    """A way to compute some kinds of jobs. Its class is an entry point of the group `GROUP`.

    Attributes:
        name: for messages.
        kinds: of jobs that it may take.
    """

    name: ClassVar[str]
    kinds: ClassVar[tuple[type[StackJob], ...]]

    def takes(self, job: Any) -> str | None:
        """Return the reason why a job is refused, or None if it is accepted."""

    def run(self, job: Any) -> Any:
        """Compute an accepted job."""


@functools.cache
def engines() -> tuple[Engine, ...]:
    """Return all installed engines. One that cannot be imported is reported once and omitted."""
    loaded: list[Engine] = []
    for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
        try:
            loaded.append(point.load()())
        except Exception as error:
            _log.warning(
                "The engine %s is omitted, since it cannot be imported: %s", point.value, error
            )
    return tuple(loaded)


def engine_for(job: StackJob) -> Engine | None:
    """Return the first engine that takes a job. Refusals are logged once for each network.

    Args:
        job: what is to be computed.
    """
    for engine in engines():
        if isinstance(job, engine.kinds):
            reason = engine.takes(job)
            if reason is None:
                return engine
            _tell(job.network, engine.name, reason)
    return None


def compute(job: StackJob) -> Any:
    """Compute a job by the first engine that takes it, or by torch.

    Args:
        job: what is to be computed.

    >>> import torch
    >>> net, stack = nn.Linear(2, 1), {"weight": torch.ones(3, 1, 2), "bias": torch.zeros(3, 1)}
    >>> def by_torch(job):
    ...     run = lambda params: torch.func.functional_call(job.network, params, job.inputs)
    ...     return torch.vmap(run)(job.stack)
    >>> compute(Outputs(net, stack, by_torch, (torch.ones(5, 2),))).shape
    torch.Size([3, 5, 1])
    """
    engine = engine_for(job)
    return job.by_torch(job) if engine is None else engine.run(job)


def _tell(network: nn.Module, name: str, reason: str) -> None:
    announced = known_of(network).setdefault("told", set())
    if (name, reason) not in announced:
        announced.add((name, reason))
        _log.info("%s is not run by %s: %s.", type(network).__name__, name, reason)

"""The contract between an algorithm and the code that trains with it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

from torch import Tensor, nn

from lightning_bnn.methods.health import Diverged, Divergence, finite_members
from lightning_bnn.methods.run import Batch, Run
from lightning_bnn.posteriors import Empirical, Posterior
from lightning_bnn.samplers import EnergySampler, Langevin
from weightsym.params import Params

__all__ = ["Fit", "Method", "Progress", "Purpose", "Samples", "State", "Transitions"]


Choice = Callable[[Sequence[int]], list[int]]
"""Picks some of many."""


@dataclass(frozen=True)
class Purpose:
    """The use of a posterior.

    Attributes:
        predicts: whether only predictions count, so that a posterior with the same predictions will
            do.
        fitting: whether the weights are about to change.
        choose: picks the networks that predict, given their indices.

    >>> from lightning_bnn import methods, params
    >>> from lightning_bnn.models import mlp
    >>> net = mlp(2, [4], 2)
    >>> method, run = methods.SGMCMC(), methods.Run(net)
    >>> state = method.init(net, params.populate(net, 1))
    >>> ends = [methods.Progress(step, step, epoch_ends=True) for step in range(6)]
    >>> _ = [method.keeping.keep_if_due(state, progress) for progress in ends]
    >>> two = methods.Purpose(choose=lambda rows: rows[:2])
    >>> method.posterior(state, run).size, method.posterior(state, run, two).size
    (6, 2)
    """

    predicts: bool = False
    fitting: bool = False
    choose: Choice = list


AS_IT_IS = Purpose()
"""No particular purpose: the posterior itself, with all its networks."""


class State(nn.Module, ABC):
    """The parameters and buffers of a method, with a leading member dimension.

    Attributes:
        divergence: members left out of the posterior, where a method judges members by their
            losses.
        notes: contents of a checkpoint besides the tensors.

    >>> from lightning_bnn import methods, params
    >>> from lightning_bnn.models import mlp
    >>> net = mlp(2, [8], 2)
    >>> state = methods.MFVI(init_std=0.1).init(net, params.populate(net, members=3))
    >>> {name: tuple(p.shape) for name, p in state.named_parameters()}  # 42 weights of each member
    {'mean': (3, 42), 'log_std': (3, 42)}
    >>> state.stack()["1.weight"].shape, state.members().size
    (torch.Size([3, 8, 2]), 3)
    """

    divergence: Divergence | None = None
    lacks: str = ""
    """Name of the missing part of the posterior, which consists of the members until it is there.
    """

    def __init__(self) -> None:
        super().__init__()
        self.notes: dict[str, Any] = {}

    def recall(self, notes: dict[str, Any]) -> None:
        """Restore the notes of a checkpoint, some of which may be missing."""
        self.notes.update({name: notes[name] for name in self.notes if name in notes})

    @abstractmethod
    def stack(self) -> Params:
        """Return one network per member: its trained weights, or the centre of its mode."""

    def healthy(self) -> Tensor:
        """Return the indices of the members of the posterior, and require at least one."""
        finite = finite_members(self.parameters()).nonzero()[:, 0]
        if len(finite) == 0:
            raise Diverged(
                "No member has finite weights: training has diverged (set a smaller "
                "learning rate), or the data or the initial network contain NaN."
            )
        return finite if self.divergence is None else self.divergence.among(finite)

    def members(self) -> Empirical:
        """Return the healthy members, all equally likely."""
        healthy = self.healthy()
        return Empirical({name: t[healthy] for name, t in self.stack().items()})


@dataclass(frozen=True)
class Fit:
    """Facts about a fit that are known before its first step.

    Attributes:
        anew: whether the fit continues neither a checkpoint nor an earlier fit.
        steps: approximate number of optimizer steps; infinite if the fit has no end.
        epochs: number of epochs.
        epoch_steps: optimizer steps per epoch; infinite if unknown.
        optimizer: moves the parameters; None without training.
        schedulers: of the learning rate.
        clips_gradients: whether gradients are clipped.
        rank: number of this process; the first one writes shared files.
        processes: number of processes that train the same members.
        trial: whether the fit is a trial of a step or two.
        batches: reads all the training data.
        example: the first rows of some inputs; None if there are none.
        in_common: replaces tensors by those of the first process, where there are several.

    >>> from lightning_bnn import methods, params
    >>> from lightning_bnn.models import mlp
    >>> net = mlp(2, [4], 2)
    >>> method, warnings = methods.SWAG(start=5), []
    >>> state = method.init(net, params.populate(net, 1))
    >>> run = methods.Run(net, warn=warnings.append)
    >>> for epochs in (10, 5):  # the second fit ends where weights would be collected
    ...     method.before_fit(state, methods.Fit(epochs=epochs), run)
    >>> [warning.partition(":")[0] for warning in warnings]
    ['SWAG will collect weights fewer than twice']
    """

    anew: bool = True
    steps: int | float = float("inf")
    epochs: int | float = float("inf")
    epoch_steps: int | float = float("inf")
    optimizer: Any = None
    schedulers: tuple[Any, ...] = ()
    clips_gradients: bool = False
    rank: int = 0
    processes: int = 1
    trial: bool = False
    batches: Callable[[], Iterable[Batch]] = tuple
    example: Callable[[], tuple[Any, ...]] = tuple
    in_common: Callable[[Params], Params] = dict


@dataclass(frozen=True)
class Progress:
    """The position of a fit after an optimizer step.

    Attributes:
        step: optimizer steps so far, this one included.
        epoch: number of epochs completed before this step.
        epoch_ends: whether this was the last step of its epoch.
        optimizer: moved the weights.
        schedulers: of the learning rate.
        in_common: see `Fit`.

    >>> from lightning_bnn import methods, params
    >>> from lightning_bnn.models import mlp
    >>> net, method = mlp(2, [4], 2), methods.SWAG(start=1)
    >>> state, run = method.init(net, params.populate(net, 1)), methods.Run(net)
    >>> ends = [methods.Progress(10 * (epoch + 1), epoch, epoch_ends=True) for epoch in range(4)]
    >>> [method.after_step(state, progress, run) for progress in ends]
    [False, True, True, True]
    """

    step: int
    epoch: int
    epoch_ends: bool
    optimizer: Any = None
    schedulers: tuple[Any, ...] = ()
    in_common: Callable[[Params], Params] = dict


class Method(ABC):
    """An algorithm that makes a posterior of networks trained side by side.

    A method knows neither the trainer nor any storage, and holds nothing that changes in training:
    that belongs to its state. Only `init`, `losses` and `posterior` are required. A method whose
    networks are draws of chains derives from `Samples`, one whose steps use all the data from
    `Transitions`.

    >>> import torch
    >>> from weightsym import params
    >>> from lightning_bnn.methods import Batch, DeepEnsemble, Run
    >>> from lightning_bnn.models import mlp
    >>> class Bagging(DeepEnsemble):
    ...     def losses(self, state, batch, run):
    ...         halves = [torch.randperm(batch.examples)[: batch.examples // 2] for _ in range(3)]
    ...         inputs = torch.stack([batch.inputs[0][rows] for rows in halves])
    ...         targets = torch.stack([batch.targets[rows] for rows in halves])
    ...         return super().losses(state, Batch((inputs,), targets, per_member=True), run)
    >>> net, method = mlp(2, [8], 2), Bagging()
    >>> state = method.init(net, params.populate(net, members=3))
    >>> batch = Batch((torch.randn(10, 2),), torch.arange(10) % 2)
    >>> method.losses(state, batch, Run(net))["loss"].shape
    torch.Size([3])
    """

    name: ClassVar[str] = ""
    """Name in messages and of the LightningModule; by default that of the class."""
    prior: Any = None
    """The prior over weights, a module, if the method has one."""
    temperature: float | None = None
    """T of the tempered posterior; None leaves it to the optimizer, which uses 1 by default."""
    trains = True
    """Whether there is anything to train."""
    keeps_networks = False
    """Whether the posterior is made during the run, of its weights, or around the weights at its
    end."""
    unfitted = ""
    """What is evaluated, even of a single member, if nothing has been trained or loaded."""
    needs_targets = True
    """Whether batches have targets in training."""
    refreshes_statistics = False
    """Whether drawn networks need BatchNorm statistics of their own."""

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        cls.name = vars(cls).get("name", cls.__name__)

    # ------------------------------------------------------------ before a fit
    def prepare(self, network: nn.Module) -> nn.Module:
        """Return the network that defines the computation, or a modified copy."""
        return network

    @abstractmethod
    def init(self, network: nn.Module, stack: Params) -> State:
        """Create the trained state.

        Args:
            network: gives the computation.
            stack: one initial network per member.
        """

    def configure_optimizer(
        self,
        state: Any,
        optimizer: Any,
        run: Run,
        scheduler: Any = None,
        epochs: int | float = float("inf"),
        resumed: bool = False,
    ) -> Any:
        """Refuse incompatible settings, and pass the prior to a sampler.

        Args:
            state: of this method.
            optimizer: chosen by the user.
            run: holds the likelihood.
            scheduler: of the learning rate, chosen by the user.
            epochs: number of epochs of the fit.
            resumed: whether the fit continues from a checkpoint.

        Returns:
            The scheduler to use; None for none.
        """
        if isinstance(optimizer, Langevin | EnergySampler):
            raise ValueError(
                f"`optimizer` {type(optimizer).__name__} samples, but {self.name} "
                "optimises: use SGD or Adam, or the module SGHMC, HMC or MILE."
            )
        return scheduler

    def before_fit(self, state: Any, fit: Fit, run: Run) -> None:
        """Discard the results of another run, and warn of settings that cannot work."""

    # ------------------------------------------------------------ steps
    @abstractmethod
    def losses(self, state: Any, batch: Batch, run: Run) -> dict[str, Tensor]:
        """Return terms of the objective per member; the sum of ``loss`` is minimised."""

    def complexity_weight(self, state: Any) -> float:
        """Return the current factor of prior and entropy in the objective, which is 1 for Bayes."""
        return 1.0

    def before_clipping(self, state: Any) -> None:
        """Read the gradients before they are clipped, if clipping would change the posterior."""

    def after_step(self, state: Any, progress: Progress, run: Run) -> bool:
        """Collect networks if it is time, and return whether it was."""
        return False

    # ------------------------------------------------------------ after steps
    def after_validation(self, state: Any, run: Run) -> dict[str, Tensor]:
        """Return means over members to log after a validation."""
        return {}

    def at_end(self, state: Any, data: Iterable[Batch], run: Run) -> None:
        """Compute curvatures or statistics from the trained weights and all the data."""

    def after_fit(self, state: Any, run: Run) -> None:
        """Release data and files, and report on the fit, also after an error."""

    @abstractmethod
    def posterior(self, state: Any, run: Run, purpose: Purpose = AS_IT_IS) -> Posterior:
        """Return the current posterior, or a cheaper one that is sufficient for the purpose."""


@runtime_checkable
class Samples(Protocol):
    """A method whose networks are draws of chains, collected during the run.

    >>> from lightning_bnn import methods
    >>> isinstance(methods.SGMCMC(), Samples), isinstance(methods.SWAG(), Samples)
    (True, False)
    """

    keeping: Any
    """Schedule and storage of the collected networks, see `Keeping`."""


@runtime_checkable
class Transitions(Protocol):
    """A method whose steps are transitions that use all the data, not gradients of one batch.

    >>> from lightning_bnn import methods
    >>> isinstance(methods.MILE(), Transitions), isinstance(methods.SGMCMC(), Transitions)
    (True, False)
    """

    transitions: int
    """Number of transitions per training step."""

    def transition(self, state: Any, run: Run, move: Callable[..., Tensor]) -> dict[str, Tensor]:
        """Move all chains once.

        Args:
            state: of this method.
            run: computes losses.
            move: takes a transition, given a closure that returns energies and sets gradients.

        Returns:
            Terms that are worth logging.
        """
        ...

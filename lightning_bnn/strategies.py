"""Members spread over the processes of one run, instead of data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerStatus
from torch import Tensor, nn

__all__ = ["MembersStrategy", "sharding"]

_SHARDING = {
    "FSDPStrategy": "FSDP",
    "ModelParallelStrategy": "FSDP2",
    "DeepSpeedStrategy": "DeepSpeed",
}


class MembersStrategy(DDPStrategy):
    """Every process trains some of the members, on the same data. Gradients are not exchanged.

    ``Trainer(strategy="members", devices=8)`` with a module that trains members side by side, such
    as ``DeepEnsemble(members=1000)``. Losses that are logged, predictions of validation and test,
    harvested networks and checkpoints are those of all members: a run may be resumed with another
    number of processes, or in one. Ordinary data-parallel training would make all members equal.
    It takes what ``DDPStrategy`` takes to start processes.

    >>> from lightning import Trainer
    >>> off = {"logger": False, "enable_checkpointing": False, "accelerator": "cpu"}
    >>> trainer = Trainer(strategy="members", devices=2, **off)
    >>> type(trainer.strategy).__name__, trainer.strategy.share(1000)  # of the first process
    ('MembersStrategy', (0, 500))
    """

    strategy_name = "members"

    # -------------------------------------------------------- shares
    def share(self, members: int) -> tuple[int, int]:
        """First member of this process, and the one after the last."""
        if members < self.world_size:
            raise ValueError(
                f"`members` must be at least the number of processes, {self.world_size}, got "
                f"{members}."
            )
        rank = self.global_rank
        return members * rank // self.world_size, members * (rank + 1) // self.world_size

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Every process sees all the data."""
        return {"num_replicas": 1, "rank": 0}

    def setup(self, trainer: Any) -> None:
        """Let go of the members of others, nothing is wrapped, and nothing is made equal."""
        module: Any = self.lightning_module
        if not hasattr(module, "take_share"):
            raise ValueError(
                f"`strategy` members needs a module that trains members side by side and can share "
                f"them out, such as DeepEnsemble; {type(module).__name__} is none."
            )
        shared = [p for p in module.shared_parameters() if p.requires_grad]
        if shared:
            raise ValueError(
                "`strategy` members: the likelihood learns from all members, and processes do not "
                "exchange gradients; fix its noise, or train in one process."
            )
        if module.population.share is None:
            module.take_share(*self.share(module.members))
        super(DDPStrategy, self).setup(trainer)

    def teardown(self) -> None:
        """Every process goes on with all members, unless something went wrong in one of them."""
        module: Any = self.lightning_module
        status = None if module is None else module.trainer.state.status
        if status == TrainerStatus.RUNNING and module.population.share is not None:
            for optimizer in self.optimizers:
                self._note_seeds(optimizer)
                for parameter in self._stacked(optimizer).values():
                    state = optimizer.state[parameter]
                    state.update({k: self._gather(v, parameter) for k, v in state.items()})
            module.take_whole(self.gather_members)
        super().teardown()

    def _setup_model(self, model: nn.Module) -> nn.Module:  # type: ignore[override]  # no DDP around it
        return model

    def gather_members(self, tensor: Tensor) -> Tensor:
        """From the members of this process to all, in order. Every process must call it."""
        if self.world_size == 1:
            return tensor
        sizes = [torch.zeros((), dtype=torch.long, device=tensor.device) for _ in self._ranks]
        dist.all_gather(sizes, torch.tensor(len(tensor), device=tensor.device))
        most = int(max(sizes))
        padded = tensor.new_zeros(most, *tensor.shape[1:])
        padded[: len(tensor)] = tensor
        every = [torch.empty_like(padded) for _ in self._ranks]
        dist.all_gather(every, padded)
        return torch.cat([member[:size] for member, size in zip(every, sizes, strict=True)])

    @property
    def _ranks(self) -> range:
        return range(self.world_size)

    def _own(self, tensor: Tensor) -> Tensor:
        module: Any = self.lightning_module
        return tensor[module.population.share.first : module.population.share.last]

    # -------------------------------------------------------- checkpoints
    def lightning_module_state_dict(self) -> dict[str, Any]:
        module: Any = self.lightning_module
        names = set() if module.population.share is None else module.state.state_dict().keys()
        return {
            name: self.gather_members(value) if name in names else value
            for name, value in module.state_dict().items()
        }

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """All members, or the share of this process once it has one."""
        module: Any = self.lightning_module
        state = checkpoint["state_dict"]
        if module.population.share is not None:
            names = module.state.state_dict().keys()
            state = {n: self._own(t) if n in names else t for n, t in state.items()}
        module.load_state_dict(state, strict=strict)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """With the states of all members."""
        module: Any = self.lightning_module
        if module.population.share is None:
            return super().optimizer_state(optimizer)
        self._note_seeds(optimizer)
        state = super().optimizer_state(optimizer)
        return _changed(state, self._stacked(optimizer), self._gather)

    def _note_seeds(self, optimizer: Any) -> None:
        """Every process has noise of its own, which all of them go on with."""
        seeds: list[Any] = [None] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(seeds, [group.get("seed") for group in optimizer.param_groups])
            for group, *of_ranks in zip(optimizer.param_groups, *seeds, strict=True):
                group["seeds"] = of_ranks

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """The share of this process."""
        states = [
            _changed(state, self._stacked(optimizer), lambda value, _: self._own(value))
            for optimizer, state in zip(
                self.optimizers, checkpoint["optimizer_states"], strict=True
            )
        ]
        own = [g.get("seed") for o in self.optimizers for g in o.param_groups]
        super().load_optimizer_state_dict({**checkpoint, "optimizer_states": states})
        groups = (g for o in self.optimizers for g in o.param_groups)
        for group, seed in zip(groups, own, strict=True):
            seeds = group.pop("seeds", [])
            if len(seeds) == self.world_size:
                group["seed"] = seeds[self.global_rank]
            elif "seed" in group and self.world_size > 1:  # others than before have other noise
                group["seed"] = seed
                group.pop("is_seeded", None)

    def _gather(self, value: Any, parameter: nn.Parameter) -> Any:
        counts = isinstance(value, Tensor) and value.shape == parameter.shape
        return self.gather_members(value) if counts else value

    def _stacked(self, optimizer: Any) -> dict[int, nn.Parameter]:
        """Parameters that hold members, by their number in the optimizer's state."""
        module: Any = self.lightning_module
        tensors = {id(p) for p in module.state.parameters()}
        every = [p for group in optimizer.param_groups for p in group["params"]]
        return {k: p for k, p in enumerate(every) if id(p) in tensors}


def sharding(trainer: Any) -> str | None:
    """Name what leaves every process with a piece of the weights, or None if they are whole.

    >>> from lightning import Trainer
    >>> off = {"logger": False, "enable_checkpointing": False, "accelerator": "cpu"}
    >>> sharding(Trainer(**off)) is None
    True
    """
    kinds = (base.__name__ for base in type(trainer.strategy).__mro__)
    return next((_SHARDING[strategy] for strategy in kinds if strategy in _SHARDING), None)


def _changed(state: Mapping[str, Any], stacked: Mapping[int, Any], change: Any) -> dict[str, Any]:
    """An optimizer's state in which tensors that count members are replaced."""
    entries = {
        number: {
            name: change(value, stacked[number])
            if number in stacked and isinstance(value, Tensor) and value.ndim
            else value
            for name, value in entry.items()
        }
        for number, entry in state["state"].items()
    }
    return {**state, "state": entries}


StrategyRegistry.register(
    "members",
    MembersStrategy,
    description="Members of an ensemble over processes, without exchange of gradients",
    override=True,
)

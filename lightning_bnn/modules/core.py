"""A network, a method and the state of its members, as a LightningModule without its hooks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import lightning as L
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_bnn import _compat
from lightning_bnn.likelihoods import Likelihood
from lightning_bnn.member_batch import MemberBatch
from lightning_bnn.methods import Run, State
from lightning_bnn.methods.health import Divergence
from lightning_bnn.methods.method import AS_IT_IS, Purpose
from lightning_bnn.methods.run import EXAMPLE_ROWS
from lightning_bnn.modules import batches
from lightning_bnn.modules.members import Members
from lightning_bnn.modules.templates import TemplateMode, network_of
from lightning_bnn.posteriors import Posterior
from weightsym.params import Params, keyed_randomness


class Core(L.LightningModule):
    """Members of a method: their weights, their inputs, their posterior.

    `Bayesian` adds what a trainer calls. The parts of a module rest on this class.
    """

    divergence: Divergence | None
    template: nn.Module
    template_mode: TemplateMode
    likelihood: Likelihood
    method: Any
    state: Any
    run: Run
    population: Members
    make_optimizer: Callable[[Any], Any]
    lr_interval: str | None
    make_scheduler: Callable[[Any], Any] | None
    seed: int
    given_seed: int | None
    eval_samples: int
    has_weights: bool
    known_example: tuple[Any, ...]
    unused_names: set[str]

    # ------------------------------------------------------------ the state
    def adopt(self, state: State) -> None:
        """Have the parts of a state under their own names, in checkpoints too."""
        for name, module in state.named_children():
            self.add_module(name, module)
        for name, parameter in state.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        for name, buffer in state.named_buffers(recurse=False):
            self.register_buffer(name, buffer)
        self.__dict__["state"] = state
        self.register_load_state_dict_post_hook(_after_loading)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """The template follows to the device: it may hold tensors that no state dict names."""
        self.template._apply(fn, recurse)
        super()._apply(fn, recurse)
        _relink(self)
        return self

    def __getattr__(self, name: str) -> Any:
        """Find what only the state knows, such as `modes()` or `chains()`."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            state = self.__dict__.get("state")
            if state is None or name.startswith("_") or not hasattr(state, name):
                raise
            return getattr(state, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse to set an argument of the method, which would change nothing."""
        if name in self.__dict__.get("_arguments", ()):
            raise AttributeError(
                f"`{name}` is an argument of the method: set `module.method.{name}`."
            )
        if name == "_current_fx_name":  # which Lightning sets forty times in a step
            self.__dict__[name] = value
        else:
            super().__setattr__(name, value)

    def randomness(self, *key: int | str) -> AbstractContextManager[None]:
        """Random numbers of this module and this process, under a key."""
        return keyed_randomness(self.seed, *key, self.global_rank, device=self.device)

    # ------------------------------------------------------------ batches
    def inputs_and_targets(self, batch: Any) -> tuple[tuple[Any, ...], Tensor]:
        """Inputs and targets of a batch. Override it for batches of another layout."""
        _warn_of_unused(self, batch)
        return batches.inputs_and_targets(batch, self.template)

    def inputs_only(self, batch: Any) -> tuple[Any, ...]:
        """Inputs of a batch that may have no targets. Of a tuple, all but the last are inputs."""
        overridden = type(self).inputs_and_targets is not Core.inputs_and_targets
        if overridden and not isinstance(batch, Tensor):
            return self.inputs_and_targets(batch)[0]
        _warn_of_unused(self, batch)
        return batches.inputs_only(batch, self.template)

    def cast(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Floating inputs in the precision of the weights."""
        dtype = next((p.dtype for p in self.parameters() if p.is_floating_point()), None)
        return tuple(
            x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs
        )

    def example(self) -> tuple[Any, ...]:
        """Two rows of input: from a batch that was seen, or from the train loader's data set."""
        self.known_example = self.known_example or _example_of(self)
        tensors = [x.to(self.device) if isinstance(x, Tensor) else x for x in self.known_example]
        return self.cast(tensors)

    # ------------------------------------------------------------ members
    @property
    def num_data(self) -> int | None:
        """Number of training examples, once it is known."""
        return self.run.num_data

    @num_data.setter
    def num_data(self, value: int | None) -> None:
        self.run.num_data = value

    @property
    def members(self) -> int:
        """Number of members that are trained here."""
        return self.population.count

    def member_stack(self) -> Params:
        """One network for each member: the weights that are trained, or the centres of modes."""
        return self.state.stack()

    def weights(self) -> tuple[nn.Module, Params, tuple[Any, ...]]:
        """Template, stack of members, and an example of its inputs: what callbacks look at."""
        return self.template, self.member_stack(), self.example()

    def member(self, index: int) -> nn.Module:
        """A plain module with the weights of one member."""
        if not 0 <= index < self.members:
            raise ValueError(f"`index` must be between 0 and {self.members - 1}, got {index}.")
        result = network_of(self.template)
        result.load_state_dict({n: t[index] for n, t in self.member_stack().items()}, strict=False)
        return result.train(self.training)

    def shared_parameters(self) -> list[Tensor]:
        """Parameters that belong to all members, such as those of the likelihood."""
        stacked = {id(p) for p in self.state.parameters()}
        return [p for p in self.parameters() if id(p) not in stacked]

    def posterior(self) -> Posterior:
        """The posterior as it is now, apart from what trains."""
        return self.posterior_for(AS_IT_IS)

    def posterior_for(self, purpose: Purpose) -> Posterior:
        """The posterior for a purpose. It is said where a trained one lacks its Gaussians."""
        if self.has_weights and not self.state.is_complete and not self.fits_now:
            missing = self.method.completion or "second collection of weights"
            rank_zero_warn(
                f"{type(self).__name__} has no {missing} yet (no training data, or a checkpoint "
                "from before the end of a fit?): its members predict as they are."
            )
        return self.method.posterior(self.state, self.run, purpose)

    @property
    def fits_now(self) -> bool:
        """Whether a trainer is about to change the weights."""
        trainer = _compat.trainer_of(self)
        if trainer is None or trainer.state.fn != TrainerFn.FITTING:
            return False
        return trainer.state.status == TrainerStatus.RUNNING


class ModulePart:
    """A part of a module, which goes with it into copies and files.

    Modules that nobody uses any more must free their memory at once, so that the part refers to
    its module weakly.

    Args:
        module: of which this is a part.
    """

    def __init__(self, module: Core) -> None:
        self._module = weakref.ref(module)

    @property
    def module(self) -> Core:
        """The module of this part."""
        module = self._module()
        assert module is not None
        return module

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_module": self.module}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _module=weakref.ref(state["_module"]))


def _after_loading(module: Core, incompatible: Any) -> None:
    module.has_weights = True
    _relink(module)


def _relink(module: Core) -> None:
    """See that parameters and buffers of the state are those of its module, if replaced."""
    state = module.state
    for tensors, of_module in (
        (state._parameters, module._parameters),
        (state._buffers, module._buffers),
    ):
        tensors.update({name: of_module[name] for name in tensors})


def _warn_of_unused(module: Core, batch: Any) -> None:
    """Say once what a batch holds that nothing reads."""
    names = [n for n in batches.left_over(batch, module.template) if n not in module.unused_names]
    base = getattr(module.template, "get_base_model", None)  # of peft, whose own takes anything
    asked = set(batches.parameters_of(base())) if callable(base) else set()
    if wanted := asked & set(names):
        raise ValueError(
            f"{', '.join(map(repr, sorted(wanted)))} of the batches would not reach the network: "
            "pass `network.get_base_model()`, which holds the adapter, too."
        )
    if names:
        module.unused_names |= set(names)
        rank_zero_warn(
            f"{', '.join(map(repr, names))} of the batches is not used: "
            f"{type(module.template).__name__}.forward has no positional parameter of that name."
        )


def _example_of(module: Core) -> tuple[Any, ...]:
    """Two rows of input: those that the user names, or the first of the train loader's data."""
    trainer, example = _compat.trainer_of(module), module.example_input_array
    if example is not None:
        return example if isinstance(example, tuple) else (example,)
    if trainer is None or trainer.train_dataloader is None:
        return ()
    with keyed_randomness(module.seed, "example", device=module.device):  # nobody else's numbers
        raw = batches.first_rows(trainer.train_dataloader, EXAMPLE_ROWS)
        if raw is None:
            return ()
        raw = trainer.strategy.batch_to_device(raw, dataloader_idx=0)
        if isinstance(raw, MemberBatch):
            raw = tuple(x[0] for x in raw)
    return module.inputs_and_targets(raw)[0]

"""A LightningModule around a network that it does not own: batches, modes, devices, errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import lightning as L
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_bnn.likelihoods import Categorical, Likelihood
from lightning_bnn.member_batch import MemberBatch
from lightning_bnn.metrics.validation import are_distributions
from lightning_bnn.modules.batches import inputs_and_targets, inputs_only, left_over
from lightning_bnn.modules.data_size import first_rows
from lightning_bnn.modules.templates import misfit, raised_by
from lightning_bnn.randomness import keyed_randomness

__all__ = ["EXAMPLE_ROWS", "TemplateModule"]

EXAMPLE_ROWS = 2


class TemplateModule(L.LightningModule):
    """Runs a network with weights from elsewhere.

    The network is kept unregistered: its own weights are neither trained nor saved.
    """

    template: nn.Module
    likelihood: Likelihood
    seed: int
    _example: tuple[Any, ...]
    _left_over: set[str]
    _outputs_seen: bool
    _frozen_modules: list[nn.Module]

    # -------------------------------------------------------- batches
    def inputs_and_targets(self, batch: Any) -> tuple[tuple[Any, ...], Tensor]:
        """Inputs and targets of a batch; override it for batches of another layout."""
        self._tell_left_over(batch)
        return inputs_and_targets(batch, self.template)

    def inputs_only(self, batch: Any) -> tuple[Any, ...]:
        """Inputs of a batch that may have no targets; of a tuple, all but the last are inputs."""
        own = type(self).inputs_and_targets is not TemplateModule.inputs_and_targets
        if own and not isinstance(batch, Tensor):
            return self.inputs_and_targets(batch)[0]
        self._tell_left_over(batch)
        return inputs_only(batch, self.template)

    def _tell_left_over(self, batch: Any) -> None:
        """Say once what a batch holds for nobody."""
        names = [name for name in left_over(batch, self.template) if name not in self._left_over]
        if names:
            self._left_over |= set(names)
            rank_zero_warn(
                f"{', '.join(map(repr, names))} of the batches is not used: "
                f"{type(self.template).__name__}.forward has no positional parameter of that name."
            )

    def _cast(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Floating inputs in the precision of the weights."""
        dtype = next((p.dtype for p in self.parameters() if p.is_floating_point()), None)
        return tuple(
            x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs
        )

    def _randomness(self, *key: int | str) -> AbstractContextManager[None]:
        return keyed_randomness(self.seed, *key, self.global_rank, device=self.device)

    # -------------------------------------------------------- example
    def example(self) -> tuple[Any, ...]:
        """Two rows of input: from a batch that was seen, or from the train loader's data set."""
        if not self._example:
            given = self.example_input_array
            if given is not None:
                self._example = given if isinstance(given, tuple) else (given,)
            elif self._trainer is not None and self.trainer.train_dataloader is not None:
                self._example = self._peek(self.trainer.train_dataloader)
        return self._example

    def _peek(self, loader: Any) -> tuple[Any, ...]:
        """The first rows of a data set, without touching anybody's random numbers."""
        with keyed_randomness(self.seed, "example", device=self.device):
            batch = first_rows(loader, EXAMPLE_ROWS)
            if batch is None:
                return ()
            batch = self.trainer.strategy.batch_to_device(batch, dataloader_idx=0)
            if isinstance(batch, MemberBatch):
                batch = tuple(x[0] for x in batch)
        return self._cast(self.inputs_and_targets(batch)[0])

    # -------------------------------------------------------- the template
    def _same_mode(self) -> None:
        """Training or not; what the given network had frozen in evaluation mode stays there."""
        if self.template.training != self.training:
            self.template.train(self.training)
            for module in self._frozen_modules if self.training else ():
                module.eval()

    @contextmanager
    def _predicting(self) -> Iterator[None]:
        """Evaluation mode for predictions, whatever the module's: it is left in training by a fit.

        Statistics of the examples at hand would be used, and learnt, otherwise.
        """
        self._same_mode()
        training = [module for module in self.template.modules() if module.training]
        self.template.eval()
        try:
            yield
        finally:
            for module in training:
                module.training = True

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """The template follows to the device: it may hold tensors that no state dict names."""
        self.template._apply(fn, recurse)
        return super()._apply(fn, recurse)

    def nll(self, outputs: Any, targets: Tensor) -> Tensor:
        """Mean negative log-likelihood of a batch, for outputs of every network."""
        return -self.likelihood.log_prob(self._one_tensor(outputs), targets).mean(-1)

    def nll_each(self, outputs: Any, targets: Tensor) -> Tensor:
        """The same where every network has targets of its own."""
        every = self._one_tensor(outputs).flatten(0, 1), targets.flatten(0, 1)
        return -self.likelihood.log_prob(*every).unflatten(0, targets.shape[:2]).mean(-1)

    def _one_tensor(self, outputs: Any) -> Tensor:
        if not isinstance(outputs, Tensor):
            raise ValueError(
                f"`network` must return one tensor, {type(self.template).__name__} returns a "
                f"{type(outputs).__name__}: wrap it in a module that picks the outputs."
            )
        if not self._outputs_seen:
            self._outputs_seen = True
            self._look_at_outputs(outputs)
        return outputs

    def _look_at_outputs(self, outputs: Tensor) -> None:
        """Probabilities train, too, as logits between 0 and 1; worse, and nothing else tells."""
        if isinstance(self.likelihood, Categorical) and are_distributions(outputs.detach()):
            rank_zero_warn(
                f"{type(self.template).__name__} returns probabilities, rows that sum to one, and "
                "Categorical takes logits: leave out the softmax at the end of `network`."
            )

    def _checked(self, run: Callable[[], Any], inputs: Sequence[Any]) -> Any:
        try:
            return run()
        except RuntimeError as error:
            wrong = misfit(error, inputs)
            if wrong is None or not raised_by(error, self.template):
                raise
            raise ValueError(f"{type(self.template).__name__} does not take {wrong}.") from error

    # -------------------------------------------------------- checkpoints
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep what a checkpoint cannot rebuild, to be compared, and an example of the inputs."""
        checkpoint["lightning_bnn"] = {
            "class": type(self).__name__,
            "made_of": self._made_of(),
            "example": [x.detach().cpu() if isinstance(x, Tensor) else x for x in self._example],
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Warn if this module targets another posterior than the one that was saved."""
        kept = checkpoint.get("lightning_bnn", {})
        for name, text in kept.get("made_of", {}).items():
            own = self._made_of().get(name)
            if own != text:
                told = (
                    f"The checkpoint was trained with {name} {text}, this module has {own}: pass "
                    f"`{name}` to `load_from_checkpoint`."
                )
                if name == "likelihood":  # its parameters would not fit
                    raise ValueError(told)
                rank_zero_warn(told)
        moved = (x.to(self.device) if isinstance(x, Tensor) else x for x in kept.get("example", ()))
        self._example = self._example or tuple(moved)

    def _made_of(self) -> dict[str, str]:
        return {
            name: " ".join(repr(getattr(self, name)).split())
            for name in ("likelihood", "prior")
            if isinstance(getattr(self, name, None), nn.Module)
        }

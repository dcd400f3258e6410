"""The learning coefficient of a network at the ends of epochs."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from lightning_bnn._compat import figure_step
from lightning_bnn.callbacks.seen_examples import ExampleListener, ExampleStore, Seen
from lightning_bnn.callbacks.watching import SymmetryCallback, stack_of
from weightsym.params import Params, check_count, elsewhere, random_numbers, structural_copy

Loss = Callable[[Any, Tensor], Tensor]

__all__ = ["LearningCoefficient"]


class LearningCoefficient(SymmetryCallback):
    r"""Logs the local learning coefficient of the network, from chains that start at its weights.

    .. math:: \hat\lambda = n \beta\, (E[L_n(w)] - L_n(w^*)), \quad \beta = 1 / \log n

    Twice the coefficient is the effective number of parameters at these weights, see
    `lightning_bnn.methods.learning_coefficient`. The data are the first examples of the epoch, as
    the network received them. Logged at the ends of chosen epochs:

    - ``learning_coefficient``, its standard error ``learning_coefficient/error``, and
      ``learning_coefficient/rhat``, R-hat of the losses of the chains,
    - ``learning_coefficient/wbic``, the Bayesian information criterion of singular models.

    Works with any LightningModule; with our modules it watches the first member. One estimate costs
    ``chains * steps`` gradients, each of all examples or of a batch.

    Args:
        loss: function of outputs and targets that returns the mean loss, in nats; by default that
            of the module's likelihood, or one suggested by the targets: cross-entropy for classes,
            or a Gaussian with the errors' variance for numbers.
        every_n_epochs: number of epochs between two estimates.
        examples: number of examples n.
        module: name of the network inside the LightningModule; by default it is found.
        chains: number of chains.
        steps: number of steps of every chain, of which the second half is averaged.
        lr: step size, in the scale of an SGD on the mean loss.
        localization: precision of the Gaussian that holds chains near the network.
        batch_size: number of examples per gradient, by default all.
        seed: seed of all random numbers.

    References:
        | The Local Learning Coefficient: A Singularity-Aware Complexity Measure (Lau et al., 2023)
        | https://arxiv.org/abs/2308.12108

    >>> from lightning import Trainer
    >>> from lightning_bnn.datamodules import TwoGaussians
    >>> from lightning_bnn.models import mlp
    >>> from lightning_bnn.modules import DeepEnsemble
    >>> quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    >>> complexity = LearningCoefficient(steps=40)
    >>> quiet |= {"enable_model_summary": False}
    >>> trainer = Trainer(max_epochs=1, callbacks=[complexity], **quiet)
    >>> trainer.fit(DeepEnsemble(mlp(2, [8], 2), members=1), TwoGaussians())
    >>> [key for key in sorted(trainer.logged_metrics) if key.startswith("learning")][:2]
    ['learning_coefficient', 'learning_coefficient/error']
    """

    history: list[tuple[int, list[float]]]
    """Step and (coefficient, error, R-hat, WBIC), as logged."""

    def __init__(
        self,
        loss: Loss | None = None,
        every_n_epochs: int = 1,
        examples: int = 1024,
        module: str | None = None,
        chains: int = 4,
        steps: int = 1000,
        lr: float = 0.03,
        localization: float = 100.0,
        batch_size: int | None = None,
        seed: int = 0,
    ) -> None:
        from lightning_bnn.methods.learning_coefficient import check_chains

        super().__init__(module, every_n_steps=sys.maxsize)
        check_count("every_n_epochs", every_n_epochs)
        check_count("examples", examples, 2)
        self.loss, self.every_n_epochs = loss, every_n_epochs
        self.settings: dict[str, Any] = {
            "chains": chains, "steps": steps, "lr": lr, "localization": localization,
            "batch_size": batch_size, "seed": seed,
        }  # fmt: skip
        check_chains(**self.settings)
        self._is_whole = False
        self._store, self._listener = ExampleStore(examples), ExampleListener(module)

    # -------------------------------------------------------- hooks
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        super().on_train_start(trainer, pl_module)
        self._every = sys.maxsize  # epochs count, not steps

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self._store.clear()
        self._is_whole = False

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, *_: Any
    ) -> None:
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx, *_)
        self._is_whole |= batch_idx == 0  # else the run goes on in the middle of an epoch
        if self._is_due(trainer):
            self._listener.listen(self._store, pl_module, batch)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        super().on_train_batch_end(trainer, pl_module, *_)
        self._listener.hear(self._store)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if self._is_due(trainer) and self._is_whole:
            self._see(trainer, pl_module)
        self._is_whole = False

    def _is_due(self, trainer: Any) -> bool:
        return (trainer.current_epoch + 1) % self.every_n_epochs == 0

    def _close(self) -> None:
        super()._close()
        self._listener.hear(self._store)
        self._store.clear()

    # -------------------------------------------------------- the look
    def look(self, trainer: Any, pl_module: Any, weights: Params) -> None:
        with random_numbers(elsewhere(pl_module.parameters())):  # networks may draw in evaluation
            estimate = self._estimate(pl_module, weights)
        row = [estimate.value, estimate.error, estimate.rhat, estimate.wbic]
        self._log_all(trainer, pl_module, dict(zip(_NAMES, row, strict=True)))
        self.history.append((figure_step(trainer), row))

    def _estimate(self, pl_module: Any, weights: Params) -> Any:
        from lightning_bnn.methods import learning_coefficient

        assert self.network is not None
        examples = self._store.examples()
        if examples is None:
            raise ValueError("the network was called with no examples that have known targets.")
        network = copy.deepcopy(structural_copy(self.network.module))
        if stack_of(pl_module) is None:
            loss, targets = self._read(network, examples)
        else:
            weights = {name: t[0] for name, t in weights.items()}
            loss, targets = self.loss or _of(pl_module.likelihood), examples.targets["targets"]
        network.load_state_dict(weights, strict=False)
        data = *examples.inputs.values(), targets
        symmetries = self.network.symmetries
        return learning_coefficient(network, loss, data, symmetries, **self.settings)

    def _read(self, network: nn.Module, examples: Seen) -> tuple[Loss, Tensor]:
        """Return the loss of a network with a single output tensor, and the targets."""
        from lightning_bnn.callbacks.run_evidence import read_as_one_tensor, return_first_tensor

        if self.loss is not None:
            return_first_tensor(network, examples)
            return self.loss, next(iter(examples.targets.values()))
        likelihood, name = read_as_one_tensor(network.eval(), examples)
        return _of(likelihood), examples.targets[name]


_NAMES = (
    "learning_coefficient", "learning_coefficient/error", "learning_coefficient/rhat",
    "learning_coefficient/wbic",
)  # fmt: skip


def _of(likelihood: Any) -> Loss:
    """Return the mean loss of one network."""

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return -likelihood.log_prob(outputs[None], targets)[0].mean()

    return loss

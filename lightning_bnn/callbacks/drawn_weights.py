"""Training of any module by IVON: batches at drawn weights, everything else at the means."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn

from weightsym import params as P

__all__ = ["DrawnWeights"]


class DrawnWeights(Callback):
    """Evaluates training batches at the weights that IVON draws.

    Validation, checkpoints and other callbacks see the means. With accumulated gradients one draw
    serves all batches of a step, and clipping does not change the posterior. Use your own module,
    with a ``configure_optimizers`` that returns a `lightning_bnn.samplers.IVON` with ``num_data``
    and ``prior_precision`` or ``weight_decay``.

    References:
        | Variational Learning is Effective for Large Deep Networks (Shen et al., 2024)
        | https://arxiv.org/abs/2402.17641

    >>> import torch, lightning as L
    >>> from lightning_bnn.samplers import IVON
    >>> class Mine(L.LightningModule):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.net = nn.Linear(2, 1)
    ...     def training_step(self, batch, index):
    ...         return (self.net(batch) - batch.sum(1, keepdim=True)).square().mean()
    ...     def configure_optimizers(self):
    ...         return IVON(self.parameters(), num_data=64, prior_precision=1.0)
    >>> drawn, module = DrawnWeights(), Mine()
    >>> off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    >>> trainer = L.Trainer(max_epochs=3, callbacks=[drawn], **dict.fromkeys(off, False))
    >>> trainer.fit(module, torch.utils.data.DataLoader(torch.randn(64, 2), 16))
    >>> drawn.posterior(module.net).sample(5)["weight"].shape
    torch.Size([5, 1, 2])
    """

    def __init__(self) -> None:
        self.optimizers: list[Any] = []

    def posterior(self, network: nn.Module) -> Any:
        """Return the posterior of a trained network, a `DiagonalGaussian`.

        Args:
            network: the module, or a part of it trained by IVON.
        """
        from lightning_bnn.posteriors import DiagonalGaussian

        std = {n: s for o in self.optimizers for n, s in o.deviations(network).items()}
        if not std:
            raise ValueError("`network` has no weights trained by IVON: call `fit` first.")
        return DiagonalGaussian(P.of(network), std, [*std])

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        from lightning_bnn.samplers import IVON

        self.optimizers = [o for o in trainer.optimizers if isinstance(o, IVON)]
        if not self.optimizers:
            names = ", ".join(type(o).__name__ for o in trainer.optimizers) or "none"
            raise ValueError(
                "DrawnWeights requires the optimizer lightning_bnn.samplers.IVON, but "
                f"`configure_optimizers` has returned {names}."
            )

    def on_train_batch_start(self, *args: Any) -> None:
        for optimizer in self.optimizers:
            if optimizer.draws_itself:  # otherwise a module of ours draws
                optimizer.perturb()

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Pass the gradients to the optimizer before they are clipped."""
        overridden = is_overridden("configure_gradient_clipping", pl_module)
        optimizer = getattr(optimizer, "optimizer", optimizer)
        clips = (trainer.gradient_clip_val or overridden) and optimizer in self.optimizers
        if clips and optimizer.draws_itself:  # otherwise a module of ours shows it
            optimizer.observe()

    def on_train_batch_end(self, *args: Any) -> None:
        for optimizer in self.optimizers:
            optimizer.restore()

    def on_exception(self, *args: Any) -> None:
        """Restore the means after an error."""
        self.on_train_batch_end()

"""Networks that were drawn get BatchNorm statistics of their own before they predict."""

from __future__ import annotations

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_bnn.modules.batch_norm import has_statistics, refreshed
from lightning_bnn.modules.judged_module import JudgedModule
from lightning_bnn.modules.training_data import training_batches, training_source
from lightning_bnn.posteriors import Empirical, Posterior
from lightning_bnn.randomness import keyed_generator

__all__ = ["Refreshing"]


class Refreshing(JudgedModule):
    """Draws networks, and runs the training data through them once if they have BatchNorm."""

    def judged_modes(self, samples: int) -> list[Posterior]:
        """Every mode with networks and statistics of its own."""
        modes = self.posterior().modes()
        return [self.refreshed(mode, samples, k) for k, mode in enumerate(modes)]

    def refreshed(self, posterior: Posterior, samples: int | None = None, *key: int) -> Posterior:
        """The posterior as it predicts: networks that were drawn, with statistics of their own.

        Args:
            posterior: of the weights.
            samples: networks to draw, by default as many as predict.
            *key: other keys draw other networks.
        """
        if not has_statistics(self.template):
            return posterior
        source = training_source(self)
        if source is None:
            rank_zero_warn(
                "There are no training data for the BatchNorm statistics of the networks, those of "
                "the run are used: pass a datamodule, or call `use_training_data(...)`."
            )
            return posterior
        generator = keyed_generator(self.seed, "judged", *key, device=self.device)
        networks = posterior.sample(samples or self.judged_samples, generator)
        batches = (inputs for inputs, _ in training_batches(self, source))
        return Empirical(refreshed(self.template, networks, batches, self.chunk_size))

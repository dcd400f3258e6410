"""What a module does to be judged: drawing networks once, predicting with them, logging numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_bnn.evaluation import Evaluator
from lightning_bnn.methods import Method
from lightning_bnn.methods.batch_statistics import has_statistics, refreshed
from lightning_bnn.modules.part import Bayesian, Part
from lightning_bnn.modules.sharing import shared_predictor
from lightning_bnn.params import Params
from lightning_bnn.posteriors import Empirical, Posterior, Predictor
from lightning_bnn.randomness import keyed_generator

__all__ = ["Judging", "Prediction"]


class Prediction(NamedTuple):
    """What `predict_step` returns.

    ``mean`` averages over networks: probabilities ``(batch, classes)``, or the moments of a
    Gaussian likelihood. ``samples`` are the outputs of each, ``(samples, batch, ...)``.

    >>> from lightning_bnn.models import mlp
    >>> from lightning_bnn.modules import DeepEnsemble
    >>> prediction = DeepEnsemble(mlp(2, [8], 3), members=4).predict_step(torch.randn(5, 2), 0)
    >>> prediction.mean.shape, prediction.samples.shape
    (torch.Size([5, 3]), torch.Size([4, 5, 3]))
    """

    mean: Any
    samples: Tensor


class Judging(Part):
    """The part of a module that predicts; every stage draws its networks once, for all batches.

    Args:
        module: whose posterior predicts.
    """

    def __init__(self, module: Bayesian) -> None:
        super().__init__(module)
        self.evaluator: Evaluator | None = None
        self._drawn: Predictor | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Without networks that were drawn."""
        return {**super().__getstate__(), "evaluator": None, "_drawn": None}

    # ------------------------------------------------------------ what predicts
    def unrefreshed(self) -> Posterior:
        """What predicts, before networks that are drawn get statistics of their own."""
        module = self.module
        if type(module.method).judged is Method.judged:  # a subclass may have its own posterior
            return module.posterior()
        return module.method.judged(module.state, self._choose, module.fits_now)

    def _choose(self, numbers: Sequence[int]) -> list[int]:
        """Up to ``eval_samples`` of many, drawn without replacement."""
        generator = keyed_generator(self.module.seed, "kept")
        order = torch.randperm(len(numbers), generator=generator)[: self.module.eval_samples]
        return [numbers[k] for k in order.sort().values.tolist()]

    @property
    def samples(self) -> int:
        """How many networks predict in validation, test and prediction."""
        return self.module.method.count(self.unrefreshed(), self.module.eval_samples)

    def posterior(self) -> Posterior:
        """What predicts in validation, test and prediction."""
        return self.refreshed(self.unrefreshed(), self.module.eval_samples)

    def refreshed(self, posterior: Posterior, samples: int, *key: int) -> Posterior:
        """A posterior as it predicts: networks that are drawn have statistics of their own.

        Args:
            posterior: of the weights.
            samples: networks to draw.
            *key: other keys draw other networks.
        """
        module = self.module
        drawn = module.method.refreshes_statistics and not isinstance(posterior, Empirical)
        if not drawn or not has_statistics(module.template):
            return posterior
        data = module.fitting.training_data()
        if data is None:
            rank_zero_warn(
                "There are no training data for the BatchNorm statistics of the networks, those of "
                "the run are used: pass a datamodule, or call `use_training_data(...)`."
            )
            return posterior
        generator = keyed_generator(module.seed, "judged", *key, device=module.device)
        networks = posterior.sample(samples, generator)
        inputs = (batch.inputs for batch in data)
        return Empirical(refreshed(module.template, networks, inputs, module.run.chunk_size))

    def export(self, samples: int | None) -> Params:
        """Plain networks that predict as the posterior does; None asks for as many as predict."""
        module = self.module
        wanted = module.eval_samples if samples is None else samples
        choose = self._choose if samples is None else list
        posterior = module.method.exported(module.state, choose, module.fits_now)
        posterior = self.refreshed(posterior, wanted)
        if isinstance(posterior, Empirical):
            wanted = posterior.size if samples is None else min(samples, posterior.size)
        return posterior.sample(wanted, keyed_generator(module.seed, "judged"))

    def predictor(self) -> Predictor:
        """The networks of this stage, or as many that are drawn for this call."""
        if self._drawn is not None:
            return self._drawn
        module = self.module
        generator = keyed_generator(module.seed, "judged", device=module.device)
        with torch.no_grad():
            if module.share is not None:
                return shared_predictor(module, generator)
            posterior = self.posterior()
            count = module.method.count(posterior, module.eval_samples)
            return posterior.predictor(count, generator, module.run.chunk_size)

    # ------------------------------------------------------------ a stage
    def begin(self, evaluator: Evaluator | None) -> None:
        """Draw the networks that predict, once for all batches."""
        self.end()
        if not self.module.fits_now:
            self._prepare()
        self._drawn = self.predictor()
        self.evaluator = None if evaluator is None else evaluator.to(self.module.device)

    def _prepare(self) -> None:
        """Complete what can be completed; weights that nobody has trained are mentioned."""
        module = self.module
        if not module.method.is_complete(module.state):
            if module.fitting.training_data() is None:
                rank_zero_warn(
                    f"There are no training data for the {module.method.completion}, the members "
                    "predict without their Gaussians: pass a datamodule, or a checkpoint of a "
                    "finished fit."
                )
            module.fitting.complete()
        drawn = "its members have the weights that they were drawn with"
        instead = module.method.unfitted or (drawn if module.members > 1 else "")
        if instead and not module.has_weights:
            rank_zero_warn(
                f"{type(module).__name__} has not been fitted: {instead}; fit it, or pass the "
                "`ckpt_path` of a fit."
            )

    def add(self, batch: Any, index: int, *which: int) -> None:
        """Evaluate one batch of a set; nothing if there was no network to draw.

        Args:
            batch: of the loader.
            index: number of the set.
            *which: which batch this is.
        """
        module = self.module
        if self.evaluator is None:
            return
        if self.evaluator.needs_targets(index):
            inputs, targets = module.inputs_and_targets(batch)
            self.evaluator.add(module.outputs(inputs, *which), targets, index)
        else:
            self.evaluator.add(module.outputs(module.inputs_only(batch), *which), None, index)

    def log(self, stage: str, shown: Sequence[str] = ()) -> None:
        """Log every number under the name of a stage.

        Args:
            stage: ``"val"`` or ``"test"``.
            shown: what the progress bar shows.
        """
        if self.evaluator is None:
            self.module.log(f"{stage}/nll", math.nan, prog_bar="nll" in shown, sync_dist=True)
            return
        for name, value in self.evaluator.values().items():
            # Metrics are the same on all processes already; the sync only keeps Lightning quiet.
            shows = name in shown
            self.module.log(f"{stage}/{name}", value.float(), prog_bar=shows, sync_dist=True)
        self.end()

    def end(self) -> None:
        """Let go of the networks that were drawn."""
        self.evaluator, self._drawn = None, None

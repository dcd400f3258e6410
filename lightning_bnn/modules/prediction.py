"""Predictions of networks drawn once per stage: evaluation, calibration, export."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_map
from torch.utils.data.distributed import DistributedSampler

from lightning_bnn import _compat
from lightning_bnn.calibration import Calibrated, calibrated
from lightning_bnn.calibration.calibrated import validation_loaders
from lightning_bnn.calibration.calibrators import method_of
from lightning_bnn.evaluation.evaluators import Evaluator, named_sets
from lightning_bnn.likelihoods import Likelihood
from lightning_bnn.methods import Purpose
from lightning_bnn.methods.method import AS_IT_IS
from lightning_bnn.modules.fitting import complete
from lightning_bnn.modules.training_data import moved_by
from lightning_bnn.posteriors import Empirical, Posterior, Predictor
from lightning_bnn.predictions import Predictions
from weightsym import params as P
from weightsym.params import Params, has_statistics, keyed_generator

if TYPE_CHECKING:
    from lightning_bnn.modules.bayesian import Bayesian

__all__ = ["Prediction", "Predictive"]

_SHOWN = ("acc", "nll", "rmse")
"""Numbers of a validation in the progress bar."""
_ROWS = 1000
"""Examples of a table that are predicted at a time."""


class Prediction(NamedTuple):
    """The result of `predict_step`.

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


class PredictionStage:
    """A validation, test or prediction, with networks drawn once for all batches.

    Attributes:
        predictor: the networks; None outside of a stage.
        evaluator: of their predictions, if they are evaluated.
    """

    predictor: Predictor | None = None
    evaluator: Evaluator | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Omit the drawn networks."""
        return {}


# ------------------------------------------------------------ what predicts
def posterior_for(module: Bayesian, purpose: Purpose) -> Posterior:
    """Return the posterior for a purpose, with a warning if a trained one lacks its Gaussians."""
    missing = module.state.lacks
    if missing and module.has_weights and not module.fits_now:
        rank_zero_warn(
            f"{type(module).__name__} has no {missing} yet (no training data, or a checkpoint "
            "from before the end of a fit?): its members predict without it."
        )
    return module.method.posterior(module.state, module.run, purpose)


def unrefreshed(module: Bayesian) -> Posterior:
    """Return the posterior for predictions, without refreshed statistics."""
    if module.has_own_posterior:
        return module.posterior()
    choose = partial(_some, module.seed, module.eval_samples)
    return posterior_for(module, Purpose(True, module.fits_now, choose))


def posterior_of(module: Bayesian) -> Posterior:
    """Return the posterior for validation, test and prediction."""
    return refreshed(module, unrefreshed(module), module.eval_samples)


def modes_of(module: Bayesian, samples: int) -> list[Posterior]:
    """Return the posteriors of the modes, as used for predictions.

    Args:
        module: whose posterior it is.
        samples: how many networks of each will predict.
    """
    modes = posterior_for(module, Purpose(predicts=True)).modes()
    return [refreshed(module, mode, samples, k) for k, mode in enumerate(modes)]


def _some(seed: int, count: int, numbers: Sequence[int]) -> list[int]:
    """Draw at most ``count`` numbers without replacement."""
    order = torch.randperm(len(numbers), generator=keyed_generator(seed, "kept"))[:count]
    return [numbers[k] for k in order.sort().values.tolist()]


def count_of(module: Bayesian, posterior: Posterior) -> int:
    """Return the number of networks for predictions: all of a list, else the requested number."""
    return posterior.size if isinstance(posterior, Empirical) else module.eval_samples


def refreshed(module: Bayesian, posterior: Posterior, samples: int, *key: int) -> Posterior:
    """Return a posterior whose drawn networks have BatchNorm statistics of their own.

    Args:
        module: that predicts.
        posterior: of the weights.
        samples: networks to draw.
        *key: other keys draw other networks.
    """
    drawn = module.method.refreshes_statistics and not isinstance(posterior, Empirical)
    if not drawn or not has_statistics(module.template):
        return posterior
    data = module.data.batches(module)
    if data is None:
        rank_zero_warn(
            "There are no training data for the BatchNorm statistics of the networks, so those "
            "of the run are used: pass a datamodule, or call `use_training_data(...)`."
        )
        return posterior
    generator = keyed_generator(module.seed, "judged", *key, device=module.device)
    networks = posterior.sample(samples, generator)
    inputs = (batch.inputs for batch in data)
    return Empirical(P.refreshed(module.template, networks, inputs, module.run.chunk_size))


def exported(module: Bayesian, samples: int | None) -> Params:
    """Return networks that predict like the posterior, by default ``eval_samples`` of them."""
    wanted = module.eval_samples if samples is None else samples
    choose = partial(_some, module.seed, wanted) if samples is None else list
    posterior = posterior_for(module, Purpose(fitting=module.fits_now, choose=choose))
    if any(getattr(mode, "is_linearised", False) for mode in posterior.modes()):
        raise ValueError(
            "Linearised networks cannot be exported: use `layers='last'` or `prediction='network'`."
        )
    posterior = refreshed(module, posterior, wanted)
    if isinstance(posterior, Empirical):
        wanted = posterior.size if samples is None else min(samples, posterior.size)
    return posterior.sample(wanted, keyed_generator(module.seed, "judged"))


def predictor_of(module: Bayesian) -> Predictor:
    """Return the predictor of this stage, or a new one for this call."""
    if module.stage.predictor is not None:
        return module.stage.predictor
    generator = keyed_generator(module.seed, "judged", device=module.device)
    with torch.no_grad():
        posterior = posterior_of(module)
        return posterior.predictor(count_of(module, posterior), generator, module.run.chunk_size)


# ------------------------------------------------------------ a stage
def begin(module: Bayesian, evaluator: Evaluator | None = None) -> None:
    """Draw the networks that predict, once for all batches."""
    module.stage = PredictionStage()
    if not module.fits_now:
        _prepare(module)
    module.stage.predictor = predictor_of(module)
    module.stage.evaluator = None if evaluator is None else evaluator.to(module.device)


def _prepare(module: Bayesian) -> None:
    """Complete the posterior, and warn of untrained weights."""
    complete(module)
    if instead := _instead_of_a_fit(module):
        rank_zero_warn(f"{instead}; fit it, or pass the `ckpt_path` of a fit.")


def _instead_of_a_fit(module: Bayesian) -> str:
    """Describe the weights of a module that has not been fitted, or return an empty text."""
    drawn = "its members have their initial weights"
    instead = module.method.unfitted or (drawn if module.members > 1 else "")
    missing = instead and not module.has_weights
    return f"{type(module).__name__} has not been fitted: {instead}" if missing else ""


def current_posterior(module: Bayesian) -> Posterior:
    """Make the posterior of a module that is being fitted or has been."""
    instead = "" if module.fits_now else _instead_of_a_fit(module)
    if instead:
        raise ValueError(f"{instead}. Its posterior is that of a fit or a checkpoint.")
    return posterior_for(module, AS_IT_IS)


def begin_stage(module: Bayesian) -> None:
    """Draw the networks of a validation, a test or a prediction."""
    trainer: Any = module.trainer
    if trainer.predicting:
        return begin(module)
    if trainer.testing:
        source = trainer.datamodule if _compat.tests_datamodule(trainer) else None
        sets = named_sets(source, trainer.test_dataloaders)
        return begin(module, Evaluator(module.likelihood, sets))
    return begin(module, Evaluator(module.likelihood))


def add(module: Bayesian, batch: Any, number: int, loader: int) -> None:
    """Evaluate one batch.

    Args:
        module: that predicts.
        batch: of a loader.
        number: of the batch.
        loader: its number; in a test every loader has a set of its own.
    """
    evaluator, index = module.stage.evaluator, loader if module.trainer.testing else 0
    assert evaluator is not None
    targets: Tensor | None = None
    if evaluator.needs_targets(index):
        inputs, targets = module.inputs_and_targets(batch)
    else:
        inputs = module.inputs_only(batch)
    evaluator.add(module.outputs(inputs, loader, number), targets, index)


def end_stage(module: Bayesian) -> None:
    """Log every metric under the name of the stage, and release the networks."""
    trainer = module.trainer
    if not trainer.predicting:
        _log(module, "test" if trainer.testing else "val")
    if trainer.testing or trainer.validating:
        _compat.in_one_column(trainer)
    if trainer.validating or trainer.sanity_checking:
        with module.randomness("bracket"):
            terms = module.method.after_validation(module.state, module.run)
        for name, value in terms.items():
            module.log(f"val/{name}", value.float(), sync_dist=True)
    module.stage = PredictionStage()


def _log(module: Bayesian, name: str) -> None:
    in_bar = _SHOWN if name == "val" else ()
    assert module.stage.evaluator is not None
    for key, value in module.stage.evaluator.values().items():
        # Metrics are the same on all processes already; the sync only keeps Lightning quiet.
        module.log(f"{name}/{key}", value.float(), prog_bar=key in in_bar, sync_dist=True)


# ------------------------------------------------------------ calibration
@torch.no_grad()
def calibrate(module: Bayesian, data: Any, method: str | None, **options: Any) -> Calibrated:
    """Predict held-out data, and fit a calibrator to the predictions.

    Args:
        module: that predicts.
        data: a datamodule with validation data, a loader, or inputs and targets.
        method: name of the calibrator, by default the first that fits the likelihood.
        **options: of `lightning_bnn.calibration.calibrated`.
    """
    method = method_of(module.likelihood, method)
    loaders = [_whole(loader) for loader in _held_out(data)]
    trains = hasattr(data, "train_dataloader")
    if trains and module.data.batches(module) is None:  # some methods complete their posterior
        module.data.source = data
    move = moved_by(module, data)
    parts: list[Any] = []
    begin(module)
    try:
        for index, raw in enumerate(chain.from_iterable(loaders)):
            inputs, targets = module.inputs_and_targets(move(raw))
            outputs = module.outputs(inputs, 0, index)
            parts.append(Predictions.of(module.likelihood, outputs, targets).cpu())
    finally:
        module.stage = PredictionStage()
    if not parts:
        raise ValueError(f"The held-out data of {type(data).__name__} are empty.")
    options_of_all: dict[str, Any] = {"seed": module.seed, "module": module, **options}
    return calibrated(parts[0].joined(parts), method, **options_of_all)


def _held_out(data: Any) -> list[Any]:
    """Return the loaders of held-out data, or batches of tensors."""
    if isinstance(data, tuple) and len(data) > 1 and all(isinstance(t, Tensor) for t in data):
        sizes = {len(t) for t in data}
        if len(sizes) > 1:
            raise ValueError(
                f"`data` must have as many targets as inputs, got {', '.join(map(str, sizes))}."
            )
        return [zip(*(t.split(_ROWS) for t in data), strict=True)]
    if callable(getattr(data, "val_dataloader", None)):
        return validation_loaders(data)
    if hasattr(data, "whole"):
        raise ValueError(
            "`data` is a loader whose batches its datamodule prepares: pass the datamodule."
        )
    if isinstance(data, (tuple, nn.Module, Tensor)) or not hasattr(data, "__iter__"):
        raise ValueError(
            "`data` must be a datamodule with a `val_dataloader`, a loader or a tuple of tensors "
            f"(inputs, targets), got a {type(data).__name__}."
        )
    return [data]


def _whole(loader: Any) -> Any:
    """Return a loader of all examples, even if processes share them, for a common calibrator."""
    whole = getattr(loader, "whole", None)
    if whole is not None:
        return whole()
    if isinstance(getattr(loader, "sampler", None), DistributedSampler):
        raise ValueError(
            "The validation data are divided among several processes, each of which would fit a "
            "different calibrator: calibrate in one process, or with a loader that has all "
            "examples."
        )
    return loader


class Predictive(nn.Module):
    r"""Runs every network of a stack and averages the likelihood's predictions.

    .. math:: p(y | x) = \frac1S \sum_s p(y | x, \omega_s)

    Args:
        template: gives the computation.
        networks: a stack.
        likelihood: turns outputs ``(samples, batch, ...)`` into a prediction.

    >>> from lightning_bnn.likelihoods import Categorical
    >>> from lightning_bnn.models import mlp
    >>> from lightning_bnn.modules import DeepEnsemble
    >>> ensemble, x = DeepEnsemble(mlp(2, [8], 3), members=4), torch.randn(5, 2)
    >>> plain = ensemble.predictive()
    >>> type(plain).__name__, torch.allclose(plain(x), ensemble(x), atol=1e-5)
    ('Predictive', True)

    So it deploys any posterior: here that of a list of modules.

    >>> posterior = Posterior.of([mlp(2, [8], 3) for _ in range(4)])
    >>> plain = Predictive(mlp(2, [8], 3), posterior.sample(4), Categorical())
    >>> plain(x).shape
    torch.Size([5, 3])
    """

    template: nn.Module
    likelihood: Likelihood

    def __init__(self, template: nn.Module, networks: Params, likelihood: nn.Module) -> None:
        super().__init__()
        self.networks = P.stacked_copy(template, networks).requires_grad_(False)
        self.__dict__["template"] = copy.deepcopy(template).eval()
        self.likelihood = cast(Likelihood, copy.deepcopy(likelihood))
        self.eval()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Move the template, too, which may have tensors outside the state dict."""
        self.template._apply(fn, recurse)
        return super()._apply(fn, recurse)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.likelihood.predictive(self.outputs(*inputs, **named))

    def outputs(self, *inputs: Any, **named: Any) -> Any:
        """Return the outputs of every network, ``(samples, batch, ...)``.

        Args:
            *inputs: of the network.
            **named: inputs by the names of the network's ``forward``.
        """
        members = P.unstack({name: t.detach() for name, t in P.of(self.networks).items()})
        outputs = [functional_call(self.template, member, inputs, named) for member in members]
        return tree_map(lambda *t: torch.stack(t) if isinstance(t[0], Tensor) else t[0], *outputs)

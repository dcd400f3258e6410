"""What a module does to be calibrated: predicting the validation data once."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.utils.data.distributed import DistributedSampler

from lightning_bnn.calibration import Calibrated, calibrated, method_of, read, validation_loaders
from lightning_bnn.modules.part import Bayesian
from lightning_bnn.modules.training_data import moved_by

__all__ = ["calibrate"]


def _whole(loader: Any) -> Any:
    """All examples, also where several processes share them: all fit the same calibrator."""
    whole = getattr(loader, "whole", None)
    if whole is not None:
        return whole()
    if isinstance(getattr(loader, "sampler", None), DistributedSampler):
        raise ValueError(
            "The validation data are shared by several processes, each would fit another "
            "calibrator: calibrate in one process, or with a loader that has all examples."
        )
    return loader


@torch.no_grad()
def calibrate(module: Bayesian, datamodule: Any, method: str | None, **options: Any) -> Calibrated:
    """Predict the validation data, and fit a calibrator to the predictions.

    Args:
        module: whose posterior predicts.
        datamodule: what has the validation data.
        method: name of the calibrator, by default the first that fits the likelihood.
        **options: of `lightning_bnn.calibration.calibrated`.
    """
    method = method_of(module.likelihood, method)
    loaders = [_whole(loader) for loader in validation_loaders(datamodule)]
    if module.fitting.training_data() is None:  # some methods complete their posterior by them
        module.use_training_data(datamodule)
    move = moved_by(module, datamodule)
    parts: list[tuple[Tensor, ...]] = []
    every: list[Tensor] = []
    module.judging.begin(None)
    try:
        for index, raw in enumerate(chain.from_iterable(loaders)):
            inputs, targets = module.inputs_and_targets(move(raw))
            predicted = read(module.likelihood, method, module.outputs(inputs, 0, index))
            parts.append(tuple(t.cpu() for t in predicted))
            every.append(targets.cpu())
    finally:
        module.judging.end()
    if not parts:
        raise ValueError(f"The validation data of {type(datamodule).__name__} are empty.")
    predictions = tuple(torch.cat(p, 1) for p in zip(*parts, strict=True))
    known: dict[str, Any] = {"seed": module.seed, "module": module, **options}
    return calibrated(module.likelihood, predictions, torch.cat(every), method, **known)

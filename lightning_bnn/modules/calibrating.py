"""What a module does to be calibrated: predicting the validation data once."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch import Tensor

from lightning_bnn.calibration import Calibrated, calibrated, method_of, read, validation_loaders
from lightning_bnn.modules.owner import Bayesian
from lightning_bnn.modules.training_data import moved_by

__all__ = ["calibrate"]


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
    loaders = validation_loaders(datamodule)
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

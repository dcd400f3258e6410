"""Metrics of posteriors: MMD, calibration, OOD detection, diversity, scores of predictions.

Every metric is a function. Those that are accumulated over batches are a `torchmetrics.Metric` of
the same words, too. What torchmetrics has right (accuracy, regression errors) is not repeated.

>>> import torch
>>> from lightning_bnn.metrics import ECE, ece
>>> probs, labels = torch.tensor([[0.25, 0.75], [1.0, 0.0]]), torch.tensor([1, 0])
>>> metric = ECE()
>>> metric.update(probs, labels)
>>> metric.compute() == ece(probs, labels)
tensor(True)
"""

from typing import TYPE_CHECKING

from weightsym import lazy_package

if TYPE_CHECKING:
    from lightning_bnn.metrics.calibration import *
    from lightning_bnn.metrics.classification import *
    from lightning_bnn.metrics.convergence import *
    from lightning_bnn.metrics.diversity import *
    from lightning_bnn.metrics.gaussian_mixture import *
    from lightning_bnn.metrics.kernels import *
    from lightning_bnn.metrics.mmd import *
    from lightning_bnn.metrics.ood import *
    from lightning_bnn.metrics.regression import *
    from lightning_bnn.metrics.remembered_mmd import *

lazy_package(__name__)

"""Metrics of posteriors: MMD, calibration, OOD detection, diversity, scores of predictions.

Every metric is a function. Metrics that accumulate over batches are also `torchmetrics.Metric`
classes of the same name. Metrics that torchmetrics computes correctly (accuracy, regression errors)
are not repeated.

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

"""Metrics of posteriors: MMD, calibration, OOD detection, diversity, likelihood.

Every metric is a function and a `torchmetrics.Metric` of the same words. Metrics that torchmetrics
has right (accuracy, regression errors) are not repeated here.

>>> import torch
>>> from lightning_bnn.metrics import ECE, ece
>>> probs, labels = torch.tensor([[0.25, 0.75], [1.0, 0.0]]), torch.tensor([1, 0])
>>> metric = ECE()
>>> metric.update(probs, labels)
>>> metric.compute() == ece(probs, labels)
tensor(True)
"""

from lightning_bnn.metrics.agreement import Agreement, TotalVariation, agreement, total_variation
from lightning_bnn.metrics.calibration import ACE, ECE, MCE, ace, ece, mce
from lightning_bnn.metrics.chains import (
    effective_sample_size,
    mcse_mean,
    mcse_quantile,
    mcse_sd,
    rhat,
    tail_effective_sample_size,
)
from lightning_bnn.metrics.convergence import (
    EffectiveSampleSize,
    MCSEMean,
    MCSEQuantile,
    MCSESd,
    RHat,
    TailEffectiveSampleSize,
)
from lightning_bnn.metrics.detection import OODDetection
from lightning_bnn.metrics.diversity import (
    Disagreement,
    MutualInformation,
    PairwiseMutualInformation,
    Uncertainty,
    decompose_uncertainty,
    disagreement,
    mutual_information,
    pairwise_mutual_information,
)
from lightning_bnn.metrics.function_space import FunctionSpaceMMD, function_space_mmd
from lightning_bnn.metrics.kernels import KernelGrid
from lightning_bnn.metrics.laws import Estimate, ModesTable, law_mmd, mixture_mmd, modes_table
from lightning_bnn.metrics.likelihood import NLL, BrierScore, brier_score, nll
from lightning_bnn.metrics.mmd import MMDTable, mmd, mmd_table, share_layers
from lightning_bnn.metrics.mmd_metric import MMD
from lightning_bnn.metrics.ood import AUPR, AUROC, FPR95, FPRAtTPR
from lightning_bnn.metrics.ranking import aupr, auroc, fpr95, fpr_at_tpr
from lightning_bnn.metrics.reference import LayerMMD, MMDReference
from lightning_bnn.metrics.reliability import Reliability, adaptive_reliability, reliability
from lightning_bnn.metrics.scores import (
    energy_score,
    entropy_score,
    max_probability_score,
    mutual_information_score,
)
from lightning_bnn.metrics.sources import StackSource, Transformed, WeightSource
from lightning_bnn.metrics.two_sample import TwoSampleTest, permutation_test

__all__ = [
    "ACE",
    "AUPR",
    "AUROC",
    "Agreement",
    "BrierScore",
    "Disagreement",
    "ECE",
    "EffectiveSampleSize",
    "Estimate",
    "FPR95",
    "FPRAtTPR",
    "FunctionSpaceMMD",
    "KernelGrid",
    "LayerMMD",
    "MCE",
    "MCSEMean",
    "MCSEQuantile",
    "MCSESd",
    "MMD",
    "MMDReference",
    "MMDTable",
    "ModesTable",
    "MutualInformation",
    "NLL",
    "OODDetection",
    "PairwiseMutualInformation",
    "RHat",
    "Reliability",
    "StackSource",
    "TailEffectiveSampleSize",
    "TotalVariation",
    "Transformed",
    "TwoSampleTest",
    "Uncertainty",
    "WeightSource",
    "ace",
    "adaptive_reliability",
    "agreement",
    "aupr",
    "auroc",
    "brier_score",
    "decompose_uncertainty",
    "disagreement",
    "ece",
    "effective_sample_size",
    "energy_score",
    "entropy_score",
    "fpr95",
    "fpr_at_tpr",
    "function_space_mmd",
    "law_mmd",
    "max_probability_score",
    "mce",
    "mcse_mean",
    "mcse_quantile",
    "mcse_sd",
    "mixture_mmd",
    "mmd",
    "mmd_table",
    "modes_table",
    "mutual_information",
    "mutual_information_score",
    "nll",
    "pairwise_mutual_information",
    "permutation_test",
    "reliability",
    "rhat",
    "share_layers",
    "tail_effective_sample_size",
    "total_variation",
]

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

from lightning_bnn._lazy import lazy_package

if TYPE_CHECKING:
    from lightning_bnn.metrics.agreement import (
        Agreement,
        TotalVariation,
        agreement,
        predictive_kl,
        total_variation,
    )
    from lightning_bnn.metrics.calibration import ACE, ECE, ace, ece
    from lightning_bnn.metrics.chains import (
        effective_sample_size,
        mcse_mean,
        mcse_quantile,
        mcse_sd,
        rhat,
        tail_effective_sample_size,
    )
    from lightning_bnn.metrics.density_scores import (
        CRPS,
        crps,
        energy_distance,
        sharpness,
        wasserstein,
    )
    from lightning_bnn.metrics.detection import OODDetection
    from lightning_bnn.metrics.diversity import (
        Disagreement,
        MutualInformation,
        PairwiseMutualInformation,
        decompose_uncertainty,
        disagreement,
        mutual_information,
        pairwise_mutual_information,
    )
    from lightning_bnn.metrics.gaussian_mixture import (
        mixture_moments,
        mixture_nll,
        mixture_quantiles,
    )
    from lightning_bnn.metrics.intervals import (
        interval_coverage,
        interval_width,
        pit,
        quantile_calibration,
        quantile_calibration_floor,
    )
    from lightning_bnn.metrics.kernels import KernelGrid
    from lightning_bnn.metrics.laws import (
        MMD,
        law_mmd,
        mixture_mmd,
    )
    from lightning_bnn.metrics.likelihood import NLL, BrierScore, brier_score, nll
    from lightning_bnn.metrics.mmd import (
        function_space_mmd,
        mmd,
        mmd_table,
        permutation_test,
        share_layers,
    )
    from lightning_bnn.metrics.ranking import AUPR, AUROC, FPR95, aupr, auroc, fpr95, fpr_at_tpr
    from lightning_bnn.metrics.reference import (
        MMDReference,
        Transformed,
    )
    from lightning_bnn.metrics.reliability import reliability
    from lightning_bnn.metrics.scores import (
        energy_score,
        entropy_score,
        max_probability_score,
        mutual_information_score,
    )
    from lightning_bnn.metrics.selective import (
        aurc,
        risk_coverage,
    )
    from lightning_bnn.metrics.set_coverage import (
        class_coverage,
        set_coverage,
        set_size,
    )

__all__ = [
    "ACE",
    "AUPR",
    "AUROC",
    "Agreement",
    "BrierScore",
    "CRPS",
    "Disagreement",
    "ECE",
    "FPR95",
    "KernelGrid",
    "MMD",
    "MMDReference",
    "MutualInformation",
    "NLL",
    "OODDetection",
    "PairwiseMutualInformation",
    "TotalVariation",
    "Transformed",
    "ace",
    "agreement",
    "aupr",
    "aurc",
    "auroc",
    "brier_score",
    "class_coverage",
    "crps",
    "decompose_uncertainty",
    "disagreement",
    "ece",
    "effective_sample_size",
    "energy_distance",
    "energy_score",
    "entropy_score",
    "fpr95",
    "fpr_at_tpr",
    "function_space_mmd",
    "interval_coverage",
    "interval_width",
    "law_mmd",
    "max_probability_score",
    "mcse_mean",
    "mcse_quantile",
    "mcse_sd",
    "mixture_mmd",
    "mixture_moments",
    "mixture_nll",
    "mixture_quantiles",
    "mmd",
    "mmd_table",
    "mutual_information",
    "mutual_information_score",
    "nll",
    "pairwise_mutual_information",
    "permutation_test",
    "pit",
    "predictive_kl",
    "quantile_calibration",
    "quantile_calibration_floor",
    "reliability",
    "rhat",
    "risk_coverage",
    "set_coverage",
    "set_size",
    "share_layers",
    "sharpness",
    "tail_effective_sample_size",
    "total_variation",
    "wasserstein",
]

lazy_package(__name__)

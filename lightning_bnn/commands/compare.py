"""Posteriors on disk against a reference, in weights and in predictions (P1, tables 1 and 2)."""

from __future__ import annotations

from typing import Literal

from lightning_bnn.evaluation.compare import compare as compared
from lightning_bnn.findings import report, results_folder
from weightsym import Outcome


def compare(
    reference: str,
    posteriors: dict[str, str] | None = None,
    data: str | None = None,
    protocol: Literal["full", "p1"] = "full",
    samples: int = 100,
    ood: str | None = None,
    score: Literal["max_probability", "entropy", "mutual_information"] = "max_probability",
    seed: int = 0,
    reference_is: Literal["trained", "sampled"] | None = None,
    out: str = "studies/compare",
) -> Outcome:
    """Compare any number of posteriors with a reference, in weights and in predictions.

    A posterior is a run (a folder written by `fit`), a checkpoint, a bank, or a folder of
    checkpoints; rows in brackets select some of its modes or networks: runs/bank[0:10]. The command
    measures three distances to the reference, with and without symmetries: of the law (networks
    over runs and draws), of a single mode, and of the mixture of all modes. Predictions have one
    row for a single mode (mean and standard deviation over modes) and one for all together
    (standard error by the jackknife over modes). A posterior of one mode has errors by a bootstrap
    over test examples. Rows computed earlier with the same settings are reused. In Python:
    `lightning_bnn.compare`.

    Args:
        reference: the networks that represent the posterior: a bank, an ensemble, a folder.
        posteriors: the posteriors by name, e.g. --posteriors.SWAG runs/swag --posteriors.MFVI
            runs/mfvi
        data: a configuration with network and data; by default that of the reference, or of the
            first posterior that has one.
        protocol: full removes all symmetries that were found; p1 follows P1's code, and also prints
            its two tables.
        samples: number of networks drawn from every posterior.
        ood: name of the test set that is out of distribution; by default the first.
        score: score that detects out-of-distribution examples.
        seed: random seed of the draws.
        reference_is: whether the reference was trained or sampled, for the tables; by default read
            from its run.
        out: folder for the results.
    """
    if not posteriors:
        raise ValueError("`--posteriors` is missing: for example --posteriors.SWAG runs/swag")
    findings = compared(
        reference, posteriors, data, protocol=protocol, samples=samples, ood=ood, score=score,
        seed=seed, reference_is=reference_is, out=out,
    )  # fmt: skip
    return report(findings, results_folder(out, "compare"))

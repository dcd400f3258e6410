"""P1, figures 3, 7 and 8: mutual information of all pairs of networks of an ensemble."""

from __future__ import annotations

from typing import Literal

from bnn_research.populations import ENSEMBLES, population
from lightning_bnn.evaluation.populations import collapse_findings
from lightning_bnn.findings import publish
from weightsym import Outcome


def collapse(
    networks: str | None = None,
    data: str | None = None,
    scale: Literal["small", "paper"] = "small",
    members: int | None = None,
    epochs: int | None = None,
    ood: str | None = None,
    seed: int = 0,
    out: str = "studies/collapse",
) -> Outcome:
    """Measure the diversity of networks by the mutual information of all pairs.

    The information is measured in and out of distribution.

    Pairs that agree in distribution may or may not agree out of it: P1 finds a positive,
    significant and very low correlation. By default perceptrons on scikit-learn's digits are
    trained, as a substitute for OptuNets on MNIST (--scale paper); for ResNets use --networks.

    Args:
        networks: a run, a bank or a folder of checkpoints; by default networks are trained.
        data: a configuration with their network and data, if there is none beside them.
        scale: small, which runs in minutes, or paper, the paper's recipe.
        members: number of networks to train.
        epochs: number of training epochs.
        ood: name of the test set that is out of distribution; by default the first.
        seed: random seed of the initial weights; other seeds repeat the study on the same data.
        out: folder for the results.
    """
    ensemble = population(
        "collapse", out, ENSEMBLES, scale, networks, data, seed, members=members, epochs=epochs
    )
    return publish(collapse_findings(ensemble, ood), ensemble.folder)

"""P1, figure 2: the L2 mass of trained networks, and the part that rescaling could save."""

from __future__ import annotations

from typing import Literal

from bnn_research.populations import ENSEMBLES, population
from lightning_bnn.evaluation.populations import mass_findings
from lightning_bnn.findings import publish
from weightsym import Outcome


def mass(
    networks: str | None = None,
    data: str | None = None,
    scale: Literal["small", "paper"] = "small",
    members: int | None = None,
    epochs: int | None = None,
    seed: int = 0,
    out: str = "studies/mass",
) -> Outcome:
    """Compare the mass of networks with its minimum over all rescalings of their units.

    Weight decay penalises mass without effect: a network far above its minimum has equivalents with
    a smaller loss. Figure 2 of P1 shows OptuNets on MNIST (--scale paper). By default perceptrons
    on scikit-learn's digits are trained, as a substitute.

    Args:
        networks: a run, a bank or a folder of checkpoints; by default networks are trained.
        data: a configuration with their network and data, if there is none beside them.
        scale: small, which runs in minutes, or paper, the paper's recipe.
        members: number of networks to train.
        epochs: number of training epochs.
        seed: random seed of the initial weights; other seeds repeat the study on the same data.
        out: folder for the results.
    """
    ensemble = population(
        "mass", out, ENSEMBLES, scale, networks, data, seed, members=members, epochs=epochs
    )
    return publish(mass_findings(ensemble), ensemble.folder)

"""What the networks of a reference predict, to compare other predictions with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from lightning_bnn.comparison.problem import StoredBatches
from lightning_bnn.comparison.reference import Reference
from lightning_bnn.comparison.stored_posteriors import StoredPosterior
from lightning_bnn.judging import averages_of_mode, reference_of
from lightning_bnn.posteriors import Empirical

__all__ = ["predictions_of_reference"]


def predictions_of_reference(
    stored: StoredPosterior, batches: StoredBatches, reference: Reference, likelihood: nn.Module
) -> Any:
    """What compares with as many networks of the reference as are drawn from a posterior.

    Args:
        stored: the reference.
        batches: data in distribution.
        reference: says how many networks are drawn, by which seed, and where it is computed.
        likelihood: says what outputs mean.
    """
    if not stored.knows_its_noise():
        return None
    networks = Empirical(replace(stored, modes=stored.judged).networks())
    ((predictions,),) = averages_of_mode(
        networks, stored.network, likelihood, [batches], (reference.samples,),
        reference.seed, "reference predictions", device=reference.device,
    )  # fmt: skip
    return reference_of(predictions)

"""What the reference scores itself: one half of its chains, judged beside the other half."""

from __future__ import annotations

from pathlib import Path

from lightning_bnn.comparison.errors import Numbers
from lightning_bnn.comparison.options import Options
from lightning_bnn.comparison.places import Place
from lightning_bnn.comparison.problem import read_problem
from lightning_bnn.comparison.reference import Reference
from lightning_bnn.comparison.reference_predictions import predictions_of_reference
from lightning_bnn.comparison.rows import rows_of
from lightning_bnn.comparison.stored_posteriors import read_posterior
from lightning_bnn.posteriors import Empirical

__all__ = ["numbers_of_halves"]


def numbers_of_halves(place: Place, config: Path, options: Options) -> Numbers:
    """All numbers of the second half of a reference's chains, as of any posterior beside the first.

    Both halves are draws of one law, so that these distances are what noise alone makes: what is
    not farther from the reference cannot be told from it. There are none of fewer than four chains,
    since a law takes two on each side.

    Args:
        place: where the chains are.
        config: with their network and data.
        options: how posteriors are compared with the reference.
    """
    problem = read_problem(config)
    stored = read_posterior("reference", place, problem).thinned(options.reference_samples)
    half = sum(isinstance(mode, Empirical) and mode.size > 1 for mode in stored.modes) // 2
    if half < 2:
        return {}
    first, second = stored.only(range(half)), stored.only(range(half, 2 * half))
    reference = Reference.of(first, problem, options)
    sets = [problem.test_set()] if stored.knows_its_noise() else []
    predicted = (
        predictions_of_reference(first, sets[0], reference, stored.likelihood) if sets else None
    )
    rows = rows_of(second, reference, sets, options.score, predicted)
    return {name: number for row in rows for name, number in row.numbers.items()}

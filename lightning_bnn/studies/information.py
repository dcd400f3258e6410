"""P2, section 4: what estimates of the information say about layers of 5 to 500 units."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor
from tqdm.auto import tqdm

from lightning_bnn.plots import lines_figure
from lightning_bnn.posteriors.mutual_information import Sampled, log_ratios
from lightning_bnn.posteriors.permanents import (
    log_bethe,
    log_capacity,
    log_permanent,
    log_transpositions,
)
from lightning_bnn.posteriors.unit_layers import UnitLayer
from lightning_bnn.randomness import keyed_generator
from lightning_bnn.studies.findings import Findings, measured_line, publish, results_folder
from lightning_bnn.tables import Cell, Measured, Table
from lightning_bnn.tables import spread as table_spread

__all__ = ["information", "near_draws", "uniform_draws"]

_EXACT_UP_TO = 8


def information(
    widths: list[int] = [5, 8, 10, 20, 50, 100, 200, 500],  # noqa: B006
    draws: list[int] = [5, 20, 100],  # noqa: B006
    weights: int = 8,
    spread: float = 1.0,
    sigma: float = 0.7,
    samples: int = 100,
    out: str = "studies/information",
) -> None:
    """Print mean and standard deviation, over weight samples, of every estimate.

    Each unit has a given number of weights of its own, with means from N(0, spread^2) and
    deviations sigma. "uniform" is the paper's estimate, the identity and K - 1 uniform permutations
    (a lower bound, at most log K). "near" draws K permutations that prefer to exchange units with
    similar means, as the paper proposes, and weights them (an upper bound). The other columns draw
    nothing: capacity (lower bound), Bethe and transpositions (upper bounds).

    Args:
        widths: numbers of units.
        draws: numbers of permutations, K, of the estimates that draw.
        weights: number of weights of each unit.
        spread: standard deviation of the means.
        sigma: standard deviation of every weight.
        samples: number of weight samples for every number.
        out: folder for the results.
    """
    limits = (("widths", widths, 2), ("draws", draws, 1), ("samples", [samples], 2))
    for name, values, least in (*limits, ("weights", [weights], 1)):
        if not all(value >= least for value in values):
            raise ValueError(f"`{name}` must be at least {least}, got {values}.")
    folder = results_folder(out, "information")
    rows = [
        _row(width, draws, *_ratios(width, weights, spread, sigma, samples))
        for width in tqdm(widths, desc="widths")
    ]
    header = list(rows[0])
    title = f"Information in nats: mean ± standard deviation of {samples} weight samples"
    table = Table(title, header, [list(row.values()) for row in rows], 2)
    curves = {
        name: measured_line(widths, [cast(Measured, row[name]) for row in rows])
        for name in header[3:]
    }
    findings = Findings(
        "information",
        "Estimates of the information between weights and the order of their units (P2, section 4)",
        {"information": table},
        {"information": lines_figure({"": curves}, ("units", "information (nats)"))},
        settings={
            "widths": widths, "draws": draws, "weights": weights, "spread": spread, "sigma": sigma,
            "samples": samples,
        },
    )  # fmt: skip
    publish(findings, folder)


def _ratios(
    width: int, weights: int, spread: float, sigma: float, samples: int
) -> tuple[Tensor, Tensor]:
    """Log-ratios of densities, ``(samples, units, units)``, and distances of means."""
    generator = keyed_generator("information", width)
    mean = spread * torch.randn(width, weights, generator=generator, dtype=torch.float64)
    noise = torch.randn(samples, width, weights, generator=generator, dtype=torch.float64)
    log_std = torch.full_like(noise, math.log(sigma))
    tensors = (mean + sigma * noise, mean.expand_as(noise), log_std, noise)
    layer = UnitLayer(0, width, (("w", 0, torch.arange(width)[:, None]),))
    ratios = log_ratios(layer, Sampled(*({"w": tensor} for tensor in tensors)))
    return ratios, torch.cdist(mean, mean)


def _row(width: int, draws: list[int], ratios: Tensor, distances: Tensor) -> dict[str, Cell]:
    """Every estimate by its name, which is the header of its column."""
    order = math.lgamma(width + 1)

    def bounded(bound: Callable[[Tensor], Tensor]) -> Measured:
        return table_spread(order - torch.cat([bound(part) for part in ratios.split(10)]))

    def drawn(estimate: Callable[..., Tensor], count: int) -> Measured:
        generator = keyed_generator("information", width, count)
        return table_spread(
            torch.stack([estimate(one, distances, count, generator) for one in ratios])
        )

    return {
        "units": str(width),
        "log n!": order,
        "exact": bounded(log_permanent) if width <= _EXACT_UP_TO else "",
        **{f"uniform {count}": drawn(uniform_draws, count) for count in draws},
        **{f"near {count}": drawn(near_draws, count) for count in draws},
        "capacity": bounded(log_capacity),
        "Bethe": bounded(log_bethe),
        "transpositions": bounded(log_transpositions),
    }


def uniform_draws(
    ratios: Tensor, distances: Tensor, count: int, generator: torch.Generator
) -> Tensor:
    """The identity and uniform permutations, all weighed alike.

    Args:
        ratios: log-ratios of one network, ``(units, units)``.
        distances: not used.
        count: permutations, the identity included.
        generator: draws them.
    """
    n = len(ratios)
    orders = torch.rand(count - 1, n, generator=generator).argsort(1)
    terms = ratios[torch.arange(n), orders].sum(1)
    return math.log(count) - torch.cat([terms.new_zeros(1), terms]).logsumexp(0)


def near_draws(ratios: Tensor, distances: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Permutations that prefer near units, weighed by how likely they were.

    Unit after unit takes an image among those that are left, with probabilities that fall
    exponentially with the distance of the means: of the proposals that do so, one whose
    probabilities are known.

    Args:
        ratios: log-ratios of one network, ``(units, units)``.
        distances: of the means of all pairs of units.
        count: permutations.
        generator: draws them.
    """
    n = len(ratios)
    free = torch.ones(count, n, dtype=torch.bool)
    chances, terms = ratios.new_zeros(count), ratios.new_zeros(count)
    for unit in range(n):
        logs = (-distances[unit]).expand(count, n).masked_fill(~free, -torch.inf).log_softmax(1)
        image = torch.multinomial(logs.exp(), 1, generator=generator)
        chances = chances + logs.gather(1, image)[:, 0]
        terms = terms + ratios[unit, image[:, 0]]
        free.scatter_(1, image, False)
    return math.log(count) - (terms - chances - math.lgamma(n + 1)).logsumexp(0)

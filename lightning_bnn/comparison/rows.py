"""The numbers of one posterior beside a reference: of a single mode, and of all together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lightning_bnn import params as P
from lightning_bnn.comparison.calibrated_numbers import calibrated_numbers
from lightning_bnn.comparison.errors import Numbers, bootstrap, jackknife, left_out, over_modes
from lightning_bnn.comparison.problem import StoredBatches
from lightning_bnn.comparison.reference import Reference
from lightning_bnn.comparison.stored_posteriors import StoredPosterior
from lightning_bnn.judging.averages import averages_of_mode, draw, has_classes
from lightning_bnn.judging.evaluators import Score
from lightning_bnn.judging.numbers import NumbersOf, numbers_of
from lightning_bnn.likelihoods import Gaussian
from lightning_bnn.params import Params, is_weight
from lightning_bnn.randomness import keyed_generator

__all__ = ["Row", "rows_of"]


@dataclass(frozen=True)
class Row:
    """The numbers of one posterior, of one of its modes or of all.

    Attributes:
        method: name of the posterior.
        mode: "one" or "multi".
        numbers: by name, as fractions and nats.
        seeds: how many modes stand behind the errors.
        networks: how many were compared with the reference.
        pooled: how many of them count where all networks are alike, as P1 measures it.
    """

    method: str
    mode: str
    numbers: Numbers
    seeds: int
    networks: int = 0
    pooled: int = 0


def rows_of(
    posterior: StoredPosterior,
    reference: Reference,
    sets: Sequence[StoredBatches],
    score: Score,
    predicted: Any = None,
    validation: StoredBatches | None = None,
) -> list[Row]:
    """One row for a mode (mean and deviation over modes), one for all together (jackknife).

    Args:
        posterior: what is compared.
        reference: what it is compared with.
        sets: data, the first in distribution.
        score: that detects out-of-distribution examples.
        predicted: of `reference_of`: what the reference predicts in distribution.
        validation: data that predictions are calibrated on, if there are any.
    """
    posterior = _at_most(posterior, reference)
    count = len(posterior.modes)
    share = max(1, reference.samples // count)
    every, sizes = _drawn(posterior, reference)
    distances = _distances(every, sizes, reference)
    pooled = _pooled(every, sizes, reference, share) if reference.pools else {}
    quality = _quality(posterior, reference, sets, score, share, predicted, validation)
    all_modes = sum(sizes), _sum_of_shares(sizes, share)
    compared = {"one": (min(sizes), min(sizes)), "multi": all_modes}
    return [
        Row(
            posterior.name,
            mode,
            {**pooled.get(mode, {}), **numbers, **quality.get(mode, {})},
            count,
            *compared[mode],
        )
        for mode, numbers in distances.items()
    ]


def _at_most(posterior: StoredPosterior, reference: Reference) -> StoredPosterior:
    """Not more modes than networks are asked for."""
    count = len(posterior.modes)
    if count <= reference.samples:
        return posterior
    order = torch.randperm(count, generator=keyed_generator(reference.seed, "modes"))
    return posterior.only(order[: reference.samples].sort().values.tolist())


@torch.no_grad()
def _drawn(posterior: StoredPosterior, reference: Reference) -> tuple[Params, list[int]]:
    """Networks of all modes as one stack, and how many each mode has."""
    draws = (draw(m, reference.samples, reference.seed, k) for k, m in enumerate(posterior.modes))
    stacks = [{name: t for name, t in stack.items() if is_weight(name, t)} for stack in draws]
    every = {name: torch.cat([stack[name] for stack in stacks]) for name in stacks[0]}
    reference.check(every, posterior.name)
    return every, [P.stack_size(stack) for stack in stacks]


@torch.no_grad()
def _distances(every: Params, sizes: Sequence[int], reference: Reference) -> dict[str, Numbers]:
    """Distances of one mode, and of all modes as a law and as a mixture."""
    return reference.of_modes(every, [k for k, size in enumerate(sizes) for _ in range(size)])


@torch.no_grad()
def _pooled(
    every: Params, sizes: Sequence[int], reference: Reference, share: int
) -> dict[str, Numbers]:
    """As P1 measures it: all networks alike, of all modes as many as of one."""
    alone = torch.arange(sum(sizes)).split(list(sizes))
    shared = [rows[:share] for rows in alone]
    single = alone if min(sizes) >= 2 else ()
    together = [torch.cat(shared), *left_out(shared)] if len(alone) > 1 else []
    distances = reference.pooled(every, [*single, *together])
    numbers: dict[str, Numbers] = {}
    if single:
        numbers["one"] = over_modes(distances[: len(single)])
    if together:
        whole, *left = distances[len(single) :]
        numbers["multi"] = jackknife(whole, left)
    return numbers


def _sum_of_shares(sizes: Sequence[int], share: int) -> int:
    return sum(min(size, share) for size in sizes)


def _quality(
    posterior: StoredPosterior,
    reference: Reference,
    sets: Sequence[StoredBatches],
    score: Score,
    share: int,
    predicted: Any,
    validation: StoredBatches | None,
) -> dict[str, Numbers]:
    """Every metric of the predictions of one mode and of all modes; none without data."""
    if not sets:
        return {}
    if not posterior.knows_its_noise():
        raise ValueError(
            f"{posterior.name} are networks without the noise that their likelihood has learned: "
            "name the checkpoint of the run in place of a bank or a folder."
        )
    likelihood = posterior.likelihood
    sets = sets if _predicts(likelihood) else sets[:1]
    held_out = [] if validation is None or not _predicts(likelihood) else [validation]
    of_modes = [
        averages_of_mode(
            mode, posterior.network, likelihood, [*sets, *held_out], (reference.samples, share),
            reference.seed, k, device=reference.device,
        )
        for k, mode in enumerate(posterior.judged)
    ]  # fmt: skip
    targets, unit = sets[0].targets(), sets[0].target_std()

    def numbers(of_sets: Sequence[Any]) -> NumbersOf:
        tested, known = of_sets[: len(sets)], of_sets[len(sets) :]
        plain = numbers_of(likelihood, tested, targets, score, predicted, unit)
        if not held_out:
            return plain
        known_targets = held_out[0].targets()
        more = calibrated_numbers(
            likelihood, known[0], tested[0], known_targets, targets, reference.seed
        )
        return lambda *rows: {**plain(*rows), **more(*rows[:1])}

    alone = [numbers([counts[0] for counts in mode]) for mode in of_modes]
    if len(alone) == 1:
        sizes = [counts[0].examples for counts in of_modes[0][: len(sets)]]
        return {"one": bootstrap(sizes, alone[0], seed=reference.seed)}
    shared = [
        type(parts[0]).stacked(parts)
        for parts in ([mode[s][1] for mode in of_modes] for s in range(len(of_modes[0])))
    ]
    modes = torch.arange(len(alone))
    subsets = [modes, *left_out(modes.split(1))]
    whole, *left = (numbers([part[kept].mean() for part in shared])() for kept in subsets)
    return {"one": over_modes([of_mode() for of_mode in alone]), "multi": jackknife(whole, left)}


def _predicts(likelihood: Any) -> bool:
    """Whether outputs say something without targets, so that OOD sets can be looked at."""
    return has_classes(likelihood) or isinstance(likelihood, Gaussian)

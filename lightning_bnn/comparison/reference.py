"""Compare posteriors with a reference: weights by MMD, predictions by every metric."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bnn import params as P
from lightning_bnn.comparison.problem import Batches
from lightning_bnn.comparison.protocols import Protocol
from lightning_bnn.comparison.stored_posteriors import Contender
from lightning_bnn.comparison.tables import Measured, spread
from lightning_bnn.judging.averages import (
    Averages,
    bootstrap,
    drawn,
    jackknife,
    predict_mode,
    probabilities,
    qualities,
)
from lightning_bnn.metrics import MMDReference, Transformed
from lightning_bnn.metrics.mmd import MMDTable
from lightning_bnn.params import Params, is_weight
from lightning_bnn.randomness import keyed_generator

__all__ = ["Arena", "Row", "rows_of"]

Numbers = dict[str, Measured]
_GROUPS = 20
"""At most so many parts are left out in turn by the jackknife."""


@dataclass(frozen=True)
class Row:
    """The numbers of one posterior, of one of its modes or of all.

    Attributes:
        method: name of the posterior.
        mode: "one" or "multi".
        numbers: by name, as fractions and nats.
        seeds: how many modes stand behind the errors.
        networks: how many were compared with the reference.
    """

    method: str
    mode: str
    numbers: Numbers
    seeds: int
    networks: int = 0


class Arena:
    """A reference, freed of symmetries or not, to compare any number of posteriors with.

    Args:
        networks: the reference, a stack.
        template: a network of its kind; it is left as it is.
        example: inputs of the network.
        protocol: what is removed, and how.
        samples: networks that are drawn from every posterior.
        seed: of the draws.
        device: where it is computed.
    """

    def __init__(
        self,
        networks: Params,
        template: nn.Module,
        example: Sequence[Any],
        protocol: Protocol,
        samples: int = 100,
        seed: int = 0,
        device: str = "cpu",
    ) -> None:
        self.samples, self.seed = samples, seed
        self.device, self.size = device, P.stack_size(networks)
        self._remover = protocol.remover(template.eval(), *example)
        self.raw = MMDReference(networks, device=device)
        self.freed = MMDReference(self._freed(networks), device=device)
        self._seen = set(_digests(networks, self.raw.layers))

    def _freed(self, networks: Params) -> Transformed:
        return Transformed(networks, self._remover(networks))

    def check_alike(self, networks: Params, name: str) -> None:
        """Refuse networks that have other layers than the reference."""
        for layer in self.raw.layers:
            own, other = tuple(self.raw.source.shapes[layer]), networks.get(layer)
            if other is None or tuple(other.shape[1:]) != own:
                told = "is missing" if other is None else f"has shape {tuple(other.shape[1:])}"
                raise ValueError(
                    f"{name} has other networks than the reference: `{layer}`, of shape {own} "
                    f"there, {told}."
                )

    def check_apart(self, networks: Params, name: str) -> None:
        """Refuse networks that are in the reference, too: they would bias the MMD."""
        same = sum(digest in self._seen for digest in _digests(networks, self.raw.layers))
        if same:
            raise ValueError(
                f"{same} networks of {name} are also in the reference: train them from another "
                "seed (`seed_everything` and the seed of the module), or choose other rows."
            )

    def distances(self, networks: Params, parts: Sequence[Tensor]) -> list[dict[str, float]]:
        """MMD^2 of parts of a stack to the reference, with and without symmetries.

        Args:
            networks: a stack.
            parts: rows of each.
        """
        found: list[dict[str, float]] = [{} for _ in parts]
        for name, reference, source in (
            ("mmd", self.raw, networks),
            ("ns", self.freed, self._freed(networks)),
        ):
            for numbers, values in zip(found, reference.compare_parts(source, parts), strict=True):
                numbers |= _reduced(name, reference, values)
        return found

    def noise_floor(self, samples: int, repeats: int = 20) -> Numbers:
        """The same between random parts of the reference itself: mean and standard deviation.

        Two samples of m and n networks of one law scatter by a deviation that falls as 1/m + 1/n.
        The parts of a reference are smaller than what they stand for, a posterior's samples and
        the whole reference: the numbers are scaled accordingly.

        Args:
            samples: networks that were drawn from a posterior.
            repeats: how often the reference is split.
        """
        count = min(samples, self.size // 2)
        parts = 1 / count + 1 / (self.size - count)
        scale = (1 / samples + 1 / self.size) / parts
        found: dict[str, list[float]] = {}
        for name, reference in (("mmd", self.raw), ("ns", self.freed)):
            values = reference.noise_floor(count, repeats, keyed_generator(self.seed, "floor"))
            for one in values:
                for key, value in _reduced(name, reference, scale * one).items():
                    found.setdefault(key, []).append(value)
        return {key: spread(torch.tensor(values)) for key, values in found.items()}


def _reduced(name: str, reference: MMDReference, values: Tensor) -> dict[str, float]:
    """One number for every reduction over kernels."""
    sizes = torch.tensor([math.prod(reference.source.shapes[n]) for n in reference.layers])
    table = MMDTable(reference.layers, sizes, values)
    return {
        name: float(table.reduce("median")),
        f"{name}_mean": float(table.reduce("mean")),
        f"{name}_max": float(table.reduce("max")),
    }


def _digests(networks: Params, layers: Iterable[str]) -> list[bytes]:
    """One hash for every network."""
    hashes = [hashlib.blake2b(digest_size=16) for _ in range(P.stack_size(networks))]
    for name in layers:
        for own, row in zip(hashes, networks[name], strict=True):
            own.update(row.contiguous().cpu().view(torch.uint8).numpy().tobytes())
    return [own.digest() for own in hashes]


# ------------------------------------------------------------ one posterior
def rows_of(contender: Contender, arena: Arena, sets: Sequence[Batches], score: str) -> list[Row]:
    """One row for a mode (mean and deviation over modes), one for all together (jackknife).

    Args:
        contender: the posterior.
        arena: the reference.
        sets: data, the first in distribution.
        score: that detects out-of-distribution examples.
    """
    contender = _at_most(contender, arena)
    count = len(contender.modes)
    share = max(1, arena.samples // count)
    weights, networks = _compared(contender, arena, share)
    quality = _judged(contender, arena, sets, score, share)
    return [
        Row(contender.name, mode, {**weights.get(mode, {}), **quality.get(mode, {})}, count, n)
        for mode, n in networks.items()
    ]


def _at_most(contender: Contender, arena: Arena) -> Contender:
    """Not more modes than networks are asked for."""
    count = len(contender.modes)
    if count <= arena.samples:
        return contender
    order = torch.randperm(count, generator=keyed_generator(arena.seed, "modes"))
    kept = order[: arena.samples].sort().values.tolist()
    return replace(
        contender,
        modes=[contender.modes[k] for k in kept],
        judged=[contender.judged[k] for k in kept],
    )


@torch.no_grad()
def _compared(
    contender: Contender, arena: Arena, share: int
) -> tuple[dict[str, Numbers], dict[str, int]]:
    """MMD of one mode and of all modes to the reference, and how many networks that took."""
    stacks = [
        {n: t for n, t in drawn(mode, arena.samples, arena.seed, k).items() if is_weight(n, t)}
        for k, mode in enumerate(contender.modes)
    ]
    sizes = [P.stack_size(stack) for stack in stacks]
    starts = torch.tensor([0, *sizes]).cumsum(0).tolist()
    alone = [torch.arange(start, start + n) for start, n in zip(starts, sizes, strict=False)]
    shared = [rows[:share] for rows in alone]
    every = {name: torch.cat([stack[name] for stack in stacks]) for name in stacks[0]}
    del stacks
    arena.check_alike(every, contender.name)
    arena.check_apart(every, contender.name)
    groups = _groups(shared)
    parts = {
        "one": alone if min(sizes) >= 2 else [],
        "multi": [torch.cat(shared), *_left_out(groups)] if len(alone) > 1 else [],
    }
    wanted = [*parts["one"], *parts["multi"]]
    found = arena.distances(every, wanted) if wanted else []
    first, rest = found[: len(parts["one"])], found[len(parts["one"]) :]
    numbers: dict[str, Numbers] = {}
    if first:
        numbers["one"] = _over_modes(first)
    if rest:
        numbers["multi"] = jackknife(rest[0], rest[1:])
    networks = {"one": min(sizes)}
    if len(alone) > 1:
        networks["multi"] = sum(map(len, shared))
    return numbers, networks


def _groups(parts: Sequence[Tensor]) -> list[Tensor]:
    """Neighbouring parts joined, so that there are not too many to leave out."""
    count = min(len(parts), _GROUPS)
    edges = torch.linspace(0, len(parts), count + 1).round().long().tolist()
    return [torch.cat(list(parts[a:b])) for a, b in zip(edges, edges[1:], strict=False)]


def _left_out(groups: Sequence[Tensor]) -> list[Tensor]:
    """All but one group, for every group; nothing where too little would be left."""
    if len(groups) < 3:
        return []
    return [
        torch.cat([group for k, group in enumerate(groups) if k != out])
        for out in range(len(groups))
    ]


def _over_modes(found: Sequence[Mapping[str, float]]) -> Numbers:
    return {
        name: spread(torch.tensor([one[name] for one in found], dtype=torch.float64))
        for name in found[0]
    }


def _judged(
    contender: Contender, arena: Arena, sets: Sequence[Batches], score: str, share: int
) -> dict[str, Numbers]:
    """Every metric of one mode and of all modes; nothing where outputs are no classes."""
    if probabilities(contender.likelihood, torch.zeros(1, 1)) is None:
        return {}
    found = [
        predict_mode(
            mode, contender.template, contender.likelihood, sets, (arena.samples, share),
            arena.seed, k, device=arena.device,
        )
        for k, mode in enumerate(contender.judged)
    ]  # fmt: skip
    labels = sets[0].targets()
    alone, shared = (
        [Averages.stacked([mode[s][c] for mode in found]) for s in range(len(sets))] for c in (0, 1)
    )

    def of(parts: Sequence[Averages], picked: Tensor = labels) -> dict[str, float]:
        return qualities(parts[0], picked, parts[1] if len(parts) > 1 else None, score)

    if len(found) == 1:
        return {"one": _over_examples([part[0] for part in alone], labels, of, arena.seed)}
    single = [of([part[k] for part in alone]) for k in range(len(found))]
    modes = torch.arange(len(found))
    groups = _left_out(_groups(modes.split(1)))
    whole = of([part.mean() for part in shared])
    left = [of([part[kept].mean() for part in shared]) for kept in groups]
    return {"one": _over_modes(single), "multi": jackknife(whole, left)}


def _over_examples(
    parts: Sequence[Averages],
    labels: Tensor,
    of: Callable[..., dict[str, float]],
    seed: int,
) -> Numbers:
    """With a bootstrap over the examples of every set."""

    def resampled(*rows: Tensor) -> dict[str, float]:
        return of([part[r] for part, r in zip(parts, rows, strict=True)], labels[rows[0]])

    return bootstrap([len(part.entropy) for part in parts], resampled, seed=seed)

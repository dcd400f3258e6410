"""Compare posteriors with a reference: weights by MMD, predictions by every metric."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bnn import params as P
from lightning_bnn.metrics import MMDReference, Transformed, mmd_table
from lightning_bnn.metrics.mmd import MMDTable
from lightning_bnn.params import Params, is_weight
from lightning_bnn.posteriors import Empirical
from lightning_bnn.randomness import keyed_generator
from lightning_bnn.studies.contenders import Contender
from lightning_bnn.studies.protocols import Protocol
from lightning_bnn.studies.scoring import Averages, bootstrap, jackknife, predict_mode, qualities
from lightning_bnn.studies.tables import Measured, spread

__all__ = ["Arena", "Row", "compare_weights", "judge_predictions", "rows_of"]

Numbers = dict[str, Measured]


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
        template: a network of its kind.
        example: inputs of the network.
        protocol: what is removed, and how.
        samples: networks that are drawn from every posterior.
        seed: of the draws.
        device: where distances are computed.
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
        self.template, self.protocol = template.eval(), protocol
        self.samples, self.seed = samples, seed
        self.symmetries = protocol.symmetries(self.template, *example)
        self.networks, self.size = networks, P.stack_size(networks)
        self.raw = MMDReference(networks, device=device)
        freed = Transformed(networks, protocol.removal(networks, self.symmetries))
        self.freed = MMDReference(freed, device=device)

    def check_apart(self, stacks: Sequence[Params], name: str) -> None:
        """Refuse networks that are in the reference, too: they would bias the MMD."""
        rows = torch.cat([P.ravel(stack, stacked=True)[0] for stack in stacks]).cpu()
        seen = {row.numpy().tobytes() for row in P.ravel(self.networks, stacked=True)[0].cpu()}
        same = sum(row.numpy().tobytes() in seen for row in rows)
        if same:
            raise ValueError(
                f"{same} networks of {name} are also in the reference: train them from another "
                "seed (`seed_everything` and the seed of the module), or choose other rows."
            )

    def distances(self, networks: Params) -> dict[str, float]:
        """MMD^2 of a stack to the reference, with and without symmetries."""
        removal = self.protocol.removal(networks, self.symmetries)
        return {
            **_reduced("mmd", mmd_table(self.raw, networks)),
            **_reduced("ns", mmd_table(self.freed, Transformed(networks, removal))),
        }

    def noise_floor(self, samples: int, repeats: int = 20) -> Numbers:
        """The same between random parts of the reference itself: mean and standard deviation.

        Args:
            samples: networks of the one part, as many as were drawn from a posterior.
            repeats: how often the reference is split.
        """
        count = min(samples, self.size // 2)
        found: dict[str, list[float]] = {}
        for name, reference in (("mmd", self.raw), ("ns", self.freed)):
            values = reference.noise_floor(count, repeats, keyed_generator(self.seed, "floor"))
            sizes = torch.tensor([math.prod(reference.source.shapes[n]) for n in reference.layers])
            for one in values:
                table = MMDTable(reference.layers, sizes, one)
                for key, value in _reduced(name, table).items():
                    found.setdefault(key, []).append(value)
        return {key: spread(torch.tensor(values)) for key, values in found.items()}


def _reduced(name: str, table: MMDTable) -> dict[str, float]:
    return {
        name: float(table.reduce("median")),
        f"{name}_mean": float(table.reduce("mean")),
        f"{name}_max": float(table.reduce("max")),
    }


# ------------------------------------------------------------ one posterior
def rows_of(contender: Contender, arena: Arena, data: Mapping[str, Any], score: str) -> list[Row]:
    """One row for a mode (mean and deviation over modes), one for all together (jackknife).

    Args:
        contender: the posterior.
        arena: the reference.
        data: ``loaders`` (the first one in distribution) and the ``labels`` of the first.
        score: that detects out-of-distribution examples.
    """
    count = len(contender.modes)
    shares = _shares(contender, arena.samples)
    weights = compare_weights(contender, arena, shares)
    quality = judge_predictions(contender, arena, data, score, shares)
    drawn = {"one": min(_available(mode, arena.samples) for mode in contender.modes)}
    if count > 1:
        drawn["multi"] = sum(shares)
    return [
        Row(contender.name, mode, {**weights.get(mode, {}), **quality[mode]}, count, networks)
        for mode, networks in drawn.items()
    ]


def _shares(contender: Contender, samples: int) -> list[int]:
    """Networks of each mode in the row of all modes: as many as of the others."""
    share = max(1, samples // len(contender.modes))
    return [min(share, _available(mode, samples)) for mode in contender.modes]


def _available(mode: Any, samples: int) -> int:
    return min(samples, mode.size) if isinstance(mode, Empirical) else samples


@torch.no_grad()
def compare_weights(
    contender: Contender, arena: Arena, shares: Sequence[int]
) -> dict[str, Numbers]:
    """MMD of one mode and of all modes to the reference.

    Args:
        contender: the posterior.
        arena: the reference.
        shares: networks of every mode among those of all.
    """
    stacks = []
    for k, mode in enumerate(contender.modes):
        drawn = mode.sample(
            _available(mode, arena.samples), keyed_generator(arena.seed, "weights", k)
        )
        stacks.append({n: t.detach() for n, t in drawn.items() if is_weight(n, t)})
    arena.check_apart(stacks, contender.name)
    found: dict[str, Numbers] = {}
    if all(len(next(iter(s.values()))) >= 2 for s in stacks):
        found["one"] = _over_modes([arena.distances(stack) for stack in stacks])
    if len(stacks) > 1:
        parts = [
            {n: t[:share] for n, t in stack.items()}
            for stack, share in zip(stacks, shares, strict=True)
        ]
        found["multi"] = _of_all(
            len(parts), lambda kept: arena.distances(_concatenated([parts[k] for k in kept]))
        )
    return found


def _of_all(parts: int, value: Any) -> Numbers:
    """With a jackknife, where what is left over still can be compared."""
    if parts > 2:
        return jackknife(parts, value)
    return {name: Measured(v) for name, v in value(list(range(parts))).items()}


def _concatenated(stacks: Sequence[Params]) -> Params:
    return {name: torch.cat([stack[name] for stack in stacks]) for name in stacks[0]}


def _over_modes(found: Sequence[Mapping[str, float]]) -> Numbers:
    return {
        name: spread(torch.tensor([one[name] for one in found], dtype=torch.float64))
        for name in found[0]
    }


def judge_predictions(
    contender: Contender,
    arena: Arena,
    data: Mapping[str, Any],
    score: str,
    shares: Sequence[int],
) -> dict[str, Numbers]:
    """Every metric of one mode and of all modes.

    Args:
        contender: the posterior.
        arena: says how many networks are drawn, and from which seed.
        data: see `rows_of`.
        score: that detects out-of-distribution examples.
        shares: networks of every mode among those of all.
    """
    labels: Tensor = data["labels"]
    found = [
        predict_mode(
            mode,
            contender.template,
            data["loaders"],
            (_available(mode, arena.samples), share),
            arena.seed + k,
        )
        for k, (mode, share) in enumerate(zip(contender.judged, shares, strict=True))
    ]
    alone, shared = (
        [Averages.stacked([mode[s][c] for mode in found]) for s in range(len(data["loaders"]))]
        for c in (0, 1)
    )

    def of(sets: Sequence[Averages], picked: Tensor = labels) -> dict[str, float]:
        return qualities(sets[0], picked, sets[1] if len(sets) > 1 else None, score)

    if len(found) == 1:
        sets = [one[0] for one in alone]
        sizes = [len(one.entropy) for one in sets]

        def resampled(*rows: Tensor) -> dict[str, float]:
            return of([one[r] for one, r in zip(sets, rows, strict=True)], labels[rows[0]])

        return {"one": bootstrap(sizes, resampled, seed=arena.seed)}
    single = [of([one[k] for one in alone]) for k in range(len(found))]
    multi = _of_all(len(found), lambda kept: of([one[kept].mean() for one in shared]))
    return {"one": _over_modes(single), "multi": multi}

"""Trained networks of one kind, and what becomes of their means by every way into one frame."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from tqdm.auto import tqdm

from lightning_bnn import params as P
from lightning_bnn.datamodules.base import DataModule, Splits
from lightning_bnn.modules import DeepEnsemble
from lightning_bnn.params import Params, stack_size
from lightning_bnn.posteriors import DiagonalGaussian
from lightning_bnn.randomness import keyed_generator, keyed_randomness
from lightning_bnn.studies.alignment_methods import (
    LEARNED,
    MATRICES,
    PERMUTATIONS,
    Kind,
    aligned,
    without_gains,
)
from lightning_bnn.studies.alignment_networks import Architecture
from lightning_bnn.studies.runs import fit_quietly
from lightning_bnn.symmetry.matching.alignment import distance_to_mean
from lightning_bnn.symmetry.matching.repair import reestimated

__all__ = ["DRAWS", "Population", "Scale"]

DRAWS = 100


@dataclass(frozen=True)
class Scale:
    """Which networks, how many, and into how many sets they are cut.

    Attributes:
        architectures: by name.
        sizes: of the sets.
        sets: at most so many of each size.
        share: of the epochs of training.
    """

    architectures: tuple[str, ...]
    sizes: tuple[int, ...]
    sets: int
    share: float = 1.0


OfSets = dict[str, dict[int, list[dict[str, float]]]]
"""By method and by the number of networks: what was measured on every set."""


class Population:
    """Trained networks of one kind, and what becomes of their means."""

    def __init__(
        self, kind: Architecture, name: str, settings: Scale, seed: int, folder: Path
    ) -> None:
        self.kind, self.name, self.settings, self.seed = kind, name, settings, seed
        self.examples = kind.examples()
        with keyed_randomness(seed, name):
            self.model: nn.Module = kind.build(self.examples.classes).eval()
        self.inputs = self.examples.train[0]
        self.plain = Kind.of(self.model, self.inputs)
        batches = zip(*(t.split(64) for t in self.examples.train), strict=True)
        self.batches = list(batches)[:20]
        self.members = max(max(settings.sizes), 2 * min(settings.sizes))
        self.stack = self._trained(folder / "networks")
        self.mixed = Kind.folded(self.model, self.inputs) if self.plain.symmetries.linear else None
        self.methods = PERMUTATIONS + (MATRICES if self.mixed else ())

    def _trained(self, folder: Path) -> Params:
        """The networks, trained or as an earlier run has left them."""
        epochs = max(1, round(self.settings.share * self.kind.epochs))
        key = f"{self.name} {epochs} {self.kind.lr} {self.members} {self.seed} {self.model}"
        file = folder / f"{hashlib.blake2b(key.encode(), digest_size=8).hexdigest()}.safetensors"
        if file.exists():
            return load_file(file)
        generator = keyed_generator(self.seed, "starts", self.name)
        module = DeepEnsemble(
            self.model,
            members=self.members,
            prior_std=self.kind.prior_std,
            optimizer=lambda p: torch.optim.Adam(p, self.kind.lr),
        )
        module.networks.load_state_dict(P.populate(self.model, self.members, generator))
        fit_quietly(module, _Shuffled(*self.examples.train, self.seed), epochs)
        stack = {n: t.detach().contiguous().clone() for n, t in module.member_stack().items()}
        folder.mkdir(exist_ok=True)
        save_file(stack, file.with_suffix(".part"))
        file.with_suffix(".part").rename(file)
        return stack

    def measured(self) -> OfSets:
        """All methods on all sets of all sizes."""
        found: OfSets = {method: {} for method in self.methods}
        sets = [
            (size, k)
            for size in self.settings.sizes
            for k in range(min(self.settings.sets, self.members // size))
        ]
        title = f"{self.name}, seed {self.seed}"
        for size, k in tqdm(sets, desc=title, unit="set", leave=False):
            networks = {n: t[k * size : (k + 1) * size] for n, t in self.stack.items()}
            for method, numbers in self._one_set(networks).items():
                found[method].setdefault(size, []).append(numbers)
        return found

    @torch.no_grad()
    def _one_set(self, networks: Params) -> dict[str, dict[str, float]]:
        """What every method makes of one set."""
        losses = [self._judged(self.plain, network)[0] for network in P.unstack(networks)]
        ends = sum(losses) / len(losses)
        chosen = [m for m in PERMUTATIONS if m not in LEARNED or len(losses) == 2]
        result = {m: self._measured(self.plain, networks, m, ends) for m in chosen}
        if self.mixed is not None:
            folded = without_gains(self.model, networks, self.inputs)
            result |= {m: self._measured(self.mixed, folded, m, ends) for m in MATRICES}
        return result

    def _measured(self, kind: Kind, networks: Params, method: str, ends: float) -> dict[str, float]:
        """What one method makes of one set."""
        start = time.process_time()
        moved = aligned(kind, networks, method, self.batches, self.seed)
        seconds = time.process_time() - start
        loss, accuracy = self._judged(kind, self._mean(kind, moved))
        distance = distance_to_mean(moved, kind.compared)
        result = {
            "excess": loss - ends,
            "accuracy": accuracy,
            "distance": distance / distance_to_mean(networks, kind.compared),
            "per_network": distance / stack_size(networks),
            "seconds": seconds,
        }
        if self.kind.prior_std is not None:
            result["draws"] = self._of_draws(kind, moved)
        return result

    def _mean(self, kind: Kind, networks: Params) -> Params:
        """The mean network, with statistics of BatchNorm of its own."""
        floating = {n: t for n, t in networks.items() if t.is_floating_point()}
        mean = {n: floating[n].mean(0) if n in floating else t[0] for n, t in networks.items()}
        return reestimated(kind.model, mean, [x for x, _ in self.batches])

    def _of_draws(self, kind: Kind, networks: Params) -> float:
        """Mean accuracy of single draws of the Gaussian with the same means and deviations."""
        generator = keyed_generator(self.seed, "draws", self.name)
        drawn = P.unstack(DiagonalGaussian.fit(networks).sample(DRAWS, generator))
        return sum(self._judged(kind, network)[1] for network in drawn) / DRAWS

    def _judged(self, kind: Kind, network: Params) -> tuple[float, float]:
        """Loss and accuracy on the test set."""
        inputs, labels = self.examples.test
        logits = torch.cat([P.apply(kind.model, network, x) for x in inputs.split(500)])
        loss = float(nn.functional.cross_entropy(logits, labels))
        return loss, 100 * float((logits.argmax(-1) == labels).double().mean())


class _Shuffled(DataModule):
    """Examples in an order that the seed decides."""

    def __init__(self, inputs: Tensor, labels: Tensor, seed: int) -> None:
        super().__init__(batch_size=64, seed=seed)
        self.examples = (inputs, labels)

    def load(self) -> Splits:
        return Splits(self.examples, None, self.examples)

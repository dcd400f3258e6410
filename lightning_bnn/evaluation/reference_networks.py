"""Networks that represent the posterior, and the distances of others to them."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from lightning_bnn.evaluation.draws import predictions_of_mode
from lightning_bnn.evaluation.errors import Numbers
from lightning_bnn.evaluation.evaluators import Score
from lightning_bnn.evaluation.problem import Problem, StoredBatches
from lightning_bnn.evaluation.protocols import PROTOCOLS, Protocol
from lightning_bnn.evaluation.stored_posteriors import StoredPosterior
from lightning_bnn.likelihoods import Likelihood
from lightning_bnn.metrics import MMDReference, Transformed, rhat
from lightning_bnn.metrics.mmd import MMDTable, Reduction, modes_table
from lightning_bnn.posteriors import Empirical
from lightning_bnn.tables import Measured, spread
from weightsym import params as P
from weightsym.params import (
    Inputs,
    Params,
    fastest,
    in_precision,
    in_runnable_precision,
    keyed_generator,
)

Made = Literal["trained", "sampled"]
"""How networks came about: by training runs, or as draws of the posterior."""


@dataclass(frozen=True)
class Options:
    """Options of a comparison, see `lightning_bnn.evaluation.compare.compare`.

    Attributes:
        reference_samples: networks of every chain of the reference at most.
        functions: whether laws are compared as functions, too.
    """

    protocol: str = "full"
    samples: int = 100
    ood: str | None = None
    score: Score = "max_probability"
    seed: int = 0
    reference_is: Made | None = None
    reference_samples: int | None = None
    functions: bool = False


MEDIAN, LARGEST = 1.01, 1.05
"""Chains whose R-hat is above these, over examples, count as not converged."""
_EXAMPLES = 100
_LEAST = 8
"""Draws of a chain that an R-hat takes at least."""


def have_converged(reductions: Sequence[float]) -> bool:
    """Return whether chains with the given median and largest R-hat count as converged."""
    median, largest = reductions
    return median <= MEDIAN and largest <= LARGEST


@torch.no_grad()
def rhat_of_predictions(reference: StoredPosterior, problem: Problem) -> tuple[float, float] | None:
    """Return the median and largest R-hat of the log-density of up to a hundred targets.

    Args:
        reference: a posterior of several chains; another has no R-hat.
        problem: its network and data.
    """
    chains = reference.stacks()
    draws = min((P.stack_size(chain) for chain in chains), default=0)
    if len(chains) < 2 or draws < _LEAST:
        return None
    last = [{name: t[-draws:] for name, t in chain.items()} for chain in chains]
    networks = {name: torch.cat([chain[name] for chain in last]) for name in last[0]}
    inputs, targets = next(iter(problem.test_set()))
    outputs = precise_outputs(problem.network, networks, inputs[:_EXAMPLES])
    likelihood = cast(Likelihood, reference.likelihood)
    values = likelihood.log_prob(outputs, targets[:_EXAMPLES])
    reductions = rhat(values.view(len(chains), draws, -1))
    return float(reductions.median()), float(reductions.max())


@torch.no_grad()
def precise_outputs(network: nn.Module, networks: Params, inputs: Tensor) -> Tensor:
    """Compute the outputs of a stack in float64, unless the network does not support it.

    In float32 the log-densities of confident networks are ties, which ranks cannot order.

    Args:
        network: gives the computation.
        networks: a stack.
        inputs: of one batch.
    """

    def use(model: nn.Module, inputs: Inputs) -> Tensor:
        dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
        return P.apply(
            model, {n: in_precision(t, dtype) for n, t in networks.items()}, *inputs.args
        )

    return in_runnable_precision(network, Inputs((inputs,)), use).double()


_WEIGHT_SPACES = ("", "ns_")
"""Networks as they are, and without symmetries."""
_SUFFIXES: dict[Reduction, str] = {"median": "", "mean": "_mean", "max": "_max"}
"""Suffixes of P1's numbers, by reduction over kernels."""


class Reference:
    """Networks that represent the posterior, for comparison with others.

    Args:
        networks: the reference, a stack.
        network: one of their kind; it is left as it is.
        example: its inputs.
        protocol: says which symmetries are removed, and how.
        samples: networks that are drawn from every posterior.
        seed: of the draws.
        device: where it is computed.
        chains: the chain of every network, if they are draws of chains.
        predict: computes the predictions of every network of a stack for some inputs, if
            networks are compared as functions, too.
    """

    def __init__(
        self,
        networks: Params,
        network: nn.Module,
        example: Sequence[Any],
        protocol: Protocol,
        samples: int = 100,
        seed: int = 0,
        device: str | torch.device = "cpu",
        chains: Sequence[int] | None = None,
        predict: Callable[[Params], Tensor] | None = None,
    ) -> None:
        self.samples, self.seed = samples, seed
        self.pools, self.has_chains = protocol.pools, chains is not None
        self.device, self.size = device, P.stack_size(networks)
        if self.size < 2:
            raise ValueError(f"`reference` must hold at least 2 networks, got {self.size}.")
        self._remover = protocol.remover(network.eval(), *example)
        weights = [n for n in P.weight_names(network) if n in networks] or None  # and no buffers
        self._predict = predict
        self._spaces = {
            space: MMDReference(
                stack, layers=None if space == "f_" else weights, device=device, chains=chains
            )
            for space, stack in self._stacks(networks)
        }
        self._plain = self._spaces[""]
        self._digests = set(_digests(networks, self._plain.layers))

    @classmethod
    def of(cls, stored: StoredPosterior, problem: Problem, options: Options) -> Reference:
        """Build the reference from a posterior of networks.

        Args:
            stored: the posterior.
            problem: its network and data.
            options: how others will be compared with it.
        """
        return cls(
            stored.networks(),
            problem.network,
            [problem.example()],
            PROTOCOLS[options.protocol],
            options.samples,
            options.seed,
            fastest(),
            stored.chains(),
            problem.probe(stored.likelihood) if options.functions else None,
        )

    def _stacks(self, networks: Params) -> Iterator[tuple[str, Any]]:
        """Yield the networks as given, without symmetries, and, if compared, as functions."""
        yield "", networks
        yield "ns_", Transformed(networks, self._remover(networks))
        if self._predict is not None:
            yield "f_", {"function": self._predict(networks)}

    def check(self, networks: Params, name: str) -> None:
        """Refuse networks with other layers, or contained in the reference, which bias the MMD.

        Args:
            networks: a stack.
            name: of the posterior that they are from.
        """
        for layer in self._plain.layers:
            shape, tensor = tuple(self._plain.source.shapes[layer]), networks.get(layer)
            if tensor is None or tuple(tensor.shape[1:]) != shape:
                problem = "is missing" if tensor is None else f"has shape {tuple(tensor.shape[1:])}"
                raise ValueError(
                    f"{name} has different networks from the reference: `{layer}`, of shape "
                    f"{shape} in the reference, {problem}."
                )
        same = sum(d in self._digests for d in _digests(networks, self._plain.layers))
        if same:
            raise ValueError(
                f"{same} networks of {name} are also in the reference: train them from another "
                "seed (`seed_everything` and the seed of the module), or choose other rows."
            )

    def of_modes(self, networks: Params, modes: Sequence[int]) -> dict[str, Numbers]:
        """Return MMD^2 of the modes of a stack: single ones ("one"), and all of them ("multi").

        Those of single modes have deviations over modes; law, mixture and floor of all modes have
        errors of the jackknife over modes and over chains of the reference.

        Args:
            networks: a stack.
            modes: which of its networks belong together.
        """
        single: Numbers = {}
        multi: Numbers = {}
        for prefix, stack in self._stacks(networks):
            table = modes_table(self._spaces[prefix], stack, modes)
            single[f"{prefix}mixture"] = spread(table.single.reduce("median"))
            for name in ("law", "mixture", "floor"):
                number = getattr(table, name).estimate("median")
                multi[f"{prefix}{name}"] = Measured(float(number.value), float(number.error))
        return {"one": single, "multi": multi} if len(set(modes)) > 1 else {"one": single}

    def pooled(self, networks: Params, parts: Sequence[Tensor]) -> list[dict[str, float]]:
        """Return MMD^2 of parts of a stack to the reference, with networks pooled as in P1.

        Args:
            networks: a stack.
            parts: rows of each part, perhaps none.
        """
        if not parts:
            return []
        both = itertools.islice(self._stacks(networks), len(_WEIGHT_SPACES))
        values = [self._spaces[space].compare_parts(stack, parts) for space, stack in both]
        return [self._reduced(*pair) for pair in zip(*values, strict=True)]

    def noise_floor(self, samples: int, repeats: int = 20) -> Numbers:
        """Return mean and deviation of MMD^2 between random parts of the reference itself.

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
        plain, freed = (
            scale * reference.noise_floor(count, repeats, keyed_generator(self.seed, "floor"))
            for reference in (self._spaces[space] for space in _WEIGHT_SPACES)
        )
        splits = [self._reduced(*values) for values in zip(plain, freed, strict=True)]
        return {key: spread(torch.tensor([split[key] for split in splits])) for key in splits[0]}

    def _reduced(self, plain: Tensor, freed: Tensor) -> dict[str, float]:
        """Reduce MMD^2 by layer and kernel to one number for every reduction."""
        layers = self._plain.layers
        shapes = self._plain.source.shapes
        sizes = torch.tensor([math.prod(shapes[layer]) for layer in layers])
        numbers: dict[str, float] = {}
        for name, values in (("mmd", plain), ("ns", freed)):
            table = MMDTable(layers, sizes, values)
            for reduction, suffix in _SUFFIXES.items():
                numbers[f"{name}{suffix}"] = float(table.reduce(reduction))
        return numbers


def _digests(networks: Params, layers: Iterable[str]) -> list[bytes]:
    """Return a hash of every network."""
    hashes = [hashlib.blake2b(digest_size=16) for _ in range(P.stack_size(networks))]
    for layer in layers:
        for digest, row in zip(hashes, networks[layer], strict=True):
            digest.update(row.contiguous().cpu().view(torch.uint8).numpy().tobytes())
    return [digest.digest() for digest in hashes]


def predictions_of_reference(
    stored: StoredPosterior, batches: StoredBatches, reference: Reference
) -> Any:
    """Predict by as many networks of the reference as are drawn from a posterior.

    Args:
        stored: the reference.
        batches: data in distribution.
        reference: says how many networks are drawn, by which seed, and where it is computed.
    """
    if not stored.knows_its_noise():
        return None
    networks = Empirical(replace(stored, modes=stored.predictors).networks())
    ((predictions,),) = predictions_of_mode(
        networks, stored.network, stored.likelihood, [batches], (reference.samples,),
        reference.seed, "reference predictions", device=reference.device,
    )  # fmt: skip
    return predictions

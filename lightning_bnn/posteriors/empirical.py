"""Posteriors made of networks or of other posteriors: a list, and a mixture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from lightning_bnn.named_tensors import NamedTensors
from lightning_bnn.posteriors.base import Posterior, Predictor, check_count
from weightsym import params as P
from weightsym.params import (
    Networks,
    Params,
    is_whole,
    keyed_generator,
    stack,
    stack_size,
    varying_weights,
    widest,
)

__all__ = ["Empirical", "Mixture"]


class Empirical(Posterior):
    r"""The networks of a stack, all equally likely.

    .. math:: q = \frac{1}{N} \sum_i \delta_{w_i}

    Networks are drawn without replacement, since duplicates would bias a comparison.

    Args:
        networks: a stack, or a list of modules.
        chains: index of the chain of every network; by default each network is a mode of its own.

    >>> posterior = Empirical({"w": torch.arange(3.0)}, chains=[0, 1, 0])
    >>> sorted(posterior.sample(3)["w"].tolist())
    [0.0, 1.0, 2.0]
    >>> [mode.networks["w"].tolist() for mode in posterior.modes()]
    [[0.0, 2.0], [1.0]]
    """

    def __init__(
        self, networks: Networks, chains: Sequence[int | str] | Tensor | None = None
    ) -> None:
        super().__init__()
        networks = stack(networks)
        self.size = stack_size(networks)
        if chains is not None and len(chains) != self.size:
            raise ValueError(f"`chains` must be {self.size} numbers, got {len(chains)}.")
        chains = chains.tolist() if isinstance(chains, (Tensor, np.ndarray)) else chains
        chains = range(self.size) if chains is None else chains
        numbers = {chain: k for k, chain in enumerate(dict.fromkeys(chains))}
        named = not all(map(is_whole, numbers))
        self.chains = tuple(numbers[chain] if named else int(chain) for chain in chains)
        self.constants = NamedTensors(networks)

    def modes(self) -> list[Posterior]:
        """Return the networks of each chain."""
        rows: dict[int, list[int]] = {}
        for row, chain in enumerate(self.chains):
            rows.setdefault(chain, []).append(row)
        networks = self.networks
        return [
            Empirical({name: t[places] for name, t in networks.items()}, [chain] * len(places))
            for chain, places in rows.items()
        ]

    def extra_repr(self) -> str:
        """Return the description that ``print`` shows in parentheses."""
        modes = len(set(self.chains))
        networks = self.networks
        weights = sum(networks[name][0].numel() for name in varying_weights(networks))
        parts = {self.size: "each a mode", 1: "one mode"}
        count = parts.get(modes, f"{modes} modes")
        return f"{self.size} networks of {weights} weights, {count}"

    @property
    def networks(self) -> Params:
        """The networks of the posterior, as a stack."""
        return self.constants.tensors()

    def sample(self, n: int, generator: torch.Generator | None = None) -> Params:
        """Draw a stack of n different networks, in random order."""
        check_count(n, self.size)
        chosen = _order(self.size, generator)[:n]
        return {name: t[chosen.to(t.device)] for name, t in self.networks.items()}

    def predictor(
        self, n: int, generator: torch.Generator | None = None, chunk_size: int | None = None
    ) -> Predictor:
        """Predict with n of the networks, in their own order if n is their number."""
        networks = self.networks if n == self.size else self.sample(n, generator)
        return lambda model, *x: P.apply(model, networks, *x, chunk_size=chunk_size)


class Mixture(Posterior):
    r"""A mixture of several posteriors, such as one for each mode.

    .. math:: q = \sum_k \pi_k\, q_k

    Args:
        components: posteriors over the same network.
        weights: their probabilities, by default equal.

    >>> modes = [Empirical({"w": torch.full((5,), float(k))}) for k in range(2)]
    >>> Mixture(modes).sample(4)["w"].unique()
    tensor([0., 1.])
    """

    weights: Tensor

    def __init__(
        self, components: Sequence[Posterior], weights: Sequence[float] | None = None
    ) -> None:
        super().__init__()
        if not components:
            raise ValueError("`components` must hold at least one posterior.")
        values = torch.ones(len(components)) if weights is None else torch.tensor(weights)
        good = values.shape == (len(components),) and bool((values.isfinite() & (values > 0)).all())
        if not good:
            raise ValueError(
                f"`weights` must be {len(components)} positive, finite numbers, got "
                f"{values.tolist()}."
            )
        self.components = nn.ModuleList(components)
        self.register_buffer("weights", (values / values.sum()).double())

    def extra_repr(self) -> str:
        """Return the description that ``print`` shows in parentheses."""
        return f"{len(self.components)} components, the first {self.components[0]}"

    def modes(self) -> list[Posterior]:
        """Return the modes of all components."""
        return cast(list[Posterior], list(self.components))

    def sample(self, n: int, generator: torch.Generator | None = None) -> Params:
        """Draw a stack of n networks, in random order.

        Components get their expected numbers of networks, randomly rounded: the sample is spread
        over the modes as evenly as possible, and its expectation is that of the mixture.
        """
        shares, order = self._spread(n, generator)
        parts = [component.sample(count, by) for component, count, by in shares]
        _check_alike(parts)
        joined = {name: torch.cat([stack[name] for stack in parts]) for name in parts[0]}
        return {name: t[order.to(t.device)] for name, t in joined.items()}

    def predictor(
        self, n: int, generator: torch.Generator | None = None, chunk_size: int | None = None
    ) -> Predictor:
        """Predict with every component in its own way."""
        shares, order = self._spread(n, generator)
        parts = [component.predictor(count, by, chunk_size) for component, count, by in shares]

        def predict(model: nn.Module, *x: Any) -> Any:
            outputs = [predictor(model, *x) for predictor in parts]
            return tree_map(lambda *ts: torch.cat(ts)[order.to(ts[0].device)], *outputs)

        return predict

    def log_prob(self, params: Params) -> Tensor:
        """Return the log-density of every network of a stack."""
        logs = torch.stack([component.log_prob(params) for component in self.modes()])
        return torch.logsumexp(logs + self.weights.log().to(logs)[:, None], 0)

    def _spread(
        self, n: int, generator: torch.Generator | None
    ) -> tuple[list[tuple[Posterior, int, torch.Generator | None]], Tensor]:
        """Return the components to draw from with their counts and generators, and the order."""
        check_count(n)
        counts, generators, order = spread(n, self.weights, generator)
        shares = zip(self.modes(), counts, generators, strict=True)
        return [share for share in shares if share[1]], order


def mixture_of(modes: Sequence[Posterior]) -> Posterior:
    """Return the mixture of some posteriors, or the only one."""
    return modes[0] if len(modes) == 1 else Mixture(modes)


def _check_alike(parts: Sequence[Params]) -> None:
    """Require draws of networks with equal shapes."""
    shapes = [{name: t.shape[1:] for name, t in stack.items()} for stack in parts]
    if any(shape != shapes[0] for shape in shapes):
        raise ValueError("`components` must be posteriors of the same network, but shapes differ.")


def spread(
    n: int, weights: Tensor, generator: torch.Generator | None = None
) -> tuple[list[int], list[torch.Generator | None], Tensor]:
    """Spread n draws over components: counts, generators of their own, and an order.

    This is systematic sampling, with one random offset for all components. The draws of a component
    depend on its position only, not on those of the others.

    Args:
        n: number of draws.
        weights: positive numbers, one for each component.
        generator: by default components draw from the global random state.
    """
    device = generator.device if generator is not None else torch.get_default_device()
    shares = weights.cpu().double() / weights.cpu().double().sum()
    offset = torch.rand((), generator=generator, device=device, dtype=widest(device)).cpu()
    edges = (n * shares.cumsum(0) + offset).floor()
    edges[-1] = n
    counts = edges.diff(prepend=edges.new_zeros(1)).long().tolist()
    order = _order(n, generator)
    generators: list[torch.Generator | None] = [None] * len(counts)
    if generator is not None:
        seed = int(torch.randint(2**62, (), generator=generator, device=device))
        generators = [keyed_generator(seed, k, device=generator.device) for k in range(len(counts))]
    return counts, generators, order


def _order(n: int, generator: torch.Generator | None) -> Tensor:
    device = generator.device if generator is not None else None
    return torch.randperm(n, generator=generator, device=device)

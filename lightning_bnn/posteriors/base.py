"""A distribution over the weights of a network: draw networks from it, predict with them."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from weightsym import params as P
from weightsym.params import Params, RavelSpec, check_integer, keyed_generator

__all__ = ["Posterior", "Predictor"]

Predictor = Callable[..., Any]
_AT_ONCE = 2**31
"""Bytes of networks that are held for predictions."""


class Posterior(nn.Module, ABC):
    """The interface of posteriors, which move, save and load as modules do.

    >>> class Coin(Posterior):
    ...     def sample(self, n, generator=None):
    ...         sides = torch.randint(2, (n, 1, 1), generator=generator)
    ...         return {"weight": 2.0 * sides - 1, "bias": torch.zeros(n, 1)}
    >>> outputs = Coin().predict(torch.nn.Linear(1, 1), torch.ones(3, 1), n=50)
    >>> outputs.shape, outputs.unique().tolist()
    (torch.Size([50, 3, 1]), [-1.0, 1.0])
    """

    @staticmethod
    def of(source: Any, network: nn.Module | None = None, draws: bool = False) -> Posterior:
        """Make a posterior from an object that holds networks.

        Args:
            source: a list of modules, a stack, a bank, a folder or a file of plain networks, a
                module of this package, a matrix of draws (one vector of weights a row, in the order
                of ``parameters()``), a fitted object of laplace-torch, a state or a list of states
                of the library `posteriors`, an ensemble of TorchUncertainty or of probly, or a
                posterior.
            network: a module of their architecture, required for files and vectors, and for states
                without all of its tensors.
            draws: whether the networks are draws of one posterior; by default each is a mode of its
                own, as the members of an ensemble are.

        >>> from lightning_bnn.posteriors import Posterior
        >>> networks = [nn.Linear(2, 1) for _ in range(4)]
        >>> len(Posterior.of(networks).modes()), len(Posterior.of(networks, draws=True).modes())
        (4, 1)
        >>> Posterior.of(torch.randn(20, 3), nn.Linear(2, 1), draws=True).networks["weight"].shape
        torch.Size([20, 1, 2])
        """
        from lightning_bnn.posteriors.sources import posterior_from

        return posterior_from(source, network, draws)

    @abstractmethod
    def sample(self, n: int, generator: torch.Generator | None = None) -> Params:
        """Draw a stack of n networks.

        Args:
            n: number of networks.
            generator: makes the draw repeatable; by default the global random state.
        """

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the posterior as safetensors and plain JSON, which hold no code.

        Gaussians, Laplace approximations, lists of networks, mixtures and permutations of these.

        Args:
            folder: a new folder, or one without a posterior.

        >>> import tempfile
        >>> from lightning_bnn.posteriors import DiagonalGaussian
        >>> posterior, folder = DiagonalGaussian({"w": torch.zeros(3)}), tempfile.mkdtemp()
        >>> posterior.save(folder)
        >>> Posterior.load(folder)
        DiagonalGaussian(3 weights)
        """
        from lightning_bnn.posteriors.saving import save_posterior

        save_posterior(self, folder)

    @staticmethod
    def load(folder: str | os.PathLike[str], network: nn.Module | None = None) -> Posterior:
        """Read a posterior written by `save`, bit for bit, without running any code in the folder.

        Args:
            folder: of the posterior.
            network: module whose architecture the posterior must have.
        """
        from lightning_bnn.bundles import read_bundle
        from lightning_bnn.posteriors.saving import posterior_of

        return posterior_of(*read_bundle(folder), network)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.extra_repr()})"

    def predictor(
        self, n: int, generator: torch.Generator | None = None, chunk_size: int | None = None
    ) -> Predictor:
        """Predict with the same n networks for every input.

        The networks are drawn once. Large ones are drawn again, a few at a time, for every input.

        Args:
            n: number of networks.
            generator: makes the draw repeatable.
            chunk_size: number of networks that run at once, see `weightsym.params.apply`.

        Returns:
            A function of a module (which gives the computation) and inputs, to outputs ``(n, batch,
            ...)``.
        """
        example = self.sample(1, keyed_generator("size"))
        at_once = max(1, _AT_ONCE // sum(t.nbytes for t in example.values()))
        if n <= at_once:
            return self.drawn_predictor(n, generator, chunk_size)
        seed = int(torch.randint(2**62, (), generator=generator, device=_device(generator)))
        sizes = [min(at_once, n - start) for start in range(0, n, at_once)]

        def in_pieces(model: nn.Module, *x: Any) -> Any:
            device = next(iter(example.values())).device
            outputs = []
            for k, size in enumerate(sizes):
                of_piece = keyed_generator(seed, k, device=device)
                outputs.append(self.drawn_predictor(size, of_piece, chunk_size)(model, *x))
            return tree_map(lambda *parts: torch.cat(parts), *outputs)

        return in_pieces

    def drawn_predictor(
        self, n: int, generator: torch.Generator | None = None, chunk_size: int | None = None
    ) -> Predictor:
        """Predict with n networks held in memory, see `predictor`."""
        networks = self.sample(n, generator)
        return lambda model, *x: P.apply(model, networks, *x, chunk_size=chunk_size)

    def predict(
        self,
        model: nn.Module,
        x: Any,
        n: int,
        generator: torch.Generator | None = None,
        chunk_size: int | None = None,
    ) -> Any:
        """Return the outputs of n sampled networks, ``(n, batch, ...)``.

        Args:
            model: gives the computation.
            x: the input, or a tuple of several.
            n: number of networks.
            generator: makes the draw repeatable.
            chunk_size: number of networks that run at once, see `weightsym.params.apply`.
        """
        inputs = x if isinstance(x, tuple) else (x,)
        return self.predictor(n, generator, chunk_size)(model, *inputs)

    def modes(self) -> list[Posterior]:
        """Return the independently found parts, by default the posterior itself."""
        return [self]

    def log_prob(self, params: Params) -> Tensor:
        """Return the log-density of every network of a stack, if the posterior has one."""
        raise NotImplementedError(f"{type(self).__name__} has no density.")


def check_count(n: int, available: int | None = None) -> None:
    """Require a number of networks that can be drawn."""
    check_integer("n", n)
    if n < 1 or (available is not None and n > available):
        limit = f" and at most {available}, the number of networks" if available else ""
        raise ValueError(f"`n` must be at least 1{limit}, got {n}.")


def check_fit(drawn: Params, network: nn.Module) -> None:
    """Require a stack with the architecture of a module."""
    fixed, params = P.fixed_weights(network), P.of(network)
    expected = {n: tuple(t.shape) for n, t in params.items() if n in drawn or n not in fixed}
    shapes = {name: tuple(t.shape[1:]) for name, t in drawn.items()}
    for name in sorted(expected.keys() | shapes.keys()):
        actual, asked = shapes.get(name, "missing"), expected.get(name, "missing")
        if actual != asked:
            raise ValueError(
                f"The posterior is not of this network: {name!r} is {actual} in it, but "
                f"{asked} in `network`."
            )


def joined(tensors: Params, spec: RavelSpec, title: str, stacked: bool = False) -> Tensor:
    """Join tensors to a vector, or to one row for each network of a stack.

    Args:
        tensors: by name; those that are not in the vector are left out.
        spec: their required names and shapes.
        title: of the argument, for messages.
        stacked: whether the first dimension counts networks.
    """
    for name, shape in zip(spec.names, spec.shapes, strict=True):
        actual = tensors[name].shape if name in tensors else None
        if actual is None or len(actual) < stacked or actual[stacked:] != shape:
            wanted = f"{tuple(shape)}{' for each network of a stack' if stacked else ''}"
            got = "nothing" if actual is None else tuple(actual)
            raise ValueError(f"`{title}` must have {name!r} of shape {wanted}, got {got}.")
    return P.ravel(tensors, spec.names, stacked)[0]


def standard_normal(
    shape: Sequence[int], like: Tensor, generator: torch.Generator | None = None
) -> Tensor:
    """Draw standard normal numbers with the type and device of a tensor, from any generator.

    Args:
        shape: of the result.
        like: gives type and device.
        generator: makes the draw repeatable; by default the global random state.
    """
    device = like.device if generator is None else generator.device
    return torch.randn(*shape, generator=generator, device=device, dtype=like.dtype).to(like.device)


def with_constants(weights: Params, constants: Params, order: Sequence[str]) -> Params:
    """Combine the weights of a stack with tensors that all its networks share.

    Args:
        weights: a stack of some tensors.
        constants: the other tensors, shared by all networks.
        order: of all names.
    """
    n = P.stack_size(weights)
    shared = {name: t.expand(n, *t.shape).clone() for name, t in constants.items()}
    every = {**weights, **shared}
    return {name: every[name] for name in order}


def _device(generator: torch.Generator | None) -> torch.device:
    return torch.device("cpu") if generator is None else generator.device

"""Posteriors from what holds networks: modules, stacks, files, and draws of other libraries."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_bnn.bank import CheckpointBank, chains_of, read_networks
from lightning_bnn.bank.shipped import shipped_path
from lightning_bnn.posteriors.base import Posterior, check_count, with_constants
from lightning_bnn.posteriors.empirical import Empirical
from weightsym import params as P
from weightsym.params import Params
from weightsym.randomness import keyed_randomness

__all__: list[str] = []


def posterior_from(source: Any, network: nn.Module | None, draws: bool) -> Posterior:
    """Make a posterior, see `Posterior.of`.

    Args:
        source: what holds networks.
        network: one of their kind.
        draws: whether networks are draws of one posterior.
    """
    posterior = _posterior(source, network)
    if draws and isinstance(posterior, Empirical):
        return Empirical(posterior.networks, [0] * posterior.size)
    return posterior


def network_of(sources: Iterable[Any]) -> nn.Module:
    """Find a network of the kind that some sources hold: the first that is a module.

    Args:
        sources: what `posterior_from` takes.
    """
    for source in sources:
        listed = isinstance(source, (list, tuple, nn.ModuleList))
        candidates = (
            getattr(source, "template", None),
            next(iter(source), None) if listed else getattr(source, "model", None),
        )
        for candidate in candidates:
            if isinstance(candidate, nn.Module):
                return candidate
    raise ValueError("`network` is missing: pass a module of the kind that is compared.")


def _posterior(source: Any, network: nn.Module | None) -> Posterior:
    if isinstance(source, Posterior):
        return source
    if isinstance(source, (str, os.PathLike)):
        path = shipped_path(os.fspath(source))
        stack, records = read_networks(path, _needed(network, "files"))
        if not (path / "manifest.jsonl").is_file() and any("member" in row for row in records):
            raise ValueError(
                f"{source} is of a module of this package, which alone knows its posterior: load "
                "it by `load_from_checkpoint`, or give the path to `compare`."
            )
        return Empirical(stack, chains_of(records))
    if isinstance(source, CheckpointBank):
        return Empirical(source[:], chains_of(source.records))
    if isinstance(source, Tensor):
        return Empirical(_stack_of_rows(source, _needed(network, "vectors")))
    if callable(getattr(source, "posterior", None)):  # a module of this package
        return cast(Posterior, source.posterior())
    model: Any = getattr(source, "model", None)
    if callable(getattr(source, "sample", None)) and isinstance(model, nn.Module):
        return _Fitted(source, network or cast(Any, getattr(model, "model", model)))
    return Empirical(source)


def _needed(network: nn.Module | None, source: str) -> nn.Module:
    if network is None:
        raise ValueError(
            f"`network` is missing: {source} do not say what they are the weights of, so pass a "
            "module of their kind."
        )
    return network


class _Fitted(Posterior):
    """Draws of an object of another library that was fitted to a module, as laplace-torch has.

    Args:
        fitted: its ``sample(n)`` returns vectors of weights.
        network: that it was fitted to.
    """

    fitted: Any
    network: nn.Module

    def __init__(self, fitted: Any, network: nn.Module) -> None:
        super().__init__()
        self.__dict__.update(fitted=fitted, network=network)
        mean = getattr(fitted, "mean", None)
        if isinstance(mean, Tensor) and mean.ndim == 1:
            self._check(mean)

    def _check(self, mean: Tensor) -> None:
        """Refuse a mean that is not the network's: draws of some weights may be of any of them."""
        names, params = _names_of_rows(self.network, len(mean)), P.of(self.network)
        if not torch.equal(mean.detach().cpu(), P.ravel(params, names)[0].cpu().to(mean.dtype)):
            raise ValueError(
                f"The mean of {type(self.fitted).__name__} is not the weights of the network: pass "
                "the module that it was fitted to as `network`."
            )

    def extra_repr(self) -> str:
        """Describe the posterior in the brackets that ``print`` shows."""
        return f"draws of {type(self.fitted).__name__}"

    def sample(self, n: int, generator: torch.Generator | None = None) -> Params:
        """A stack of n networks."""
        check_count(n)
        key = torch.randint(
            2**62, (), generator=generator, device=getattr(generator, "device", None)
        )
        with torch.no_grad(), keyed_randomness(int(key), "fitted"):
            return _stack_of_rows(self.fitted.sample(n), self.network)


def _stack_of_rows(rows: Tensor, network: nn.Module) -> Params:
    """Networks from vectors of all weights of a network, or of its last ones."""
    if rows.ndim != 2 or not len(rows):
        raise ValueError(
            f"Draws must be a matrix of one row for each network, got shape {tuple(rows.shape)}."
        )
    params = P.of(network)
    names = _names_of_rows(network, rows.shape[1])
    spec = P.RavelSpec(tuple(names), tuple(params[name].shape for name in names))
    constants = {name: t for name, t in params.items() if name not in names}
    return with_constants(P.unravel(rows.detach(), spec), constants, list(params))


def _names_of_rows(network: nn.Module, width: int) -> list[str]:
    """Names of the parameters that vectors of some length hold, in the order of `parameters()`."""
    every = dict(network.named_parameters())
    trained = [name for name, p in every.items() if p.requires_grad]
    candidates = [list(every), *(trained[k:] for k in range(len(trained)))]
    for names in candidates:
        if sum(every[name].numel() for name in names) == width:
            return names
    raise ValueError(
        f"Draws of {width} weights do not fit the network, which has "
        f"{sum(p.numel() for p in every.values())}, also not its last layers."
    )

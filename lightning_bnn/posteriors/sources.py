"""Posteriors from objects with networks: modules, stacks, files, and draws of other libraries."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributions import MultivariateNormal

from lightning_bnn.bank import CheckpointBank, chains_of, read_networks
from lightning_bnn.bank.shipped import shipped_path
from lightning_bnn.posteriors.base import (
    Posterior,
    check_count,
    check_fit,
    with_constants,
)
from lightning_bnn.posteriors.empirical import Empirical, mixture_of
from lightning_bnn.posteriors.gaussian import DiagonalGaussian
from lightning_bnn.posteriors.laplace import CurvatureBlock, LaplaceGaussian
from weightsym import params as P
from weightsym.params import Params, keyed_randomness

__all__: list[str] = []


def posterior_from(source: Any, network: nn.Module | None, draws: bool) -> Posterior:
    """Make a posterior, see `Posterior.of`.

    Args:
        source: an object with networks.
        network: a module of their architecture.
        draws: whether networks are draws of one posterior.
    """
    posterior = _posterior(source, network)
    if network is not None and isinstance(posterior, Empirical):
        check_fit(posterior.networks, network)
    if draws and isinstance(posterior, Empirical):
        return Empirical(posterior.networks, [0] * posterior.size)
    return posterior


def network_of(sources: Iterable[Any]) -> nn.Module:
    """Find the architecture of some sources: the first module among their networks.

    Args:
        sources: as for `posterior_from`.
    """
    for source in sources:
        listed = isinstance(source, (list, tuple, nn.ModuleList))
        members = source if listed else getattr(source, "core_models", None) or ()
        candidates = (
            getattr(source, "template", None),
            next(iter(members), None),
            None if listed else getattr(source, "model", None),
        )
        for candidate in candidates:
            if isinstance(candidate, nn.Module):
                return candidate
    raise ValueError(
        "`network` is missing: pass a module with the architecture of the compared networks."
    )


def _posterior(source: Any, network: nn.Module | None) -> Posterior:
    if isinstance(source, Posterior):
        return source
    if isinstance(source, (str, os.PathLike)):
        path = shipped_path(os.fspath(source))
        stack, records = read_networks(path, _needed(network, "files"))
        if not (path / "manifest.jsonl").is_file() and any("member" in row for row in records):
            raise ValueError(
                f"{source} is a checkpoint of this package, whose posterior only its module "
                "defines: load it by `load_from_checkpoint`, or pass the path to `compare`."
            )
        return Empirical(stack, chains_of(records))
    if isinstance(source, CheckpointBank):
        return Empirical(source[:], chains_of(source.records))
    if isinstance(source, Tensor):
        return Empirical(_stack_of_rows(source, _needed(network, "vectors")))
    if callable(getattr(source, "posterior", None)):  # a module of this package
        return cast(Posterior, source.posterior())
    return _of_other_libraries(source, network)


def _of_other_libraries(source: Any, network: nn.Module | None) -> Posterior:
    """Recognise objects by their attributes, so that no other library needs to be imported."""
    model: Any = getattr(source, "model", None)
    if callable(getattr(source, "sample", None)) and isinstance(model, nn.Module):
        return _Fitted(source, network or cast(Any, getattr(model, "model", model)))
    states = source if isinstance(source, (list, tuple)) else [source]
    if states and all(map(_is_state, states)):
        return _posterior_of_states(states, network, alone=states is not source)
    if network is not None and isinstance(source, Mapping):
        params = P.of(network)
        if all(n in params and params[n].shape == t.shape for n, t in source.items()):
            raise ValueError("`source` is one network, like `network`: pass a list of networks.")
    return Empirical(getattr(source, "core_models", source))  # an ensemble of TorchUncertainty


def _needed(network: nn.Module | None, source: str) -> nn.Module:
    if network is None:
        raise ValueError(
            f"`network` is missing: {source} do not name their weights, so pass a module "
            "of their architecture."
        )
    return network


class _Fitted(Posterior):
    """Draws of a fitted object of another library, such as laplace-torch.

    Args:
        fitted: object whose ``sample(n)`` returns vectors of weights.
        network: the fitted module.
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
        """Require a mean equal to the network's weights: draws could be of any weights."""
        names, params = _names_of_rows(self.network, len(mean)), P.of(self.network)
        if not torch.equal(mean.detach().cpu(), P.ravel(params, names)[0].cpu().to(mean.dtype)):
            raise ValueError(
                f"The mean of {type(self.fitted).__name__} differs from the weights of the "
                "network: pass the fitted module as `network`."
            )

    def extra_repr(self) -> str:
        """Return the description that ``print`` shows in parentheses."""
        return f"draws of {type(self.fitted).__name__}"

    def sample(self, n: int, generator: torch.Generator | None = None) -> Params:
        """Draw a stack of n networks."""
        check_count(n)
        key = torch.randint(
            2**62, (), generator=generator, device=getattr(generator, "device", None)
        )
        with torch.no_grad(), keyed_randomness(int(key), "fitted"):
            return _stack_of_rows(self.fitted.sample(n), self.network)


def _stack_of_rows(rows: Tensor, network: nn.Module) -> Params:
    """Make networks from vectors of all weights of a network, or of its last layers."""
    if rows.ndim != 2 or not len(rows):
        raise ValueError(
            f"Draws must be a matrix with one row for each network, got shape {tuple(rows.shape)}."
        )
    params = P.of(network)
    names = _names_of_rows(network, rows.shape[1])
    spec = P.RavelSpec(tuple(names), tuple(params[name].shape for name in names))
    constants = {name: t for name, t in params.items() if name not in names}
    return with_constants(P.unravel(rows.detach(), spec), constants, list(params))


def _names_of_rows(network: nn.Module, width: int) -> list[str]:
    """Return the parameters in vectors of some length, in the order of `parameters()`."""
    every = dict(network.named_parameters())
    trained = [name for name, p in every.items() if p.requires_grad]
    candidates = [list(every), *(trained[k:] for k in range(len(trained)))]
    for names in candidates:
        if sum(every[name].numel() for name in names) == width:
            return names
    raise ValueError(
        f"Draws of {width} weights do not fit the network of "
        f"{sum(p.numel() for p in every.values())}, nor its last layers."
    )


# ------------------------------------------------------------ states of the library `posteriors`
_normal = functools.partial(MultivariateNormal, validate_args=False)
_ROOTS: dict[str, Callable[[Tensor], Tensor]] = {
    "sd_diag": torch.abs,
    "log_sd_diag": torch.exp,
    "prec_diag": torch.rsqrt,
    "cov": torch.linalg.cholesky,
    "prec": lambda prec: _normal(prec[0], precision_matrix=prec).scale_tril,
    "L_factor": lambda flat: _lower(flat),
}
"""Names of fields with roots of covariances (vectors if diagonal), by class of states."""


def _is_state(source: Any) -> bool:
    """Return whether an object holds the weights of one network by name."""
    params = getattr(source, "params", None)
    tensors = list(params.values()) if isinstance(params, Mapping) else []
    alike = bool(tensors) and all(isinstance(t, Tensor) for t in tensors)
    return alike and not isinstance(source, nn.Module)


def _posterior_of_states(
    states: Sequence[Any], network: nn.Module | None, alone: bool
) -> Posterior:
    """Make a Gaussian from states with variances, otherwise an empirical posterior."""
    if len({next(iter(s.params.values())).data_ptr() for s in states}) < len(states):
        raise ValueError("Some of the states share tensors: update with `inplace=False`.")
    networks = [_completed(state, network) for state in states]
    names = [next((n for n in _ROOTS if hasattr(s, n)), None) for s in states]
    if len(set(names)) > 1:
        raise ValueError("The states are of several classes: pass those of one algorithm.")
    if names[0] is not None:
        parts = [_gaussian(*pair, names[0]) for pair in zip(states, networks, strict=True)]
        return mixture_of(parts)
    if alone:
        raise ValueError(
            f"{type(states[0]).__name__} is one network of a chain: pass a list of such states."
        )
    return Empirical(networks)


def _completed(state: Any, network: nn.Module | None) -> Params:
    """Return the weights of a state, completed by tensors of the network."""
    params = {name: t.detach() for name, t in state.params.items()}
    every = params if network is None else P.of(network)
    for name, tensor in params.items():
        if name not in every or every[name].shape != tensor.shape:
            raise ValueError(
                f"{type(state).__name__} has {name!r} of shape {tuple(tensor.shape)}, "
                "which the network does not have: pass the module with these weights as "
                "`network`."
            )
    return {**every, **params}


def _gaussian(state: Any, mean: Params, field: str) -> Posterior:
    """Make the Gaussian of a state whose ``field`` holds its variances."""
    names = sorted(state.params)  # the order in which the library joins them to vectors
    vector, spec = P.ravel(mean, names)
    value, size = getattr(state, field), len(vector)
    if field.endswith("_diag"):
        is_dict = isinstance(value, Mapping) and value.keys() == set(names)
        value, layout = P.ravel(dict(value), names) if is_dict else (vector, None)
        fits = layout == spec
    else:
        fits = value.shape == ((size * (size + 1) // 2,) if field == "L_factor" else (size, size))
    if not fits:
        raise ValueError(f"`{field}` of {type(state).__name__} does not fit its `params`.")
    try:
        root = _ROOTS[field](value.detach())
    except torch.linalg.LinAlgError:
        root = vector.new_zeros(1)
    scales = root if root.ndim == 1 else root.diagonal()
    if not bool(root.isfinite().all() & (scales > 0).all()):
        raise ValueError(
            f"`{field}` of {type(state).__name__} does not define positive finite "
            "variances: start with the precision of a prior."
        )
    if root.ndim == 1:
        return DiagonalGaussian(mean, P.unravel(root, spec), names)
    left, deviations, _ = torch.linalg.svd(root)
    precisions = deviations[:, None] ** -2
    prior = float(precisions.min()) / 2  # a part of the precisions
    block = CurvatureBlock(tuple(names), precisions - prior, left)
    return LaplaceGaussian(mean, [block], prior, prediction="network")


def _lower(flat: Tensor) -> Tensor:
    """Build a lower triangular matrix from its entries, row by row, with a positive diagonal."""
    size = math.isqrt(2 * len(flat))
    matrix = flat.new_zeros(size, size)
    matrix[torch.ones_like(matrix, dtype=torch.bool).tril()] = flat
    return matrix * matrix.diagonal().sign()

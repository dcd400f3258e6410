"""Posteriors on disk: their tensors as safetensors, and their settings as JSON."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bnn.bundles import DAMAGES, write_bundle
from lightning_bnn.posteriors.base import Posterior, check_fit
from lightning_bnn.posteriors.empirical import Empirical, Mixture
from lightning_bnn.posteriors.gaussian import DiagonalGaussian, LowRankGaussian
from lightning_bnn.posteriors.laplace import CurvatureBlock, LaplaceGaussian
from lightning_bnn.posteriors.scales import GaussianScales
from lightning_bnn.posteriors.symmetrized import Symmetrized
from weightsym import Axis, PermutationGroup, Placement, Symmetries
from weightsym import params as P
from weightsym.params import Params, RavelSpec, check_not_negative, first_line, keyed_generator

__all__: list[str] = []


def save_posterior(
    posterior: Posterior,
    folder: str | os.PathLike[str],
    texts: Mapping[str, str] | None = None,
) -> None:
    """Write a posterior, see `Posterior.save`, and further files of text beside it."""
    content = {"kind": "posterior", "posterior": _settings(posterior)}
    write_bundle(folder, content, [posterior.state_dict()], texts)


def posterior_of(
    content: dict[str, Any], parts: Iterator[Params], network: nn.Module | None
) -> Posterior:
    """Make the posterior of a bundle, see `Posterior.load`."""
    if content["kind"] != "posterior" or len(content["files"]) != 1:
        raise ValueError(f"{content['folder']} does not hold a posterior, but {content['kind']!r}.")
    state = next(parts)
    try:
        posterior = _made(content["posterior"], state)
        posterior.load_state_dict(state)  # what constructors have computed, bit for bit
        drawn = posterior.sample(1, keyed_generator("size"))
    except DAMAGES as error:
        reason, folder = first_line(error).rstrip(".:"), content["folder"]
        raise ValueError(
            f"{folder} is damaged and does not define a posterior: {reason}."
        ) from None
    if network is not None:
        check_fit(drawn, network)
    return posterior


# ------------------------------------------------------------ kinds
_KINDS = (
    DiagonalGaussian, LowRankGaussian, LaplaceGaussian, GaussianScales, Empirical,
    Mixture, Symmetrized,
)  # fmt: skip


def _settings(posterior: Posterior) -> dict[str, Any]:
    """Return the settings of a posterior, without its tensors."""
    settings: dict[str, Any] = {"class": _name_of_kind(posterior)}
    match posterior:
        case DiagonalGaussian() | LowRankGaussian():
            spec = posterior.spec
            shapes = {n: list(s) for n, s in zip(spec.names, spec.shapes, strict=True)}
            settings |= {"shapes": shapes, "order": list(posterior.order)}
            if isinstance(posterior, LowRankGaussian):
                settings["scale"] = posterior.scale
        case LaplaceGaussian():
            names = ["temperature", "prediction", "last_layer"]
            settings |= {name: getattr(posterior, name) for name in names}
            settings["order"] = list(posterior.constants.tensors())
            settings["blocks"] = [list(block.names) for block in posterior.blocks]
        case GaussianScales():
            settings |= {"rows": posterior.rows, "order": list(posterior.order)}
        case Empirical():
            order = list(posterior.networks)
            settings |= {"chains": list(posterior.chains), "order": order}
        case Mixture():
            settings["components"] = [_settings(component) for component in posterior.modes()]
        case Symmetrized():
            settings |= {"base": _settings(posterior.base), "draws": posterior.draws}
            settings |= _permutations(posterior.sym)
    return settings


def _name_of_kind(posterior: Posterior) -> str:
    name = type(posterior).__name__
    if type(posterior) not in _KINDS:
        raise ValueError(
            f"{name} cannot be saved, since it consists of more than tensors: save draws of it, "
            "`Empirical(posterior.sample(n), [0] * n)`."
        )
    return name


def _made(settings: Mapping[str, Any], state: Params) -> Posterior:
    """Make a posterior from its settings and `state_dict`."""
    constants = _below("constants.", state)
    match settings["class"]:
        case "DiagonalGaussian":
            mean, names = _network(settings, state, constants)
            _check_positive("standard deviations", state["log_std"].double().exp())
            return DiagonalGaussian(mean, 1.0, names)
        case "GaussianScales":
            network = {name: constants[name] for name in settings["order"]}
            scales = state["log_std"].exp()
            _check_positive("standard deviations", scales)
            return GaussianScales(network, settings["rows"], state["mean"], scales)
        case "LowRankGaussian":
            mean, names = _network(settings, state, constants)
            spec = P.ravel(mean, names)[1]
            std, deviations = (P.unravel(state[name], spec) for name in ("std", "deviations"))
            return LowRankGaussian(mean, std, deviations, settings["scale"], names)
        case "LaplaceGaussian":
            curvature = _below("curvature.", state)
            _check_laplace(settings, constants, curvature, state["prior_precision"])
            blocks = [
                CurvatureBlock(
                    tuple(names), curvature[f"{k}.values"],
                    curvature.get(f"{k}.left"), curvature.get(f"{k}.right"),
                )
                for k, names in enumerate(settings["blocks"])
            ]  # fmt: skip
            return LaplaceGaussian(
                {name: constants[name] for name in settings["order"]}, blocks,
                float(state["prior_precision"]), settings["temperature"], settings["prediction"],
                settings["last_layer"],
            )  # fmt: skip
        case "Empirical":
            return Empirical(
                {name: constants[name] for name in settings["order"]}, _integers(settings["chains"])
            )
        case "Mixture":
            return _mixture(settings["components"], state)
        case "Symmetrized":
            base = _made(settings["base"], _below("base.", state))
            return Symmetrized(base, _symmetries(settings), settings["draws"])
    raise ValueError(f"{str(settings['class'])[:80]!r} is not a class of saved posteriors")


def _network(
    settings: Mapping[str, Any], state: Params, constants: Params
) -> tuple[Params, list[str]]:
    """Return the means as a network, and the names of its weights."""
    names, shapes = list(settings["shapes"]), map(torch.Size, settings["shapes"].values())
    mean = P.unravel(state["mean"], RavelSpec(tuple(names), tuple(shapes)))
    return {name: {**constants, **mean}[name] for name in settings["order"]}, names


def _mixture(components: Sequence[Mapping[str, Any]], state: Params) -> Mixture:
    parts = [
        _made(component, _below(f"components.{k}.", state))
        for k, component in enumerate(components)
    ]
    _check_positive("weights of a mixture", state["weights"])
    if abs(float(state["weights"].sum()) - 1) > 1e-5:
        raise ValueError("the weights of a mixture do not sum to 1")
    _check_alike(parts)
    return Mixture(parts, state["weights"].tolist())


def _permutations(sym: Symmetries) -> dict[str, Any]:
    """Return the permutations of a network as plain data."""
    groups = [
        {
            "units": g.units, "name": g.name, "kind": g.kind, "inner": g.inner,
            "tensors": g.tensors, "places": [[p.axis, p.positions.tolist()] for p in g.placements],
        }
        for g in sym.permutations
    ]  # fmt: skip
    shapes = {name: list(shape) for name, shape in sym.shapes.items()}
    axes = [asdict(axis) for axis in sym.axes]
    return {"axes": axes, "groups": groups, "of": shapes, "weights": sym.weights}


def _symmetries(settings: Mapping[str, Any]) -> Symmetries:
    """Make symmetries from permutations as plain data."""
    groups = tuple(
        PermutationGroup(
            g["units"], g["name"], tuple(Placement(a, torch.tensor(p)) for a, p in g["places"]),
            g["kind"], tuple(map(tuple, g["inner"])), tuple(map(tuple, g["tensors"])),
        )
        for g in settings["groups"]
    )  # fmt: skip
    shapes = {name: torch.Size(shape) for name, shape in settings["of"].items()}
    axes = tuple(Axis(**axis) for axis in settings["axes"])
    return Symmetries(axes, groups, (), (), weights=tuple(settings["weights"]), shapes=shapes)


def _below(prefix: str, state: Params) -> Params:
    return {name[len(prefix) :]: t for name, t in state.items() if name.startswith(prefix)}


def _check_positive(title: str, values: Tensor) -> None:
    """Repeat the checks of constructors, since `load_state_dict` sets values after them."""
    if not bool((values > 0).all() & values.isfinite().all()):
        raise ValueError(f"{title} are not positive and finite")


def _check_laplace(
    settings: Mapping[str, Any], constants: Params, curvature: Params, prior: Tensor
) -> None:
    """Refuse precisions that are none, and settings that omit tensors or name an unknown layer."""
    for name in (name for name in curvature if name.endswith(".values")):
        _check_positive("precisions", curvature[name] + prior)
    check_not_negative("temperature", settings["temperature"])
    if sorted(settings["order"]) != sorted(constants):
        raise ValueError("`order` does not name each of its tensors once")
    if {name.partition(".")[0] for name in curvature} != set(
        map(str, range(len(settings["blocks"])))
    ):
        raise ValueError("`blocks` do not match its curvature")
    layer = settings["last_layer"]
    if layer is not None and not any(name.rpartition(".")[0] == layer for name in constants):
        raise ValueError(f"`last_layer` is {str(layer)[:80]!r}, but the network has no such layer")


def _check_alike(parts: Sequence[Posterior]) -> None:
    """Refuse components that cannot be drawn, or have different networks."""
    drawn = [component.sample(1, keyed_generator("size")) for component in parts]
    if len({frozenset((name, t.shape) for name, t in network.items()) for network in drawn}) > 1:
        raise ValueError("the components of a mixture have different networks")


def _integers(values: Sequence[Any]) -> list[int]:
    if not all(type(value) is int for value in values):
        raise ValueError("chains are not numbered")
    return list(values)

"""Networks with randomly dropped units."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from lightning_bnn.metrics.validation import check_choice
from lightning_bnn.named_tensors import NamedTensors
from lightning_bnn.posteriors.base import Posterior, Predictor, check_count
from weightsym import params as P
from weightsym.params import (
    Params,
    elsewhere,
    keyed_generator,
    random_numbers,
    stack_size,
    structural_copy,
)

__all__ = ["Dropout"]

Layers = Literal["all", "last"]


_BY_CHANNEL = (F.dropout1d, F.dropout2d, F.dropout3d)
_NO_MASKS = {
    F.multi_head_attention_forward: "it is in attention",
    F.alpha_dropout: "alpha dropout moves its units",
    F.feature_alpha_dropout: "alpha dropout moves its units",
}
_ATTENTION = "query", "key", "value", "attn_mask", "dropout_p", "is_causal"
ACTIVE: frozenset[Any] = frozenset((F.dropout, *_BY_CHANNEL, *_NO_MASKS))
"""Functions with an argument ``training`` that switches their dropout on."""


@dataclass(frozen=True)
class DropoutSite:
    """One call of dropout.

    Args:
        rate: fraction of dropped units.
        units: number of units.
        weight: name of the weight that reads them, None if there is none.
        repeat: number of columns of the weight for each unit.
        reason: explanation why there is no such weight.
        fused: whether attention itself drops, which it reports in training only.
    """

    rate: float
    units: int = 0
    weight: str | None = None
    repeat: int = 1
    reason: str = "no weight reads its units one by one"
    fused: bool = False


@torch.no_grad()
def dropout_sites(model: nn.Module, example: Sequence[Any]) -> list[DropoutSite]:
    """Find all calls of dropout in a network in evaluation mode, in the order of the forward pass.

    Those of `F.scaled_dot_product_attention` come first, whatever the order.

    A weight reads the units of a call if multiplying its columns changes the outputs exactly as
    multiplying the units does. Random numbers test this.

    Args:
        model: the network.
        example: inputs.
    """
    training = model.training
    model.eval()
    try:
        watch = _Watch()
        with watch:
            model(*example)
        fused = _fused_sites(model, example) if watch.attention else []
        if not any(site.rate > 0 for site in (*fused, *watch.sites)):
            raise ValueError(
                f"`network` {type(model).__name__} has no dropout with a rate above 0: add "
                "some, or pass `p` to `MCDropout`, which inserts it before linear layers."
            )
        sites = enumerate(watch.sites)
        return fused + [_with_reader(model, example, k, s) if s.units else s for k, s in sites]
    finally:
        model.train(training)


@torch.no_grad()
def drops_units(model: nn.Module, example: Sequence[Any]) -> bool:
    """Return whether a network drops units in training, by modules or by functions."""
    watch = _in_training(model, example)
    return any(watch.attention) or any(site.rate > 0 for site in watch.sites)


def _fused_sites(model: nn.Module, example: Sequence[Any]) -> list[DropoutSite]:
    """List the dropout inside attention in training, in order."""
    rates = _in_training(model, example).attention
    sites = [DropoutSite(rate, reason="it is in attention", fused=True) for rate in rates]
    return sites if any(rates) else []


def _in_training(model: nn.Module, example: Sequence[Any]) -> _Watch:
    """List calls of dropout of a copy in training, up to an error such as that of BatchNorm."""
    watch = _Watch()
    with random_numbers(elsewhere(model.parameters())), watch, suppress(Exception):
        structural_copy(model).train()(*example)
    return watch


def _with_reader(
    model: nn.Module, example: Sequence[Any], index: int, site: DropoutSite
) -> DropoutSite:
    params = dict(model.named_parameters())
    like = next(iter(params.values()))
    factors = 2 * torch.rand(site.units, generator=keyed_generator("dropout")).to(like)

    def outputs(factors: Tensor, changed: Params) -> Tensor:
        with _Watch(index, factors):
            outputs_found = functional_call(model, changed, tuple(example))
        return torch.cat([t.flatten() for t in tree_leaves(outputs_found) if isinstance(t, Tensor)])

    plain, wanted = outputs(torch.ones_like(factors), {}), outputs(factors, {})
    if torch.allclose(plain, wanted):
        return site
    for name, weight in params.items():
        if weight.ndim < 2 or weight.shape[1] % site.units:
            continue
        repeat = weight.shape[1] // site.units
        columns = factors.repeat_interleave(repeat).view(-1, *(1,) * (weight.ndim - 2))
        outputs_found = outputs(torch.ones_like(factors), {name: weight * columns})
        if torch.allclose(outputs_found, wanted, rtol=1e-4, atol=1e-5):
            return replace(site, weight=name, repeat=repeat)
    return site


class _Watch(TorchFunctionMode):
    """Records calls of dropout, and can add noise to one of them or multiply its units.

    Args:
        index: number of the call; by default none.
        factors: for every unit.
    """

    def __init__(self, index: int = -1, factors: Tensor | None = None) -> None:
        super().__init__()
        self.index, self.factors = index, factors
        self.sites: list[DropoutSite] = []
        self.attention: list[float] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            self.attention.append(kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0))
        if func not in ACTIVE:
            return out
        if func in _NO_MASKS:
            position = args[10] if len(args) > 10 else 0.0
            rate = kwargs.get("p", kwargs.get("dropout_p", position))
            self.sites.append(DropoutSite(rate, reason=_NO_MASKS[func]))
            return out
        shape = out.shape[1:2] + (1,) * (out.ndim - 2) if func in _BY_CHANNEL else out.shape[1:]
        rate = kwargs.get("p", 0.5)
        self.sites.append(DropoutSite(rate, shape.numel() if rate > 0 else 0))
        if self.factors is None or len(self.sites) != self.index + 1:
            return out
        noise = torch.randn(out.shape, generator=keyed_generator("units")).to(out)
        return (out + noise) * self.factors.view(shape)


class Dropout(Posterior):
    r"""A network with randomly dropped units, each with the rate of its dropout layer.

    .. math:: W'_{i j} = W_{i j}\, z_j / (1 - p), \quad z_j \sim \mathrm{Bernoulli}(1 - p)

    Predictions drop different units for every input, as dropout does in training. Everything else,
    such as BatchNorm, is in evaluation mode. A sample of weights drops the same units for all
    inputs: the columns of the next weight that read them are zero, and the other columns are
    divided by one minus the rate.

    Args:
        networks: a stack, over whose members the draws are spread evenly.
        sites: calls of dropout, see `dropout_sites`; not needed for predictions.
        layers: whether ``"all"`` sites are active or only the ``"last"``.

    References:
        | Dropout as a Bayesian Approximation (Gal and Ghahramani, 2016)
        | https://arxiv.org/abs/1506.02142

    >>> from weightsym import params as P
    >>> layers = torch.nn.Linear(2, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1)
    >>> net = torch.nn.Sequential(*layers)
    >>> posterior = Dropout(P.stack([P.of(net)]))
    >>> outputs = posterior.predict(net, torch.ones(3, 2), n=10)
    >>> outputs.shape, bool((outputs.std(0) > 0).any())
    (torch.Size([10, 3, 1]), True)
    """

    def __init__(
        self,
        networks: Params,
        sites: Sequence[DropoutSite] | None = None,
        layers: Layers = "all",
    ) -> None:
        super().__init__()
        check_choice("layers", layers, get_args(Layers))
        self.size, self.sites, self.layers = stack_size(networks), sites, layers
        self.constants = NamedTensors(networks)

    def extra_repr(self) -> str:
        """Return the description that ``print`` shows in parentheses."""
        return f"{self.size} networks, units of {self.layers} layers dropped"

    def sample(self, n: int, generator: torch.Generator | None = None) -> Params:
        """Draw a stack of n networks with dropped units."""
        check_count(n)
        if self.sites is None:
            raise ValueError("`sites` must be known to draw weights, see `dropout_sites`.")
        rows = torch.arange(n) % self.size
        drawn = {name: t[rows.to(t.device)] for name, t in self.constants.tensors().items()}
        chosen = self.sites[-1:] if self.layers == "last" else self.sites
        for site in (site for site in chosen if site.rate > 0):
            if site.weight is None:
                raise ValueError(
                    "This dropout is not a distribution over weights, since "
                    f"{site.reason}; only predictions work."
                )
            weight = drawn[site.weight]
            mask = _mask(n, site, weight, generator)
            weight *= mask.reshape(n, 1, -1, *(1,) * (weight.ndim - 3))
        return drawn

    def predictor(
        self, n: int, generator: torch.Generator | None = None, chunk_size: int | None = None
    ) -> Predictor:
        """Predict n times, with different masks for every input, from the global generator."""
        check_count(n)
        members = P.unstack(self.constants.tensors())
        counts = [len(range(m, n, self.size)) for m in range(min(n, self.size))]

        def predict(model: nn.Module, *x: Any) -> Any:
            if self.sites is None:
                self.sites = dropout_sites(model, x)
            outputs = []
            for member, count in zip(members, counts, strict=False):
                stack = {name: t.expand(count, *t.shape) for name, t in member.items()}
                mode = _Active(self.sites, self.layers)
                with mode, model.register_forward_pre_hook(mode.begin):
                    outputs.append(P.apply(model, stack, *x, chunk_size=chunk_size))
            return tree_map(lambda *parts: torch.cat(parts), *outputs)

        return predict

    def modes(self) -> list[Posterior]:
        """Return one posterior for each network."""
        members = P.unstack(self.constants.tensors())
        return [Dropout(P.stack([member]), self.sites, self.layers) for member in members]


class _Active(TorchFunctionMode):
    """A mode in which dropout drops units, although its network is in evaluation mode."""

    def __init__(self, sites: Sequence[DropoutSite], layers: Layers) -> None:
        super().__init__()
        ordinary = sum(not site.fused for site in sites)
        self.first = ordinary - 1 if layers == "last" else 0
        only_ordinary = layers == "last" and ordinary > 0
        self.rates = [] if only_ordinary else [site.rate for site in sites if site.fused]
        self.begin()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Intercept calls of dropout, which come in the order of the forward pass."""
        kwargs = kwargs or {}
        if func in ACTIVE:
            kwargs = {**kwargs, "training": self.calls >= self.first}
            self.calls += 1
        if func is F.scaled_dot_product_attention and self.rates:
            kwargs = {**dict(zip(_ATTENTION, args, strict=False)), **kwargs}
            return func(**{**kwargs, "dropout_p": next(self.attention, 0.0)})
        return func(*args, **kwargs)

    def begin(self, *_: Any) -> None:
        """Restart the count of sites at the beginning of a forward pass."""
        self.calls, self.attention = 0, iter(self.rates)


def _mask(n: int, site: DropoutSite, like: Tensor, generator: torch.Generator | None) -> Tensor:
    device = like.device if generator is None else generator.device
    mask = torch.rand(n, site.units, generator=generator, device=device) >= site.rate
    scale = 0.0 if site.rate == 1 else 1 / (1 - site.rate)
    return (mask * scale).to(like).repeat_interleave(site.repeat, 1)

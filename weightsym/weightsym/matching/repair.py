"""Statistics of interpolated networks: preactivations repaired, BatchNorm estimated anew."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from weightsym.matching.activations import call_modules
from weightsym.networks.batch_norms import batch_norms, refreshed
from weightsym.networks.forward import in_precision_of, structural_copy
from weightsym.networks.shared_tensors import owners
from weightsym.params import Params, of

_LAYERS = (nn.Linear, nn.modules.conv._ConvNd)


class Repaired(NamedTuple):
    """A network that computes with biases where layers had none, and weights for it.

    >>> from weightsym import params as P
    >>> from weightsym import repair
    >>> layers = torch.nn.Linear(2, 3, bias=False), torch.nn.ReLU(), torch.nn.Linear(3, 1)
    >>> net = torch.nn.Sequential(*layers)
    >>> w = P.of(net)
    >>> repaired = repair(net, w, w, w, 0.5, [torch.randn(8, 2)])
    >>> sorted(repaired.params.keys() - w.keys())
    ['0.bias']
    """

    model: nn.Module
    params: Params


@torch.no_grad()
def repair(
    model: nn.Module,
    params: Params,
    a: Params,
    b: Params,
    weight: float,
    batches: Iterable[Any],
) -> Repaired:
    r"""Give units of a network on a line the mean and deviation that lie between those of its ends.

    Averages of networks have preactivations with too little variance. In every hidden linear layer
    and convolution, one after the other in the order in which they are called, a channel with mean
    :math:`\mu` and deviation :math:`\sigma` over all samples and positions becomes

    .. math:: z' = \frac{(1 - \lambda) \sigma_a + \lambda \sigma_b}{\sigma}\, (z - \mu)
        + (1 - \lambda) \mu_a + \lambda \mu_b,

    which weights and bias of the layer take up. Channels that never vary are only shifted; samples
    of a layer that is called several times are those of all calls. Layers that give the output
    stay, and so does what calls no layer (projections into fused attention). A network with
    BatchNorm gets statistics estimated on the batches instead, which does the same.

    References:
        REPAIR: REnormalizing Permuted Activations for Interpolation Repair (Jordan et al., 2023)

    Args:
        model: gives the computation; it runs in evaluation mode and is left untouched.
        params: the network to repair, usually ``interpolate(a, b, weight)``.
        a: one end.
        b: the other end.
        weight: position on the line.
        batches: inputs, or tuples whose first element is the input; read several times.

    Returns:
        A network and its parameters: layers without a bias have one, where one is needed.

    >>> from weightsym import params as P
    >>> from torch import nn
    >>> from weightsym import interpolate, repair
    >>> net, x = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 1)), torch.randn(64, 2)
    >>> a, b = P.unstack(P.populate(net, 2))
    >>> model, params = repair(net, interpolate(a, b, 0.5), a, b, 0.5, [x])
    >>> hidden = [x @ w["0.weight"].T + w["0.bias"] for w in (params, a, b)]
    >>> middle, *ends = (z.std(0) for z in hidden)
    >>> torch.allclose(middle, sum(ends) / 2, atol=1e-5)
    True
    """
    if not 0 <= weight <= 1:
        raise ValueError(f"`weight` must lie between 0 and 1, got {weight}.")
    if isinstance(batches, Tensor) or not isinstance(batches, Sequence):
        raise ValueError("`batches` must be a list of inputs: it is read several times.")
    if not batches:
        raise ValueError("`batches` is empty.")
    inputs = [x[0] if isinstance(x, tuple | list) else x for x in batches]
    for name, network in (("params", params), ("a", a), ("b", b)):
        check_whole(model, network, name)
    repairs = Repairs(model, a, b, inputs)
    return Repaired(repairs.network, repairs.at(params, weight))


class Repairs:
    """Repairs of the networks on one line, whose ends are measured once.

    Args:
        model: gives the computation.
        a: one end.
        b: the other end.
        inputs: of all batches.
    """

    def __init__(self, model: nn.Module, a: Params, b: Params, inputs: Sequence[Any]) -> None:
        self.network, self.inputs = structural_copy(model).eval(), inputs
        self.layers: list[str] = []
        if not batch_norms(model):
            self.layers = _hidden_layers(self.network, a, inputs[0])
            _check_unshared(self.network, self.layers)
            self.added = _add_biases(self.network, self.layers)
            self.ends = [self._moments(self._with_biases(end), self.layers) for end in (a, b)]

    def at(self, params: Params, weight: float) -> Params:
        """A network at a position on the line, repaired."""
        if not self.layers:
            return reestimated(self.network, params, self.inputs)
        params = self._with_biases(params)
        for layer in self.layers:
            moments = self._moments(params, [layer])[layer]
            a, b = (end[layer] for end in self.ends)
            mean = torch.lerp(torch.as_tensor(a.mean), torch.as_tensor(b.mean), weight)
            deviation = torch.lerp(a.deviation, b.deviation, weight)
            factor = (deviation / moments.deviation).where(moments.deviation > 0, 1.0)
            params |= self._folded(layer, params, factor, mean - factor * moments.mean)
        return params

    def _with_biases(self, params: Params) -> Params:
        zeros = {n: params[w].new_zeros(units) for n, (w, units) in self.added.items()}
        return {**zeros, **params}

    def _folded(self, layer: str, params: Params, factor: Tensor, shift: Tensor) -> Params:
        """Weight and bias after which every channel is multiplied and then shifted."""
        module, names = self.network.get_submodule(layer), [f"{layer}.weight", f"{layer}.bias"]
        weight, bias = (params[n] for n in names)
        new = factor * bias.to(factor) + shift
        return {
            names[0]: (weight.to(factor) * _along(module, factor, weight)).to(weight),
            names[1]: new.to(bias),
        }

    def _moments(self, params: Params, layers: Sequence[str]) -> dict[str, BatchMoments]:
        """Of the preactivations of some layers, over all inputs and calls."""
        by_layer = {layer: BatchMoments() for layer in layers}
        with ExitStack() as stack:
            for layer, moments in by_layer.items():
                module = self.network.get_submodule(layer)
                stack.callback(module.register_forward_hook(_measure(moments)).remove)
            for x in self.inputs:
                call_modules(self.network, params, x)
        if any(not bool(torch.as_tensor(m.squares).isfinite().all()) for m in by_layer.values()):
            raise ValueError("`batches` lead to preactivations that are NaN or infinite.")
        return by_layer


@dataclass
class BatchMoments:
    """Count, means and sums of squared deviations of units, summed up batch by batch."""

    count: int = 0
    mean: Tensor | float = 0.0
    squares: Tensor | float = 0.0

    def add(self, rows: Tensor) -> None:
        """Take in more samples, ``(units, samples)``."""
        rows = rows.double()
        mean, new = rows.mean(-1), rows.shape[-1]
        off, share = mean - self.mean, self.count * new / (self.count + new)
        squares = (rows - mean[..., None]).square().sum(-1)
        self.squares = self.squares + squares + share * off.square()
        self.mean = self.mean + off * new / (self.count + new)
        self.count += new

    @property
    def deviation(self) -> Tensor:
        """Standard deviations over all samples, zero where only rounding varies."""
        deviation = (torch.as_tensor(self.squares) / self.count).sqrt()
        return deviation.where(deviation > 1e-7 * torch.as_tensor(self.mean).abs(), 0.0)


def _measure(moments: BatchMoments) -> Callable[[nn.Module, tuple[Any, ...], Tensor], None]:
    def measure(module: nn.Module, _: tuple[Any, ...], output: Tensor) -> None:
        dim = -1 if isinstance(module, nn.Linear) else -1 - len(module.kernel_size)  # type: ignore[arg-type]
        moments.add(output.movedim(dim, 0).flatten(1))

    return measure


def _along(module: nn.Module, factor: Tensor, weight: Tensor) -> Tensor:
    """Factors of output channels in the shape of a weight."""
    if not isinstance(module, nn.modules.conv._ConvTransposeNd):
        return factor.reshape(-1, *(1,) * (weight.ndim - 1))
    rows = factor.reshape(module.groups, -1).repeat_interleave(len(weight) // module.groups, 0)
    return rows.reshape(*weight.shape[:2], *(1,) * (weight.ndim - 2))


# ------------------------------------------------------------ layers
def _hidden_layers(network: nn.Module, params: Params, x: Any) -> list[str]:
    """Linear layers and convolutions in the order of their calls, without those of the output."""
    names: dict[nn.Module, str] = {
        m: n for n, m in network.named_modules() if isinstance(m, _LAYERS)
    }
    called: dict[str, list[Tensor]] = {}

    def note(module: nn.Module, _: tuple[Any, ...], output: Tensor) -> None:
        called.setdefault(names[module], []).append(_whole(output))

    with ExitStack() as stack:
        for module in names:
            stack.callback(module.register_forward_hook(note).remove)
        outputs = call_modules(network, params, x)
    results = {id(_whole(t)) for t in tree_leaves(outputs) if isinstance(t, Tensor)}
    hidden = [name for name, outputs_of in called.items() if not set(map(id, outputs_of)) & results]
    return hidden if len(hidden) < len(called) else hidden[:-1]


def _whole(tensor: Tensor) -> Tensor:
    """The tensor that a view is a part of."""
    return tensor if tensor._base is None else tensor._base


def _check_unshared(network: nn.Module, layers: Sequence[str]) -> None:
    trained, first = of(network), owners(network)
    names = Counter(first.values())
    for weight in (f"{layer}.weight" for layer in layers):
        if weight not in trained or names[first[weight]] > 1:
            raise ValueError(
                f"`model` cannot be repaired: {weight!r} is computed, or is also the weight of "
                "another layer, so that it cannot take a factor."
            )


def _add_biases(network: nn.Module, layers: Sequence[str]) -> dict[str, tuple[str, int]]:
    """Give layers without a bias one of zeros, and return names, weights and sizes."""
    added = {}
    for layer in layers:
        module: Any = network.get_submodule(layer)
        if module.bias is None:
            units = module.out_features if isinstance(module, nn.Linear) else module.out_channels
            module.bias = nn.Parameter(module.weight.new_zeros(units))
            added[f"{layer}.bias"] = (f"{layer}.weight", units)
    return added


def check_whole(model: nn.Module, params: Params, name: str) -> None:
    """Refuse a stack, and parameters that are not complete."""
    template = of(model)
    if params.keys() != template.keys() or any(
        params[n].shape != t.shape for n, t in template.items()
    ):
        raise ValueError(f"`{name}` must hold all tensors of one network {type(model).__name__}.")


# ------------------------------------------------------------ BatchNorm
def reestimated(network: nn.Module, params: Params, inputs: Iterable[Any]) -> Params:
    """Average the statistics over all batches, as a fresh pass in training mode would."""
    if not batch_norms(network):
        return params
    calls = ((in_precision_of(params, x),) for x in inputs)
    fresh = refreshed(network, {n: t[None] for n, t in params.items()}, calls)
    return {n: t[0] for n, t in fresh.items()}

r"""Layers with different noise for every example, in any network, without rewriting it.

Calls of ``linear`` and ``conv`` with a sampled weight are intercepted while the network runs. The
first dimension of their input must be the examples of the batch; a layer that sees another number
of rows (tokens folded into the batch, time first) keeps the weight sample of the whole batch.

- Flipout: one perturbation :math:`\Delta = \sigma \epsilon` for the batch, with signs of its own
  for every example, :math:`y = \mu x + r \odot \Delta (s \odot x)`. Every example sees an exact
  sample of the weights; examples are uncorrelated.
- Local: the output of a linear layer is drawn from its own distribution,
  :math:`y \sim N(\mu x, \sigma^2 x^2)`, again exact for every example. Layers that use a weight
  several times for one example (convolutions, sequences) take flipout: local noise would there be
  that of another posterior.

References:
    | Variational Dropout and the Local Reparameterization Trick (Kingma et al., 2015)
    | https://arxiv.org/abs/1506.02557
    | Flipout (Wen et al., 2018)
    | https://arxiv.org/abs/1803.04386

Weights common to all examples are drawn in few passes over memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from weightsym.params import Params, RavelSpec, keep_freed_memory

_LOG_2PI = math.log(2 * math.pi)


class Draw(NamedTuple):
    """Sampled weights, and moments of their distribution, summed over weights.

    Attributes:
        weights: a stack of ``samples * members`` networks, the first sample of all members first.
        cross_entropy: with an isotropic Gaussian prior, ``(members,)``.
        entropy: of the distribution, ``(members,)``.
        noise: the standard normal numbers, ``(samples, members, weights)``.
    """

    weights: Params
    cross_entropy: Tensor
    entropy: Tensor
    noise: Tensor


def draw(
    mean: Tensor,
    log_std: Tensor,
    spec: RavelSpec,
    prior_std: float,
    samples: int = 1,
) -> Draw:
    """Draw weights of every member, several times, from the global random state.

    Args:
        mean: ``(members, weights)``.
        log_std: logarithms of the standard deviations.
        spec: names and shapes of the tensors in a row.
        prior_std: of every weight under the prior.
        samples: number of networks per member.
    """
    if mean.device.type == "cpu":
        keep_freed_memory()
    noise = mean.detach().new_empty(samples, *mean.shape).normal_()
    cross, entropy, *parts = _Draw.apply(mean, log_std, noise, spec, prior_std)
    return Draw(dict(zip(spec.names, parts, strict=True)), cross, entropy, noise)


class _Draw(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, mean: Tensor, log_std: Tensor, noise: Tensor, spec: RavelSpec, prior_std: float
    ) -> tuple[Tensor, ...]:
        std = log_std.exp()
        weights = torch.addcmul(mean, std, noise)
        ctx.save_for_backward(mean, std, noise)
        ctx.precision = prior_std**-2
        size = mean.shape[1]
        squares = _squares(mean) + _squares(std)
        cross = squares * (ctx.precision / 2) + size * (math.log(prior_std) + _LOG_2PI / 2)
        entropy = log_std.sum(1, dtype=squares.dtype) + size * (1 + _LOG_2PI) / 2
        rows = weights.view(-1, size)
        pieces = rows.split([s.numel() for s in spec.shapes], 1)
        tensors = [
            p.reshape(len(rows), *s) if len(rows) > 1 else p.view(1, *s)
            for p, s in zip(pieces, spec.shapes, strict=True)
        ]
        return cross, entropy, *tensors

    @staticmethod
    def backward(ctx: Any, of_cross: Tensor, of_entropy: Tensor, *grads: Tensor) -> tuple[Any, ...]:
        mean, std, noise = ctx.saved_tensors
        joined = torch.cat([g.reshape(len(g), -1) for g in grads], 1).view_as(noise)
        of_cross, of_entropy = of_cross.to(std), of_entropy.to(std)
        weight = of_cross[:, None] * ctx.precision
        if len(noise) == 1:
            of_mean = joined[0]
            of_log_std = torch.mul(of_mean, noise[0])
        else:
            of_log_std = torch.einsum("smd,smd->md", joined, noise)
            of_mean = joined.sum(0)
        of_log_std = torch.addcmul(of_entropy[:, None], of_log_std.addcmul_(std, weight), std)
        of_mean.addcmul_(mean, weight)
        return of_mean, of_log_std, None, None, None


def _squares(rows: Tensor) -> Tensor:
    """Return squares in at least float32."""
    dtype = torch.promote_types(rows.dtype, torch.float32)
    return torch.linalg.vector_norm(rows, dim=1, dtype=dtype).square()


Reparameterisation = Literal["weight", "local", "flipout"]
_LEAST = 1e-16


@dataclass
class _Weight:
    name: str
    mean: Tensor
    std: Tensor
    noise: Tensor
    signs: tuple[Tensor, ...] = field(default=())
    perturbed: bool = False
    plain: bool = False


class Perturbed(TorchFunctionMode):
    """A mode in which layers with sampled weights draw noise for every example.

    Args:
        sampled: the weights of the network.
        mean, std, noise: of each, such that ``sampled = mean + std * noise``.
        kind: ``"local"`` or ``"flipout"``.
        examples: number of examples in the batch; layers whose input has another number of rows
            keep the sampled weights.
        plain: names of weights without noise per example.
    """

    def __init__(
        self,
        sampled: Mapping[str, Tensor],
        mean: Mapping[str, Tensor],
        std: Mapping[str, Tensor],
        noise: Mapping[str, Tensor],
        kind: Reparameterisation,
        examples: int,
        plain: Collection[str] = (),
    ) -> None:
        super().__init__()
        self.kind, self.examples = kind, examples
        self._weights = {
            id(tensor): _Weight(name, mean[name], std[name], noise[name])
            for name, tensor in sampled.items()
            if name in mean and name not in plain
        }

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Replace calls of layers with a sampled weight."""
        kwargs = kwargs or {}
        named = {**dict(zip(_LAYERS.get(func, ()), args, strict=False)), **kwargs}
        weight = self._weights.get(id(named.get("weight")))
        x: Any = named.get("input")
        if func not in _LAYERS or weight is None or not self._is_batch(func, x):
            out = func(*args, **kwargs)
            if isinstance(out, Tensor):
                self._note_plain_use(args, kwargs)
            return out
        del named["weight"], named["input"]
        bias = self._weights.get(id(named.get("bias")))
        self._note_perturbed_use(weight, bias)
        if self.kind == "local" and func is F.linear and x.ndim == 2:
            return self._local(x, weight, bias, named.pop("bias", None))
        return self._flipout(func, x, weight, bias, named)

    def _is_batch(self, func: Any, x: Any) -> bool:
        return x.ndim == _batched_dims(func, x) and len(x) == self.examples

    def _note_plain_use(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for value in (*args, *kwargs.values()):
            weight = self._weights.get(id(value))
            if weight is not None:
                weight.plain = True
                self._refuse_both(weight)

    def _note_perturbed_use(self, weight: _Weight, bias: _Weight | None) -> None:
        if self.kind == "local" and weight.perturbed:
            raise ValueError(
                "`reparameterisation='local'` requires layers that are used once, but "
                f"{weight.name} is used twice in one forward pass: set 'flipout'."
            )
        for used in (weight, bias):
            if used is not None:
                used.perturbed = True
                self._refuse_both(used)

    def _refuse_both(self, weight: _Weight) -> None:
        """Refuse a weight with two uses, which would give an example two different samples."""
        if weight.plain and weight.perturbed:
            raise ValueError(
                f"`reparameterisation={self.kind!r}` cannot be used: {weight.name} is the "
                "weight of a layer, and also has another use. Set 'weight'."
            )

    def _local(self, x: Tensor, weight: _Weight, bias: _Weight | None, plain_bias: Any) -> Tensor:
        mean = F.linear(x, weight.mean, plain_bias if bias is None else bias.mean)
        squares = None if bias is None else bias.std.square()
        variance = F.linear(x.square(), weight.std.square(), squares)
        return mean + (variance + _LEAST).sqrt() * torch.randn_like(mean)

    def _flipout(
        self, func: Any, x: Tensor, weight: _Weight, bias: _Weight | None, options: dict[str, Any]
    ) -> Tensor:
        plain_bias = options.pop("bias", None)
        mean = func(x, weight.mean, plain_bias if bias is None else bias.mean, **options)
        dim = -1 if func is F.linear else 1
        ins, outs = self._signs(weight, x, mean, dim)
        moved = func(x * ins, weight.std * weight.noise, None, **options) * outs
        if bias is not None:
            signs = self._signs(bias, mean, mean, dim)[1]
            moved = moved + signs * _spread((bias.std * bias.noise)[None], mean.ndim, dim)
        return mean + moved

    def _signs(self, weight: _Weight, x: Tensor, y: Tensor, dim: int) -> tuple[Tensor, ...]:
        """Return signs of inputs and outputs for every example, equal in all uses of a weight."""
        if not weight.signs:
            weight.signs = tuple(
                torch.randint(2, (len(t), t.shape[dim]), device=t.device).to(t) * 2 - 1
                for t in (x, y)
            )
        ins, outs = weight.signs
        return _spread(ins, x.ndim, dim), _spread(outs, y.ndim, dim)


def _spread(signs: Tensor, ndim: int, dim: int) -> Tensor:
    """Reshape ``(batch, channels)`` to multiply a tensor with more dimensions."""
    ones = (1,) * (ndim - 2)
    shape = (len(signs), *ones, signs.shape[1]) if dim == -1 else (*signs.shape, *ones)
    return signs.reshape(shape)


_CONV = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_LAYERS: dict[Any, tuple[str, ...]] = {
    F.linear: ("input", "weight", "bias"),
    **{conv: _CONV for conv in (F.conv1d, F.conv2d, F.conv3d)},
}


def _batched_dims(func: Any, x: Tensor) -> int:
    """Return the number of dimensions of an input with a batch."""
    if func is F.linear:
        return max(x.ndim, 2)
    return {F.conv1d: 3, F.conv2d: 4, F.conv3d: 5}[func]


def tied_names(model: nn.Module) -> set[str]:
    """Return the names of weights that a module holds more than once."""
    owners: dict[int, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(p), []).append(name)
    return {name for names in owners.values() if len(names) > 1 for name in names}

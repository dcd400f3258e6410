"""Fold the gains of norms into the next linear maps, so that the residual stream can be rotated.

With gains, only signs and permutations of a normalised stream keep a network's function. The same
function without gains allows all rotations (of an RMSNorm; those that keep the vector of ones, of a
LayerNorm).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from weightsym.discovery import discover
from weightsym.groups.symmetries import Symmetries
from weightsym.networks.forward import Inputs, on_network, outputs, structural_copy
from weightsym.params import Params, of


def fold_norms(model: nn.Module, *example: Any, partial: bool = False, **named: Any) -> nn.Module:
    r"""Copy a network with the gains and biases of its norms folded into the next linear maps.

    .. math:: W' = W \mathrm{diag}(\gamma), \quad b' = b + W \beta

    ``nn.LayerNorm``, ``nn.RMSNorm`` and modules that compute the same with a ``weight``, and maybe
    a ``bias``, of their own are folded, if linear maps alone read them. The function stays;
    `discover` finds the rotations of the stream then. Training goes on differently, for the weights
    are others.

    Args:
        model: any module; it is left untouched.
        *example: example inputs, as the module takes them.
        partial: leave the norms that cannot be folded, instead of an error.
        **named: example inputs by name.

    Raises:
        ValueError: a norm is read by something that is not a linear map of its own, and ``partial``
            is not set.

    >>> from weightsym import discover, fold_norms
    >>> layers = torch.nn.Linear(4, 3), torch.nn.LayerNorm(3), torch.nn.Linear(3, 2)
    >>> net, x = torch.nn.Sequential(*layers), torch.randn(8, 4)
    >>> folded = fold_norms(net, x)
    >>> torch.allclose(folded(x), net(x), atol=1e-5)
    True
    >>> discover(net, x).linear, discover(folded, x).linear[0].kind
    ((), 'centred')
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"`model` must be a torch.nn.Module, got {type(model).__name__}.")
    folds, others = _folds_of(model, Inputs(example, named))
    if others and not partial:
        raise ValueError(
            f"The norm {others[0]!r} cannot be folded: only linear maps may read it, with weights "
            "of their own, and with a bias if the norm has one."
        )
    return _without_gains(copy.deepcopy(model), folds)


def fold_networks(
    model: nn.Module, networks: Sequence[Params], *example: Any, **named: Any
) -> tuple[nn.Module, list[Params]]:
    """Fold the norms of several networks of one architecture, wherever only linear maps read them.

    Args:
        model: gives the computation, with or without weights; it is left untouched.
        networks: their tensors, none of which is changed.
        *example: example inputs, as the module takes them.
        **named: example inputs by name.

    Returns:
        The module without these gains, and the tensors of every network for it.

    >>> from weightsym.params import of
    >>> layers = torch.nn.Linear(4, 3), torch.nn.LayerNorm(3), torch.nn.Linear(3, 2)
    >>> net, x = torch.nn.Sequential(*layers), torch.randn(8, 4)
    >>> folded, (weights,) = fold_networks(net, [of(net)], x)
    >>> list(weights) == list(of(folded))
    True
    """
    folded, fold = folding(_filled(model, networks[0]), *example, **named)
    return folded, [fold(network) for network in networks]


def folding(
    model: nn.Module, *example: Any, **named: Any
) -> tuple[nn.Module, Callable[[Params], Params]]:
    """Find the norms that can be folded once, for networks that are read one by one.

    Args:
        model: gives the computation and the weights of the module that is returned.
        *example: example inputs, as the module takes them.
        **named: example inputs by name.

    Returns:
        The module without these gains, and a function from the tensors of a network to those of the
        same network for this module.
    """
    folds, _ = _folds_of(model, Inputs(example, named))
    folded = _without_gains(_shared_copy(model), folds)
    names = list(of(folded))

    def fold(network: Params) -> Params:
        after = _after(network, folds)
        return {name: after[name] for name in names if name in after}

    return folded, fold


# ------------------------------------------------------------ readers
def _readers(sym: Symmetries, prefix: str) -> dict[str, int]:
    """List the tensors that absorb the scales of a norm, if all may be linear maps after it.

    Each comes with the dimension along which it reads the norm: the last one, or the first of two.
    """
    gain = f"{prefix}weight"
    groups = [[sym.axes[p.axis] for p in group.placements] for group in sym.scalings]
    every = [axis for group in groups if gain in {a.tensor for a in group} for axis in group]
    firsts = {axis.tensor for axis in every if axis.dim == 0}
    readers = dict[str, int]()
    for name in {axis.tensor: None for axis in every if axis.tensor not in (gain, f"{prefix}bias")}:
        shape = sym.shapes[name]
        if len(shape) == 2 and name in firsts and shape[:1] == sym.shapes[gain]:
            readers[name] = 0
        elif shape[1:] == sym.shapes[gain]:
            readers[name] = -1
        else:
            return {}
    return {name: readers[name] for name in sym.shapes if name in readers}


def _folded(params: Params, prefix: str, readers: Mapping[str, int]) -> Params:
    """Fold the gain and bias of a norm into its readers."""
    gain, bias = params[f"{prefix}weight"], params.get(f"{prefix}bias")
    new = {**params, f"{prefix}weight": torch.ones_like(gain)}
    for name, dim in readers.items():
        new[name] = params[name] * (gain if dim else gain[:, None])
        if bias is not None:
            new[f"{prefix}bias"] = torch.zeros_like(bias)
            shift = params[name] @ bias if dim else bias @ params[name]
            new[_bias_of(name)] = new.get(_bias_of(name), torch.zeros_like(shift)) + shift
    return new


def _bias_of(weight: str) -> str:
    owner, dot, name = weight.rpartition(".")
    return owner + dot + (name.replace("weight", "bias") if "weight" in name else f"{name}_bias")


@torch.no_grad()
def _folds(model: nn.Module, prefix: str, readers: Mapping[str, int], inputs: Inputs) -> bool:
    """Test whether folding keeps the function for random gains and biases."""
    params: Params = dict(model.named_parameters())
    generator = torch.Generator().manual_seed(0)
    for full in (name for name in (f"{prefix}weight", f"{prefix}bias") if name in params):
        params[full] = torch.randn(params[full].shape, generator=generator).to(params[full])
    new = _folded(params, prefix, readers)
    inputs = on_network(model, inputs)
    added = [name for name in new if name not in params]
    if any(type(model.get_submodule(name.rpartition(".")[0])) is not nn.Linear for name in added):
        return False
    before, after = (outputs(model, p, inputs) for p in (params, new))
    tolerance = torch.finfo(params[f"{prefix}weight"].dtype).eps ** 0.3
    return all(
        bool((a - b).abs().max() <= tolerance * b.abs().max())
        for a, b in zip(after, before, strict=True)
    )


# ------------------------------------------------------------ folds
class _Fold(NamedTuple):
    """A foldable norm, and the linear maps that read it."""

    name: str
    readers: dict[str, int]
    norm: _Norm

    @property
    def prefix(self) -> str:
        return f"{self.name}." if self.name else ""


def _folds_of(model: nn.Module, inputs: Inputs) -> tuple[list[_Fold], list[str]]:
    """Return the foldable norms of a network, and the names of all others."""
    affine = {name: module for name, module in model.named_modules() if _is_affine(module)}
    norms = {name: norm for name, module in affine.items() if (norm := _norm_of(module))}
    if not norms:
        return [], []
    with_gains = _shared_copy(model).eval()
    for name, norm in norms.items():
        if norm.offset:
            _put(with_gains, name, _WithGain(norm.plain, norm.gain, norm.bias))
    sym = discover(with_gains, *inputs.args, **inputs.named)
    folds, others = list[_Fold](), list[str]()
    for name, norm in norms.items():
        fold = _Fold(name, _readers(sym, f"{name}." if name else ""), norm)
        if fold.readers and _folds(with_gains, fold.prefix, fold.readers, inputs):
            folds.append(fold)
        else:
            others.append(name)
    return folds, others


def _shared_copy(model: nn.Module) -> nn.Module:
    """Copy a network, of which the copy shares the weights unless they are on the meta device."""
    is_empty = any(p.is_meta for p in model.parameters())
    return copy.deepcopy(model) if is_empty else structural_copy(model)


def _filled(model: nn.Module, params: Params) -> nn.Module:
    """Fill the weights of a network that are on the meta device."""
    named = model.named_parameters()
    new = {id(p): nn.Parameter(params[n], p.requires_grad) for n, p in named if p.is_meta}
    return copy.deepcopy(model, new) if new else model


@torch.no_grad()
def _after(params: Params, folds: Sequence[_Fold]) -> Params:
    """Fold the gains and biases of all foldable norms of a network."""
    params = dict(params)
    for fold in folds:
        gain = fold.norm.offset + params[f"{fold.prefix}weight"]
        params = dict(_folded({**params, f"{fold.prefix}weight": gain}, fold.prefix, fold.readers))
        for name in ("weight", "bias"):
            params.pop(f"{fold.prefix}{name}", None)
    return params


@torch.no_grad()
def _without_gains(folded: nn.Module, folds: Sequence[_Fold]) -> nn.Module:
    """Fold the gains of the norms of a network into linear maps."""
    new = _after(dict(folded.named_parameters()), folds)
    for name in {n for fold in folds for r in fold.readers for n in (r, _bias_of(r))} & new.keys():
        owner, _, leaf = name.rpartition(".")
        setattr(folded.get_submodule(owner), leaf, nn.Parameter(new[name]))
    for fold in folds:
        _remove_gain(folded, fold.name, fold.norm.plain)
    _leave_fused_kernels(folded)
    return folded


# ------------------------------------------------------------ norms
class _Norm(NamedTuple):
    """The gain and bias of a norm, and the norm without them."""

    gain: Tensor
    bias: Tensor | None
    plain: nn.Module
    offset: int


def _is_affine(module: nn.Module) -> bool:
    """Return whether the only parameters are a weight vector and possibly a bias vector."""
    parameters = dict(module.named_parameters())
    weight = parameters.get("weight")
    same = (
        all(p.shape == weight.shape for p in parameters.values()) if weight is not None else False
    )
    return (
        same and weight is not None and weight.ndim == 1 and parameters.keys() <= {"weight", "bias"}
    )


@torch.no_grad()
def _norm_of(module: nn.Module) -> _Norm | None:
    """Return the gain and bias of a module if it behaves as a norm over the last axis."""
    weight, bias = module.weight, getattr(module, "bias", None)
    assert isinstance(weight, Tensor)
    shape = weight.shape
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, *shape, generator=generator, dtype=torch.float64)
    x = torch.cat([x, 1e-3 * x, 10 * x + 1])
    try:
        y = copy.deepcopy(module).double().cpu().eval()(x)
    except Exception:  # whatever a module of this shape may raise, it is no norm of vectors
        return None
    for plain, offset in ((p, o) for p in _plain_norms(module, shape) for o in (0, 1)):
        gain = offset + weight
        expected = plain(x) * gain.double().cpu()
        expected = expected if bias is None else expected + bias.double().cpu()
        if y.shape == x.shape and torch.allclose(y.double(), expected, rtol=1e-6, atol=1e-7):
            return _Norm(gain.detach().clone(), bias, plain, offset)
    return None


def _plain_norms(module: nn.Module, shape: torch.Size) -> Iterator[nn.Module]:
    """Yield norms without gain, with the epsilon of the module under any of its usual names."""
    epsilons = [
        getattr(module, n, None) for n in ("eps", "variance_epsilon", "epsilon", "norm_eps")
    ]
    eps = next((e for e in epsilons if isinstance(e, float)), None)
    yield nn.RMSNorm(shape, eps=eps, elementwise_affine=False)
    if eps is not None:
        yield nn.LayerNorm(shape, eps=eps, elementwise_affine=False)


class _WithGain(nn.Module):
    """A norm with a multiplicative gain parameter."""

    def __init__(self, plain: nn.Module, gain: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.plain, self.weight = plain, nn.Parameter(gain)
        self.bias = None if bias is None else nn.Parameter(bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        y = self.plain(x) * self.weight
        return y if self.bias is None else y + self.bias


def _remove_gain(model: nn.Module, name: str, plain: nn.Module) -> None:
    """Remove the gain of a norm. Norms of torch keep their class."""
    old = model.get_submodule(name)
    if type(old) in (nn.LayerNorm, nn.RMSNorm):
        setattr(old, "elementwise_affine", False)  # noqa: B010
        for key in list(dict(old.named_parameters())):
            old.register_parameter(key, None)
    else:
        _put(model, name, _Plain(plain, old.weight))


class _Plain(nn.Module):
    """A norm without gain, whose weight others may ask for its type."""

    def __init__(self, plain: nn.Module, weight: Any) -> None:
        super().__init__()
        self.plain = plain
        self.register_buffer("weight", weight.detach().new_empty(0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.plain(x)


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, module.train(model.get_submodule(name).training))


def _leave_fused_kernels(model: nn.Module) -> None:
    """Disable fused kernels of layers whose norms have lost their gains."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer) and any(
            norm.weight is None for norm in (module.norm1, module.norm2)
        ):
            module.activation_relu_or_gelu = 0

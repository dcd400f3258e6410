"""Fold the gains of norms into the next linear maps, so that the residual stream can be rotated.

With gains, only signs and permutations of a normalised stream keep a network's function. The same
function without gains allows all rotations (of an RMSNorm; those that keep the vector of ones, of a
LayerNorm).
"""

from __future__ import annotations

import copy
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from weightsym.discovery.random_weights import RandomWeights
from weightsym.networks.dicts import Computed
from weightsym.networks.forward import (
    Inputs,
    as_real,
    called,
    called_by,
    on_network,
    structural_copy,
    tensors_of,
)
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


Network = Mapping[str, Tensor]


def fold_networks(
    model: nn.Module, networks: Sequence[Network], *example: Any, **named: Any
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
    return folded, [dict(fold(network)) for network in networks]


def folding(
    model: nn.Module, *example: Any, **named: Any
) -> tuple[nn.Module, Callable[[Network], Network]]:
    """Find the norms that can be folded once, for networks that are read one by one.

    Args:
        model: gives the computation, and the weights of the module that is returned. Its matrices
            may be on the meta device.
        *example: example inputs, as the module takes them.
        **named: example inputs by name.

    Returns:
        The module without these gains, and a function from the tensors of a network to those of the
        same network for this module, each of which is computed when it is read.
    """
    folds, _ = _folds_of(model, Inputs(example, named))
    folded = _without_gains(_shared_copy(model), folds)
    names = tuple(of(folded))

    def fold(network: Network) -> Network:
        here = tuple(name for name in names if _has(network, folds, name))
        return Computed(here, functools.partial(_after, network, folds), network)

    return folded, fold


# ------------------------------------------------------------ readers
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "linear", "matmul")
_COPIES = (
    "clone", "_to_copy", "copy", "cat", "stack", "index", "index_select", "gather", "mean", "sum",
    "constant_pad_nd", "select_copy", "slice_copy",
)  # fmt: skip


class _Readers(TorchDispatchMode):
    """The linear maps that read norms in a forward, and what else is done with both.

    Attributes:
        of_norm: by norm, its readers, and the dimension along which each reads it.
        spoilt: norms that are read otherwise, and tensors that are used otherwise.
    """

    def __init__(self, network: nn.Module, norms: Iterable[str]) -> None:
        super().__init__()
        self.of_norm: dict[str, dict[str, int]] = {name: {} for name in norms}
        self.spoilt: set[str] = set()
        self._weights = dict(network.named_parameters())
        self._names = {_memory(w): name for name, w in self._weights.items()}
        self._norms: dict[int, str] = {}
        self._held = list[Tensor]()  # so that no memory is used twice
        for name in self.of_norm:
            hook = functools.partial(self._normed, name)
            network.get_submodule(name).register_forward_hook(hook)

    def _normed(self, name: str, _: nn.Module, args: Any, output: Tensor) -> None:
        self._note(name, output)

    def _note(self, name: str, t: Tensor) -> None:
        """Note that a tensor holds the outputs of a norm."""
        self._norms[_memory(t)] = name
        self._held.append(t)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Record who reads norms, and execute the operation."""
        result = function(*args, **(kwargs or {}))
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        results = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        norms = {self._norms[_memory(x)] for x in given if _memory(x) in self._norms}
        names = {self._names[_memory(x)] for x in given if _memory(x) in self._names}
        operation, is_view = function._opname, {*map(_memory, results)} <= {*map(_memory, given)}
        if operation in _PRODUCTS and len(norms) == 1 and names:
            self._read(operation, norms.pop(), given[-2], given[-1])
        elif operation in _COPIES and len(norms) == 1 and len(results) == 1:
            self._note(norms.pop(), results[0])
        elif not is_view:
            self.spoilt |= norms | names
        return result

    def _read(self, operation: str, norm: str, left: Tensor, right: Tensor) -> None:
        """Record a product of a norm and a tensor."""
        w, along = (right, -2) if _memory(left) in self._norms else (left, -1)
        along = -1 if operation == "linear" else along
        name = self._names.get(_memory(w), "")
        weight = self._weights.get(name)
        if weight is None or weight.ndim != 2:
            self.spoilt.add(norm)
        elif name not in self.of_norm[norm]:
            here, last = (w.stride(along), w.shape[along]), (weight.stride(-1), weight.shape[-1])
            self.of_norm[norm][name] = -1 if here == last else 0


def _memory(t: Tensor) -> int:
    return t.untyped_storage()._cdata


@torch.no_grad()
def _readers(model: nn.Module, norms: Iterable[str], inputs: Inputs) -> dict[str, dict[str, int]]:
    """List the linear maps of their own that read each norm, if nothing else does.

    Each comes with the dimension along which it reads the norm: the last one, or the first of two.
    """
    network = structural_copy(model).eval()
    log, is_fused = _Readers(network, norms), torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)  # it hides who reads a norm
        with log:
            called(network, {}, on_network(network, inputs))
    finally:
        torch.backends.mha.set_fastpath_enabled(is_fused)
    times = Counter(name for readers in log.of_norm.values() for name in readers)
    return {
        norm: readers
        for norm, readers in log.of_norm.items()
        if norm not in log.spoilt and not any(n in log.spoilt or times[n] > 1 for n in readers)
    }


def _bias_of(weight: str) -> str:
    owner, dot, name = weight.rpartition(".")
    return owner + dot + (name.replace("weight", "bias") if "weight" in name else f"{name}_bias")


# ------------------------------------------------------------ folds
class _Fold(NamedTuple):
    """A foldable norm, and the linear maps that read it."""

    name: str
    readers: dict[str, int]
    norm: _Norm

    @property
    def prefix(self) -> str:
        return f"{self.name}." if self.name else ""

    @property
    def vectors(self) -> list[str]:
        """The names of the gain and the bias."""
        return [f"{self.prefix}{n}" for n in ("weight", "bias")[: 1 + (self.norm.bias is not None)]]

    @property
    def biases(self) -> dict[str, str]:
        """The linear maps by the names of the biases that absorb that of the norm."""
        return {_bias_of(n): n for n in self.readers} if self.norm.bias is not None else {}

    def is_writable(self, model: nn.Module) -> bool:
        """Return whether all linear maps have a bias, or are of torch and can have one."""
        named = dict(model.named_parameters())
        added = (n.rpartition(".")[0] for n in self.biases if n not in named)
        return all(type(model.get_submodule(owner)) is nn.Linear for owner in added)

    def scaled(self, network: Network, name: str, w: Tensor) -> Tensor:
        """Return a linear map that reads the norm without its gain."""
        gain = self.norm.offset + network[self.vectors[0]]
        return w * (gain if self.readers[name] else gain[:, None])

    def shift(self, network: Network, name: str, w: Tensor) -> Tensor:
        """Return what the bias of the norm adds to the outputs of a linear map."""
        bias = network[self.vectors[1]]
        return w @ bias if self.readers[name] else bias @ w


def _after(network: Network, folds: Sequence[_Fold], name: str) -> Tensor:
    """Return one tensor of a network after some folds, one after the other."""
    for k, fold in reversed([*enumerate(folds)]):
        before = functools.partial(_after, network, folds[:k])
        if name in fold.readers:
            return fold.scaled(network, name, before(name))
        if name in fold.biases:
            shift = fold.shift(network, fold.biases[name], before(fold.biases[name]))
            return before(name) + shift if _has(network, folds[:k], name) else shift
    return network[name]


def _has(network: Network, folds: Sequence[_Fold], name: str) -> bool:
    return name in network or any(name in fold.biases for fold in folds)


def _folds_of(model: nn.Module, inputs: Inputs) -> tuple[list[_Fold], list[str]]:
    """Return the foldable norms of a network, and the names of all others."""
    affine = {name: module for name, module in model.named_modules() if _is_affine(module)}
    norms = {name: norm for name, module in affine.items() if (norm := _norm_of(module))}
    if not norms:
        return [], []
    found = _readers(model, norms, inputs).items()
    folds = [_Fold(name, readers, norms[name]) for name, readers in found if readers]
    folds = [fold for fold in folds if fold.is_writable(model)]
    if not _keep_the_function(model, folds, inputs):
        folds = [fold for fold in folds if _keep_the_function(model, [fold], inputs)]
    return folds, [name for name in norms if name not in {fold.name for fold in folds}]


@torch.no_grad()
def _keep_the_function(model: nn.Module, folds: Sequence[_Fold], inputs: Inputs) -> bool:
    """Test whether folding keeps the function for random weights, gains and biases."""
    network = structural_copy(model).eval()
    weights, generator = RandomWeights.of_unknown(network), torch.Generator().manual_seed(0)
    vectors = {n: weights.state[n] for fold in folds for n in fold.vectors}
    vectors = {n: torch.randn(t.shape, generator=generator).to(t) for n, t in vectors.items()}
    before = Computed(
        tuple(weights.state), lambda n: vectors[n] if n in vectors else weights.read(n)
    )
    folded = structural_copy(_without_gains(_shared_copy(model), folds)).eval()
    ways = (network, before.__getitem__), (folded, functools.partial(_after, before, folds))
    inputs = on_network(network, inputs)
    returned = (called_by(network, read, inputs) for network, read in ways)
    old, new = ([as_real(t) for t in tensors_of(found)] for found in returned)
    precision = max(torch.finfo(t.dtype).eps for t in vectors.values()) if vectors else 0.0
    return all(
        bool((a - b).abs().max() <= precision**0.3 * b.abs().max())
        for a, b in zip(old, new, strict=True)
    )


def _shared_copy(model: nn.Module) -> nn.Module:
    """Copy a network, of which the copy shares the weights unless they are on the meta device."""
    is_empty = any(p.is_meta for p in model.parameters())
    return copy.deepcopy(model) if is_empty else structural_copy(model)


def _filled(model: nn.Module, params: Network) -> nn.Module:
    """Fill the vectors of a network that are on the meta device."""
    named = [(n, p) for n, p in model.named_parameters() if p.is_meta and p.ndim == 1]
    new = {id(p): nn.Parameter(params[n], p.requires_grad) for n, p in named}
    return copy.deepcopy(model, new) if new else model


@torch.no_grad()
def _without_gains(folded: nn.Module, folds: Sequence[_Fold]) -> nn.Module:
    """Fold the gains of the norms of a network into linear maps."""
    old: Params = dict(folded.named_parameters())
    if any(t.is_meta for t in old.values()):
        old = {name: t.to("meta") for name, t in old.items()}
    changed = {n for fold in folds for n in (*fold.readers, *fold.biases)}
    new = {name: _after(old, folds, name) for name in changed}
    for name in changed:
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

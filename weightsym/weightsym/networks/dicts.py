"""Networks and stacks as dicts of tensors, and their weights as vectors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from weightsym.arguments import is_number

__all__ = [
    "Networks",
    "Params",
    "RavelSpec",
    "fixed_weights",
    "is_stacked",
    "is_weight",
    "of",
    "ravel",
    "shares",
    "stack",
    "stack_size",
    "unravel",
    "unstack",
    "varying_weights",
    "weight_names",
    "weighted_mean",
]

Params = dict[str, Tensor]
Networks = Params | Sequence[Params | nn.Module] | nn.ModuleList
"""A stack, or a list of networks as dicts or modules: `stack` makes one stack of both."""


@dataclass(frozen=True, eq=False)
class Computed(Mapping[str, Tensor]):
    """Tensors that are computed when they are read, and not held.

    Attributes:
        names: of all tensors.
        compute: returns one of them.
        like: tensors of the same shapes.
    """

    names: Sequence[str]
    compute: Callable[[str], Tensor]
    like: Mapping[str, Tensor] | None = None

    def shape(self, name: str) -> torch.Size:
        """Return the shape of a tensor, which is that of the tensor of ``like``, if it is there."""
        if self.like is None or name not in self.like:
            return self[name].shape
        return shape_of(self.like, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __getitem__(self, name: str) -> Tensor:
        return self.compute(name)


def shape_of(params: Mapping[str, Tensor], name: str) -> torch.Size:
    """Return the shape of a tensor, which is neither read nor computed where it is known."""
    known = getattr(params, "shape", None)
    return params[name].shape if known is None else known(name)


def of(module: nn.Module) -> Params:
    """Return the parameters and persistent buffers of a module, each once, without copies.

    >>> list(of(torch.nn.Linear(2, 1)))
    ['weight', 'bias']
    """
    owners: set[int] = set()
    result: Params = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor) and id(tensor) not in owners:
            owners.add(id(tensor))
            result[name] = tensor.detach()
    return result


def weight_names(module: nn.Module) -> list[str]:
    """Return the names of the weights: floating-point parameters, shared ones once.

    >>> weight_names(torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3)))
    ['0.weight', '0.bias', '1.weight', '1.bias']
    """
    return [name for name, p in module.named_parameters() if p.is_floating_point()]


def fixed_weights(module: nn.Module) -> set[str]:
    """Return the names of the parameters without gradients, which networks may omit.

    >>> net = torch.nn.Linear(2, 1)
    >>> _ = net.weight.requires_grad_(False)
    >>> fixed_weights(net)
    {'weight'}
    """
    return {name for name, p in module.named_parameters() if not p.requires_grad}


def stack(networks: Networks) -> Params:
    """Stack networks, given as mappings or as modules. A stack is returned unchanged.

    >>> stack([{"w": torch.zeros(3)}, {"w": torch.ones(3)}])["w"].shape
    torch.Size([2, 3])
    >>> stack([torch.nn.Linear(2, 1) for _ in range(5)])["weight"].shape
    torch.Size([5, 1, 2])
    """
    if isinstance(networks, dict):
        stack_size(networks)
        return networks
    every = _listed(networks)
    first = every[0]
    for k, network in enumerate(every):
        if odd := sorted(first.keys() ^ network.keys()):
            raise ValueError(
                f"`networks[{k}]` has different names from the first: {odd[0]!r} is in only one "
                "of them."
            )
        for name, tensor in network.items():
            if tensor.shape != first[name].shape:
                shapes = f"{tuple(tensor.shape)}, not {tuple(first[name].shape)}"
                raise ValueError(
                    f"`networks[{k}]` differs from the first network: {name!r} has shape {shapes}."
                )
    return {name: torch.stack([network[name] for network in every]) for name in first}


def _listed(networks: Any) -> list[Mapping[str, Tensor]]:
    """List networks as dicts, and refuse anything but a list of networks."""
    if not isinstance(networks, (list, tuple, nn.ModuleList)):
        raise ValueError(
            "`networks` must be a stack (a dict of tensors with a leading dimension) or a list of "
            f"networks, got one {type(networks).__name__}."
        )
    every = [of(network) if isinstance(network, nn.Module) else network for network in networks]
    if not every:
        raise ValueError("`networks` must hold at least one network.")
    for k, network in enumerate(every):
        title = type(network).__name__
        if isinstance(network, Mapping):
            others = (type(t).__name__ for t in network.values() if not isinstance(t, Tensor))
            title = next((f"dict of {name}" for name in others), "")
        if title:
            raise ValueError(
                f"`networks[{k}]` must be a module or a dict of tensors, got a {title}."
            )
    return every


def unstack(params: Params) -> list[Params]:
    """Return the networks of a stack, as views.

    >>> unstack({"w": torch.tensor([[1.0, 2.0], [3.0, 4.0]])})
    [{'w': tensor([1., 2.])}, {'w': tensor([3., 4.])}]
    """
    stack_size(params)
    return [
        dict(zip(params, row, strict=True))
        for row in zip(*(t.unbind(0) for t in params.values()), strict=True)
    ]


def stack_size(params: Params) -> int:
    """Return the number of networks in a stack.

    >>> stack_size({"w": torch.zeros(5, 2), "b": torch.zeros(5)})
    5
    """
    sizes = {tuple(t.shape[:1]) for t in params.values()}
    if len(sizes) != 1 or sizes == {()}:
        raise ValueError(f"`params` is not a stack: its leading dimensions are {sorted(sizes)}.")
    return next(iter(sizes))[0]


def is_stacked(params: Mapping[str, Tensor], template: Mapping[str, Any]) -> bool:
    """Return whether parameters have a member dimension, compared with a template.

    >>> w = of(torch.nn.Linear(2, 1))
    >>> is_stacked(w, w), is_stacked(stack([w, w, w]), w)
    (False, True)
    """
    extra_dimensions = set()
    for name in params:
        if name in template:
            given = shape_of(params, name)
            shape = torch.Size(getattr(template[name], "shape", template[name]))
            if given != shape and given[1:] != shape:
                raise ValueError(
                    f"`{name}` has shape {tuple(given)}, but the network has {tuple(shape)}."
                )
            extra_dimensions.add(len(given) - len(shape))
    if len(extra_dimensions) > 1:
        raise ValueError("Some tensors of `params` are stacked and some are not.")
    return extra_dimensions == {1}


@dataclass(frozen=True)
class RavelSpec:
    """The names and shapes of the tensors in a vector of weights.

    >>> vector, spec = ravel({"a": torch.eye(2), "b": torch.ones(3)})
    >>> spec.names, [tuple(shape) for shape in spec.shapes]
    (('a', 'b'), [(2, 2), (3,)])
    """

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]


def ravel(
    params: Params, names: Sequence[str] | None = None, stacked: bool = False
) -> tuple[Tensor, RavelSpec]:
    """Flatten all weights into one vector, or into one row per member of a stack.

    Args:
        params: one network or a stack.
        names: the tensors to take; by default all floating ones that are not BatchNorm statistics.
        stacked: whether the first dimension counts members.

    >>> rows, spec = ravel({"a": torch.ones(5, 2, 2), "b": torch.zeros(5, 3)}, stacked=True)
    >>> rows.shape, rows[0].tolist()
    (torch.Size([5, 7]), [1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0])
    """
    if names is None:
        names = [name for name, tensor in params.items() if is_weight(name, tensor)]
    leading = (stack_size(params),) if stacked else ()
    spec = RavelSpec(tuple(names), tuple(params[n].shape[len(leading) :] for n in names))
    return torch.cat([params[n].reshape(*leading, -1) for n in names], -1), spec


def is_weight(name: str, tensor: Tensor) -> bool:
    """Return whether a tensor of `Params` is a weight: floating-point, and no BatchNorm statistic.

    >>> is_weight("bn.weight", torch.ones(2)), is_weight("bn.running_var", torch.ones(2))
    (True, False)
    """
    return tensor.is_floating_point() and name.rpartition(".")[2] not in (
        "running_mean",
        "running_var",
    )


def varying_weights(stack: Params) -> list[str]:
    """Return the names of the weights that differ within a stack, or of all if none differ.

    A stack does not tell buffers of users from weights, but by this.

    >>> varying_weights({"w": torch.eye(2), "table": torch.ones(2, 100)})
    ['w']
    """
    weights = [name for name, tensor in stack.items() if is_weight(name, tensor)]
    return [n for n in weights if bool((stack[n] != stack[n][:1]).any())] or weights


def unravel(vector: Tensor, spec: RavelSpec) -> Params:
    """Invert `ravel`, with any leading dimensions.

    >>> w = {"a": torch.eye(2), "b": torch.ones(3)}
    >>> all(torch.equal(v, w[k]) for k, v in unravel(*ravel(w)).items())
    True
    """
    parts = vector.split([s.numel() for s in spec.shapes], -1)
    return {
        n: p.reshape(*vector.shape[:-1], *s)
        for n, s, p in zip(spec.names, spec.shapes, parts, strict=True)
    }


# ------------------------------------------------------------ weighted means
def shares(
    weights: Sequence[int | float] | Tensor | None, count: int, name: str = "`weights`"
) -> list[float]:
    r"""Return the weights of the networks in a mean, normalised to sum to one.

    .. math:: w_k / \textstyle\sum_l w_l

    Args:
        weights: one number for each network, not negative; by default all count the same.
        count: how many networks there are.
        name: of the argument, for the one who gave it.

    >>> shares([3, 1], 2), shares(None, 4)
    ([0.75, 0.25], [0.25, 0.25, 0.25, 0.25])
    """
    if weights is None:
        return [1 / count] * count
    numbers = weights.tolist() if isinstance(weights, Tensor) else weights
    numbers = list(numbers) if isinstance(numbers, Sequence) else [numbers]
    good = all(is_number(w) and w >= 0 for w in numbers)
    if not good or len(numbers) != count or not 0 < sum(map(float, numbers)) < math.inf:
        raise ValueError(
            f"{name} must be {count} non-negative numbers, one for each network, got "
            f"{' '.join(map(str, numbers))}."
        )
    total = sum(map(float, numbers))
    return [float(w) / total for w in numbers]


def weighted_mean(stack: Params, weights: Sequence[int | float] | Tensor | None = None) -> Params:
    r"""Return the weighted mean of the networks of a stack.

    .. math:: \bar\theta = \frac{\sum_k w_k \theta_k}{\sum_k w_k}

    Tensors of whole numbers are those of the first network, and so are buffers that hold infinite
    values and are the same in all, such as masks. Networks of weight zero do not count, whatever
    they hold. Half precision is averaged in float32.

    Args:
        stack: networks of one kind.
        weights: one number for each network, not negative; by default all count the same.

    >>> weighted_mean({"w": torch.tensor([[1.0], [5.0]])}, weights=[3, 1])["w"]
    tensor([2.])
    """
    parts = torch.tensor(shares(weights, stack_size(stack)), dtype=torch.float64)
    counted = (parts > 0).nonzero().flatten()
    if len(counted) < len(parts):
        parts = parts[counted]
        stack = {n: t.index_select(0, counted.to(t.device)) for n, t in stack.items()}
    return {name: _mean(t, parts) for name, t in stack.items()}


def _mean(rows: Tensor, parts: Tensor) -> Tensor:
    if len(rows) == 1 or not rows.is_floating_point():
        return rows[0].clone()
    wide = rows if rows.dtype == torch.float64 else rows.float()
    mean = torch.tensordot(parts.to(wide), wide, 1)
    if rows.ndim > 1 and bool(rows[0].isinf().any()):
        same = (rows == rows[:1]).all(0)
        mean = torch.where(same, rows[0].to(mean), mean)
    return mean.to(rows.dtype)

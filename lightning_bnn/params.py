"""Functions on `Params`, the one currency of this package: a dict from state-dict names to tensors.

One network is a dict with the shapes of its module. A *stack* of N networks is the same dict with
one leading dimension N. Weights are the floating parameters; buffers (BatchNorm statistics) travel
with them.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from lightning_bnn.stacks import (
    FastLayers,
    fitting_chunk,
    remember_loop,
    remember_vmap,
    run_network,
    runs_at_once,
    undoing,
)
from lightning_bnn.stacks.drawing import block_of, draw_blocks, undrawn

__all__ = [
    "Params",
    "RavelSpec",
    "apply",
    "apply_each",
    "chunk_of",
    "is_stacked",
    "is_weight",
    "of",
    "populate",
    "ravel",
    "runs_at_once",
    "stack",
    "stack_size",
    "stacked_copy",
    "unravel",
    "unstack",
    "weight_names",
]

Params = dict[str, Tensor]
_log = logging.getLogger(__name__)


def of(module: nn.Module) -> Params:
    """The state of a module: parameters and persistent buffers, each once, without copies.

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
    """Names of the weights: floating parameters, shared ones once."""
    return [name for name, p in module.named_parameters() if p.is_floating_point()]


def stack(networks: Sequence[Params]) -> Params:
    """Join networks into a stack.

    >>> stack([{"w": torch.zeros(3)}, {"w": torch.ones(3)}])["w"].shape
    torch.Size([2, 3])
    """
    if not networks:
        raise ValueError("`networks` must hold at least one network.")
    names = networks[0].keys()
    for k, network in enumerate(networks):
        if network.keys() != names:
            odd = sorted(names ^ network.keys())[0]
            raise ValueError(
                f"`networks[{k}]` has other names than the first: {odd!r} is only in one of them."
            )
    return {name: torch.stack([network[name] for network in networks]) for name in names}


def unstack(params: Params) -> list[Params]:
    """The networks of a stack, as views."""
    stack_size(params)
    return [
        dict(zip(params, row, strict=True))
        for row in zip(*(t.unbind(0) for t in params.values()), strict=True)
    ]


def stack_size(params: Params) -> int:
    """Number of networks in a stack."""
    sizes = {t.shape[:1] for t in params.values()}
    if len(sizes) != 1 or sizes == {torch.Size([])}:
        raise ValueError(
            f"`params` is not a stack: its leading dimensions are {sorted(map(tuple, sizes))}."
        )
    return next(iter(sizes))[0]


def is_stacked(params: Mapping[str, Tensor], template: Mapping[str, Any]) -> bool:
    """Whether parameters carry a member dimension, read off a template of tensors or shapes."""
    found = set()
    for name, tensor in params.items():
        if name in template:
            shape = torch.Size(getattr(template[name], "shape", template[name]))
            if tensor.shape != shape and tensor.shape[1:] != shape:
                raise ValueError(
                    f"`{name}` has shape {tuple(tensor.shape)}, the network has {tuple(shape)}."
                )
            found.add(tensor.ndim - len(shape))
    if len(found) > 1:
        raise ValueError("Some tensors of `params` are stacked and some are not.")
    return found == {1}


@dataclass(frozen=True)
class RavelSpec:
    """How a vector of weights is cut back into tensors."""

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]


def ravel(
    params: Params, names: Sequence[str] | None = None, stacked: bool = False
) -> tuple[Tensor, RavelSpec]:
    """All weights as one vector, or as one row per member of a stack.

    Args:
        params: one network or a stack.
        names: the tensors to take, by default all floating ones that are not BatchNorm statistics.
        stacked: whether the first dimension counts members.
    """
    chosen = tuple(
        names if names is not None else (n for n, t in params.items() if is_weight(n, t))
    )
    start = 1 if stacked else 0
    spec = RavelSpec(chosen, tuple(params[n].shape[start:] for n in chosen))
    lead = (stack_size(params),) if stacked else ()
    return torch.cat([params[n].reshape(*lead, -1) for n in chosen], -1), spec


def is_weight(name: str, tensor: Tensor) -> bool:
    """Whether a tensor of `Params` counts as weights: floating, and no BatchNorm statistic.

    >>> is_weight("bn.weight", torch.ones(2)), is_weight("bn.running_var", torch.ones(2))
    (True, False)
    """
    return tensor.is_floating_point() and name.rpartition(".")[2] not in (
        "running_mean",
        "running_var",
    )


def unravel(vector: Tensor, spec: RavelSpec) -> Params:
    """The inverse of `ravel`; leading dimensions are kept.

    >>> w = {"a": torch.eye(2), "b": torch.ones(3)}
    >>> all(torch.equal(v, w[k]) for k, v in unravel(*ravel(w)).items())
    True
    """
    parts = vector.split([s.numel() for s in spec.shapes], -1)
    return {
        n: p.reshape(*vector.shape[:-1], *s)
        for n, s, p in zip(spec.names, spec.shapes, parts, strict=True)
    }


# ------------------------------------------------------------ prediction
def apply(model: nn.Module, params: Params, *x: Any, chunk_size: int | None = None) -> Any:
    """Run a module with other parameters: one network, or every member of a stack.

    Tiny networks run all members at once (``vmap``), larger ones member by member; so do networks
    that ``vmap`` cannot handle (recurrent layers, data-dependent control flow). Which way was taken
    is logged once per module.

    Args:
        model: gives the computation; its own parameters are not read and no buffer of it is
            changed.
        params: one network or a stack. In training mode the BatchNorm statistics in it are updated
            in place.
        *x: the inputs, shared by all members.
        chunk_size: run that many members at once; ``1`` forces the loop.

    Returns:
        What the module returns; for a stack every tensor has a leading member dimension.
    """
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"`chunk_size` must be at least 1, got {chunk_size}.")
    template = of(model)
    missing = template.keys() - params.keys()
    if missing:
        raise ValueError(
            f"`params` lacks {sorted(missing)[0]!r} (and {len(missing) - 1} more) of "
            f"{type(model).__name__}."
        )
    if not is_stacked(params, template):
        return run_network(model, params, x)
    return _stacked(model, params, x, None, chunk_size)


def apply_each(model: nn.Module, params: Params, *x: Any, chunk_size: int | None = None) -> Any:
    """Run every member of a stack on inputs of its own; otherwise as `apply`.

    Args:
        model: gives the computation.
        params: a stack.
        *x: the inputs; the leading dimension of every tensor counts members.
        chunk_size: run that many members at once; ``1`` forces the loop.
    """
    members = stack_size(params)
    sizes = {len(t) for t in tree_leaves(x) if isinstance(t, Tensor)}
    if sizes != {members}:
        raise ValueError(f"`x` must have inputs for {members} members, it has {sorted(sizes)}.")
    return _stacked(model, params, x, 0, chunk_size)


def chunk_of(model: nn.Module, params: Params, x: Any, chunk_size: int | None = None) -> int:
    """How many members of a stack run at once: 1 where they run one by one.

    Args:
        model: gives the computation.
        params: a stack.
        x: the inputs of one network.
        chunk_size: what was asked for, if anything.
    """
    members = stack_size(params)
    if not runs_at_once(model, chunk_size):
        return 1
    if chunk_size is not None:
        return min(chunk_size, members)
    one = {name: t[0].clone() for name, t in params.items()}  # statistics are not to change
    found = fitting_chunk(model, lambda: run_network(model, one, x), x, members)
    return members if found is None else found


def _stacked(
    model: nn.Module, params: Params, x: Any, own: int | None, chunk_size: int | None
) -> Any:
    if runs_at_once(model, chunk_size):
        undo = undoing(model, params)
        try:
            outputs = _vmapped(model, params, x, own, chunk_size)
            remember_vmap(model)
            return outputs
        except (RuntimeError, ValueError, NotImplementedError) as error:
            undo()
            outputs = _looped(model, params, x, own)  # what is wrong with inputs is raised here
            remember_loop(model, error)
            return outputs
    return _looped(model, params, x, own)


def _vmapped(
    model: nn.Module, params: Params, x: Any, own: int | None, chunk_size: int | None
) -> Any:
    def one(member: Params, x: Any) -> Any:
        return run_network(model, member, x)

    if chunk_size is None and not torch.is_grad_enabled() and not model.training:
        chunk_size = chunk_of(model, params, _inputs_of(x, own, 0))
    mapped: Callable[..., Any] = torch.vmap(
        one, in_dims=(0, own), randomness="different", chunk_size=chunk_size
    )
    with FastLayers():
        return mapped(params, x)


def _looped(model: nn.Module, params: Params, x: Any, own: int | None) -> Any:
    outputs = [
        run_network(model, member, _inputs_of(x, own, m))
        for m, member in enumerate(unstack(params))
    ]
    return tree_map(
        lambda *leaves: torch.stack(leaves) if isinstance(leaves[0], Tensor) else leaves[0],
        *outputs,
    )


def _inputs_of(x: Any, own: int | None, member: int) -> Any:
    if own is None:
        return x
    return tree_map(lambda t: t[member] if isinstance(t, Tensor) else t, x)


# ------------------------------------------------------------ populations
def populate(
    model: nn.Module, members: int, generator: torch.Generator | None = None, skip: int = 0
) -> Params:
    """A stack of independently re-initialised copies of a module.

    Every submodule with a ``reset_parameters`` (or ``_reset_parameters``) method draws its
    parameters anew; parameters that no such method owns keep the value they have in ``model``, and
    a warning names them.

    Args:
        model: the network; it is left untouched.
        members: how many copies.
        generator: seeds come from here, one for each member (for blocks of so and so many members
            of a small network, which are drawn at once); by default from the global random state.
        skip: leave out the first so many of those the generator would give.
    """
    if members < 1:
        raise ValueError(f"`members` must be at least 1, got {members}.")
    state = of(model)
    block = block_of(model, state)
    first, last = skip // block, -(-(skip + members) // block)
    seeds = torch.randint(2**62, (last,), generator=generator).tolist()[first:]
    drawn = draw_blocks(model, state, seeds, block)
    if shared := undrawn(model, state, drawn):
        names = ", ".join(shared[:5])
        _log.warning("No `reset_parameters` draws %s: all members share its value.", names)
    start = skip - first * block
    return {name: t[start : start + members].clone() for name, t in drawn.items()}


def stacked_copy(model: nn.Module, params: Params) -> nn.Module:
    """A copy of a module whose tensors carry the member dimension, under the same names.

    Tensors that the module holds in several places stay one.
    """
    result = copy.deepcopy(model)
    places: dict[int, list[str]] = {}
    for name, tensor in result.state_dict(keep_vars=True).items():
        places.setdefault(id(tensor), []).append(name)
    aliases = {names[0]: names for names in places.values()}
    for name, tensor in params.items():
        stacked: Tensor | None = None
        for alias in aliases.get(name, [name]):
            path, _, leaf = alias.rpartition(".")
            owner = result.get_submodule(path)
            old = owner._parameters.get(leaf)
            trained = leaf in owner._parameters
            if stacked is None:
                stacked = tensor.clone()
                if trained:
                    wanted = old is None or old.requires_grad
                    stacked = nn.Parameter(stacked, requires_grad=wanted)
            held: dict[str, Any] = owner._parameters if trained else owner._buffers
            held[leaf] = stacked
    return result

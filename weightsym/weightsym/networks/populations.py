"""Stacks of new networks, and modules with stacked tensors."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_batchedtensor
from torch.func import functional_call

from weightsym.networks.devices import check_memory, elsewhere, random_numbers
from weightsym.networks.dicts import Params, of

__all__ = ["populate", "stacked_copy"]

_log = logging.getLogger("weightsym.params")


def populate(
    model: nn.Module, members: int, generator: torch.Generator | None = None, skip: int = 0
) -> Params:
    """Return a stack of independently re-initialised copies of a module.

    Every layer with a ``reset_parameters`` (or ``_reset_parameters``) method draws its
    parameters anew, then those with an ``_init_weights`` for their parts (as in transformers), then
    adapters of peft; parameters that no such method owns keep the value they have in ``model``, and
    a warning names them.

    Args:
        model: the network; it is left untouched.
        members: how many copies.
        generator: gives the seeds, one for each member (one for each block of members of a small
            network, which are drawn at once); by default the global random state does.
        skip: how many members to leave out, of those that the generator would give first.

    >>> from weightsym import params as P
    >>> net = nn.Linear(2, 1)
    >>> networks = P.populate(net, 4, torch.Generator().manual_seed(0))
    >>> networks["weight"].shape
    torch.Size([4, 1, 2])
    >>> again = P.populate(net, 4, torch.Generator().manual_seed(0))
    >>> torch.equal(networks["weight"], again["weight"])
    True
    """
    if members < 1:
        raise ValueError(f"`members` must be at least 1, got {members}.")
    state = of(model)
    _check_room(state, members)
    block = block_of(model, state)
    first, last = skip // block, -(-(skip + members) // block)
    seeds = torch.randint(2**62, (last,), generator=generator).tolist()[first:]
    drawn = draw_blocks(model, state, seeds, block)
    if shared := undrawn(model, state, drawn):
        names = ", ".join(shared[:5])
        _log.warning("No `reset_parameters` draws %s: all members share its value.", names)
    start = skip - first * block
    return {name: t[start : start + members].clone() for name, t in drawn.items()}


def _check_room(state: Params, members: int) -> None:
    """Refuse stacks that do not fit into memory twice, as blocks and as their concatenation."""
    for tensor in list(state.values())[:1]:
        size = members * sum(t.nbytes for t in state.values())
        title = f"Drawing {members} networks of {size / members / 1e6:.3g} MB"
        check_memory(2 * size, tensor.device, title, "draw fewer at a time, see `skip`")


def stacked_copy(model: nn.Module, params: Params) -> nn.Module:
    """Copy a module with stacked tensors under the same names.

    Tensors that the module holds in several places stay one. It is not made to run: buffers that
    have no place in a state dict are left out.

    >>> from weightsym import params as P
    >>> net = nn.Linear(2, 1)
    >>> copy = P.stacked_copy(net, P.populate(net, 4))
    >>> {name: tuple(p.shape) for name, p in copy.named_parameters()}
    {'weight': (4, 1, 2), 'bias': (4, 1)}
    """
    left_out = {id(buffer): None for buffer in _computed(model)}
    result = copy.deepcopy(model, left_out)  # None is in their places
    places: dict[int, list[str]] = {}
    for name, tensor in result.state_dict(keep_vars=True).items():
        places.setdefault(id(tensor), []).append(name)
    for names in places.values():
        if names[0] not in params:
            continue
        stacked = params[names[0]].clone()
        owners = [(result.get_submodule(n.rpartition(".")[0]), n.rpartition(".")[2]) for n in names]
        owner, leaf = owners[0]
        trained = owner._parameters.get(leaf)
        if trained is not None:
            stacked = nn.Parameter(stacked, requires_grad=trained.requires_grad)
        for owner, leaf in owners:
            tensors: dict[str, Any] = owner._buffers if trained is None else owner._parameters
            tensors[leaf] = stacked
    return result


# ------------------------------------------------------------ new weights for many copies at once
_NUMBERS, _MOST = 2**16, 256


def _computed(module: nn.Module) -> list[Tensor]:
    """List the non-persistent buffers."""
    parts = [m for m in module.modules() if m._non_persistent_buffers_set]
    buffers = [m._buffers[name] for m in parts for name in m._non_persistent_buffers_set]
    return [t for t in buffers if t is not None]


def _parts_first(module: nn.Module) -> list[nn.Module]:
    """List all submodules, children before parents, in the order of construction."""
    below = (submodule for child in module.children() for submodule in _parts_first(child))
    return list(dict.fromkeys([*below, module]))


def _resettable(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the submodules that can reset their parameters, if they have any."""
    for layer in _parts_first(module):
        names = ("reset_parameters", "_reset_parameters")
        has_any = next(layer.parameters(), None) is not None
        if has_any and any(callable(getattr(layer, n, None)) for n in names):
            yield layer


def _to_be_drawn(model: nn.Module) -> nn.Module:
    """Return a copy whose parameters can be redrawn, sharing buffers of modules without any."""
    parts = _without_parameters(model)
    shared = {id(t): t for m in parts for t in m._buffers.values() if t is not None}
    return copy.deepcopy(model, shared)


def _without_parameters(model: nn.Module) -> list[nn.Module]:
    """List the submodules that have buffers and no parameters."""
    return [m for m in model.modules() if m._buffers and not m._parameters]


def block_of(model: nn.Module, state: Mapping[str, Tensor]) -> int:
    """Choose how many copies to draw at once: one if they are large or ``vmap`` draws wrongly.

    It depends on nothing but the network, so that a copy is the same whatever else is drawn.
    """
    size = sum(t.numel() for t in state.values())
    block = min(_MOST, _NUMBERS // max(1, size))
    if block < 2 or any(t.is_meta for t in state.values()):
        return 1
    with random_numbers(elsewhere(model.parameters())):
        one_by_one = [dict(_reset(_to_be_drawn(model), state)) for _ in range(2)]
        try:
            network = _to_be_drawn(model)
            together = _vmapped(network, state, 3)
            if any(is_batchedtensor(t) for t in network.buffers()):
                return 1
        except (RuntimeError, ValueError, TypeError, NotImplementedError):
            return 1
    differ = (_varies(torch.stack([a[n] for a in one_by_one])) for n in state)
    return block if list(differ) == [_varies(together[n]) for n in state] else 1


def draw_blocks(
    model: nn.Module, state: Mapping[str, Tensor], seeds: list[int], block: int
) -> dict[str, Tensor]:
    """Draw a stack of new weights, one block of copies for each seed."""
    blocks, network = [], _to_be_drawn(model)
    for seed in seeds:
        with random_numbers(elsewhere(model.parameters()), seed):
            if block > 1:
                blocks.append(_vmapped(network, state, block))
            else:
                drawn = _reset(network, state)
                blocks.append({name: t.clone()[None] for name, t in drawn.items()})
    return {name: torch.cat([b[name] for b in blocks]) for name in state}


def undrawn(
    model: nn.Module, state: Mapping[str, Tensor], drawn: Mapping[str, Tensor]
) -> list[str]:
    """Return the names of the weights that no ``reset_parameters`` changes.

    Args:
        model: the network.
        state: its state.
        drawn: copies of it with new weights.
    """
    owners = list(_resettable(model))
    owned = {id(p) for child in owners for p in child.parameters(recurse=False)}
    owned |= {id(p) for c in owners if hasattr(c, "_reset_parameters") for p in c.parameters()}
    named = [(n, p) for n, p in model.named_parameters() if n in state]
    return [
        name
        for name, p in named
        if (id(p) not in owned or not p.is_meta and _varies(state[name].flatten()))
        and (p.is_meta or torch.equal(drawn[name][0], state[name]))
    ]


def _reset(module: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    adapters = dict(_adapters(module, state))
    untouched = {
        layer for adapter, fresh in adapters.items() if not fresh for layer in adapter.modules()
    }
    for child in _resettable(module):
        reset: Any = getattr(child, "reset_parameters", None) or child._reset_parameters
        if child not in untouched:
            reset()
    _draw_as_libraries_do(module, untouched)
    for adapter in (a for a in adapters if a not in untouched):  # in order: each draws
        named: Any = adapter.lora_A
        for name in named:
            adapter.reset_lora_parameters(name, init_lora_weights=True)  # type: ignore[operator]
    after = module.state_dict()
    return {name: after[name].detach() for name in state}


def _draw_as_libraries_do(module: nn.Module, untouched: set[nn.Module]) -> None:
    """Initialise modules as transformers and timm do, except untouched ones."""
    untouched = untouched.union(_without_parameters(module))
    for parent in _parts_first(module):
        draw: Any = getattr(parent, "_init_weights", None)
        if callable(draw) and _needs_one(draw):
            for layer in _parts_first(parent):
                if untouched.isdisjoint(layer.modules()):
                    draw(layer)


def _adapters(module: nn.Module, state: Mapping[str, Tensor]) -> Iterator[tuple[nn.Module, bool]]:
    """Yield low-rank adapters of peft, and whether they are still zero, as fresh ones are.

    Others may belong to weights that were changed with them: they stay as they are.
    """
    for path, layer in module.named_modules():
        if hasattr(layer, "reset_lora_parameters"):
            prefix = f"{path}.lora_B.".lstrip(".")
            factors = [t for n, t in state.items() if n.startswith(prefix)]
            yield layer, all(t.is_meta or not bool(t.any()) for t in factors)


def _needs_one(function: Any) -> bool:
    """Return whether a function requires exactly one argument."""
    parameters = inspect.signature(function).parameters.values()
    return sum(p.default is p.empty and p.kind == p.POSITIONAL_OR_KEYWORD for p in parameters) == 1


class _Anew(nn.Module):
    """A network whose forward draws its weights."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return _reset(self.network, state)


def _vmapped(model: nn.Module, state: Mapping[str, Tensor], count: int) -> dict[str, Tensor]:
    drawing = _Anew(model)

    def one(zero: Tensor) -> dict[str, Tensor]:
        member = {f"network.{name}": t.detach() + zero.to(t.dtype) for name, t in state.items()}
        return functional_call(drawing, member, (state,))

    with torch.no_grad():
        device = next(iter(state.values())).device
        mapped = torch.vmap(one, randomness="different")
        return {n: t.clone() for n, t in mapped(torch.zeros(count, device=device)).items()}


def _varies(stack: Tensor) -> bool:
    return bool((stack[1:] != stack[:1]).any())

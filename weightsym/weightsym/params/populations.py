"""Stacks of new networks, and modules whose tensors are those of a stack."""

from __future__ import annotations

import copy
import logging
from typing import Any

import torch
from torch import nn

from weightsym.devices import check_memory
from weightsym.params.networks import Params, of
from weightsym.stacks.drawing import block_of, draw_blocks, undrawn

__all__ = ["populate", "stacked_copy"]

_log = logging.getLogger("weightsym.params")


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
    """Refuse stacks that do not fit twice: blocks are drawn, and then joined."""
    for tensor in list(state.values())[:1]:
        size = members * sum(t.nbytes for t in state.values())
        what = f"Drawing {members} networks of {size / members / 1e6:.3g} MB"
        check_memory(2 * size, tensor.device, what, "draw fewer at a time, see `skip`")


def stacked_copy(model: nn.Module, params: Params) -> nn.Module:
    """A copy of a module whose tensors carry the member dimension, under the same names.

    Tensors that the module holds in several places stay one.

    >>> from weightsym import params as P
    >>> net = nn.Linear(2, 1)
    >>> copy = P.stacked_copy(net, P.populate(net, 4))
    >>> {name: tuple(p.shape) for name, p in copy.named_parameters()}
    {'weight': (4, 1, 2), 'bias': (4, 1)}
    """
    result = copy.deepcopy(model)
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

"""New weights for many copies of a network at once."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from weightsym.devices import elsewhere, random_numbers

__all__ = ["block_of", "draw_blocks", "undrawn"]

_NUMBERS, _MOST = 2**16, 256


def _resettable(module: nn.Module) -> Iterator[nn.Module]:
    """Submodules that can draw their parameters anew."""
    names = ("reset_parameters", "_reset_parameters")
    return (m for m in module.modules() if any(callable(getattr(m, n, None)) for n in names))


def block_of(model: nn.Module, state: Mapping[str, Tensor]) -> int:
    """Choose how many copies are drawn at once: one if they are large, or ``vmap`` draws wrongly.

    It depends on nothing but the network, so that a copy is the same whatever else is drawn.
    """
    size = sum(t.numel() for t in state.values())
    block = min(_MOST, _NUMBERS // max(1, size))
    if block < 2:
        return 1
    with random_numbers(elsewhere(model.parameters())):
        one_by_one = [dict(_reset(copy.deepcopy(model), state)) for _ in range(2)]
        try:
            together = _vmapped(model, state, 3)
        except (RuntimeError, ValueError, TypeError, NotImplementedError):
            return 1
    differ = (_varies(torch.stack([a[n] for a in one_by_one])) for n in state)
    return block if list(differ) == [_varies(together[n]) for n in state] else 1


def draw_blocks(
    model: nn.Module, state: Mapping[str, Tensor], seeds: list[int], block: int
) -> dict[str, Tensor]:
    """Copies of the state with new weights, one block for each seed, as a stack."""
    blocks, network = [], copy.deepcopy(model)
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
    """Names of the weights that no ``reset_parameters`` owns, or that theirs leaves as they are.

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
        if id(p) not in owned
        or (_varies(state[name].flatten()) and torch.equal(drawn[name][0], state[name]))
    ]


def _reset(module: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    for child in _resettable(module):
        reset: Any = getattr(child, "reset_parameters", None) or child._reset_parameters
        reset()
    after = module.state_dict()
    return {name: after[name].detach() for name in state}


class _Anew(nn.Module):
    """A network whose forward pass draws its weights."""

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

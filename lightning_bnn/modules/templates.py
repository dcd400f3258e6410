"""The network that gives the computation: how it is taken over, and what went wrong in it."""

from __future__ import annotations

import copy
import traceback
from pathlib import Path

from torch import nn
from torch.nn.parameter import is_lazy

from lightning_bnn import params as P
from lightning_bnn.bank import find_prefix, read_state, strip_prefix

__all__ = ["fixed_names", "raised_by", "template_of"]


def template_of(network: nn.Module, start_from: str | None) -> nn.Module:
    """A copy of a network, with the weights of a checkpoint if one is named."""
    if not isinstance(network, nn.Module):
        raise ValueError(f"`network` must be a torch.nn.Module, got {type(network).__name__}.")
    if any(is_lazy(p) for p in network.parameters()):
        raise ValueError("`network` has lazy parameters: run one batch through it first.")
    if any(p.is_complex() for p in network.parameters()):
        raise ValueError("`network` has complex parameters, which have no posterior here.")
    template = copy.deepcopy(network)
    if start_from is not None:
        path, wanted = Path(start_from), P.of(template)
        if not path.is_file():
            raise ValueError(f"`start_from` {start_from} does not exist.")
        state, _ = read_state(path)
        prefix = find_prefix(path, state, wanted, None)
        template.load_state_dict(strip_prefix(state, prefix, list(wanted)), strict=False)
    return template


def fixed_names(template: nn.Module) -> set[str]:
    """Weights that are not trained, and buffers of modules none of whose weights are."""
    fixed = {name for name, p in template.named_parameters() if not p.requires_grad}
    for path, module in template.named_modules():
        own = list(module.parameters(recurse=False))
        if own and not any(p.requires_grad for p in own):
            prefix = f"{path}." if path else ""
            fixed |= {prefix + name for name, _ in module.named_buffers(recurse=False)}
    return fixed


def raised_by(error: BaseException, network: nn.Module) -> bool:
    """Whether an error comes out of the forward pass of a network."""
    modules = {id(module) for module in network.modules()}
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(id(frame.f_locals.get("self")) in modules for frame in frames)

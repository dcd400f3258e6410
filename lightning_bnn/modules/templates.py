"""The network that gives the computation: how it is taken over, and what went wrong in it."""

from __future__ import annotations

import copy
import traceback
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_bnn.methods.run import evaluation

__all__ = ["TemplateMode", "explaining_misfits", "fixed_names", "template_of"]


def template_of(network: nn.Module) -> nn.Module:
    """A copy of a network that can have a posterior."""
    if not isinstance(network, nn.Module):
        raise ValueError(f"`network` must be a torch.nn.Module, got {type(network).__name__}.")
    if any(is_lazy(p) for p in network.parameters()):
        raise ValueError("`network` has lazy parameters: run one batch through it first.")
    if any(p.is_complex() for p in network.parameters()):
        raise ValueError("`network` has complex parameters, which have no posterior here.")
    try:
        return copy.deepcopy(network)
    except RuntimeError as error:
        if "graph leaves" not in str(error):
            raise
        raise ValueError(
            "`network` holds weights that are computed from others by a hook: take the one of "
            "torch.nn.utils.parametrizations (weight_norm, spectral_norm) instead."
        ) from error


def fixed_names(template: nn.Module) -> set[str]:
    """Weights that are not trained, and buffers of modules none of whose weights are."""
    fixed = {name for name, p in template.named_parameters() if not p.requires_grad}
    for path, module in template.named_modules():
        weights = list(module.parameters(recurse=False))
        if weights and not any(p.requires_grad for p in weights):
            prefix = f"{path}." if path else ""
            fixed |= {prefix + name for name, _ in module.named_buffers(recurse=False)}
    return fixed


class TemplateMode:
    """Training or evaluation of a template, which is no registered part of the module that runs it.

    Args:
        template: whose mode is set.
        network: what it is a copy of; what is frozen there in evaluation mode stays so.
    """

    def __init__(self, template: nn.Module, network: nn.Module) -> None:
        self.template = template
        self.frozen = [m for m in template.modules() if network.training and not m.training]

    def follow(self, training: bool) -> None:
        """Take the mode of the module that runs the template."""
        if self.template.training != training:
            self.template.train(training)
            for module in self.frozen if training else ():
                module.eval()

    def evaluation(self, training: bool) -> AbstractContextManager[None]:
        """Evaluation mode for predictions, whatever the mode: a fit leaves that of training behind.

        Statistics of the examples at hand would be used, and learnt, otherwise.
        """
        self.follow(training)
        return evaluation(self.template)


@contextmanager
def explaining_misfits(network: nn.Module, inputs: Sequence[Any]) -> Iterator[None]:
    """Say which inputs a network does not take, instead of what torch has against them.

    Args:
        network: is run meanwhile.
        inputs: what it is given.
    """
    try:
        yield
    except RuntimeError as error:
        wrong = _misfit(error, inputs)
        if wrong is None or not _raised_by(error, network):
            raise
        raise ValueError(f"{type(network).__name__} does not take {wrong}.") from error


def _misfit(error: BaseException, inputs: Sequence[Any]) -> str | None:
    """Quote what torch has against the inputs, if it is their type or their shape.

    Args:
        error: what a network has raised.
        inputs: what it was given.
    """
    tensors = [x for x in inputs if isinstance(x, Tensor)]
    first = (str(error).strip().splitlines() or [""])[0].rstrip(".")
    if any(word in first for word in ("dtype", "scalar type", "Input type")):
        types = ", ".join(str(x.dtype) for x in tensors)
        hint = "" if all(x.is_floating_point() for x in tensors) else "; pass `x.float()`"
        return f"inputs of type {types}: {first}{hint}"
    if any(word in str(error) for word in ("shape", "size")):
        return f"inputs of shape {', '.join(str(tuple(x.shape)) for x in tensors)}: {first}"
    return None


def _raised_by(error: BaseException, network: nn.Module) -> bool:
    """Check whether an error comes out of the forward pass of a network."""
    modules = {id(module) for module in network.modules()}
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(id(frame.f_locals.get("self")) in modules for frame in frames)

"""Tell whether a forward asks for its mode: where it does not, it trains as it evaluates."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

__all__ = ["ModeReads"]


class ModeReads:
    """Watches the attribute `training` while a forward runs.

    Attributes:
        asked: whether the mode may matter: something has read it, or could do so unseen.
    """

    def __init__(self, model: nn.Module) -> None:
        self.asked = any(map(_reads_unseen, model.modules())) or bool(
            model._forward_hooks or model._forward_pre_hooks  # they run outside the forward
        )

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Every module answers as before, and is seen to do so."""

        def read(module: nn.Module) -> Any:
            self.asked = self.asked or not _drops_nothing(module)
            return vars(module)["training"]

        def write(module: nn.Module, value: Any) -> None:
            vars(module)["training"] = value

        watched_property = property(read, write)
        if self.asked or "training" in vars(nn.Module):  # someone else watches
            self.asked = True
            yield
            return
        nn.Module.training = watched_property  # type: ignore[assignment]  # an attribute of every instance
        try:
            yield
        finally:
            del nn.Module.training


def _reads_unseen(module: nn.Module) -> bool:
    """Whether a module may know its mode in another way than by reading `training` in Python."""
    overrides = type(module).train is not nn.Module.train or type(module).eval is not nn.Module.eval
    hidden = any("training" in vars(c) for c in type(module).__mro__ if c is not nn.Module)
    return overrides or hidden or isinstance(module, torch.jit.ScriptModule)


def _drops_nothing(module: nn.Module) -> bool:
    """A dropout with probability zero gives what it gets in both modes, and so does attention."""
    if type(module) is nn.MultiheadAttention:
        return module.dropout == 0
    return isinstance(module, nn.modules.dropout._DropoutNd) and module.p == 0

"""What was found out about networks goes with their copies."""

from __future__ import annotations

import copy
import weakref
from typing import Any

from torch import nn

__all__ = ["copied", "known_of"]

_KNOWN: weakref.WeakKeyDictionary[nn.Module, dict[Any, Any]] = weakref.WeakKeyDictionary()


def known_of(model: nn.Module) -> dict[Any, Any]:
    """What is known of a network, to read and to add to.

    Args:
        model: the network.
    """
    return _KNOWN.setdefault(model, {})


def copied(model: nn.Module) -> nn.Module:
    """A copy of a network that knows what is known of the network, also later.

    Args:
        model: what to copy.
    """
    result = copy.deepcopy(model)
    _KNOWN[result] = known_of(model)
    return result

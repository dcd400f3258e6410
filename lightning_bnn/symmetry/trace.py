"""`discover`: read the graph of a module, follow its channels, return the symmetries."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from torch import nn

from lightning_bnn.symmetry.export import UnsupportedModel, export, to_network
from lightning_bnn.symmetry.groups import Frozen, Symmetries
from lightning_bnn.symmetry.interpreter import Tracer
from lightning_bnn.symmetry.layer_rules import layer_rules
from lightning_bnn.symmetry.refutation import refute
from lightning_bnn.symmetry.rules import RULES, Rule

__all__ = ["discover"]

_log = logging.getLogger(__name__)


def discover(
    model: nn.Module,
    *example: Any,
    batch_norm: Literal["carrier", "eval"] = "carrier",
    rules: Mapping[str, Rule] | None = None,
) -> Symmetries:
    """Find the permutations, positive scalings and sign flips of a network that keep its function.

    The graph of the network is read from `torch.export`; every activation carries the labels of its
    channels, shape operations are executed on the labels, all others tie them, and connected
    channels form the groups. What is not understood is held fixed and listed in ``.frozen``. The
    result is checked numerically, at random weights, before it is returned.

    Args:
        model: any module; it is left untouched.
        *example: example inputs, as the module takes them; they are moved to its device and type.
        batch_norm: ``"carrier"`` keeps the weights before a batch norm and lets its gain carry the
            scale (exact in training and evaluation); ``"eval"`` treats batch norm as a fixed affine
            map (exact in evaluation only).
        rules: how to treat further operations, by name (``"mylib.op"``, ``"cumsum"``); see
            `lightning_bnn.symmetry.rules`.

    Raises:
        UnsupportedModel: the network cannot be traced, or a rule given by ``rules`` breaks its
            function.
        ValueError: the example does not fit the network.
    """
    if batch_norm not in ("carrier", "eval"):
        raise ValueError(f"`batch_norm` must be 'carrier' or 'eval', got {batch_norm!r}.")
    if not isinstance(model, nn.Module):
        raise ValueError(f"`model` must be a torch.nn.Module, got {type(model).__name__}.")
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise UnsupportedModel(f"{type(model).__name__} only wraps a network: pass `model.module`.")
    example = to_network(model, example)
    own = {_bare(name): rule for name, rule in (rules or {}).items()}
    tracer = Tracer(model, {**RULES, **layer_rules(batch_norm), **own})
    was_training = [m for m in model.modules() if m.training]
    try:
        model.eval()
        tracer.read(export(model, example))
        if tracer.unread_parameters():
            _read_training_graph(tracer, model, example)
        for name in own.keys() - tracer.operations:
            _log.warning("discover: the network has no operation %r; its rule is not used.", name)
        symmetries = replace(tracer.result(), batch_norm=batch_norm)
        return refute(model, symmetries, example, custom_rules=bool(rules))
    finally:
        for module in was_training:
            module.training = True


def _bare(name: str) -> str:
    """``aten.relu.default`` is ``relu``, ``mylib.op.default`` is ``mylib.op``."""
    parts = name.replace("::", ".").split(".")
    return parts[1] if parts[0] == "aten" else ".".join(parts[:2])


def _read_training_graph(tracer: Tracer, model: nn.Module, example: tuple[Any, ...]) -> None:
    """Heads that only exist in training constrain the channels they read."""
    model.train()
    try:
        tracer.read(export(model, example))
    except (UnsupportedModel, ValueError):
        for name in tracer.unread_parameters():
            tracer.frozen.append(
                Frozen(
                    "parameter", name, "", "not used in evaluation; training could not be traced"
                )
            )
    finally:
        model.eval()

"""`discover`: trace a module, read its groups by dimensional analysis, verify them."""

from __future__ import annotations

import gc
import logging
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

from torch import nn

from weightsym.discovery.cache import (
    Operations,
    key_of,
    operations_of,
    recall,
    remember,
    with_numbers,
)
from weightsym.discovery.description import read_graphs, reasons, symmetries_of
from weightsym.discovery.dimensions.program import Rule
from weightsym.discovery.example import longer_graphs, trace_with_two_tokens, two_rows
from weightsym.discovery.refutation import refute
from weightsym.groups.symmetries import Symmetries
from weightsym.networks.forward import (
    Inputs,
    UnsupportedModel,
    check_filled,
    on_network,
    structural_copy,
)
from weightsym.networks.shared_tensors import owners

_log = logging.getLogger(__name__)


def discover(
    model: nn.Module,
    *example: Any,
    batch_norm: Literal["carrier", "eval"] = "carrier",
    rules: Mapping[str, Rule] | None = None,
    explain: str | None = None,
    **named: Any,
) -> Symmetries:
    r"""Find the permutations, positive scalings and sign flips of a network that keep its function.

    .. math:: f(g\, \theta, x) = f(\theta, x) \quad \text{for all } x \text{ and every } g

    The graphs of the network, in evaluation and in training, are read from `torch.export`, and
    read like formulas of physics: every tensor has units, sums need equal ones, products multiply
    them, and functions of single numbers are measured. What may change its units without a change
    of the outputs is a symmetry. What is not understood is held fixed and listed in ``.frozen``.
    The result is checked numerically, at random weights, before it is returned; ``.unchecked`` says
    where that was not possible, ``.evaluation_only`` where the network could not be read in
    training. A network that does what one of an earlier call did is not read again.

    Args:
        model: any module; it is left untouched. Its parameters may be on the meta device.
        *example: example inputs, as the module takes them; they are moved to its device and type.
            Of a batch, the first two rows are used.
        batch_norm: ``"carrier"`` keeps the weights before a batch norm and lets its gain carry the
            scale (exact in training and evaluation); ``"eval"`` treats batch norm as a fixed affine
            map (exact in evaluation only).
        rules: what operations of others do, by name (``"mylib.op"``): a function of torch that
            computes the same, or ``"pointwise"`` for a function of single numbers.
        explain: name of a tensor. The operations that tie its units to those of others, or hold
            them, are printed with their lines in the code of the network.
        **named: example inputs by name, such as ``mask=mask``.

    Raises:
        UnsupportedModel: the network cannot be traced, or a rule given by ``rules`` breaks its
            function.
        ValueError: the example does not fit the network, or no output depends on the tensor that
            is to be explained.

    >>> import torch
    >>> net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))
    >>> table = str(discover(net, torch.randn(8, 2)))
    >>> print(*table.splitlines()[:3], sep="\n")
    kind          units  groups  acts on
    permutation       3       1  0.weight
    scaling           3       1  0.weight
    """
    _check_model(model, batch_norm)
    model = model if _has_numbers(model) else structural_copy(model)
    inputs = on_network(model, Inputs(example, named))
    check_filled(inputs)
    custom = {_bare(name): _checked(name, rule) for name, rule in (rules or {}).items()}
    with _in_evaluation(model):
        rows, operations, keys = _rows_and_keys(model, inputs, batch_norm)
        keys = [] if custom or explain else keys
        cached = recall(keys)
        exact = [] if cached is not None else with_numbers(keys, model, inputs)
        cached = recall(exact) if cached is None else cached
        if cached is not None:
            return _announced(cached)
        graphs, inputs = trace_with_two_tokens(model, rows, batch_norm, operations.dropouts)
        reading, groups = read_graphs(model, graphs, batch_norm, custom, explain is not None)
        if reading.idle:  # a longer example may have second steps, with states that are not zero
            for others, longer in longer_graphs(model, inputs, batch_norm):
                again = read_graphs(model, others, batch_norm, custom)
                if len(again[0].idle) < len(reading.idle):
                    (reading, groups), graphs, inputs = again, others, longer
                    break
        if explain is not None:
            print(*reasons(reading, owners(model).get(explain, explain)), sep="\n")
        symmetries, unreached = symmetries_of(model, graphs, reading, groups)
        symmetries = replace(
            symmetries, batch_norm=batch_norm, evaluation_only=graphs.evaluation_only
        )
        symmetries = refute(model, symmetries, graphs, inputs, bool(custom))
        symmetries = _with_what_is_not_reached(symmetries, unreached)
        if inputs is rows:  # keys do not see longer examples
            remember(exact if symmetries.unchecked else keys, symmetries)
    return _announced(symmetries)


def _announced(symmetries: Symmetries) -> Symmetries:
    """Warn about what was not checked."""
    if symmetries.unchecked:
        extent = "nothing" if math.isnan(symmetries.error) else "not everything"
        _log.warning("discover: %s was checked: %s.", extent, symmetries.unchecked)
    return symmetries


def _rows_and_keys(
    model: nn.Module, inputs: Inputs, batch_norm: str
) -> tuple[Inputs, Operations, list[str]]:
    """Return the rows to read, what a network does with them, and the keys of these and of all."""
    operations = operations_of(model, inputs)
    keys = [key_of(model, operations, batch_norm)]
    rows = inputs if recall(keys) else two_rows(model, inputs)
    if rows is not inputs:
        operations = operations_of(model, rows)
        keys.append(key_of(model, operations, batch_norm))
    return rows, operations, keys


@contextmanager
def _in_evaluation(model: nn.Module) -> Iterator[None]:
    """Switch to evaluation mode in a context, then restore modes and random states.

    Meanwhile Python does not look for garbage, which takes long beside the many parts of graphs.
    """
    was_training, state = [m for m in model.modules() if m.training], random.getstate()
    collects = gc.isenabled()
    try:
        gc.disable()
        _evaluate(model)
        yield
    finally:
        if collects:
            gc.enable()
        random.setstate(state)  # a forward may drop layers by it
        for module in was_training:
            module.training = True


def _evaluate(model: nn.Module) -> None:
    try:
        model.eval()
    except NotImplementedError as error:  # `ExportedProgram.module()` has one mode only
        raise UnsupportedModel(
            f"{type(model).__name__} is or contains an exported program, whose mode cannot be "
            "changed: pass the original module."
        ) from error


def _with_what_is_not_reached(symmetries: Symmetries, names: Sequence[str]) -> Symmetries:
    """Report unread tensors, whose channels another example may tie to moving ones."""
    if not names or not symmetries.touched:
        return symmetries
    reason = (
        f"no output depends on {', '.join(names)} at this example (if another task or an optional "
        "input reads them, pass a wrapper whose forward returns the outputs of all)"
    )
    return replace(symmetries, unchecked="; ".join(filter(None, (symmetries.unchecked, reason))))


def _has_numbers(model: nn.Module) -> bool:
    return not any(p.is_meta for p in model.parameters())


def _check_model(model: nn.Module, batch_norm: str) -> None:
    if batch_norm not in ("carrier", "eval"):
        raise ValueError(f"`batch_norm` must be 'carrier' or 'eval', got {batch_norm!r}.")
    if not isinstance(model, nn.Module):
        class_name = type(model).__name__
        hint = ": pass the original module" if class_name == "ExportedProgram" else ""
        raise ValueError(f"`model` must be a torch.nn.Module, got {class_name}{hint}.")
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise UnsupportedModel(f"{type(model).__name__} only wraps a network: pass `model.module`.")
    complex_ = [n for n, p in model.named_parameters() if p.is_complex()]
    if complex_:
        raise UnsupportedModel(
            f"{type(model).__name__} has complex parameters ({complex_[0]!r}): store real and "
            "imaginary parts as real parameters, and combine them with `torch.view_as_complex`."
        )
    empty = [n for n, t in model.named_buffers() if t.is_meta]
    if empty:
        raise UnsupportedModel(
            f"{type(model).__name__} has no values in {empty[0]!r} (it is on the meta device), "
            "which is read as a constant: only parameters can be on the meta device."
        )


def _checked(name: str, rule: Any) -> Rule:
    if callable(rule) or rule == "pointwise":
        return rule
    raise ValueError(
        f"`rules[{name!r}]` must be an equivalent function of torch, or 'pointwise', got {rule!r}."
    )


def _bare(name: str) -> str:
    """Shorten a name: ``aten.relu.default`` to ``relu``, ``mylib.op.default`` to ``mylib.op``."""
    parts = name.replace("::", ".").split(".")
    return parts[1] if parts[0] == "aten" else ".".join(parts[:2])

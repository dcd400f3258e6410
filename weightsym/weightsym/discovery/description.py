"""From the graphs of a network to its `Symmetries`, by dimensional analysis."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import Node

from weightsym.discovery.dimensions.nodes import ancestors, operation_of
from weightsym.discovery.dimensions.program import Rule, decompose
from weightsym.discovery.dimensions.reading import Reading
from weightsym.discovery.dimensions.reports import report
from weightsym.discovery.dimensions.result import groups_of
from weightsym.discovery.dimensions.shifts import shifts_of
from weightsym.discovery.dimensions.system import System
from weightsym.discovery.dimensions.values import Ints
from weightsym.discovery.export import Graphs
from weightsym.discovery.graph import Graph
from weightsym.groups.symmetries import Frozen, SoftmaxShift, Symmetries
from weightsym.networks.shared_tensors import named_tensors, overlapping, owners

_log = logging.getLogger(__name__)

_NO_CHANNELS = (
    "its outputs are inputs, outputs or constants of the network, or are added to them, or no "
    "two of its channels are used alike"
)


def symmetries_of(
    model: nn.Module, graphs: Graphs, reading: Reading, groups: dict[str, Any]
) -> tuple[Symmetries, list[str]]:
    """Build the `Symmetries` from the groups of a reading. Also list the unread tensors."""
    first = owners(model)
    state = model.state_dict()
    shapes = {first.get(n, n): t.shape for n, t in state.items() if isinstance(t, Tensor)}
    overlaps, used = overlapping(named_tensors(model)), set(reading.parameters)
    groups["axes"], groups["shifts"], cut = shifts_of(
        reading.programs, groups["axes"], {first[n] for n in overlaps}
    )
    unsearched = [*groups.pop("frozen"), *([Frozen("shift", "", "", cut)] if cut else [])]
    numbers = (n for n, p in model.named_parameters() if p.is_floating_point() or p.is_complex())
    unread = [n for n in numbers if first[n] not in used]
    statistics = [
        n for n, b in model.named_buffers()
        if n.rpartition(".")[2].startswith("running_") and b.is_floating_point()
    ]  # fmt: skip
    met = graphs.read | graphs.mutable
    unreached = unread + reading.idle + [n for n in statistics if not {n, first[n]} & met]
    symmetries = Symmetries(
        **groups,
        frozen=tuple(dict.fromkeys([*_frozen(reading), *unsearched, *_in_parts(overlaps, used)]))
        or _why_nothing_moves(model, groups, used),
        softmax_shift=_shift(graphs.evaluation, first),
        weights=_weights(model, reading, groups, unread, first),
        shapes=shapes,
        aliases={n: f for n, f in first.items() if n != f},
        constants={first.get(n, n): t.detach().clone() for n, t in _constants(graphs, used, first)},
    )
    return symmetries, unreached


def _name_unused(rules: Mapping[str, Rule], programs: Iterable[ExportedProgram]) -> None:
    """Warn about rules for operations that do not occur."""
    nodes = [n for p in programs for n in p.graph.nodes if n.op == "call_function"]
    for name in rules.keys() - set(map(operation_of, nodes)):
        _log.warning("discover: the network has no operation %r; its rule is not used.", name)


def read_graphs(
    model: nn.Module,
    graphs: Graphs,
    batch_norm: str,
    rules: Mapping[str, Rule],
    both: bool = False,
) -> tuple[Reading, dict[str, Any]]:
    """Read the network in both modes, with the buffers that it writes, and solve for groups.

    Args:
        model: the network.
        graphs: what it computes.
        batch_norm: as `discover` takes it.
        rules: of the user.
        both: read both modes even if all that one says is said by the other.
    """
    programs = [graph.program for graph in _told_apart(graphs, both)]
    _name_unused(rules, programs)

    shared = {owners(model)[n] for n in overlapping(named_tensors(model))}

    def reading(preserved: frozenset[str]) -> tuple[Reading, dict[str, Any]]:
        """Read the network, preserving the values that it writes to some buffers."""
        pointwise = [name for name, rule in rules.items() if rule == "pointwise"]
        parts = (decompose(model, p, graphs.mutable, preserved, rules) for p in programs)
        network = Reading.of(*parts, is_fixed=batch_norm == "eval", pointwise=pointwise)
        for name in shared & network.parameters.keys():
            for factor in network.parameters[name].factors:
                network.system.fix(factor)
        return network, groups_of(network)

    first = reading(graphs.read)
    if graphs.only_written:  # what nothing reads moves along, if that takes nothing away
        more = reading(graphs.read | graphs.only_written)
        first = more if _sizes(*more) == _sizes(*first) else first
    return first


def _sizes(reading: Reading, groups: Mapping[str, Any]) -> tuple[object, ...]:
    """Summarise groups by their sizes, for comparison."""
    blocks = sorted((g.units, g.kind) for g in groups["permutations"])
    matrices = sorted((g.kind, g.spaces, g.size) for g in groups["linear"])
    factors = [sum(g.units for g in groups[field]) for field in ("scalings", "signs")]
    return blocks, matrices, factors, [*reading.unfollowed.values()]


def _told_apart(graphs: Graphs, both: bool) -> list[Graph]:
    """Return the graph in evaluation, and that in training if they differ.

    If it only drops more, it alone: where some numbers are dropped, what holds for all of them has
    to hold for each.
    """
    evaluation, training = graphs.evaluation, graphs.training
    if training is None or evaluation.says_the_same(training):
        return [evaluation]
    alone = not both and training.only_drops(evaluation)
    return [training] if alone else [evaluation, training]


def _frozen(reading: Reading) -> list[Frozen]:
    operations = reading.operations
    return [report(operations[k], why) for k, why in reading.unfollowed.items()]


def _in_parts(overlaps: Mapping[str, str], used: set[str]) -> list[Frozen]:
    """List tensors that share memory with others in part or in another layout."""
    return [
        Frozen("parameter", name, "", f"shares its memory in part, or transposed, with {whole}")
        for name, whole in overlaps.items() if name in used
    ]  # fmt: skip


def _why_nothing_moves(
    model: nn.Module, groups: dict[str, Any], used: set[str]
) -> tuple[Frozen, ...]:
    """Return a reason for every weight if a supported network has no symmetry at all."""
    if any(groups[field] for field in ("permutations", "scalings", "signs", "linear", "shifts")):
        return ()
    parameters = [n for n, _ in model.named_parameters() if n in used]
    nothing = Frozen("network", "", "", "its outputs depend on no weight")
    return tuple(Frozen("parameter", n, "", _NO_CHANNELS) for n in parameters) or (nothing,)


def _constants(graphs: Graphs, used: set[str], first: dict[str, str]) -> list[tuple[str, Tensor]]:
    """List the persistent buffers that act only through their values."""
    live = ancestors(graphs.evaluation.results)
    return [
        (s.name, s.tensor)
        for n, s in graphs.evaluation.sources.items()
        if n in live and s.kind == "buffer" and s.persistent and first[s.name] not in used
    ]


def _weights(
    model: nn.Module, reading: Reading, groups: dict[str, Any], unread: list[str],
    first: dict[str, str],
) -> tuple[str, ...]:  # fmt: skip
    """List the parameters that count towards the mass: all but biases."""
    biases = {a.tensor for a in groups["axes"] if a.role == "bias"}
    biases |= {n for n in unread if n.endswith("bias")}
    return tuple(
        n
        for n, p in model.named_parameters()
        if p.is_floating_point() and first[n] == n and n not in biases
    )


def _shift(graph: Graph, first: dict[str, str]) -> SoftmaxShift | None:
    """Return the layer that writes the logits, if none of its tensors is shared."""

    def name_of(node: Node) -> str | None:
        source = graph.sources.get(node)
        return source.name if source is not None and source.kind == "parameter" else None

    shift = find_shift(graph.results, name_of)
    shared = {f for n, f in first.items() if n != f}
    if shift is None or shared & {first.get(n, n) for n in (shift.weight, shift.bias) if n}:
        return None
    return shift


# ------------------------------------------------------------ shifts of logits
_KEEP_LOGITS = frozenset(
    "view reshape flatten squeeze dropout softmax log_softmax contiguous clone alias".split()
)
"""What may follow the layer that writes the logits without a change of its symmetry."""


def find_shift(results: list[Node], name_of: Callable[[Node], str | None]) -> SoftmaxShift | None:
    """Return the layer that writes the logits, if only shape operations and softmax follow it.

    Its tensors must be used nowhere else, and all its outputs must see the same inputs.

    Args:
        results: what the network returns.
        name_of: gives the name of a parameter that a node stands for as a whole.
    """
    node: Any = results[0] if len(results) == 1 else None
    while node is not None and node.op == "call_function" and operation_of(node) in _KEEP_LOGITS:
        node = node.args[0] if isinstance(node.args[0], Node) else None
    if node is None or node.op != "call_function":
        return None
    operation, tensors = operation_of(node), [n for n in node.args[1:3] if isinstance(n, Node)]
    grouped = operation == "conv2d" and len(node.args) > 6 and node.args[6] != 1
    names = [name for n in tensors if len(n.users) == 1 and (name := name_of(n)) is not None]
    if operation not in ("linear", "conv2d") or grouped or not names or len(names) < len(tensors):
        return None
    if tensors[0].meta["val"].shape[0] < 2:
        return None
    return SoftmaxShift(
        names[0], names[1] if len(names) > 1 else None, -1 if operation == "linear" else 1
    )


# ------------------------------------------------------------ why a tensor stays
_UNNAMED = ("others",)


def reasons(reading: Reading, tensor: str) -> list[str]:
    """Explain which operations tie the units of a tensor to others, or fix them.

    Every line names an axis, what is said about its units, and the operation that says so, with its
    line in the code of the network.
    """
    parameters = reading.parameters
    if tensor not in parameters:
        raise ValueError(
            f"no output depends on a tensor {tensor!r}; they depend on {sorted(parameters)}."
        )
    lines = []
    for factor in parameters[tensor].factors:
        is_own = np.zeros(reading.system.count, bool)
        is_own[factor.labels.numpy()] = True
        axis = ", ".join(map(str, sorted(factor.dims))) or "all"
        lines += [f"{tensor}, axis {axis}: {text}" for text in _statements(reading, is_own)]
    return list(dict.fromkeys(lines))


def _statements(reading: Reading, is_own: NDArray[np.bool_]) -> Iterator[str]:
    """Describe, by operation, the tensors with tied units, scales and signs, and what is fixed."""
    partners: dict[int, dict[tuple[str, ...], dict[str, None]]] = {}
    for origin, relation, rows in _rows(reading.system):
        selected = rows[is_own[rows].any(1) & (rows >= 0).all(1)]
        if len(selected):
            others = _tensors_of(reading, selected[~is_own[selected]]) or _UNNAMED
            key = others if rows.shape[1] > 1 else ()
            partners.setdefault(origin, {}).setdefault(key, {})[relation] = None
    sentences: set[str] = set()
    for origin in sorted(partners):
        texts = [
            f"{_listed(kinds)} {'go with ' + _listed(others) if others else 'are held'}"
            for others, kinds in partners[origin].items()
            if others != _UNNAMED or all(partner in ((), _UNNAMED) for partner in partners[origin])
        ]
        text = f"{'; '.join(texts)}: {_operation(reading, origin)}"
        if text not in sentences:
            sentences.add(text)
            yield text + " in training" * _is_in_training(reading, origin)


def _rows(system: System) -> Iterator[tuple[int, str, Ints]]:
    """Yield all constraints: the operation that causes one, its type, and its labels."""
    for tie in system.ties:
        yield tie.origin, "units", tie.pairs
    for equation in system.scales:
        yield equation.origin, "scales", equation.labels
    for equation in system.signs:
        yield equation.origin, "signs", equation.labels
    for labels, _, origin in system.colours:
        yield origin, "places", labels[:, None]


def _listed(words: Iterable[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def _tensors_of(reading: Reading, labels: Ints) -> tuple[str, ...]:
    """Return the tensors that contain some labels."""
    return tuple(
        name
        for name, parameter in reading.parameters.items()
        if any(np.isin(f.labels.numpy(), labels).any() for f in parameter.factors)
    )


def _is_in_training(reading: Reading, origin: int) -> bool:
    operations, first = reading.operations, reading.programs[0]
    is_operation = 0 <= origin < len(operations)
    return is_operation and operations[origin].graph is not first.graph


def _operation(reading: Reading, origin: int) -> str:
    operations = reading.operations
    if origin < 0:
        return "its role as a statistic"
    if origin >= len(operations):
        return "what the network returns and writes"
    where = report(operations[origin], "")
    module = f" in `{where.module}`" if where.module else ""
    return f"{where.operation}{module}{f' at {where.line}' if where.line else ''}"

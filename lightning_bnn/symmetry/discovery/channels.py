"""Follow the channels of a network through its graphs, from inputs and weights to outputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from lightning_bnn.symmetry.discovery.constants import Followed, follow_constants
from lightning_bnn.symmetry.discovery.export import Graphs
from lightning_bnn.symmetry.discovery.graph import Graph, Source, ancestors
from lightning_bnn.symmetry.discovery.interpreter import Interpreter
from lightning_bnn.symmetry.discovery.logits import find_shift
from lightning_bnn.symmetry.discovery.parts_of_parameters import parts_to_follow, taken_apart
from lightning_bnn.symmetry.discovery.routers import Router, routers
from lightning_bnn.symmetry.discovery.twin_channels import (
    TwinChannels,
    channels_of_twins,
    in_both,
)
from lightning_bnn.symmetry.discovery.twins import find_twins
from lightning_bnn.symmetry.discovery.values import unknown
from lightning_bnn.symmetry.groups import Frozen, SoftmaxShift
from lightning_bnn.symmetry.rules.broadcasting import unify
from lightning_bnn.symmetry.rules.constraints import Rule
from lightning_bnn.symmetry.rules.factored import as_value
from lightning_bnn.symmetry.rules.gathered import as_chosen
from lightning_bnn.symmetry.rules.labels import (
    Constant,
    Factored,
    Unsupported,
    Weight,
    is_operand,
    operation_name,
)
from lightning_bnn.symmetry.shared_tensors import named_tensors, overlapping, owners

__all__ = ["Channels", "follow_channels"]


def follow_channels(
    model: nn.Module,
    graphs: Graphs,
    rules: Mapping[str, Rule],
    only_written: bool = False,
    by_parts: bool = True,
) -> Channels:
    """What the graphs say; heads that only exist in training constrain what they read, too.

    Args:
        model: the network.
        graphs: what it computes.
        rules: how operations treat channels.
        only_written: whether buffers that are written, but not read, move with what is written.
        by_parts: whether parameters that are read part by part are followed so.
    """
    channels = Channels(
        model, graphs, rules, graphs.only_written if only_written else frozenset(), by_parts
    )
    channels.follow(graphs.evaluation)
    unread = channels.unread_parameters()
    if graphs.training is None:
        reason = "not used in evaluation; training could not be traced"
        channels.frozen.extend(Frozen("parameter", name, "", reason) for name in unread)
    elif (unread or not graphs.evaluation_only) and not graphs.evaluation.says_the_same(
        graphs.training
    ):
        channels.follow(graphs.training)
    return channels


class Channels:
    """The channels of a network, as its graphs connect them.

    Attributes:
        system: the ties between channels, as the rules of the operations state them.
        frozen: what was not understood.
        owners: the first name of every tensor, by each of its names.
        constants: buffers of which only the values count.
        shift: the layer that writes the logits.
        twins: branches that correspond in all graphs so far.
        routers: layers in front of a softmax in all graphs so far.
        parts: by name, parts of parameters that are followed as tensors of their own.
        constants_added: what may be added to biases and tables.
    """

    def __init__(
        self,
        model: nn.Module,
        graphs: Graphs,
        rules: Mapping[str, Rule],
        only_written: frozenset[str] = frozenset(),
        by_parts: bool = True,
    ) -> None:
        self.model, self.interpreter = model, Interpreter(rules)
        self.system, self.frozen = self.interpreter.system, self.interpreter.frozen
        self.owners = owners(model)
        self.mutable = {self.owners.get(n, n) for n in graphs.mutable}
        self.only_written = {self.owners.get(n, n) for n in only_written}
        self.buffers_that_matter = graphs.read | only_written
        self._buffers_met = graphs.read | graphs.mutable
        self.constants: dict[str, Tensor] = {}
        self.shift: SoftmaxShift | None = None
        self.twins: list[TwinChannels] | None = None
        self.routers: set[Router] | None = None
        self.constants_added = Followed()
        self._names_read: set[str] = set()
        self._overlapping = overlapping(named_tensors(model))
        for name, other in self._overlapping.items():
            reason = f"shares its memory with {other!r} in another layout: held fixed"
            self.system.conflicts[self.owners[name]] = reason
        both = [g for g in (graphs.evaluation, graphs.training) if g is not None]
        self.parts = parts_to_follow(both, self._sole(), self.mutable) if by_parts else {}

    def _sole(self) -> set[str]:
        """Tensors that have one name only, and share their memory with no other."""
        uses = Counter(self.owners.values())
        return {name for name, n in uses.items() if n == 1} - self._overlapping.keys()

    def unread_parameters(self) -> list[str]:
        """Parameters that no graph has used so far."""
        names = (name for name, _ in self.model.named_parameters())
        return [name for name in names if self.owners[name] not in self._names_read]

    def unreached(self) -> list[str]:
        """Parameters and running statistics on which no result depends in any mode."""
        statistics = [
            name
            for name, buffer in self.model.named_buffers()
            if name.rpartition(".")[2].startswith("running_") and buffer.is_floating_point()
        ]
        return self.unread_parameters() + [
            name for name in statistics if not {name, self.owners[name]} & self._buffers_met
        ]

    def follow(self, graph: Graph) -> None:
        """Follow the channels through one graph; what it returns must stay as it is."""
        whole, graph = graph, taken_apart(graph, self.parts)
        written = [w for w in graph.written if w[0] in self.buffers_that_matter]
        ends = [*graph.results, *(node for _, node in written)]
        live = ancestors(ends)
        inputs = {n: self._operand(n, s) for n, s in graph.sources.items() if n in live}
        values = self.interpreter.run(graph.module, inputs, ends)
        held = {self.parts[n].whole if n in self.parts else n for n in self.system.conflicts}
        follow_constants(self.constants_added, whole, self.owners, held)
        self._compare_parts(graph, values)
        for name, node in written:
            self._write(graph, name, node, values[node])
        for node in graph.results:
            for leaf in tree_leaves(values[node], is_leaf=is_operand):
                self.interpreter.freeze(leaf)
        shared = {first for name, first in self.owners.items() if name != first} | {*self.parts}

        def name_of(node: Node) -> str | None:
            value = values[node]
            whole = isinstance(value, Weight) and value.shape == value.full_shape
            return value.name if whole else None

        shift = find_shift(graph.results, name_of)
        if shift is not None and not shared & {shift.weight, shift.bias}:
            self.shift = self.shift or shift

    def _compare_parts(self, graph: Graph, values: Mapping[Node, Any]) -> None:
        """Branches that correspond in this graph, too, and layers in front of a softmax."""
        names = self._sole()
        in_front = routers(graph, names)
        self.routers = in_front if self.routers is None else self.routers & in_front
        found = find_twins(graph, names | self.parts.keys(), self.mutable)
        twins = channels_of_twins(self.system, found, self.interpreter.made, values)
        self.twins = twins if self.twins is None else in_both(self.twins, twins)

    def _write(self, graph: Graph, name: str, node: Node, value: Any) -> None:
        """What a forward leaves in a buffer must move as the buffer does."""
        source = node.args[0] if node.args else None
        if isinstance(source, Node) and "batch_norm" in operation_name(source):
            return  # its rule ties the statistics
        placeholder = graph.placeholder_of(name)
        before = self._operand(placeholder, graph.sources[placeholder])
        try:
            value = as_chosen(self.system, value)
            if isinstance(value, Factored):
                value = as_value(self.system, value)
            unify(self.system, *(self.system.labels(x) for x in (before, value)))
        except (Unsupported, RuntimeError):
            self.interpreter.freeze(before)
            self.interpreter.freeze(value)

    def _operand(self, node: Node, source: Source) -> Any:
        """What stands for an input of the graph."""
        value: Any = node.meta.get("val")
        if source.kind == "constant":
            return Constant(source.tensor)
        if source.kind == "input":
            return unknown(value)
        name = self.owners.get(source.name, source.name)
        if source.kind == "buffer":
            return self._buffer(name, source, value)
        self._names_read.add(self.parts[name].whole if name in self.parts else name)
        return Weight.whole(name, value.shape, is_buffer=False)

    def _buffer(self, name: str, source: Source, value: Tensor) -> Any:
        """State that moves with its channels, a constant, or what no action could reach."""
        tensor, changes = source.tensor, name in self.mutable
        if source.persistent and tensor.is_floating_point() and (changes or tensor.ndim == 1):
            return Weight.whole(name, value.shape, is_buffer=name not in self.only_written)
        if changes:
            return unknown(value)
        if source.persistent:
            self.constants[name] = tensor.detach().clone()
        return Constant(tensor)

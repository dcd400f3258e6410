"""One check: outputs at random weights, and the error that a set of groups makes in them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor, nn

from weightsym.comparison import Comparison, agree, tolerance_in, tolerance_of
from weightsym.discovery.draws import Pick
from weightsym.discovery.graph import Graph
from weightsym.discovery.random_weights import RandomWeights, perturbing
from weightsym.discovery.streaming import streamed_outputs
from weightsym.forward import Inputs, outputs
from weightsym.groups import Symmetries
from weightsym.verify import Motion, Read, covering_motions, log_probabilities, logit_shift

__all__ = ["Check"]

Run = Callable[[Read, torch.dtype | None], list[Tensor]]
_PERTURBED = 0.3
"""The size of the logarithms of the factors that make a network another one."""


class Check:
    """A network at random weights, and the error that a set of groups makes there.

    Attributes:
        run: from how weights are read, and a precision, to outputs.
        read: how the random weights are read.
        precision: in which they are moved; as they are where it is None.
        tolerance: the error that rounding explains.
        error_seen: what the last set of groups made.
    """

    def __init__(
        self,
        run: Run,
        weights: RandomWeights,
        tolerance: float,
        precision: torch.dtype | None = None,
        first: list[Tensor] | None = None,
    ) -> None:
        self.run, self.read = run, weights.read
        self.tolerance, self.precision = tolerance, precision
        self._first, self._touched = first, weights.sym.touched
        self.error_seen = 0.0

    @cached_property
    def outputs(self) -> list[Tensor]:
        """Outputs of the network at the random weights."""
        return self.run(self.read, self.precision)

    @cached_property
    def measured(self) -> tuple[list[Tensor], list[Tensor]]:
        """The outputs at the random weights and at perturbed ones, which need not be precise."""
        if self._first is None:
            return self.outputs, self._perturbed(self._touched, _PERTURBED)
        perturbed = perturbing(self.read, self._touched, _PERTURBED, None)
        return self._first, self.run(perturbed, None)

    @cached_property
    def sensitive(self) -> bool:
        """True if any output moves with the weights."""
        right, wrong = self.measured
        return Comparison.between(right, wrong, self.tolerance).sensitive

    @cached_property
    def measure(self) -> Comparison:
        """Measure how far wrong weights move every output."""
        right, wrong = self.measured
        return Comparison.between(self.outputs, wrong, self.tolerance, right)

    @classmethod
    def of_network(cls, network: nn.Module, inputs: Inputs, sym: Symmetries) -> Check:
        """By the forward of a network."""
        weights = RandomWeights(network, sym)

        def forward(tensors: Read, precision: torch.dtype | None) -> list[Tensor]:
            return outputs(network, weights.all_by(tensors), inputs)

        return cls(forward, weights, tolerance_of(weights.state))

    @classmethod
    def of_graph(
        cls, graph: Graph, inputs: Inputs, weights: RandomWeights, even: Pick | None = None,
        first: list[Tensor] | None = None,
    ) -> Check:  # fmt: skip
        """By an exported graph in float64, one weight after the other.

        If it is ``even``, one number stands for all draws of an operation. If the outputs of the
        network at the random weights are given as ``first``, those at perturbed weights are made in
        its precision, too.
        """

        def run(tensors: Read, precision: torch.dtype | None) -> list[Tensor]:
            return streamed_outputs(graph, inputs, weights.by_any_name(tensors), precision, even)

        return cls(run, weights, tolerance_in(torch.float64), torch.float64, first)

    def holds(self, sym: Symmetries, rounding: float) -> bool:
        """Tell whether two elements give the same, which is what was measured but for rounding.

        Args:
            sym: the groups.
            rounding: of the outputs that were measured.
        """
        right, wrong = self.measured
        first, two = covering_motions(sym, torch.Generator().manual_seed(2))
        old = self._moved(first)
        if not agree(right, old, rounding):
            return False
        if sym.softmax_shift is None:
            new = self._moved(two)
        else:
            logits = logit_shift(sym, torch.Generator().manual_seed(3))
            runs = (old, right, wrong, self._moved(replace(two, logits=logits)))
            old, right, wrong, new = (log_probabilities(out, sym) for out in runs)
        self.error_seen = Comparison.between(old, wrong, self.tolerance, right).error(new)
        return self.error_seen <= self.tolerance

    def error(self, sym: Symmetries) -> float:
        """Two elements that together move every unit and flip every sign."""
        if not self.sensitive:
            return 0.0
        first, two = covering_motions(sym, torch.Generator().manual_seed(2))
        self.error_seen = self.measure.error(self._moved(first))
        if self.error_seen > self.tolerance:
            return self.error_seen
        if sym.softmax_shift is not None:
            logits = logit_shift(sym, torch.Generator().manual_seed(3))
            second = self._error_of_probabilities(replace(two, logits=logits), sym)
        else:
            second = self.measure.error(self._moved(two))
        self.error_seen = max(self.error_seen, second)
        return self.error_seen

    def _moved(self, motion: Motion) -> list[Tensor]:
        return self.run(motion.reading(self.read, self.precision), self.precision)

    def _perturbed(self, names: frozenset[str], size: float) -> list[Tensor]:
        return self.run(perturbing(self.read, names, size, self.precision), self.precision)

    def _error_of_probabilities(self, motion: Motion, sym: Symmetries) -> float:
        runs = (self.outputs, *self.measured, self._moved(motion))
        old, right, wrong, new = (log_probabilities(out, sym) for out in runs)
        return Comparison.between(old, wrong, self.tolerance, right).error(new)

    def repeatable(self) -> bool:
        """Tell whether the same weights give the same outputs."""
        return self.measure.error(self.run(self.read, self.precision)) <= self.tolerance

    def raise_tolerance_to_noise(self) -> None:
        """Allow for a forward that computes in float32 inside, and for rounding in deep networks.

        Where a small change of the weights grows on the way to the outputs, so does rounding; up to
        1e-6 is believed, far below what a wrong group does. A batch norm over two examples, one
        after the other, lets rounding grow further, and with it what a wrong group does: there, up
        to 1e-4 is believed.
        """
        noise = self._growth(1e-9) * 1e-9
        if noise < 1e-5:
            self.tolerance = max(self.tolerance, 100 * noise)
        else:
            growth = max(self._growth(1e-12), noise * 1e9) if noise > 1e-2 else noise * 1e9
            rounding = torch.finfo(torch.float64).eps * growth
            believed = min(1e-6, 1000 * rounding), min(1e-4, 30 * rounding)
            self.tolerance = max(self.tolerance, *believed)

    def _growth(self, change: float) -> float:
        """Measure how many times larger a small change of the weights is in the outputs."""
        return self.measure.error(self._perturbed(frozenset(), change)) / change

    def with_true_shift(self, sym: Symmetries) -> Symmetries:
        """Drop the softmax shift unless it keeps the probabilities."""
        if sym.softmax_shift is None:
            return sym
        logits = logit_shift(sym, torch.Generator().manual_seed(3))
        error = self._error_of_probabilities(Motion(sym, logits=logits), sym)
        return sym if error <= max(self.tolerance, 1e-6) else replace(sym, softmax_shift=None)

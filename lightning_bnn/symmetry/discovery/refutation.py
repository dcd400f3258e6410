"""Inside `discover`: test groups at random weights, drop and report those that fail."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bnn import params as P
from lightning_bnn.params import Params
from lightning_bnn.symmetry.actions import multiply, permute
from lightning_bnn.symmetry.axis_actions import EVERY, Kind
from lightning_bnn.symmetry.comparison import Comparison, perturbed, tolerance_of
from lightning_bnn.symmetry.elements import random_scales, random_signs
from lightning_bnn.symmetry.forward import Inputs, UnsupportedModel, in_runnable_precision, outputs
from lightning_bnn.symmetry.groups import Frozen, PermutationGroup, Symmetries
from lightning_bnn.symmetry.mixing import mix_some, random_mixings
from lightning_bnn.symmetry.shifting import random_shifts, shift_some
from lightning_bnn.symmetry.verify import log_probabilities, random_shift

__all__ = ["refute"]

_NOTHING_MOVES = "the outputs do not depend on the weights at this example (is it zero?)"


@torch.no_grad()
def refute(
    model: nn.Module, sym: Symmetries, inputs: Inputs, custom_rules: bool, training: Inputs | None
) -> Symmetries:
    """Test at random weights; drop and report groups that fail, refuse a user's wrong rule.

    Args:
        model: the network, in evaluation mode.
        sym: what the graphs say.
        inputs: to run it on.
        custom_rules: whether the user has given rules.
        training: inputs for training mode, in which scalings and signs are tested, too; those of
            permutations meet other random numbers there.
    """
    sym = _refuted(model, sym, inputs, custom_rules)
    factors = _only(sym, [group for group in _every(sym) if group[0] != "permutations"])
    if training is None or not (
        factors.scalings or factors.signs or factors.linear or factors.shifts
    ):
        return sym
    factors = replace(factors, softmax_shift=None, frozen=())
    try:
        model.train()
        left = _refuted(model, factors, training, custom_rules)
    except _Unrepeatable:  # noise of a source of its own: there is nothing to compare
        return sym
    finally:
        model.eval()
    frozen = (*sym.frozen, *left.frozen)
    return replace(
        sym,
        scalings=left.scalings,
        signs=left.signs,
        linear=left.linear,
        shifts=left.shifts,
        frozen=frozen,
    )


class _Unrepeatable(UnsupportedModel):
    """The same weights give other outputs every time."""


def _refuted(model: nn.Module, sym: Symmetries, inputs: Inputs, custom_rules: bool) -> Symmetries:
    check = in_runnable_precision(model, inputs, lambda *run: _Check(run[0], sym, run[1]))
    if not check.sensitive and sym.touched:
        return replace(sym, unchecked=_NOTHING_MOVES)
    if check.error(sym) <= check.tolerance:
        return replace(sym, error=check.error_seen)
    sym = check.with_true_shift(sym)
    if check.error(sym) <= check.tolerance:
        return replace(sym, error=check.error_seen)
    check.raise_tolerance_to_noise()
    if not check.repeatable():
        raise _Unrepeatable(
            f"{type(model).__name__} gives different outputs for the same input and weights in "
            "evaluation mode, so that no symmetry can be checked. Make its forward deterministic, "
            "or pass the submodule that is."
        )
    wrong = check.offenders(sym)
    if custom_rules and wrong:
        names = ", ".join(name for _, _, name in wrong[:3])
        raise UnsupportedModel(
            "A rule given in `rules` breaks the function: "
            f"the groups at {names} change the outputs."
        )
    sym = _without(sym, wrong)
    if check.error(sym) > check.tolerance:
        raise UnsupportedModel(
            f"The symmetries found in {type(model).__name__} change its outputs and were refused."
        )
    return replace(sym, error=check.error_seen)


class _Check:
    """A network at random weights, and the error that a set of groups makes there."""

    def __init__(self, network: nn.Module, sym: Symmetries, inputs: Inputs) -> None:
        self.network, self.inputs = network, inputs
        self.params = _randomised(network, sym, torch.Generator().manual_seed(1))
        self.tolerance = tolerance_of(self.params)
        self.outputs = self._run(self.params)
        self.wrong = self._run(perturbed(self.params, sym.touched))
        self.measure = Comparison.between(self.outputs, self.wrong, self.tolerance)
        self.sensitive = self.measure.sensitive
        self.error_seen = 0.0

    def error(self, sym: Symmetries) -> float:
        """Two elements that together move every unit and flip every sign."""
        if not self.sensitive:
            return 0.0
        one, two = _covering_elements(self.params, sym, torch.Generator().manual_seed(2))
        self.error_seen = self.measure.error(self._run(one))
        if sym.softmax_shift is not None:
            two = random_shift(two, sym, torch.Generator().manual_seed(3))
            second = self._error_of_probabilities(two, sym)
        else:
            second = self.measure.error(self._run(two))
        self.error_seen = max(self.error_seen, second)
        return self.error_seen

    def _run(self, params: Params) -> list[Tensor]:
        return outputs(self.network, params, self.inputs)

    def _error_of_probabilities(self, params: Params, sym: Symmetries) -> float:
        runs = (self.outputs, self.wrong, self._run(params))
        old, wrong, new = (log_probabilities(out, sym) for out in runs)
        return Comparison.between(old, wrong, self.tolerance).error(new)

    def repeatable(self) -> bool:
        """Whether the same weights give the same outputs."""
        return self.measure.error(self._run(self.params)) <= self.tolerance

    def raise_tolerance_to_noise(self) -> None:
        """A forward that computes in float32 inside cannot be checked to float64."""
        near = perturbed(self.params, size=1e-9)
        noise = self.measure.error(self._run(near))
        if noise < 1e-5:
            self.tolerance = max(self.tolerance, 100 * noise)

    def with_true_shift(self, sym: Symmetries) -> Symmetries:
        """Drop the softmax shift unless it keeps the probabilities."""
        if sym.softmax_shift is None:
            return sym
        shifted = random_shift(self.params, sym, torch.Generator().manual_seed(3))
        right = self._error_of_probabilities(shifted, sym) <= max(self.tolerance, 1e-6)
        return sym if right else replace(sym, softmax_shift=None)

    def offenders(self, sym: Symmetries) -> list[tuple[str, int, str]]:
        """Halve the set of groups until single wrong ones remain."""
        pending, wrong = [_every(sym)], []
        while pending:
            part = pending.pop()
            if not part or self.error(_only(sym, part)) <= self.tolerance:
                continue
            if len(part) == 1:
                wrong += part
            else:
                pending += [part[: len(part) // 2], part[len(part) // 2 :]]
        return wrong


def _every(sym: Symmetries) -> list[tuple[str, int, str]]:
    return [(kind, k, group.name) for kind in EVERY for k, group in enumerate(getattr(sym, kind))]


def _covering_elements(
    params: Params, sym: Symmetries, generator: torch.Generator
) -> Iterator[Params]:
    """Cycles through all units of every group; and every sign flipped in one of the two."""
    signs = random_signs(sym, generator)
    for flips in (signs, [-s for s in signs]):
        factors: dict[Kind, list[Tensor]] = {
            "signs": flips,
            "scalings": random_scales(sym, generator),
        }
        cycles = []
        for group in sym.permutations:
            order = torch.randperm(group.units, generator=generator)
            cycles.append(torch.empty_like(order).scatter_(0, order, order.roll(1)))
        mixed = mix_some(multiply(params, sym, factors), sym, random_mixings(sym, generator))
        moved = shift_some(mixed, sym, random_shifts(sym, generator))
        yield permute(moved, sym, cycles)


def _only(sym: Symmetries, kept: Sequence[tuple[str, int, str]]) -> Symmetries:
    groups: dict[str, Any] = {
        kind: tuple(getattr(sym, kind)[k] for name, k, _ in kept if name == kind) for kind in EVERY
    }
    return replace(sym, **groups)


def _without(sym: Symmetries, wrong: Sequence[tuple[str, int, str]]) -> Symmetries:
    kept = [group for group in _every(sym) if group not in wrong]
    left = _only(sym, kept)
    new_index = {k: n for n, k in enumerate(k for kind, k, _ in kept if kind == "permutations")}

    def inner(group: PermutationGroup) -> tuple[tuple[int, ...], ...]:
        rows = (row for row in group.inner if all(k in new_index for k in row))
        return tuple(tuple(new_index[k] for k in row) for row in rows)

    reports = [
        Frozen(kind.removesuffix("s"), name, "", "the numerical check refuted this group")
        for kind, _, name in wrong
    ]
    return replace(
        left,
        permutations=tuple(replace(group, inner=inner(group)) for group in left.permutations),
        frozen=(*sym.frozen, *reports),
    )


def _randomised(network: nn.Module, sym: Symmetries, generator: torch.Generator) -> Params:
    """Generic weights of the same size: zeros and ones of a fresh network would hide errors."""
    params = P.of(network)
    moved = {a.tensor for a in sym.axes} | set(P.weight_names(network))
    state = {name for name, _ in network.named_buffers()}
    largest = max((t.numel() for t in params.values()), default=0)
    pool = torch.randn(65_521, generator=generator, dtype=torch.float64)
    noises = pool.repeat(largest // len(pool) + 2)
    result = dict(params)
    for name in sorted(params.keys() & moved):
        old = params[name]
        if not old.is_floating_point() or not old.numel():
            continue
        start = int(torch.randint(len(pool), (), generator=generator))
        noise = noises[start : start + old.numel()].reshape(old.shape).to(old)
        old = old.nan_to_num(0, 0, 0)
        if name in state:  # what is positive, such as a variance, stays so
            result[name] = torch.where(old == 0, 0.1 * noise, old * (0.3 * noise).exp())
        else:
            size = float(old.norm()) / math.sqrt(old.numel()) or 0.1
            result[name] = torch.add(old, noise, alpha=0.3 * size)
    return {n: result[sym.aliases.get(n, n)] for n in result}

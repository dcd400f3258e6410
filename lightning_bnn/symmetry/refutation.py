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
from lightning_bnn.symmetry.actions import Kind, multiply, permute
from lightning_bnn.symmetry.elements import random_scales, random_signs
from lightning_bnn.symmetry.export import UnsupportedModel
from lightning_bnn.symmetry.groups import Frozen, Symmetries
from lightning_bnn.symmetry.verify import (
    in_runnable_precision,
    log_probabilities,
    outputs,
    random_shift,
    relative_error,
)

__all__ = ["refute"]

TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-3, torch.float16: 5e-2, torch.bfloat16: 2e-1}


@torch.no_grad()
def refute(
    model: nn.Module, sym: Symmetries, example: tuple[Any, ...], custom_rules: bool
) -> Symmetries:
    """Test at random weights; drop and report groups that fail, refuse a user's wrong rule."""
    check = in_runnable_precision(model, example, lambda *run: _Check(run[0], sym, run[1]))
    if check.error(sym) <= check.tolerance:
        return replace(sym, error=check.error_seen)
    sym = check.with_true_shift(sym)
    if check.error(sym) <= check.tolerance:
        return replace(sym, error=check.error_seen)
    check.raise_tolerance_to_noise()
    if not check.repeatable():
        raise UnsupportedModel(
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

    def __init__(self, network: nn.Module, sym: Symmetries, example: tuple[Any, ...]) -> None:
        self.network, self.example = network, example
        self.params = _randomised(network, sym, torch.Generator().manual_seed(1))
        self.outputs = outputs(network, self.params, example)
        dtype = next(
            (t.dtype for t in self.params.values() if t.is_floating_point()), torch.float32
        )
        self.tolerance = TOLERANCE.get(dtype, 1e-2)
        self.error_seen = 0.0

    def error(self, sym: Symmetries) -> float:
        """Two elements that together move every unit and flip every sign."""
        one, two = _covering_elements(self.params, sym, torch.Generator().manual_seed(2))
        old, new = self.outputs, self._run(one)
        self.error_seen = relative_error(old, new)
        if sym.softmax_shift is not None:
            two = random_shift(two, sym, torch.Generator().manual_seed(3))
            old, new = log_probabilities(old, sym), log_probabilities(self._run(two), sym)
        else:
            new = self._run(two)
        self.error_seen = max(self.error_seen, relative_error(old, new))
        return self.error_seen

    def _run(self, params: Params) -> list[Tensor]:
        return outputs(self.network, params, self.example)

    def repeatable(self) -> bool:
        """Whether the same weights give the same outputs."""
        again = self._run(self.params)
        return relative_error(self.outputs, again) <= self.tolerance

    def raise_tolerance_to_noise(self) -> None:
        """A forward that computes in float32 inside cannot be checked to float64."""
        generator = torch.Generator().manual_seed(4)
        near = {
            n: t * (1 + 1e-9 * torch.randn(t.shape, generator=generator).to(t))
            if t.is_floating_point()
            else t
            for n, t in self.params.items()
        }
        noise = relative_error(self.outputs, self._run(near))
        if noise < 1e-5:
            self.tolerance = max(self.tolerance, 100 * noise)

    def with_true_shift(self, sym: Symmetries) -> Symmetries:
        """Drop the softmax shift unless it keeps the probabilities."""
        if sym.softmax_shift is None:
            return sym
        shifted = random_shift(self.params, sym, torch.Generator().manual_seed(3))
        new = log_probabilities(self._run(shifted), sym)
        wrong = relative_error(log_probabilities(self.outputs, sym), new) > max(
            self.tolerance, 1e-6
        )
        return replace(sym, softmax_shift=None) if wrong else sym

    def offenders(self, sym: Symmetries) -> list[tuple[str, int, str]]:
        """Halve the set of groups until single wrong ones remain."""
        every = [
            (kind, k)
            for kind in ("permutations", "scalings", "signs")
            for k in range(len(getattr(sym, kind)))
        ]
        pending, wrong = [every], []
        while pending:
            part = pending.pop()
            if not part or self.error(_only(sym, part)) <= self.tolerance:
                continue
            if len(part) == 1:
                kind, k = part[0]
                wrong.append((kind, k, getattr(sym, kind)[k].name))
            else:
                pending += [part[: len(part) // 2], part[len(part) // 2 :]]
        return wrong


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
        yield permute(multiply(params, sym, factors), sym, cycles)


def _only(sym: Symmetries, kept: Sequence[tuple[str, int]]) -> Symmetries:
    def groups(kind: Kind) -> tuple[Any, ...]:
        return tuple(getattr(sym, kind)[k] for name, k in kept if name == kind)

    return replace(
        sym,
        permutations=groups("permutations"),
        scalings=groups("scalings"),
        signs=groups("signs"),
    )


def _without(sym: Symmetries, wrong: Sequence[tuple[str, int, str]]) -> Symmetries:
    bad = {(kind, k) for kind, k, _ in wrong}
    kept = {
        kind: [k for k in range(len(getattr(sym, kind))) if (kind, k) not in bad]
        for kind in ("permutations", "scalings", "signs")
    }
    new_index = {old: new for new, old in enumerate(kept["permutations"])}
    permutations = []
    for k in kept["permutations"]:
        group = sym.permutations[k]
        inner = tuple(
            tuple(new_index[i] for i in row)
            for row in group.inner
            if all(i in new_index for i in row)
        )
        permutations.append(replace(group, inner=inner))
    reports = [
        Frozen(kind.removesuffix("s"), name, "", "the numerical check refuted this group")
        for kind, _, name in wrong
    ]
    return replace(
        sym,
        permutations=tuple(permutations),
        scalings=tuple(sym.scalings[k] for k in kept["scalings"]),
        signs=tuple(sym.signs[k] for k in kept["signs"]),
        frozen=(*sym.frozen, *reports),
    )


def _randomised(network: nn.Module, sym: Symmetries, generator: torch.Generator) -> Params:
    """Generic weights of the same size: zeros and ones of a fresh network would hide errors."""
    params = P.of(network)
    moved = {a.tensor for a in sym.axes} | set(P.weight_names(network))
    variances = {a.tensor for a in sym.axes if a.role == "variance"}
    largest = max((t.numel() for t in params.values()), default=0)
    pool = torch.randn(65_521, generator=generator, dtype=torch.float64)
    noises = pool.repeat(largest // len(pool) + 2)
    result = dict(params)
    for name in sorted(params.keys() & moved):
        old = params[name]
        if not old.is_floating_point() or not old.numel():
            continue
        size = float(old.norm()) / math.sqrt(old.numel()) or 0.1
        start = int(torch.randint(len(pool), (), generator=generator))
        noise = noises[start : start + old.numel()].reshape(old.shape).to(old)
        result[name] = torch.add(old, noise, alpha=0.3 * size)
        if name in variances:
            result[name] = old.abs() * (0.5 + noise.abs()) + 0.1
    return result

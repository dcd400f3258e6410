"""Check symmetries by running the network: a random group element must not change its outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves, tree_map

from lightning_bnn import params as P
from lightning_bnn.params import Params
from lightning_bnn.symmetry.actions import Kind, multiply, permute, shift_logits
from lightning_bnn.symmetry.elements import random_permutations, random_scales, random_signs
from lightning_bnn.symmetry.export import check_forward, skeleton, to_network
from lightning_bnn.symmetry.groups import Symmetries
from lightning_bnn.symmetry.validation import check_params

__all__ = [
    "in_runnable_precision",
    "log_probabilities",
    "outputs",
    "random_element",
    "random_shift",
    "relative_error",
    "verify",
]

_T = TypeVar("_T")


@torch.no_grad()
def verify(
    model: nn.Module,
    sym: Symmetries,
    *example: Any,
    softmax_shift: bool = False,
    generator: torch.Generator | None = None,
) -> float:
    """Draw a random element of the whole group; return the relative error of the outputs.

    Args:
        model: the network, in the mode to be tested; its own weights are used and left untouched.
        sym: what `discover` returned for it.
        *example: inputs.
        softmax_shift: shift the logits too, and compare log-probabilities.
        generator: source of the element, by default seeded with 0.
    """
    example = to_network(model, example)
    generator = generator or torch.Generator().manual_seed(0)

    def measure(network: nn.Module, inputs: tuple[Any, ...]) -> float:
        before = P.of(network)
        check_params(before, sym, "model")
        after = random_element(before, sym, generator)
        if softmax_shift:
            after = random_shift(after, sym, generator)
        old, new = (outputs(network, p, inputs) for p in (before, after))
        if softmax_shift:
            old, new = log_probabilities(old, sym), log_probabilities(new, sym)
        return relative_error(old, new)

    return in_runnable_precision(model, example, measure)


def log_probabilities(logits: Sequence[Tensor], sym: Symmetries) -> list[Tensor]:
    """What a softmax shift leaves unchanged."""
    assert sym.softmax_shift is not None
    return [t.log_softmax(sym.softmax_shift.dim) for t in logits]


def in_runnable_precision(
    model: nn.Module, example: tuple[Any, ...], use: Callable[[nn.Module, tuple[Any, ...]], _T]
) -> _T:
    """Use a network in float64, or as it is where an operation or a plain tensor forbids that."""
    try:
        return use(*_in_precision(model, example, torch.float64))
    except (RuntimeError, TypeError, NotImplementedError):
        check_forward(model, example)
        return use(*_in_precision(model, example, None))


def random_element(params: Params, sym: Symmetries, generator: torch.Generator) -> Params:
    """Act on parameters with a random sign, scale and permutation of every unit."""
    factors: dict[Kind, list[Tensor]] = {
        "signs": random_signs(sym, generator),
        "scalings": random_scales(sym, generator),
    }
    params = multiply(params, sym, factors)
    return permute(params, sym, random_permutations(sym, generator))


def random_shift(params: Params, sym: Symmetries, generator: torch.Generator) -> Params:
    """Parameters whose logits are shifted at random."""
    if sym.softmax_shift is None:
        raise ValueError("The network does not end in a layer whose outputs are its logits.")
    shape = sym.shapes[sym.softmax_shift.weight][1:]
    return shift_logits(
        params, sym, torch.randn(shape, generator=generator), torch.randn((), generator=generator)
    )


# ------------------------------------------------------------ running
def _in_precision(
    model: nn.Module, example: tuple[Any, ...], dtype: torch.dtype | None
) -> tuple[nn.Module, tuple[Any, ...]]:
    if dtype is None:
        return skeleton(model), example

    def cast(x: Any) -> Any:
        return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x

    return skeleton(model, dtype), tree_map(cast, example)


def outputs(network: nn.Module, params: Params, example: tuple[Any, ...]) -> list[Tensor]:
    """The floating tensors that a network returns, with the same random numbers every time."""
    copies = {name: t.clone() if t.ndim <= 1 else t for name, t in params.items()}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        out = functional_call(network, copies, example)
    return [t for t in tree_leaves(out) if isinstance(t, Tensor) and t.is_floating_point()]


def relative_error(old: Sequence[Tensor], new: Sequence[Tensor]) -> float:
    """Largest difference relative to the largest output."""
    worst = 0.0
    for a, b in zip(old, new, strict=True):
        finite = torch.isfinite(a)
        if not bool(finite.any()) and a.numel():
            return float("nan")
        if not bool((finite == torch.isfinite(b)).all()):
            return float("inf")
        a, b = a[finite], b[finite]
        if a.numel():
            worst = max(
                worst,
                float((a - b).abs().max() / a.abs().max().clamp_min(torch.finfo(a.dtype).tiny)),
            )
    return worst

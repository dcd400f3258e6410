"""Networks brought close to a reference by permutations of their units."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, get_args

from torch import Tensor, nn

from lightning_bnn.metrics.validation import option
from lightning_bnn.params import Params
from lightning_bnn.symmetry import Symmetries, match, match_activations, permute

__all__ = ["Align", "alignment"]

Align = Literal["weights", "activations"]


def alignment(
    networks: Params,
    reference: Params,
    align: Align,
    symmetries: Symmetries | None,
    model: nn.Module | None = None,
    batches: Iterable[Any] | None = None,
) -> Callable[[Params], Params]:
    """A function that moves the networks, or anything else that has their shapes.

    Args:
        networks: one, or a stack whose members are matched one by one.
        reference: one network.
        align: by ``"weights"``, or by the ``"activations"`` on some data.
        symmetries: what ``discover`` returned.
        model: gives the computation, for activations.
        batches: inputs, for activations.
    """
    option("align", align, get_args(Align))
    if symmetries is None:
        raise ValueError("`symmetries` must be what `discover` returned, to match networks.")
    if align == "weights":
        permutations: Sequence[Tensor] = match(networks, reference, symmetries)
    elif model is None or batches is None:
        raise ValueError("`model` and `batches` must be given, to match activations.")
    else:
        permutations = match_activations(model, networks, reference, symmetries, batches)
    return lambda stack: permute(stack, symmetries, permutations)

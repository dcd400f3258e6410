"""Networks brought close to a reference by permutations of their units."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, get_args

from torch import Tensor, nn

from lightning_bnn.metrics.validation import check_choice
from lightning_bnn.params import Params, is_stacked
from lightning_bnn.symmetry import Symmetries, match, match_activations, permute
from lightning_bnn.symmetry import align as joint_alignment

__all__ = ["Align", "alignment"]

Align = Literal["weights", "activations", "joint"]


def alignment(
    networks: Params,
    reference: Params | None,
    align: Align,
    symmetries: Symmetries | None,
    model: nn.Module | None = None,
    batches: Iterable[Any] | None = None,
    **options: Any,
) -> Callable[[Params], Params]:
    """A function that moves the networks, or anything else that has their shapes.

    Args:
        networks: one, or a stack whose members are matched one by one.
        reference: one network, by default the first of the stack.
        align: by ``"weights"``, by the ``"activations"`` on some data, or all networks of a stack
            with each other: ``"joint"``.
        symmetries: what ``discover`` returned.
        model: gives the computation, for activations.
        batches: inputs, for activations.
        **options: of `lightning_bnn.symmetry.align`, for a joint frame.
    """
    check_choice("align", align, get_args(Align))
    if symmetries is None:
        raise ValueError("`symmetries` must be what `discover` returned, to match networks.")
    if align == "joint":
        return _jointly(networks, reference, symmetries, options)
    if options:
        raise ValueError(f"`{min(options)}` goes with `align='joint'`, got {align!r}.")
    goal = {name: t[0] for name, t in networks.items()} if reference is None else reference
    if align == "weights":
        permutations: Sequence[Tensor] = match(networks, goal, symmetries)
    elif model is None or batches is None:
        raise ValueError("`model` and `batches` must be given, to match activations.")
    else:
        permutations = match_activations(model, networks, goal, symmetries, batches)
    return lambda stack: permute(stack, symmetries, permutations)


def _jointly(
    networks: Params,
    reference: Params | None,
    symmetries: Symmetries,
    options: dict[str, Any],
) -> Callable[[Params], Params]:
    """All to each other, and then all in one to a reference if there is one."""
    if not is_stacked(networks, symmetries.shapes):
        raise ValueError("`align` is 'joint', which needs a stack of networks, not one network.")
    found = joint_alignment(networks, symmetries, **options)
    if reference is None:
        return lambda stack: found.apply(stack, symmetries)
    moved = found.apply(networks, symmetries)
    mean = {n: t.mean(0) if t.is_floating_point() else t[0] for n, t in moved.items()}
    together = match(mean, reference, symmetries)
    return lambda stack: permute(found.apply(stack, symmetries), symmetries, together)

"""Networks that have nothing in common with a given one, but look like it from afar."""

from __future__ import annotations

from dataclasses import replace

from lightning_bnn.params import Params
from lightning_bnn.randomness import keyed_generator
from lightning_bnn.symmetry.groups import LinearGroup, PermutationGroup, Symmetries
from lightning_bnn.symmetry.mixing import mix_some, random_mixings
from lightning_bnn.symmetry.placements import Placement

__all__ = ["unrelated"]


def unrelated(params: Params, sym: Symmetries, count: int, seed: int = 0) -> Params:
    r"""Networks whose units are random mixtures of the units of a network.

    The units of every group are multiplied by a random rotation that leaves the vector of ones
    alone. All means and covariances over the units of a layer stay what they are, of the weights
    that enter and leave them, of biases and gains, and so does the product :math:`W_2 W_1`; where
    the other side of these weights has units, too, those are rotated along. Only what a single unit
    is gets lost, and with it the function.

    Args:
        params: one network.
        sym: what `discover` returned.
        count: how many.
        seed: of the rotations.

    Returns:
        A stack.
    """
    mixed = replace(sym, linear=_rotated(sym))
    stack = {n: t.expand(count, *t.shape) for n, t in params.items()}
    return mix_some(stack, mixed, random_mixings(mixed, keyed_generator(seed, "unrelated"), count))


def _rotated(sym: Symmetries) -> tuple[LinearGroup, ...]:
    """The groups of permutations as groups of rotations; modules that change places stay."""
    return tuple(
        LinearGroup("centred", 1, group.units, group.name, _places(group))
        for group in sym.permutations
        if group.units > 1 and not group.tensors
    )


def _places(group: PermutationGroup) -> tuple[Placement, ...]:
    return tuple(
        Placement(p.axis, p.positions[None]) for p in group.placements if not p.meets_itself
    )

"""Straight-through matching: to a copy of the reference that learns from the midpoint's loss."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_bnn.params import Params
from lightning_bnn.randomness import keyed_generator
from lightning_bnn.symmetry.actions import permute
from lightning_bnn.symmetry.matching.ascent import Ascent
from lightning_bnn.symmetry.matching.learning import Best
from lightning_bnn.symmetry.matching.plan import Plan

__all__ = ["learn", "straight_through"]

RATE = 0.01


def learn(plan: Plan, best: Best, max_sweeps: int) -> None:
    r"""Straight-through estimator of Git Re-Basin, for every member of a stack.

    A free copy :math:`\tilde a` of the reference starts as the reference :math:`a`. Every step
    matches the network :math:`b` to it by weights, and moves it by the gradient of the loss between
    the *reference* and the matched network, as if it were the latter:

    .. math:: \pi \leftarrow \arg\max_\pi \langle \tilde a, \pi b \rangle, \quad
        \tilde a \leftarrow \tilde a - \eta\, \nabla_{\pi b} L(\tfrac12 a + \tfrac12 \pi b)

    References:
        Git Re-Basin: Merging Models modulo Permutation Symmetries (Ainsworth, Hayase, Srinivasa,
        2023)

    Args:
        plan: of the symmetries.
        best: where to start, and what keeps the best.
        max_sweeps: sweeps of coordinate ascent per step; it goes on in the next.
    """
    lines, params = best.lines, best.params
    names = [n for n in plan.compared if params[n].is_floating_point()]
    members = len(best.loss)
    free = {
        n: _wide(lines.reference[n]).detach().expand(members, *lines.reference[n].shape).clone()
        for n in names
    }  # in half precision Adam's epsilon is zero
    networks = {n: _wide(t) for n, t in params.items()}
    optimizer = lines.learning.optimizer_of(list(free.values()), RATE)
    generator = keyed_generator(lines.seed, "sweeps")
    permutations = list(best.permutations)
    for step, batch, weight in lines.steps():
        gradients = straight_through(best, permutations, names, batch, weight)
        for name, gradient in gradients.items():
            free[name].grad = gradient.to(free[name])
        optimizer.step()
        ascent = Ascent(plan, networks, free)
        sweeps = min(max_sweeps, 10)
        permutations = ascent.run(permutations, generator, sweeps, forward_pass=False)
        if step % lines.learning.every == 0 or step == lines.learning.steps:
            best.consider(permutations)


def _wide(t: Tensor) -> Tensor:
    return t.float() if t.dtype in (torch.float16, torch.bfloat16) else t


def straight_through(
    best: Best, permutations: Sequence[Tensor], names: Sequence[str], batch: object, weight: float
) -> Params:
    """Gradient of the loss at a point of the line, by the weights of the permuted network.

    Args:
        best: holds networks and losses.
        permutations: of every member.
        names: the tensors whose gradients are wanted.
        batch: input and target.
        weight: position on the line; the midpoint is at one half.
    """
    moved = permute(best.params, best.sym, permutations)
    leaves = {n: moved[n].detach().clone().requires_grad_() for n in names}
    with torch.enable_grad():
        loss = best.lines.losses({**moved, **leaves}, batch, weight).sum()
        gradients = torch.autograd.grad(loss, list(leaves.values()))
    return dict(zip(names, gradients, strict=True))

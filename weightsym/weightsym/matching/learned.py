"""Permutations and matrices learned by gradients of the loss half way between two networks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from tqdm.auto import tqdm

from weightsym import params as P
from weightsym.arguments import check_between, check_count, check_positive
from weightsym.groups.actions import multiply_sides, tied
from weightsym.groups.axis_maps import AxisMap
from weightsym.groups.element import Element, mixing_at
from weightsym.groups.elements import identity, identity_mixings
from weightsym.groups.symmetries import LinearGroup, Placement, Symmetries
from weightsym.matching.interpolation import Loss, interpolate
from weightsym.matching.matrices import SpaceMap
from weightsym.matching.plan import assign
from weightsym.networks.forward import in_precision_of, structural_copy
from weightsym.networks.randomness import keyed_generator
from weightsym.params import Params

_SWEEPS = 10  # of coordinate ascent after a step; it goes on in the next


@dataclass(frozen=True)
class Learning:
    """Settings of a match that is learned from gradients.

    Args:
        steps: gradient steps, one batch each.
        rate: learning rate of Adam.
        held_back: share of the batches that judge instead of teach; at least one does.
        every: steps from one judgement to the next.
        progress: show a bar.

    >>> from torch import nn
    >>> from weightsym import Learning, discover, match
    >>> net, x = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1)), torch.randn(16, 2)
    >>> (a, b), batches = P.unstack(P.populate(net, 2)), [(x, x.prod(1, keepdim=True))] * 2
    >>> how, loss = Learning(steps=4, every=2), torch.nn.functional.mse_loss
    >>> data = {"model": net, "batches": batches, "loss": loss}
    >>> found = match(a, b, discover(net, x), method="learned", learning=how, **data)
    >>> found.method, found.objective.item() < 0  # minus the loss at the midpoint
    ('learned', True)
    """

    steps: int = 200
    rate: float = 0.01
    held_back: float = 0.25
    every: int = 10
    progress: bool = False

    def __post_init__(self) -> None:
        check_count("steps", self.steps)
        check_count("every", self.every)
        check_positive("rate", self.rate)
        check_between("held_back", self.held_back)


class HalfWay:
    """Losses half way from a reference to the members of a stack.

    Layers that keep statistics use those of the batch, as re-estimation would give.

    Args:
        model: gives the computation; else it runs in evaluation mode.
        reference: one network.
        loss: mean loss of a batch.
        batches: pairs of input and target that judge.
    """

    def __init__(
        self, model: nn.Module, reference: Params, loss: Loss, batches: Sequence[Any]
    ) -> None:
        self.network, self.reference, self.loss = structural_copy(model), reference, loss
        self.batches = batches
        for module in self.network.modules():
            norm = isinstance(module, nn.modules.batchnorm._BatchNorm)
            module.training = norm and bool(module.track_running_stats)

    def losses(self, stack: Params, batch: Any) -> Tensor:
        """Loss on a batch, of every member."""
        x, y = batch
        goal = {n: t.expand_as(stack.get(n, t)) for n, t in self.reference.items()}
        between = interpolate(stack, goal, 0.5)
        between = {n: t if P.is_weight(n, t) else t.detach().clone() for n, t in between.items()}
        outputs = P.apply(self.network, between, in_precision_of(between, x))
        members = range(P.stack_size(stack))
        per_member = [tree_map(lambda t, m=m: t[m], outputs) for m in members]
        return torch.stack([self.loss(o, y) for o in per_member])

    @torch.no_grad()
    def judge(self, stack: Params) -> Tensor:
        """Mean loss of every member on the batches that judge."""
        losses = torch.stack([self.losses(stack, batch) for batch in self.batches])
        sizes = torch.tensor([float(len(x)) for x, _ in self.batches], dtype=torch.float64)
        mean = (losses.double().cpu() * sizes[:, None]).sum(0) / sizes.sum()
        return mean.nan_to_num(nan=torch.inf)

    def descend(
        self,
        tensors: Sequence[Tensor],
        moved: Callable[[], Params],
        batches: Sequence[Any],
        learning: Learning,
        seed: int,
    ) -> Iterator[bool]:
        """Lower the loss by Adam, and say after every step whether it is time to judge.

        Args:
            tensors: what is learned; the last step is one after which they are not finite.
            moved: gives the stack that follows from them, differentiably.
            batches: to learn from, in a new order in every round.
            learning: how to learn; the rate falls to zero.
            seed: of the order of batches.
        """
        optimizer, count, order = torch.optim.Adam(tensors, lr=learning.rate), len(batches), []
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, learning.steps)
        for step in tqdm(range(learning.steps), "match", disable=not learning.progress):
            if step % count == 0:
                generator = keyed_generator(seed, "batches", step // count)
                order = torch.randperm(count, generator=generator).tolist()
            optimizer.zero_grad()
            with torch.enable_grad():
                self.losses(moved(), batches[order[step % count]]).sum().backward()
            optimizer.step()
            schedule.step()
            if not all(bool(t.isfinite().all()) for t in tensors):
                return
            yield (step + 1) % learning.every == 0 or step + 1 == learning.steps


# ------------------------------------------------------------ elements
def learn(
    params: Params,
    half_way: HalfWay,
    batches: Sequence[Any],
    start: Element,
    learning: Learning,
    seed: int,
) -> tuple[Element, Tensor]:
    r"""The element of least loss half way that gradients lead to, and its loss.

    .. math:: \min_{g} \; L(\tfrac12 (a + g b))

    Matrices stay in their groups: rotations are exponentials of skew matrices. Units follow a table
    whose best assignment is used and whose gradient is that of the assignment (straight-through).
    Blocks such as heads stay where the start has put them.

    References:
        Git Re-Basin: Merging Models modulo Permutation Symmetries (Ainsworth, Hayase, Srinivasa,
        2023)

    Args:
        params: the network that moves.
        half_way: judges elements; the best of all is kept, be it the start.
        batches: pairs of input and target to learn from.
        start: the element to begin with.
        learning: how to learn.
        seed: of the order of batches.
    """
    free = _Free(start.sym, start.on_some(params))
    best, least = free.element(), half_way.judge(free.moved())
    if not bool(least.isfinite().all()):
        raise ValueError("`loss` is NaN or infinite at the midpoint, before anything is learnt.")
    steps = half_way.descend(free.tensors, free.moved, batches, learning, seed)
    for time in steps if free.tensors else ():
        value = half_way.judge(free.moved()) if time else least
        if bool(value < least):
            best, least = free.element(), value
    return best @ start, least


def passed_through(value: Tensor, free: Tensor) -> Tensor:
    """A tensor whose gradient goes to another one."""
    return value + (free - free.detach()).to(value)


def parted(batches: Iterable[Any], share: float, seed: int) -> tuple[list[Any], list[Any]]:
    """Batches to learn from, and those that are held back to judge."""
    if not isinstance(batches, Sequence) or len(batches) < 2:
        raise ValueError(
            "`batches` must be a list of at least two (input, target) pairs: some are held back."
        )
    if any(not isinstance(batch, tuple | list) or len(batch) != 2 for batch in batches):
        raise ValueError("`batches` must hold (input, target) pairs to learn from.")
    order = torch.randperm(len(batches), generator=keyed_generator(seed, "held back")).tolist()
    count = min(max(1, round(share * len(batches))), len(batches) - 1)
    return [batches[k] for k in sorted(order[count:])], [batches[k] for k in sorted(order[:count])]


class _Free:
    """One table for every group of units and one matrix for every space, to be learned."""

    def __init__(self, sym: Symmetries, params: Params) -> None:
        self.sym, self.params = sym, params
        blocks = [k for k, group in enumerate(sym.permutations) if group.inner or group.tensors]
        space_map = SpaceMap(sym)
        alone = [] if space_map.tangled else space_map.others
        self.groups = [k for k in alone if k not in blocks]
        units = [sym.permutations[k].units for k in self.groups]
        device = next(iter(params.values())).device
        self.tables = [torch.eye(n).to(device).requires_grad_() for n in units]
        self.logs = [
            torch.zeros_like(m, dtype=torch.float32, device=device, requires_grad=True)
            for m in identity_mixings(sym)
        ]

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors that have a gradient."""
        return [*self.tables, *self.logs]

    def moved(self) -> Params:
        """A stack of the network after permutations and matrices, differentiably."""
        result = dict(self.params)
        for k, table in zip(self.groups, self.tables, strict=True):
            matrix = passed_through(
                torch.eye(len(table)).to(table)[assign(table.detach()).to(table.device)], table
            )
            for p in self.sym.permutations[k].placements:
                axis, placement = self.sym.axes[p.axis], Placement(p.axis, p.positions[None])
                mixing = mixing_at(placement, matrix[None].to(result[axis.tensor]))
                result[axis.tensor] = AxisMap(mixings=(mixing,)).act(result[axis.tensor], axis)
        for k, (group, log) in enumerate(zip(self.sym.linear, self.logs, strict=True)):
            generator = _generator(group, log)
            forward, inverse = torch.matrix_exp(generator), torch.matrix_exp(-generator.mT)
            result = multiply_sides(result, self.sym, k, forward, inverse)
        return {n: t[None] for n, t in tied(result, self.sym).items()}

    def element(self) -> Element:
        """Permutations and matrices as they are now."""
        permutations = identity(self.sym)
        for k, table in zip(self.groups, self.tables, strict=True):
            permutations[k] = assign(table.detach())
        pairs = zip(self.sym.linear, self.logs, strict=True)
        logs = [_generator(group, log.detach().double()) for group, log in pairs]
        matrices = [torch.matrix_exp(x) for x in logs]
        return Element.of_groups(self.sym, permutations=permutations, matrices=matrices)


def _generator(group: LinearGroup, free: Tensor) -> Tensor:
    """The part of a matrix whose exponential is in the group."""
    if group.kind == "general":
        return free
    if group.kind == "complex":
        eye = torch.eye(2).to(free)
        return (free - free.mT) / 2 + eye * free.diagonal(dim1=-2, dim2=-1).mean(-1)[
            ..., None, None
        ]
    skew = (free - free.mT) / 2
    turned = group.basis.to(free) @ group.basis.to(free).mT
    return turned @ skew @ turned

"""What learning a match rests on: data, the losses between two networks, and the best so far."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from tqdm.auto import tqdm

from lightning_bnn import params as P
from lightning_bnn.params import Params
from lightning_bnn.randomness import keyed_generator
from lightning_bnn.symmetry.actions import permute
from lightning_bnn.symmetry.forward import in_precision_of, structural_copy
from lightning_bnn.symmetry.groups import Symmetries
from lightning_bnn.symmetry.matching.interpolation import Loss, interpolate

__all__ = ["Best", "Learning", "Lines"]


@dataclass(frozen=True)
class Learning:
    """How a match is learnt from gradients.

    Args:
        steps: gradient steps, one batch each.
        rate: learning rate, by default 0.01 for weights and 0.1 for the logits of Sinkhorn.
        optimizer: ``"adam"`` or ``"sgd"`` with momentum 0.9.
        where: the gradient is that of the loss at the ``"midpoint"``, or at uniform points of the
            ``"line"``.
        held_back: share of the batches that judge instead of teach; at least one does.
        every: steps from one judgement to the next.
        sharpness: of Sinkhorn, how much of every unit its matrices give to the start at first.
        iterations: of Sinkhorn, how often rows and columns are normalised.
        progress: show a bar.

    >>> from lightning_bnn.models import mlp
    >>> from lightning_bnn.symmetry import Learning, discover, match
    >>> net, x = mlp(2, [4], 1), torch.randn(16, 2)
    >>> (a, b), batches = P.unstack(P.populate(net, 2)), [(x, x.prod(1, keepdim=True))] * 2
    >>> how, loss = Learning(steps=4, every=2), torch.nn.functional.mse_loss
    >>> data = {"model": net, "batches": batches, "loss": loss}
    >>> found = match(a, b, discover(net, x), method="learned", learning=how, **data)
    >>> found.method, found.objective.item() < 0  # minus the loss at the midpoint
    ('learned', True)
    """

    steps: int = 200
    rate: float | None = None
    optimizer: Literal["adam", "sgd"] = "adam"
    where: Literal["midpoint", "line"] = "midpoint"
    held_back: float = 0.25
    every: int = 10
    sharpness: float = 0.9
    iterations: int = 20
    progress: bool = False

    def __post_init__(self) -> None:
        for name in ("steps", "every", "iterations"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1, got {getattr(self, name)}.")
        for name in ("held_back", "sharpness"):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(f"`{name}` must lie between 0 and 1, got {getattr(self, name)}.")
        if self.rate is not None and not 0 < self.rate < float("inf"):
            raise ValueError(f"`rate` must be positive and finite, got {self.rate}.")
        for name, allowed in (("optimizer", ("adam", "sgd")), ("where", ("midpoint", "line"))):
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"`{name}` must be {' or '.join(map(repr, allowed))}, "
                    f"got {getattr(self, name)!r}."
                )

    def optimizer_of(self, tensors: Sequence[Tensor], rate: float) -> torch.optim.Optimizer:
        """An optimizer; ``rate`` is used if none was asked for."""
        rate = self.rate or rate
        if self.optimizer == "adam":
            return torch.optim.Adam(tensors, rate)
        return torch.optim.SGD(tensors, rate, momentum=0.9)


class Lines:
    """Losses on the lines from a reference to the members of a stack.

    Layers that keep statistics use those of the batch, as re-estimation would give.

    Args:
        model: gives the computation; else it runs in evaluation mode.
        reference: one network.
        batches: pairs of input and target; some are held back.
        loss: mean loss of a batch.
        learning: how to learn.
        seed: of the order of batches and the points on the lines.
    """

    def __init__(
        self,
        model: nn.Module,
        reference: Params,
        batches: Iterable[Any],
        loss: Loss,
        learning: Learning,
        seed: int,
    ) -> None:
        pairs = _pairs(batches)
        self.network, self.reference, self.mean_loss = structural_copy(model), reference, loss
        self.learning, self.seed = learning, seed
        for module in self.network.modules():
            norm = isinstance(module, nn.modules.batchnorm._BatchNorm)
            module.training = norm and bool(module.track_running_stats)
        order = torch.randperm(len(pairs), generator=keyed_generator(seed, "held back")).tolist()
        count = min(max(1, round(learning.held_back * len(pairs))), len(pairs) - 1)
        self.judging = [pairs[k] for k in sorted(order[:count])]
        self.teaching = [pairs[k] for k in sorted(order[count:])]

    def losses(self, moved: Params, batch: Any, weight: float = 0.5) -> Tensor:
        """Of every member of a stack, at ``weight`` on its line from the reference."""
        x, y = batch
        between = interpolate(moved, self.reference, 1 - weight)
        between = {n: t if P.is_weight(n, t) else t.detach().clone() for n, t in between.items()}
        outputs = P.apply(self.network, between, in_precision_of(between, x))
        members = range(P.stack_size(moved))
        one = [tree_map(lambda t, m=m: t[m], outputs) for m in members]
        return torch.stack([self.mean_loss(o, y) for o in one])

    @torch.no_grad()
    def judged(self, moved: Params) -> Tensor:
        """Mean loss of every midpoint on the batches that were held back."""
        losses = torch.stack([self.losses(moved, batch) for batch in self.judging])
        sizes = torch.tensor([float(len(x)) for x, _ in self.judging], dtype=torch.float64)
        mean = (losses.double().cpu() * sizes[:, None]).sum(0) / sizes.sum()
        return mean.nan_to_num(nan=torch.inf)

    def steps(self) -> Iterator[tuple[int, Any, float]]:
        """Number, batch and position on the line of every step."""
        seed, count = self.seed, len(self.teaching)
        shown = tqdm(range(self.learning.steps), "match", disable=not self.learning.progress)
        points = keyed_generator(seed, "points")
        for step in shown:
            if step % count == 0:
                generator = keyed_generator(seed, "batches", step // count)
                order = torch.randperm(count, generator=generator).tolist()
            drawn = float(torch.rand((), generator=points))
            weight = 0.5 if self.learning.where == "midpoint" else drawn
            yield step + 1, self.teaching[order[step % count]], weight


def _pairs(batches: Iterable[Any]) -> Sequence[Any]:
    if not isinstance(batches, Sequence) or len(batches) < 2:
        raise ValueError(
            "`batches` must be a list of at least two (input, target) pairs: some are held back."
        )
    if any(not isinstance(batch, tuple | list) or len(batch) != 2 for batch in batches):
        raise ValueError("`batches` must hold (input, target) pairs to learn from.")
    return batches


class Best:
    """The permutations of every member whose midpoint has the smallest loss so far.

    Args:
        lines: judge the midpoints.
        params: the stack.
        sym: what `discover` returned.
        starts: permutations to begin with.
    """

    def __init__(
        self, lines: Lines, params: Params, sym: Symmetries, starts: Sequence[Sequence[Tensor]]
    ) -> None:
        self.lines, self.params, self.sym = lines, params, sym
        self.at_starts = [self._judged(start) for start in starts]
        self.permutations = [p.clone() for p in starts[0]]
        self.loss = self.at_starts[0]
        for start, loss in zip(starts[1:], self.at_starts[1:], strict=True):
            self._take(start, loss)
        if not bool(self.loss.isfinite().all()):
            raise ValueError(
                "`loss` is NaN or infinite at the midpoint, before anything is learnt."
            )

    def consider(self, permutations: Sequence[Tensor]) -> None:
        """Take what is better than before."""
        self._take(permutations, self._judged(permutations))

    def _take(self, permutations: Sequence[Tensor], loss: Tensor) -> None:
        better = loss < self.loss
        self.loss = torch.where(better, loss, self.loss)
        for mine, new in zip(self.permutations, permutations, strict=True):
            mine[better] = new[better]

    def _judged(self, permutations: Sequence[Tensor]) -> Tensor:
        return self.lines.judged(permute(self.params, self.sym, permutations))

"""What `match` returns: permutations, and how good they are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import overload

import torch
from torch import Tensor

from lightning_bnn.params import Params
from lightning_bnn.symmetry.actions import flip, permute
from lightning_bnn.symmetry.groups import Symmetries

__all__ = ["MatchResult"]


@dataclass(frozen=True, eq=False)
class MatchResult(Sequence[Tensor]):
    """Permutations that bring a network, or every member of a stack, close to a reference.

    It is itself the sequence of its permutations: ``permute(params, sym, match(...))``.

    Attributes:
        permutations: one per group, with a leading dimension for a stack.
        objective: what the method maximises: the inner product of weights; of activations, the sum
            of inner products, correlations or explained sums of squares; of what is learnt, minus
            the loss at the midpoint on batches held back. One number, or one per member.
        bound: what no permutation can exceed: entries of every tensor, or partners of units, may
            go anywhere; not a number where none is known (losses).
        method: how it was found; per member for a stack.
        signs: flips that come before the permutations, where they were asked for.
        tried: the best objective of every way that was tried, by its name; not a number for members
            for which a way was not worth its time.

    >>> from lightning_bnn import params as P
    >>> from lightning_bnn.models import mlp
    >>> from lightning_bnn.symmetry import discover, match
    >>> net = mlp(2, [8], 1)
    >>> sym, w = discover(net, torch.randn(8, 2)), P.of(net)
    >>> found = match(w, w, sym)
    >>> found[0], found.method, round(found.share.item(), 4)
    (tensor([0, 1, 2, 3, 4, 5, 6, 7]), 'ascent', 1.0)
    """

    permutations: tuple[Tensor, ...]
    objective: Tensor
    bound: Tensor
    method: str | tuple[str, ...]
    signs: tuple[Tensor, ...] | None = None
    tried: dict[str, Tensor] = field(default_factory=dict)

    @property
    def share(self) -> Tensor:
        """Share of the bound that is reached; not a number where the bound is not positive."""
        return torch.where(self.bound > 0, self.objective / self.bound, torch.nan)

    def apply(self, params: Params, sym: Symmetries) -> Params:
        """The matched network or stack."""
        return permute(flip(params, sym, self.signs) if self.signs else params, sym, self)

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Tensor, ...]: ...
    def __getitem__(self, index: int | slice) -> Tensor | tuple[Tensor, ...]:
        """The permutation of one group, or of several."""
        return self.permutations[index]

    def __len__(self) -> int:
        """The number of groups that are permuted."""
        return len(self.permutations)

    def single(self) -> MatchResult:
        """The result of the only member of a stack."""
        signs = None if self.signs is None else tuple(s[0] for s in self.signs)
        one = tuple(p[0] for p in self.permutations)
        tried = {name: value[0] for name, value in self.tried.items()}
        return MatchResult(one, self.objective[0], self.bound[0], self.method[0], signs, tried)

    def __str__(self) -> str:
        """Method, objective and the share of the bound that is reached, where there is one."""
        share, objective = (float(x.mean()) for x in (self.share, self.objective))
        methods = {self.method} if isinstance(self.method, str) else set(self.method)
        many = "" if self.objective.ndim == 0 else f" in the mean of {len(self.objective)} networks"
        found = " and ".join(sorted(methods))
        of_bound = f", {share:.1%} of the bound" if math.isfinite(share) else ""
        return f"{found}: objective {objective:.4g}{of_bound}{many}"

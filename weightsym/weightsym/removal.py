"""Remove symmetries from networks that never are in memory together.

A representative depends on all tensors of its network, but once the permutation, scales and signs
that lead to it are known they act on every tensor alone. So there are two passes: the first reads
whole networks, some at a time, and keeps only the group elements; the second goes layer by layer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from weightsym.actions import multiply, permute_some
from weightsym.canonical import check_form
from weightsym.groups import Symmetries
from weightsym.params import Params, is_stacked
from weightsym.scales_and_signs import Scaling, canonical_scales_and_signs
from weightsym.sorting import SortKey, sort_permutations
from weightsym.validation import check_params

__all__ = ["Removal", "plan_removal"]


@dataclass(frozen=True)
class Removal:
    """For every network of a stack, the group element that leads to its representative.

    Attributes:
        sym: the symmetries.
        permutations: per group, ``(members, units)``.
        scales: per scaling group.
        signs: per sign group.

    >>> from weightsym import params as P
    >>> from torch import nn
    >>> from weightsym import discover, plan_removal
    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> stack = P.populate(net, 10)
    >>> removal = plan_removal(stack, discover(net, torch.randn(8, 2)))
    >>> [p.shape for p in removal.permutations], [s.shape for s in removal.scales]
    ([torch.Size([10, 3])], [torch.Size([10, 3])])
    """

    sym: Symmetries
    permutations: tuple[Tensor, ...]
    scales: tuple[Tensor, ...]
    signs: tuple[Tensor, ...]

    def __call__(self, name: str, values: Tensor, rows: slice = slice(None)) -> Tensor:
        """Transform one tensor of some networks.

        Args:
            name: the tensor's name.
            values: ``(rows, *shape)``.
            rows: which networks these are.
        """
        if name not in self.sym.shapes:
            known = ", ".join(list(self.sym.shapes)[:3])
            raise ValueError(f"The network has no tensor {name!r}; it has {known}, ...")
        permutations, scales, signs = (
            [element[rows] for element in kind]
            for kind in (self.permutations, self.scales, self.signs)
        )
        for element in (*permutations, *scales, *signs):
            if len(element) != len(values):
                raise ValueError(
                    f"`values` holds {len(values)} networks, `rows` are {len(element)}."
                )
        scaled = multiply({name: values}, self.sym, {"scalings": scales, "signs": signs})
        return permute_some(scaled, self.sym, permutations)[name]


def plan_removal(
    networks: Params | Iterable[Params],
    sym: Symmetries,
    scaling: Scaling | None = "unit-norm",
    permutation: SortKey | None = "max",
    *,
    target: float = 1.0,
    descending: bool = True,
) -> Removal:
    """The group elements that `canonicalise` applies, without applying them.

    One tensor is transformed after the other, so that blocks which have tensors of their own
    (experts that are modules) stay where they are.

    Args:
        networks: a stack, or several stacks one after another (such as blocks read from disk).
        sym: what `discover` returned.
        scaling: see `canonicalise`.
        permutation: see `canonicalise`.
        target: see `canonicalise`.
        descending: see `canonicalise`.

    Returns:
        Something to call with a tensor's name and values: ``removal(name, values, rows)``.

    >>> from weightsym import params as P
    >>> from torch import nn
    >>> from weightsym import canonicalise, discover, plan_removal
    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> stack, sym = P.populate(net, 10), discover(net, torch.randn(8, 2))
    >>> removal = plan_removal(stack, sym)
    >>> part = removal("2.weight", stack["2.weight"][4:7], slice(4, 7))
    >>> torch.allclose(part, canonicalise(stack, sym)["2.weight"][4:7])
    True
    """
    blocks = [networks] if isinstance(networks, dict) else networks
    parts = [_plan(block, sym, scaling, permutation, target, descending) for block in blocks]
    if not parts:
        raise ValueError("`networks` must hold at least one stack.")
    permutations, scales, signs = (
        tuple(torch.cat(elements) for elements in zip(*kind, strict=True))
        for kind in zip(*parts, strict=True)
    )
    return Removal(sym, permutations, scales, signs)


def _plan(
    params: Params,
    sym: Symmetries,
    scaling: Scaling | None,
    permutation: SortKey | None,
    target: float,
    descending: bool,
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    check_params(params, sym, "networks")
    if not is_stacked(params, sym.shapes):
        raise ValueError("`networks` must be a stack, `params.stack([network])` makes one.")
    check_form(sym, scaling, permutation)
    members = len(next(iter(params.values())))
    scales, signs = canonical_scales_and_signs(params, sym, scaling, target)
    scaled = multiply(params, sym, {"scalings": scales, "signs": signs})
    if permutation is None:
        order = [torch.arange(g.units) for g in sym.permutations]
    else:
        held = [g for g, group in enumerate(sym.permutations) if group.tensors]
        order = sort_permutations(scaled, sym, permutation, descending, held=held)
    kinds = (order, scales, signs)
    expanded = ([t.expand(members, t.shape[-1]) for t in kind] for kind in kinds)
    permutations, scales, signs = expanded
    return permutations, scales, signs

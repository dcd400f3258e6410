"""Remove symmetries: one representative for every orbit of a network.

A canonical form proceeds by softmax shift, scale and sign, then sorting. Layers are treated in
graph order, each after the ones before it. The scale of a unit does not depend on its sign, nor its
sign on its scale, so that both follow from the incoming weights once the previous layer is done.
Every step commutes with permutations: the result is the same for every network of an orbit.

A representative depends on all tensors of its network. But once its permutation, scales and signs
are known, they act on every tensor separately. Networks that do not fit into memory together take
two passes: the first reads whole networks, some at a time, and stores only the group elements
(`plan_removal`); the second goes layer by layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Literal, cast

import torch
from torch import Tensor

from weightsym.forms.balanced_form import balancing_matrices, check_full_rank, orientation
from weightsym.forms.min_mass import min_mass
from weightsym.forms.scales_and_signs import Scaling, canonical_scales_and_signs, unit_norms
from weightsym.forms.sorting import SortKey, sort_permutations
from weightsym.groups.actions import act, permute, shift_logits, tied
from weightsym.groups.element import Element, Values
from weightsym.groups.shift_removal import remove_shifts
from weightsym.groups.symmetries import Symmetries
from weightsym.groups.units import is_other_side, writer
from weightsym.groups.validation import check_params
from weightsym.params import Params, is_stacked

Mixing = Literal["balanced"] | None
_MOST_NUMBERS = 10**8  # of networks that are tried
_NUMBERS_TRIED = 10**7  # in all networks together


def canonicalise(
    params: Params,
    sym: Symmetries,
    scaling: Scaling | None = "unit-norm",
    permutation: SortKey | None = "max",
    softmax_shift: bool = False,
    *,
    mixing: Mixing = None,
    shifts: bool = False,
    target: float = 1.0,
    descending: bool = True,
) -> Params:
    r"""Replace a network, or every member of a stack, by the representative of its orbit.

    .. math:: c(g\, \theta) = c(\theta) \quad \text{for every symmetry } g \text{ that is removed}

    This is tested once for each network at random weights, unless it has more than 100 million
    numbers. There may be no such form if several scales meet in one weight, or if units differ only
    in weights among themselves, and a `ValueError` reports it.

    Args:
        params: one network or a stack.
        sym: result of `discover`.
        scaling: norm or standard deviation of the weights that enter a unit (those of a residual
            stream's first writer; the absolute gain after a normalisation) set to ``target``, or
            the scales of least mass.
        permutation: sorting key of the units, see `sort_permutations`.
        softmax_shift: also set the mean over classes of the last layer's weights and biases to
            zero. This changes logits, not probabilities.
        mixing: ``"balanced"`` also brings the channels that matrices may mix (``sym.linear``) to
            their balanced form, see `balancing_matrices`, and retains its order. Spaces of kind
            ``general`` without full rank are refused.
        shifts: also set biases to zero that other biases can absorb, and biases without effect.
            Biases of exchangeable layers are averaged instead.
        target: norm or standard deviation of every unit.
        descending: largest first.

    Returns:
        New parameters; tensors that nothing changes are the same objects, so clone what you keep
        of a network that goes on training.

    >>> from weightsym import params as P
    >>> from torch import nn
    >>> from weightsym import canonicalise, discover, permute, random_permutations
    >>> net, x = nn.Sequential(nn.Linear(2, 5), nn.ReLU(), nn.Linear(5, 1)), torch.randn(8, 2)
    >>> sym, w = discover(net, x), P.of(net)
    >>> copy = permute(w, sym, random_permutations(sym))
    >>> one, other = canonicalise(w, sym), canonicalise(copy, sym)
    >>> all(torch.allclose(one[name], other[name], atol=1e-5) for name in w)
    True
    >>> one["0.weight"].norm(dim=1).round(decimals=4)
    tensor([1., 1., 1., 1., 1.])
    """
    check_params(params, sym)
    if mixing not in (None, "balanced"):
        raise ValueError(f"`mixing` must be 'balanced' or None, got {mixing!r}.")
    if softmax_shift:
        params = remove_softmax_shift(params, sym)
    if shifts:
        params = remove_shifts(params, sym)
    if mixing is not None and sym.linear:
        check_full_rank(params, sym)
    check_form(sym, scaling, permutation, mixing)
    params = _scaled(params, sym, scaling, mixing, target)
    return _sorted(params, sym, permutation, mixing, descending)


def _scaled(
    params: Params, sym: Symmetries, scaling: Scaling | None, mixing: Mixing, target: float = 1.0
) -> Params:
    if mixing is not None and sym.linear:
        return balanced_together([params], sym, scaling, target)[0]
    scales, signs = canonical_scales_and_signs(params, sym, scaling, target)
    return act(params, sym, {"scalings": scales, "signs": signs})


def _sorted(
    params: Params,
    sym: Symmetries,
    permutation: SortKey | None,
    mixing: Mixing,
    descending: bool = True,
) -> Params:
    if permutation is None or not sym.permutations:
        return params
    fixed = _in_order_of_spaces(sym) if mixing is not None and sym.linear else set[int]()
    order = sort_permutations(params, sym, permutation, descending, held=fixed)
    return permute(params, sym, order)


def _in_order_of_spaces(sym: Symmetries) -> set[int]:
    """Return the groups of channels whose order is that of balancing matrices."""
    inside = zip(sym.permutations, sym.covered(sym.permutations, _ORDERED), strict=True)
    return {
        k for k, (group, units) in enumerate(inside) if group.kind != "block" and bool(units.all())
    }


def check_form(
    sym: Symmetries,
    scaling: Scaling | None,
    permutation: SortKey | None,
    mixing: Mixing = None,
) -> None:
    """Refuse options that would give networks of one orbit different forms."""
    mixing = mixing if sym.linear else None
    numbers = sum(shape.numel() for shape in sym.shapes.values())
    tried = numbers <= _MOST_NUMBERS or sym.shared_axes  # products have scales that norms miss
    name = _without_form(sym, scaling, permutation, mixing) if tried else ""
    if name:
        beside = "" if mixing is None else f" beside `mixing` {mixing!r}"
        raise ValueError(
            f"`scaling` {scaling!r} and `permutation` {permutation!r}{beside} give networks of "
            f"one orbit different forms of {name!r}: scales or orders of units depend on each "
            "other here. Scales of products need 'min-mass' or None."
        )


@lru_cache(maxsize=32)
def _without_form(
    sym: Symmetries, scaling: Scaling | None, permutation: SortKey | None, mixing: Mixing
) -> str:
    """Return a tensor whose forms differ within an orbit, from the groups alone."""
    removed = replace(
        sym,
        shifts=(),
        scalings=() if scaling is None else sym.scalings,
        permutations=() if permutation is None else sym.permutations,
        linear=() if mixing is None else sym.linear,
    )

    numbers = sum(shape.numel() for shape in sym.shapes.values())
    members = min(max(_NUMBERS_TRIED // max(numbers, 1), 1), 16 if mixing is None else 4)
    generator = torch.Generator().manual_seed(0)
    drawn = {
        name: torch.randn(members, *shape, generator=generator, dtype=torch.float64)
        for name, shape in sym.shapes.items()
    }
    constants = {name: t.expand(members, *t.shape) for name, t in sym.constants.items()}
    weights = tied(drawn | constants, sym)
    moved = Element.random(removed, generator, members).on_some(weights)
    first, second = (
        _sorted(_scaled(w, sym, scaling, mixing), sym, permutation, mixing)
        for w in (weights, moved)
    )
    differ = (n for n, t in first.items() if not torch.allclose(second[n], t, rtol=1e-4, atol=1e-5))
    return next(differ, "")


_ORDERED = ("general", "orthogonal", "centred")  # their balanced form sorts the channels
_TURNED = ("orthogonal", "centred", "complex", "unit complex")


def balanced_together(
    networks: Sequence[Params], sym: Symmetries, scaling: Scaling | None, target: float = 1.0
) -> list[Params]:
    """Apply scales, then matrices, then signs and phases.

    Rotations of inputs change standard deviations, which are therefore set last, from unit norms.

    Args:
        networks: the first one determines what acts on all.
        sym: result of `discover`.
        scaling: as in `canonicalise`.
        target: as in `canonicalise`.
    """

    def moved(**values: Sequence[Tensor]) -> list[Params]:
        return [act(p, sym, cast(Values, values)) for p in networks]

    covered = sym.covered(sym.scalings, ("general", "complex"))
    if scaling == "unit-std" and _reads_mixed_channels(sym, ("general", *_TURNED)):
        networks = balanced_together(networks, sym, "unit-norm", target)
        scales, _ = canonical_scales_and_signs(networks[0], sym, scaling, target, unscaled=covered)
        return moved(scalings=scales)
    if scaling == "min-mass" or (scaling is not None and _reads_mixed_channels(sym, ("general",))):
        least = min_mass(networks[0], sym, mixing=True, tolerance=1e-13)
        networks = moved(scalings=least.scales, linear=least.matrices)
        networks = moved(scalings=unit_norms(networks[0], sym, least.falling))
    if scaling != "min-mass":
        scales, _ = canonical_scales_and_signs(networks[0], sym, scaling, target, unscaled=covered)
        networks = moved(scalings=scales)
    networks = moved(linear=balancing_matrices(networks[0], sym))
    signs, matrices = orientation(networks[0], sym)
    return moved(signs=signs, linear=matrices)


def _reads_mixed_channels(sym: Symmetries, kinds: Sequence[str]) -> bool:
    """Return whether matrices act on the other side of weights whose size sets a scale."""
    writers = [writer(sym, g) for g in sym.scalings]
    return any(
        is_other_side(sym, p.axis, w)
        for w in writers
        if w is not None
        for g in sym.linear
        if g.kind in kinds
        for p in g.placements
    )


# ------------------------------------------------------------ softmax
def remove_softmax_shift(params: Params, sym: Symmetries) -> Params:
    r"""Set the mean over classes of the last weights and biases to zero.

    .. math:: W' = W - \tfrac1C 1 1^T W, \quad b' = b - \tfrac1C 1 1^T b

    >>> from weightsym import params as P
    >>> from torch import nn
    >>> from weightsym import discover
    >>> net, x = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 4)), torch.randn(8, 2)
    >>> new = P.apply(net, remove_softmax_shift(P.of(net), discover(net, x)), x)
    >>> torch.allclose(new.mean(-1), torch.zeros(8), atol=1e-5)
    True
    >>> torch.allclose(new.softmax(-1), net(x).softmax(-1), atol=1e-5)
    True
    """
    last = sym.softmax_shift
    if last is None:
        raise ValueError(
            "`softmax_shift`: the network does not end in a layer whose outputs are its logits."
        )
    offset = 1 if is_stacked(params, sym.shapes) else 0
    weight = -params[last.weight].mean(offset)
    bias = -params[last.bias].mean(-1) if last.bias is not None else None
    return shift_logits(params, sym, weight, bias)


# ------------------------------------------------------------ networks that never are together
def plan_removal(
    networks: Params | Iterable[Params],
    sym: Symmetries,
    scaling: Scaling | None = "unit-norm",
    permutation: SortKey | None = "max",
    *,
    target: float = 1.0,
    descending: bool = True,
) -> Element:
    """Return the elements that `canonicalise` applies, without applying them.

    Tensors are transformed one after the other, so that blocks with tensors of their own (experts
    that are modules) stay in place.

    Args:
        networks: a stack, or several successive stacks (such as blocks read from disk).
        sym: result of `discover`.
        scaling: see `canonicalise`.
        permutation: see `canonicalise`.
        target: see `canonicalise`.
        descending: see `canonicalise`.

    Returns:
        An element that moves whole stacks, and some rows of one tensor after the other.

    >>> from weightsym import params as P
    >>> from torch import nn
    >>> from weightsym import canonicalise, discover, plan_removal
    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> stack, sym = P.populate(net, 10), discover(net, torch.randn(8, 2))
    >>> removal = plan_removal(stack, sym)
    >>> part = removal.rows("2.weight", stack["2.weight"][4:7], slice(4, 7))
    >>> torch.allclose(part, canonicalise(stack, sym)["2.weight"][4:7])
    True
    """
    blocks = [networks] if isinstance(networks, dict) else networks
    parts = [_plan(block, sym, scaling, permutation, target, descending) for block in blocks]
    if not parts:
        raise ValueError("`networks` must hold at least one stack.")
    permutations, scales, signs = (
        [torch.cat(values) for values in zip(*of_blocks, strict=True)]
        for of_blocks in zip(*parts, strict=True)
    )
    scaled = Element.of_values(sym, {"scalings": scales, "signs": signs})
    return Element.of_values(sym, {"permutations": permutations}) @ scaled


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
        raise ValueError("`networks` must be a stack, such as `params.stack([network])`.")
    check_form(sym, scaling, permutation)
    members = len(next(iter(params.values())))
    scales, signs = canonical_scales_and_signs(params, sym, scaling, target)
    scaled = act(params, sym, {"scalings": scales, "signs": signs})
    if permutation is None:
        order = [torch.arange(g.units) for g in sym.permutations]
    else:
        listed = [g for g, group in enumerate(sym.permutations) if group.tensors]
        order = sort_permutations(scaled, sym, permutation, descending, held=listed)
    kinds = (order, scales, signs)
    expanded = ([t.expand(members, t.shape[-1]) for t in elements] for elements in kinds)
    permutations, scales, signs = expanded
    return permutations, scales, signs

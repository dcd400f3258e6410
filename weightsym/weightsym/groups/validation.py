"""Validation of parameters and group elements, with one sentence for each refusal."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from weightsym.groups.placements import complex_matrices
from weightsym.groups.symmetries import Group, LinearGroup, ShiftGroup, Symmetries
from weightsym.networks.devices import pieces
from weightsym.networks.dicts import Computed
from weightsym.params import is_stacked

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def check_params(params: Mapping[str, Tensor], sym: Symmetries, name: str = "params") -> bool:
    """Require all parameters of a network, and return whether they are a stack.

    Statistics of norms may be missing: standard deviations and gradients have none. So are buffers
    that were read as constants, and further names of one tensor, if they hold something else.
    """
    check_symmetries(sym)
    check_named_tensors(params, name)
    missing = [n for n in sym.shapes if n not in params and not n.endswith(_STATISTICS)]
    if missing:
        first = next(iter(params), None)
        hint = f" (it holds {first!r})" if first is not None else " (it is empty)"
        raise ValueError(
            f"`{name}` lacks {missing[0]!r}{hint}: were the symmetries found for this module?"
        )
    stacked = is_stacked(params, sym.shapes)
    if not isinstance(params, Computed):  # these have been checked where they come from
        _check_numbers(params, sym, name)
    _check_members(params, sym, stacked, name)
    _check_ties(params, sym, name)
    _check_constants(params, sym, name)
    return stacked


def check_named_tensors(params: Mapping[str, Tensor], name: str) -> None:
    """Require a dict of tensors, not a module or a list of networks.

    Another mapping, such as a network on disk, knows what its values are.
    """
    is_mapping = isinstance(params, Mapping) and not isinstance(params, dict)
    tensors = isinstance(params, dict) and all(isinstance(t, Tensor) for t in params.values())
    if not (is_mapping or tensors):
        way = "`params.stack(networks)`" if isinstance(params, list) else "`params.of(module)`"
        raise ValueError(
            f"`{name}` must be a dict of tensors such as {way}, got {type(params).__name__}."
        )


def check_symmetries(sym: Symmetries) -> None:
    """Require a `Symmetries`."""
    if not isinstance(sym, Symmetries):
        raise ValueError(f"`sym` must be a `Symmetries` from `discover`, got {type(sym).__name__}.")


def _check_numbers(params: Mapping[str, Tensor], sym: Symmetries, name: str) -> None:
    """Require dense real weights in memory: integers would be rounded."""
    for tensor in (n for n in sym.numbers if n in params):
        w = params[tensor]
        if not w.is_floating_point() or w.is_meta or w.layout != torch.strided:
            description = "no numbers (meta device)" if w.is_meta else f"{w.dtype} ({w.layout})"
            raise ValueError(
                f"`{name}`: {tensor!r} must be a dense tensor of real floats, got {description}."
            )


def _check_members(params: Mapping[str, Tensor], sym: Symmetries, stacked: bool, name: str) -> None:
    sizes = {params[n].shape[0]: n for n in sym.shapes if stacked and n in params}
    if len(sizes) > 1:
        (m, first), (n, second) = list(sizes.items())[:2]
        raise ValueError(f"`{name}` is not a stack: {first!r} has {m} members, {second!r} has {n}.")


def _check_ties(params: Mapping[str, Tensor], sym: Symmetries, name: str) -> None:
    for alias, first in sym.aliases.items():
        if alias in params and not _same(params[alias], params[first]):
            raise ValueError(
                f"`{name}`: {alias!r} and {first!r} were one tensor when the symmetries were "
                "found, and now differ: discover them again."
            )


def _same(a: Tensor, b: Tensor) -> bool:
    return a is b or torch.equal(a, b)


def _check_constants(params: Mapping[str, Tensor], sym: Symmetries, name: str) -> None:
    for buffer, old in sym.constants.items():
        new = params.get(buffer)
        if new is not None and not bool(_equal_up_to_rounding(new, old).all()):
            raise ValueError(
                f"`{name}`: the buffer {buffer!r} was read as a constant and now holds other "
                "values: discover the symmetries again, with these weights in the network."
            )


def _equal_up_to_rounding(new: Tensor, old: Tensor) -> Tensor:
    old = old.to(new.device)
    if not (new.is_floating_point() and old.is_floating_point()):
        return new == old
    rounding = 4 * max(torch.finfo(new.dtype).eps, torch.finfo(old.dtype).eps)
    return torch.isclose(new.double(), old.double(), rtol=rounding, atol=0, equal_nan=True)


def check_finite(params: Mapping[str, Tensor], sym: Symmetries, name: str = "params") -> None:
    """Require finite values of at least one network, for sorting, scaling and averaging.

    Biases and statistics count as well; buffers that were read as constants may be infinite.
    """
    check_some(params, sym, name)
    names = [n for n in sym.shapes if n in params and n not in sym.constants]
    sums = [_sum(params[n].detach()) for n in names]
    if math.isfinite(sum(t.to(sums[0]) for t in sums)):  # the fastest way to see that all are
        return
    for tensor in names:
        w = params[tensor]
        bad = ~torch.isfinite(w)
        if bool(bad.any()):
            where = "holds NaN or infinite values"
            if w.ndim > len(sym.shapes[tensor]):
                where += f", first in member {int(bad.flatten(1).any(1).nonzero()[0, 0])}"
            raise ValueError(f"`{name}`: {tensor!r} {where}.")


def _sum(w: Tensor) -> Tensor:
    """Return the sum of a floating-point tensor, and zero for others, which are always finite."""
    wide = torch.promote_types(w.dtype, torch.float32)
    if not w.is_floating_point():
        return w.new_zeros((), dtype=torch.float32)
    return torch.stack([part.sum(dtype=wide) for part in pieces(w)]).sum()


def check_some(params: Mapping[str, Tensor], sym: Symmetries, name: str = "params") -> None:
    """Require at least one network."""
    first = next((n for n in sym.shapes if n in params), None)  # of a stack all are as long
    w = None if first is None else params[first]
    if w is not None and w.ndim > len(sym.shapes[str(first)]) and not len(w):
        raise ValueError(f"`{name}` must hold at least one network, got an empty stack.")


def check_squares(
    params: Mapping[str, Tensor], name: str = "params", tensors: Iterable[str] | None = None
) -> None:
    """Refuse weights whose squares overflow or all underflow.

    Args:
        params: what is multiplied, half precision in float32.
        name: of the argument.
        tensors: some of all.
    """
    tensors, survive = list(params if tensors is None else tensors), False
    for tensor in tensors:
        w = params[tensor]
        wide = torch.promote_types(w.dtype, torch.float32)
        norms = [float(torch.linalg.vector_norm(part, dtype=wide)) for part in pieces(w)]
        total = sum(norm * norm for norm in norms)
        if not total <= torch.finfo(wide).max:
            raise ValueError(f"`{name}`: the squares of {tensor!r} overflow in {wide}.")
        survive = survive or total >= torch.finfo(wide).tiny
    sizes = [] if survive else [float(params[n].abs().amax()) for n in tensors if params[n].numel()]
    if any(sizes):
        raise ValueError(
            f"`{name}`: all squared weights underflow, the largest weight is {max(sizes):.3g}."
        )


def check_one_network(params: Mapping[str, Tensor], sym: Symmetries, name: str) -> None:
    """Require complete parameters of one network, not of a stack."""
    if check_params(params, sym, name):
        raise ValueError(f"`{name}` must be one network, not a stack.")


def check_pair(
    params: Mapping[str, Tensor],
    reference: Mapping[str, Tensor],
    sym: Symmetries,
    tensors: Iterable[str],
) -> bool:
    """Validate networks and their reference, and return whether they are a stack.

    Args:
        params: one network or a stack.
        reference: one network.
        sym: what `discover` returned.
        tensors: whose squares count.
    """
    check_one_network(reference, sym, "reference")
    stacked = check_params(params, sym)
    for name, networks in (("reference", reference), ("params", params)):
        check_finite(networks, sym, name)
        check_squares(networks, name, tensors)
    return stacked


# ------------------------------------------------------------ elements
def check_element(
    field: str,
    values: Sequence[Tensor],
    sym: Symmetries,
    members: int | None = None,
    name: str = "",
) -> list[Tensor]:
    """Return one dense tensor of real numbers per group, and refuse anything else.

    Args:
        field: of the groups, an attribute of the symmetries.
        values: the part of an element.
        sym: what `discover` returned.
        members: of a stack; values may differ by member.
        name: of the argument, by default the usual one.
    """
    groups: Sequence[Any] = getattr(sym, field)
    usual, problem = _PARTS[field]
    name = name or usual
    try:
        tensors = [torch.as_tensor(v) for v in values]
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"`{name}` must hold one tensor per group, got {type(values).__name__}: {error}"
        ) from None
    if len(tensors) != len(groups):
        raise ValueError(
            f"`{name}` must hold one tensor per group: {len(groups)}, got {len(tensors)}."
        )
    for k, (value, group) in enumerate(zip(tensors, groups, strict=True)):
        shape = _shape(group)
        if value.is_complex() or value.is_meta or value.layout != torch.strided:
            got = "none (meta device)" if value.is_meta else f"{value.dtype} ({value.layout})"
            raise ValueError(f"`{name}[{k}]` must be a dense tensor of real numbers, got {got}.")
        if value.shape not in (shape, (members, *shape)):
            each = "" if members is None else f", or one such for each of {members} members"
            raise ValueError(
                f"`{name}[{k}]` must have shape {shape} ({group.name}){each}, "
                f"got shape {tuple(value.shape)}."
            )
        if trouble := problem(value, group):
            raise ValueError(f"`{name}[{k}]` must {trouble} ({group.name}).")
    return tensors


def _shape(group: Any) -> tuple[int, ...]:
    """Return the shape of an element for one network."""
    if isinstance(group, LinearGroup):
        return group.spaces, group.size, group.size
    return (group.size,) if isinstance(group, ShiftGroup) else (group.units,)


def _order_problem(value: Tensor, group: Group) -> str:
    units = torch.arange(group.units, device=value.device)
    right = value.dtype == torch.int64 and bool((value.sort(-1).values == units).all())
    return "" if right else "hold every index of its units once"


def _scale_problem(value: Tensor, _: Group) -> str:
    return "" if bool(((value > 0) & value.isfinite()).all()) else "be positive and finite"


def _sign_problem(value: Tensor, _: Group) -> str:
    right = value.dtype != torch.bool and bool((value.abs() == 1).all())
    return "" if right else "hold +1 and -1"


def _shift_problem(value: Tensor, _: ShiftGroup) -> str:
    return "" if bool(value.isfinite().all()) else "be finite"


def _matrices_problem(matrices: Tensor, group: LinearGroup) -> str:
    """Explain why matrices are not elements of their group, or return an empty string."""
    if not bool(matrices.isfinite().all()):
        return "be finite"
    matrices, near = matrices.double(), 1e-5
    singular = torch.linalg.svdvals(matrices)
    if bool((singular[..., -1] <= 1e-12 * singular[..., 0]).any()):
        return "be invertible"
    if not bool(torch.linalg.inv(matrices).isfinite().all()):
        return "be invertible: an inverse overflows"
    if not group.rescales and float((singular - 1).abs().max()) > near:
        return "be orthogonal"
    if group.kind == "centred" and float((matrices.sum(-1) - 1).abs().max()) > near:
        return "leave the vector of ones unchanged"
    if group.kind in ("complex", "unit complex"):
        x, y = matrices[..., 0, 0], matrices[..., 1, 0]
        if (
            float(((complex_matrices(x, y) - matrices).abs() / singular[..., :1, None]).max())
            > near
        ):
            return "have the form [[x, -y], [y, x]]"
    return ""


_PARTS: dict[str, tuple[str, Callable[[Tensor, Any], str]]] = {
    "permutations": ("permutations", _order_problem),
    "scalings": ("scales", _scale_problem),
    "signs": ("signs", _sign_problem),
    "linear": ("matrices", _matrices_problem),
    "shifts": ("shifts", _shift_problem),
}
"""By kind of group the argument that has its elements, and what is wrong with one, if anything."""

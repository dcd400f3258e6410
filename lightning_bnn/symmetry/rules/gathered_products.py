"""Products of tokens with the matrices that an index picks for them, followed for all matrices."""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_letters
from typing import Any

from torch import Tensor
from torch.fx import Node

from lightning_bnn.symmetry.rules.constraints import Constraints
from lightning_bnn.symmetry.rules.gathered import is_stack, labels_of, made, of_one_token
from lightning_bnn.symmetry.rules.labels import (
    Gathered,
    Unsupported,
    Value,
    Weight,
    compress,
    core,
    shape_of,
)
from lightning_bnn.symmetry.rules.lookahead import meets_stack
from lightning_bnn.symmetry.rules.tensor_weights import apply_weight

__all__ = ["contract_gathered"]


def contract_gathered(
    system: Constraints, node: Node, operands: Sequence[Any], letters: Sequence[str], result: str
) -> Any:
    """Tokens, or rows of the same index, times a matrix of a stack for each of them."""
    at = next((k for k, x in enumerate(operands) if is_stack(x)), None)
    if len(operands) != 2 or at is None or is_stack(operands[1 - at]):
        raise Unsupported("rows of a stack in a product that is not one of a matrix")
    weight: Gathered = operands[at]
    x, of_weight = operands[1 - at], letters[at]
    sizes = zip(of_weight, weight.shape[: weight.lead], strict=False)
    index = "".join(c for c, n in sizes if n > 1)
    if result[: len(index)] != index:
        raise Unsupported("rows of a stack in another order")
    labels, of_x = _rows_beside(system, x, letters[1 - at], weight, index)
    row = next(c for c in ascii_letters if c not in "".join(letters))
    pair = row + of_x, row + of_weight[weight.lead :]
    kept = [c for c in result if c not in index]
    assert isinstance(weight.what, Weight)
    out, *place = apply_weight(
        system,
        labels,
        weight.what,
        pair,
        row + "".join(c for c in kept if c in "".join(pair)),
        lambda _: not meets_stack(node),
        same_input=not isinstance(x, Gathered),
    )
    for d, c in enumerate(kept):
        out = out if c in "".join(pair) else out.unsqueeze(d + 1)
    rows = made(out, weight, shape_of(node))
    for part in place:  # all rows write the same channels
        system.tie(core(part).reshape(-1), weight.at.channels, ("permutation",))
        return Value(compress(core(out)[(0,) + (None,) * rows.lead].expand(rows.shape)))
    return rows


def _rows_beside(
    system: Constraints, x: Any, letters: str, weight: Gathered, index: str
) -> tuple[Tensor, str]:
    """Labels for all rows of what meets a stack, without the dimensions of the index."""
    if not isinstance(x, Gathered):
        labels = of_one_token(system.labels(x), [d for d, c in enumerate(letters) if c in index])
        labels = labels[None].expand(len(weight.at.channels), *labels.shape)
        return labels, "".join(c for c in letters if c not in index)
    lead = letters[: x.lead]
    ones = [c for c, n in zip(lead, x.shape, strict=False) if c not in index and n == 1]
    if x.order != weight.order or "".join(c for c in lead if c not in ones) != index:
        raise Unsupported("rows of a stack that two indices pick")
    labels = labels_of(system, x)[(slice(None),) + (None,) * len(ones)]
    return labels, "".join(ones) + letters[x.lead :]

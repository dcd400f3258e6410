"""Products of activations and weights: averages pass constants on, a softmax forgets some."""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_letters
from typing import Any

from torch import Tensor
from torch.fx import Node

from lightning_bnn.symmetry.discovery.constants.operands import (
    Added,
    Followed,
    Scores,
    Unbiased,
    equal_along,
    size_of,
)
from lightning_bnn.symmetry.rules.labels import (
    Unsupported,
    Weight,
    core,
    moving_dims,
    narrow_except,
    shape_of,
)
from lightning_bnn.symmetry.rules.softmaxes import rows_sum_to_one

__all__ = ["attention", "einsum", "matmul", "sum_with_product"]


def matmul(followed: Followed, node: Node, x: Any, y: Any) -> Any:
    """A matrix product over leading dimensions, or one with a vector."""
    sizes = [len(size_of(a)) for a in node.args[:2]]
    lead = ascii_letters[: max(0, *(n - 2 for n in sizes))]
    first = lead[len(lead) - max(0, sizes[0] - 2) :] + ("Y" if sizes[0] == 1 else "XY")
    second = lead[len(lead) - max(0, sizes[1] - 2) :] + ("Y" if sizes[1] == 1 else "YZ")
    result = lead + ("X" if sizes[0] > 1 else "") + ("Z" if sizes[1] > 1 else "")
    return _product(followed, node, node.args[:2], (x, y), (first, second), result)


def sum_with_product(
    followed: Followed, node: Node, added: Any, x: Any, y: Any, **kwargs: Any
) -> Any:
    """``baddbmm``: scores beside what does not depend on the network."""
    product = _product(followed, node, node.args[1:3], (x, y), ("aXY", "aYZ"), "aXZ")
    if added is None and (product is None or isinstance(product, Scores)):
        return product
    plain = all(v == 1 for v in kwargs.values()) and added is None
    if plain and isinstance(product, Added):
        return product
    for operand in (added, product):
        followed.see(operand)
    return None


def einsum(followed: Followed, node: Node, equation: str, operands: Any, **kwargs: Any) -> Any:
    """A product of two over named dimensions."""
    terms, arrow, result = equation.replace(" ", "").partition("->")
    letters = terms.split(",")
    if not arrow or "." in equation or len(letters) != 2:
        raise Unsupported("an equation of another form")
    if any(len(set(t)) < len(t) for t in letters):
        raise Unsupported("a diagonal")
    return _product(followed, node, node.args[1], operands, letters, result)


def _product(
    followed: Followed,
    node: Node,
    nodes: Any,
    operands: Sequence[Any],
    letters: Sequence[str],
    result: str,
) -> Any:
    weights = [k for k in (0, 1) if isinstance(operands[k], Weight)]
    if len(weights) == 1:
        return _by_weight(followed, node, operands, letters, result, weights[0])
    found: Added | Scores | None = None
    for k in (0, 1):
        numbers = followed.numbers(operands[k])
        if numbers is None:
            continue
        rest = letters[k].translate({ord(c): None for c in result})
        made = _averaged(numbers, nodes[1 - k], letters[k], letters[1 - k], result, rest)
        forgotten = _varies_with_row_only(numbers, letters[k], result)
        if found is None and made is not None and operands[1 - k] is None:
            found = followed.added(made.expand(shape_of(node)))
        elif found is None and forgotten and isinstance(operands[k], Added):
            found = Scores(core(numbers).reshape(-1))
        else:
            followed.see(operands[k])
    return found


def _averaged(
    numbers: Tensor, by: Node, letters: str, others: str, result: str, summed: str
) -> Tensor | None:
    """What is averaged by rows that sum to one is shifted like the rows."""
    if summed != others[-1] or letters.index(summed) in moving_dims(numbers):
        return None
    if not rows_sum_to_one(by):
        return None
    kept = numbers.select(letters.index(summed), 0)
    left = [c for c in letters if c != summed]
    moved = kept.permute([left.index(c) for c in result if c in left])
    for d, c in enumerate(result):
        if c not in left:
            moved = moved.unsqueeze(d)
    return moved


def _varies_with_row_only(numbers: Tensor, letters: str, result: str) -> bool:
    """Whether the last dimension of a product is one along which nothing differs."""
    return bool(result) and (
        result[-1] in letters and letters.index(result[-1]) not in moving_dims(numbers)
    )


def _by_weight(
    followed: Followed,
    node: Node,
    operands: Sequence[Any],
    letters: Sequence[str],
    result: str,
    at: int,
) -> Any:
    """A matrix between the last dimensions, or one that mixes scores but not along their rows."""
    weight, x = operands[at], operands[1 - at]
    summed = set(letters[0]) & set(letters[1]) - set(result)
    if isinstance(x, Scores) and _keeps_rows(letters[1 - at], letters[at], result):
        followed.use(weight.name, "weight")
        return x
    plain = len(weight.shape) == 2 and len(summed) == 1
    if not plain or isinstance(x, Scores | Weight) or letters[1 - at][-1] not in summed:
        followed.see(weight)
        followed.see(x)
        return None
    followed.use(weight.name, "weight")
    numbers = followed.numbers(x)
    out_dim = 1 - letters[at].index(next(iter(summed)))
    if result[-1:] != letters[at][out_dim]:
        followed.see(x)
        return None
    row = followed.row(numbers, -1, weight.shape[1 - out_dim])
    return Unbiased(weight, out_dim, row)


def _keeps_rows(scores: str, weight: str, result: str) -> bool:
    """Whether the last dimension of scores is that of a result, and not one of the weight."""
    return result[-1:] == scores[-1:] and scores[-1] not in weight


def attention(
    followed: Followed,
    node: Node,
    q: Any,
    k: Any,
    v: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **kwargs: Any,
) -> Any:
    """What all keys gain is forgotten; what all values gain goes on."""
    followed.see(q)
    equal_along(followed, k, -2)
    if attn_mask is not None:
        equal_along(followed, attn_mask, -1)
    numbers = followed.numbers(v)
    if numbers is None:
        return None
    if dropout_p:
        followed.see(v)
        return None
    equal_along(followed, v, -2)
    row = followed.system.live(narrow_except(numbers, [numbers.ndim - 1, numbers.ndim - 3]))
    return None if row is None else _heads(followed, node, row)


def _heads(followed: Followed, node: Node, row: Tensor) -> Any:
    """Values of groups of heads, repeated for all heads that they have."""
    shape = shape_of(node)
    if len(shape) > 2 and row.shape[-3] not in (1, shape[-3]):
        row = row.repeat_interleave(shape[-3] // row.shape[-3], -3)
    return followed.added(row.expand(shape))

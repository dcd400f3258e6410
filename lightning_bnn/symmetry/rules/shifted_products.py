"""What products of activations do to constants that biases add to their channels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from lightning_bnn.symmetry.rules.constraints import Constraints
from lightning_bnn.symmetry.rules.labels import (
    Factored,
    Gathered,
    Value,
    core,
    moving_dims,
    spread,
)
from lightning_bnn.symmetry.rules.shifts import is_forgotten_by_softmax, rows_sum_to_one

__all__ = ["shift_product", "stop_shifts"]


def shift_product(
    system: Constraints,
    node: Node,
    operands: Sequence[Value],
    letters: Sequence[str],
    result: str,
    product: Any,
) -> Any:
    """Averages of rows are shifted like the rows; a shift of keys is forgotten by the softmax."""
    nodes = [a for a in tree_leaves(node.args) if isinstance(a, Node)][-2:]
    names = [*result, *sorted({c for t in letters for c in t} - set(result))]
    forgotten, tied = is_forgotten_by_softmax(node), False
    for k, (x, of_x, of_other) in enumerate(zip(operands, letters, letters[::-1], strict=True)):
        still = {c for d, c in enumerate(of_x) if d not in moving_dims(x.labels)}
        averaged = set(of_other[-1:]) == {c for c in names if c not in result} <= still
        if averaged and rows_sum_to_one(nodes[1 - k]):
            rows = spread(x.labels, of_x, names)[(...,) + (0,) * (len(names) - len(result))]
            if isinstance(product, Factored):
                product = replace(product, shifted=core(rows))
            else:
                system.shifts.tie(product.labels, rows)
            tied = True
        elif not (forgotten and result[-1:] not in of_other and {*result[-1:]} <= still):
            system.shifts.stop(x.labels)
    if not tied:
        stop_shifts(system, [product])
    return product


def stop_shifts(system: Constraints, operands: Iterable[Any]) -> None:
    """No bias takes up what these activations are shifted by."""
    for x in operands:
        if isinstance(x, Value):
            system.shifts.stop(x.labels)
        elif isinstance(x, Factored) and x.shifted is not None:
            system.shifts.stop(x.shifted)
        elif isinstance(x, Gathered) and isinstance(x.what, Tensor):
            system.shifts.stop(x.what)

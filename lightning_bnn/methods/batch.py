"""A batch for networks side by side: the same examples for all of them, or some for each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map

from lightning_bnn import params as P
from lightning_bnn.params import Params

__all__ = ["EXAMPLE_ROWS", "Batch"]

EXAMPLE_ROWS = 2


@dataclass(frozen=True)
class Batch:
    """Inputs and targets.

    Attributes:
        inputs: of the networks, by position.
        targets: of the networks.
        per_member: whether the leading dimension of both counts members.
        number: how many batches of the run came before.

    >>> import torch
    >>> batch = Batch((torch.randn(3, 10, 2),), torch.zeros(3, 10), per_member=True)
    >>> batch.examples, batch.of(0).inputs[0].shape, batch.example()[0].shape
    (10, torch.Size([10, 2]), torch.Size([2, 2]))
    """

    inputs: tuple[Any, ...]
    targets: Tensor
    per_member: bool = False
    number: int = 0

    def of(self, members: int | slice | Tensor) -> Batch:
        """What some members see; for one member without the leading dimension."""
        if not self.per_member:
            return self
        return Batch(_rows(self.inputs, members), self.targets[members], True, self.number)

    def example(self) -> tuple[Any, ...]:
        """The first rows of the inputs, as one network takes them."""
        return _rows(self.of(0).inputs, slice(EXAMPLE_ROWS))

    @property
    def examples(self) -> int:
        """How many examples a member sees."""
        return self.targets.shape[1] if self.per_member else len(self.targets)

    def outputs(self, network: nn.Module, stack: Params, chunk_size: int | None) -> Any:
        """Outputs of every network of a stack, in the order of the stack."""
        apply = P.apply_each if self.per_member else P.apply
        return apply(network, stack, *self.inputs, chunk_size=chunk_size)

    def outputs_of_one(self, network: nn.Module, params: Params) -> Any:
        """The same for a single network, without ``vmap``; outputs have a leading dimension."""
        inputs = _rows(self.inputs, 0) if self.per_member else self.inputs
        outputs = P.apply(network, params, *inputs)
        return tree_map(lambda t: t[None] if isinstance(t, Tensor) else t, outputs)


def _rows(inputs: tuple[Any, ...], members: int | slice | Tensor) -> tuple[Any, ...]:
    rows: tuple[Any, ...] = tree_map(lambda t: t[members] if isinstance(t, Tensor) else t, inputs)
    return rows

"""A batch that has other examples for every member of a stack."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor


class MemberBatch(NamedTuple):
    """Examples of its own for every member: the leading dimension of both counts members.

    A loader that yields such batches trains members side by side as if each had a loader of its
    own. Those of the datamodules of this package do so with ``orders``.
    """

    inputs: Any
    targets: Tensor

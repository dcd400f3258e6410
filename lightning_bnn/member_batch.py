"""A batch with different examples for every member of a stack."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor


class MemberBatch(NamedTuple):
    """Different examples for every member, counted by the leading dimension.

    A loader of such batches trains members side by side as if each had a loader of its own. The
    datamodules of this package yield them with ``orders``.
    """

    inputs: Any
    targets: Tensor

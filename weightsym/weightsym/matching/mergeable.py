"""Whether two networks can be averaged, and in which frame."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from weightsym.arguments import is_number
from weightsym.groups.element import Element
from weightsym.groups.symmetries import Symmetries
from weightsym.matching.interpolation import Loss, barrier
from weightsym.matching.match_all import Frame, in_frame
from weightsym.matching.moved import Moved
from weightsym.matching.relation import Relation, relation
from weightsym.networks.devices import at_least_single
from weightsym.params import Params

Answer = Literal["as they are", "in one frame", "no", "cannot be told"]
SURE, HOPELESS = 0.9, 0.25
"""Least cosines above and below which a barrier is predicted to be small or large."""


@dataclass(frozen=True, eq=False)
class Meeting:
    """Two networks in one frame.

    Attributes:
        method: what has brought them there.
        element: of the first one.
        cosine: of their weights in the matrix where they are least alike.
        barrier: between them, if there are data.
    """

    method: Frame
    element: Element
    cosine: float
    barrier: float | None


@dataclass(frozen=True, eq=False)
class Mergeable:
    """What the average of two networks is worth.

    Attributes:
        meetings: both in each frame, the simplest first.
        relation: of the two; None without units that can be exchanged.
        tolerance: largest barrier that is accepted.

    >>> from weightsym import Element, Meeting, Mergeable, discover
    >>> start = Element(discover(nn.Linear(2, 2), torch.randn(8, 2)))
    >>> Mergeable((Meeting("plain", start, cosine=0.99, barrier=None),), None, 0.1).verdict
    'as they are'
    """

    meetings: tuple[Meeting, ...]
    relation: Relation | None
    tolerance: float

    @property
    def best(self) -> Meeting:
        """The simplest frame in which the average is good, else that in which it is best.

        Data tell whether another frame is clearly better: by half, and by a tenth of the tolerance.
        """
        best = max(self.meetings, key=_worth)
        low = 0.0 if best.barrier is None else best.barrier
        limit = max(2 * low, low + self.tolerance / 10)
        good = (m for m in self.meetings if self._answer(m) == "in one frame")
        return next((m for m in good if m.barrier is None or m.barrier <= limit), best)

    @property
    def verdict(self) -> Answer:
        """Whether they can be averaged as they are, in one frame, not at all, or unknown.

        With data the barrier decides, without them the least cosine of any matrix: above ``SURE``
        averages of trained pairs lose little, and below ``HOPELESS`` much. Between them it depends
        on the architecture.
        """
        answer, plain = self._answer(self.best), self.best.method == "plain"
        return "as they are" if plain and answer == "in one frame" else answer

    def _answer(self, meeting: Meeting) -> Answer:
        if meeting.barrier is not None:
            return "in one frame" if meeting.barrier <= self.tolerance else "no"
        if HOPELESS <= meeting.cosine < SURE:
            return "cannot be told"
        return "in one frame" if meeting.cosine >= SURE else "no"


def _worth(meeting: Meeting) -> float:
    if meeting.barrier is None:
        return meeting.cosine
    return -meeting.barrier if math.isfinite(meeting.barrier) else -math.inf


@torch.no_grad()
def mergeable(
    a: Params,
    b: Params,
    sym: Symmetries,
    *,
    model: nn.Module | None = None,
    batches: Sequence[tuple[Any, Any]] | None = None,
    loss: Loss = nn.functional.cross_entropy,
    tolerance: float = 0.1,
    seed: int = 0,
) -> Mergeable:
    r"""Tell whether the average of two networks is worth something, and in which frame.

    The first one is brought to the other by permutations and signs, and by matrices if channels can
    be mixed. With data, the barrier between them is measured in every frame (`barrier`). Without,
    it is predicted from the matrix in which they are least alike,

    .. math:: \min_W \frac{\langle g W_a, W_b \rangle}{\|W_a\| \|W_b\|}

    Args:
        a: one network.
        b: the other one.
        sym: what `discover` returned.
        model: gives the computation, for the barrier.
        batches: pairs of input and target, read several times.
        loss: mean loss of a batch.
        tolerance: largest barrier that is accepted, in units of the loss.
        seed: of the order from which units are matched.

    >>> from weightsym import params as P
    >>> from weightsym import discover, mergeable, permute, random_permutations
    >>> net = nn.Sequential(nn.Linear(9, 32), nn.ReLU(), nn.Linear(32, 9))
    >>> sym, w = discover(net, torch.randn(8, 9)), P.of(net)
    >>> found = mergeable(permute(w, sym, random_permutations(sym)), w, sym)
    >>> found.verdict, found.best.method
    ('in one frame', 'reference')
    """
    if not is_number(tolerance):
        raise ValueError(f"`tolerance` must be a finite number, got {tolerance!r}.")
    if (model is None) != (batches is None):
        raise ValueError("`model` and `batches` go together: both, or neither.")
    exchangeable = any(group.units > 1 for group in sym.permutations)
    meetings = list[Meeting]()
    for method in get_args(Frame)[: 3 if sym.linear else 2]:
        element = in_frame(a, b, sym, method, seed)
        height = None
        if model is not None and batches is not None:
            height = barrier(model, element(a), b, batches, loss).height
        meetings.append(Meeting(method, element, least_cosine(Moved(a, element), b, sym), height))
    related = relation(a, b, sym, seed=seed) if exchangeable else None
    return Mergeable(tuple(meetings), related, tolerance)


def least_cosine(a: Mapping[str, Tensor], b: Mapping[str, Tensor], sym: Symmetries) -> float:
    """The least cosine of two networks in any matrix that symmetries move."""
    cosines = [math.nan]
    for name in (n for n in sorted(sym.compared) if len(sym.shapes[n]) > 1):
        x, y = (at_least_single(w[name]).flatten() for w in (a, b))
        cosines.append(float(torch.cosine_similarity(x, y, 0)))
    return min(cosines[1:] or cosines)

"""Laws of shifts: they hold at every length and batch, whatever the example has."""

import pytest
import torch
import torch.nn.functional as F
from cases import Forward, randomise
from torch import nn
from torch.export import export

from weightsym import Symmetries, random_shifts, shift
from weightsym import params as P
from weightsym.discovery.dimensions.program import decompose
from weightsym.discovery.dimensions.shifts import shifts_of

IDS = torch.randint(7, (3, 4), generator=torch.Generator().manual_seed(0))
OTHER_IDS = [IDS.flip(0)[:2], IDS.repeat(1, 2)]
ROWS = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(1)).double()
OTHER_ROWS = [ROWS[:2], ROWS.repeat(1, 2, 1), ROWS[:, :3]]
PIXELS = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(2)).double()
OTHER_PIXELS = [PIXELS.repeat(1, 1, 2, 1), PIXELS[:1]]


def layers():
    return {
        "words": nn.Embedding(7, 6), "first": nn.Linear(6, 6), "last": nn.Linear(6, 2),
        "conv": nn.Conv2d(3, 6, 1),
        "token": nn.Parameter(torch.randn(1, 1, 6)),
    }  # fmt: skip


def changes(forward, x, others):
    """The sizes of all shifts, and the largest change of outputs by a random one of them."""
    model = randomise(Forward(forward, **layers()).double()).eval()
    params = P.of(model)
    axes, shifts, _ = shifts_of([decompose(model, export(model, (x,)))], ())
    shapes = {name: tensor.shape for name, tensor in params.items()}
    symmetries = Symmetries(axes, (), (), (), shapes=shapes, shifts=shifts)
    drawn = random_shifts(symmetries, torch.Generator().manual_seed(0))
    moved = shift(params, symmetries, drawn)
    with torch.no_grad():
        change = max((P.apply(model, moved, y) - model(y)).abs().max() for y in [x, *others])
    return {group.name: group.size for group in shifts}, float(change)


def nodes(s, x):
    """A graph isomorphism network on a graph in which all are neighbours."""
    h = s.first(x)
    return s.last(h + h.sum(1, keepdim=True))


COUNTED = {
    "a sum of tokens": (lambda s, t: s.last(s.words(t).sum(1)), IDS, OTHER_IDS),
    "a sum of the batch": (lambda s, x: s.last(s.first(x) + s.first(x).sum(0)), ROWS, OTHER_ROWS),
    "a sum of nodes": (nodes, ROWS, OTHER_ROWS),
    "a sum of pixels": (lambda s, x: s.last(s.conv(x).sum((2, 3))), PIXELS, OTHER_PIXELS),
    "a number of tokens": (lambda s, x: s.last(s.first(x) * x.shape[1]), ROWS, OTHER_ROWS),
    "half of the tokens": (lambda s, x: s.last(s.first(x) * (x.shape[1] // 2)), ROWS, OTHER_ROWS),
    "a number of tokens, added": (
        lambda s, x: s.last(torch.add(x, s.first(x), alpha=x.shape[1])), ROWS, OTHER_ROWS,
    ),
    "a pool that sums": (
        lambda s, x: s.last(
            F.avg_pool2d(s.conv(x), x.shape[2:], divisor_override=1).flatten(1)
        ), PIXELS, OTHER_PIXELS,
    ),
    "a product with ones": (
        lambda s, x: s.last(torch.ones(1, x.shape[1]).to(x) @ s.first(x)), ROWS, OTHER_ROWS,
    ),
    "tokens beyond the example": (
        lambda s, x: s.last(torch.cat([x[:, :1], s.first(x)[:, 1:]], 1)), ROWS[:, :1], OTHER_ROWS,
    ),
    "a token in front of others": (
        lambda s, x: s.last(torch.cat([s.token.expand(len(x), 1, 6), x[:, 1:]], 1)),
        ROWS[:, :1], OTHER_ROWS,
    ),
    "a running sum": (lambda s, x: s.last(s.first(x).cumsum(1)), ROWS, OTHER_ROWS),
    "a single token that is scaled": (
        lambda s, x: s.last(s.first(x) * x.shape[1]), ROWS[:, :1], OTHER_ROWS,
    ),
    "a sum of a single token": (lambda s, x: s.last(s.first(x).sum(1)), ROWS[:, :1], OTHER_ROWS),
    "places of a single token": (
        lambda s, x: s.last(
            (s.first(x) * torch.arange(1.0, x.shape[1] + 1).to(x)[:, None]).softmax(1)
        ), ROWS[:, :1], OTHER_ROWS,
    ),
}  # fmt: skip
AVERAGED = {
    "a mean of tokens": (lambda s, t: s.last(s.words(t).mean(1)), IDS, OTHER_IDS, {"words.weight"}),
    "a mean of pixels": (
        lambda s, x: s.last(s.conv(x).mean((2, 3))), PIXELS, OTHER_PIXELS, {"conv.bias"},
    ),
    "a pool of pixels": (
        lambda s, x: s.last(F.adaptive_avg_pool2d(s.conv(x), 1).flatten(1)), PIXELS, OTHER_PIXELS,
        {"conv.bias"},
    ),
    "the largest token": (
        lambda s, x: s.last(s.first(x).amax(1)), ROWS, OTHER_ROWS, {"first.bias"},
    ),
    **{
        f"{name} of tokens": (lambda s, x, f=f: s.last(f(s.first(x))), ROWS, OTHER_ROWS, shifted)
        for name, f, shifted in (
            ("cummax", lambda h: h.cummax(1).values, {"first.bias"}),
            ("cummin", lambda h: h.cummin(1).values, {"first.bias"}),
            ("kthvalue", lambda h: h.kthvalue(2, 1).values, {"first.bias"}),
            ("median", lambda h: h.median(1).values, {"first.bias"}),
            ("logcumsumexp", lambda h: h.logcumsumexp(1), {"first.bias"}),
            ("logsumexp", lambda h: h.logsumexp(1), {"first.bias"}),
            ("mode", lambda h: h.mode(1).values, {"first.bias"}),
            ("nanmedian", lambda h: h.nanmedian(1).values, {"first.bias"}),
            ("quantile", lambda h: h.quantile(0.3, 1), {"first.bias"}),
            ("nanquantile", lambda h: h.nanquantile(0.3, 1), {"first.bias"}),
            ("cumprod", lambda h: h.cumprod(1), set()),
            ("size", lambda h: h.abs().amax(1), set()),
            ("numbers but one", lambda h: torch.where(h.abs() == 3.0, 0.0, h), set()),
        )
    },
    "a temperature": (
        lambda s, x: s.last(torch.tanh((s.first(x) / 3).softmax(1))),
        ROWS, OTHER_ROWS, {"first.bias"},
    ),
    "averages by scores": (
        lambda s, x: s.last((x @ x.mT).softmax(-1) @ s.first(x)), ROWS, OTHER_ROWS, {"first.bias"},
    ),
    "no averages": (
        lambda s, x: s.last(F.normalize((x @ x.mT).exp(), 2, -1) @ s.first(x)),
        ROWS, OTHER_ROWS, set(),
    ),
    "masked scores": (
        lambda s, x: ((x @ s.first(x).mT).masked_fill(
            torch.ones(x.shape[1], x.shape[1]).triu(1).bool(), float("-inf")
        ).softmax(-1) @ x),
        ROWS, OTHER_ROWS, {"first.bias"},
    ),
    "scores that are masked by a number": (
        lambda s, x: ((x @ s.first(x).mT).masked_fill(
            torch.ones(x.shape[1], x.shape[1]).triu(1).bool(), -3.0
        ).softmax(-1) @ x),
        ROWS, OTHER_ROWS, set(),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", [*COUNTED, *AVERAGED])
def test_averages_pass_constants_on_at_every_length_and_counts_are_none(name):
    *network, shifted = AVERAGED.get(name) or (*COUNTED[name], set())
    shifts, change = changes(*network)
    assert shifts.keys() == shifted
    assert change < (1e-10 if shifted else 1e-300)

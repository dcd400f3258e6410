"""Streamed predictions against the functions that see all predictions at once."""

import pytest
import torch
from torch import nn

from lightning_bnn import metrics
from lightning_bnn.bank import CheckpointBank
from lightning_bnn.posteriors import stream_predictions
from weightsym import params as P


def made(members=7, examples=40):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).double()
    stack = P.populate(model, members, torch.Generator().manual_seed(1))
    x = 3 * torch.randn(examples, 5, dtype=torch.float64)
    y = torch.randint(3, (examples,))
    return model, stack, x, y


@pytest.mark.parametrize(
    ("memory", "pairs", "kind"),
    [(1, True, "bank"), (500, True, "stack"), (3000, False, "bank"), (2**30, True, "stack")],
)
def test_streaming_gives_what_all_at_once_gives(memory, pairs, kind, tmp_path):
    model, stack, x, y = made()
    networks = stack
    if kind == "bank":
        with CheckpointBank(tmp_path / "bank") as bank:
            bank.extend(stack)
        networks = tmp_path / "bank" if pairs else CheckpointBank(tmp_path / "bank", "r")
    batches = list(zip(x.split(11), y.split(11), strict=True))
    found = stream_predictions(model, networks, batches, pairs, memory)
    probs = P.apply(model.eval(), stack, x).softmax(-1)
    parts = metrics.decompose_uncertainty(probs)
    torch.testing.assert_close(found.mean, probs.mean(0))
    for name in ("total", "expected", "epistemic"):
        torch.testing.assert_close(getattr(found, name), getattr(parts, name), atol=1e-12, rtol=0)
    torch.testing.assert_close(found.accuracy, (probs.argmax(-1) == y).double().mean(1))
    torch.testing.assert_close(found.nll, -probs[:, range(40), y].log().mean(1))
    if pairs:
        every = metrics.pairwise_mutual_information(probs)
        torch.testing.assert_close(found.pairs, every, atol=1e-12, rtol=0)
        assert found.pairs[0, 1] > 1e-3
    else:
        assert found.pairs is None


def test_predictions_of_all_members_are_never_held(monkeypatch):
    model, stack, x, y = made(members=50, examples=300)
    shapes, run, limit = [], P.apply, 8 * 3 * 200
    monkeypatch.setattr(
        P, "apply", lambda *a, **o: shapes.append((out := run(*a, **o)).shape) or out
    )
    for batch in (300, 7, 1):  # small batches predict together, but no more than that
        shapes.clear()
        batches = zip(x.split(batch), y.split(batch), strict=True)
        stream_predictions(model, stack, batches, memory=limit)
        assert limit / 16 < max(shape.numel() for shape in shapes) <= limit / 8
        assert (
            max(shape[-2] for shape in shapes) == 200 // 50
        )  # so that all members predict at once
    shapes.clear()
    stream_predictions(model, stack, [(x, y)])
    assert max(shape.numel() for shape in shapes) == 50 * 300 * 3


def test_batches_may_be_empty():
    model, stack, x, y = made()
    whole = stream_predictions(model, stack, [(x, y)])
    found = stream_predictions(model, stack, [(x[:0], y[:0]), (x, y), (x[:0], y[:0])])
    torch.testing.assert_close(found.mean, whole.mean)


@pytest.mark.bad_input
def test_nothing_to_predict(tmp_path):
    model, stack, x, y = made()
    classes = "`batches` must be inputs and class indices"
    empty = CheckpointBank(tmp_path / "empty")
    for networks, batches, options, words in (
        (stack, [], {}, "`batches` has no examples"),
        *((stack, [(x, wrong)], {}, classes) for wrong in (y.double(), y[:, None], y + 3, y - 1)),
        (stack, [((x, x), y)], {}, "`batches` must be pairs of a tensor"),
        (stack, [(x, y)], {"memory": 0}, "`memory` must be at least 1"),
        (empty, [(x, y)], {}, "`networks` is empty"),
    ):
        with pytest.raises(ValueError, match=words):
            stream_predictions(model, networks, batches, **options)

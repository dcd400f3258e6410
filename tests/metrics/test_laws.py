"""What every metric class must do, in batches, as copies and on several processes."""

import io
import math
import pickle
import warnings

import pytest
import torch
from metric_cases import LABELS, METRICS, PROBS, REFERENCE, SCORES, SIZES, WEIGHTS
from processes import on_ranks
from torchmetrics import Accuracy, MetricCollection

from lightning_bnn import metrics as M

CASES = pytest.mark.parametrize("case", METRICS, ids=lambda case: case.name)


def value(case, batches, via="update"):
    metric = case.build()
    for batch in batches:
        getattr(metric, via)(*batch)
    return metric.compute()


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@CASES
def test_class_equals_function(case):
    if case.function is not None:
        expected = case.function()
        close(value(case, case.batches), expected.double())


WITHOUT_OPTIONS = [
    case
    for case in METRICS
    if case.name == type(case.build()).__name__ and case.name != "OODDetection"
]


@pytest.mark.parametrize("case", WITHOUT_OPTIONS, ids=lambda case: case.name)
def test_a_derived_class_computes_the_same(case):
    """Metrics know the name of their class, so that groups of them do not share states."""
    metric = type("Own", (type(case.build()),), {})()
    for batch in case.batches:
        metric.update(*batch)
    close(metric.compute(), value(case, case.batches))


@CASES
def test_forward_costs_one_update_and_equals_it(case, monkeypatch):
    """That of the batch joins the rest; torchmetrics would otherwise go through it twice."""
    calls, cls = [], type(case.build())
    update, expected = cls.update, value(case, case.batches)
    monkeypatch.setattr(cls, "update", lambda self, *args: calls.append(1) or update(self, *args))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # batches of one class
        close(value(case, case.batches, "__call__"), expected)
    assert len(calls) == len(case.batches)


@pytest.mark.parametrize("case", [c for c in METRICS if c.name != "MMD"], ids=lambda c: c.name)
def test_examples_that_are_not_there_change_nothing_and_alone_have_no_mean(case):
    first = case.batches[0]
    empty = [a.narrow(a.shape.index(SIZES[0]), 0, 0) if hasattr(a, "shape") else a for a in first]
    close(value(case, [*case.batches, empty]), value(case, case.batches))
    with pytest.warns(UserWarning, match="is NaN: |are NaN: "):
        found = value(case, [empty])
    numbers = found.values() if isinstance(found, dict) else [found]
    assert all(bool(number.isnan().all()) for number in numbers)


SURE = torch.eye(4).double()[LABELS]
RIGHT, WRONG = SURE, SURE.roll(1, -1)
ZEROS, ONES = torch.zeros(1, 5).double(), torch.ones(1, 5).double()
FAR = {k: v + 100 for k, v in WEIGHTS[0].items()}
EXTREMES = [
    *((cls, (RIGHT, LABELS), (WRONG, LABELS)) for cls in (M.ECE, M.ACE, M.NLL)),
    (M.BrierScore, (RIGHT, LABELS), (WRONG, LABELS)),
    *((cls, (RIGHT, RIGHT), (RIGHT, WRONG)) for cls in (M.Agreement, M.TotalVariation)),
    *((cls, (SCORES, SCORES > 0), (SCORES, SCORES < 0)) for cls in (M.AUROC, M.AUPR, M.FPR95)),
    (M.MMD, (WEIGHTS[0], WEIGHTS[0]), (WEIGHTS[0], FAR)),
    (M.CRPS, (ZEROS, ZEROS, ZEROS[0]), (ZEROS, ZEROS, 3 * ONES[0])),
    (M.Disagreement, (torch.stack([RIGHT, RIGHT]),), (torch.stack([RIGHT, WRONG]),)),
]


@pytest.mark.parametrize(("cls", "best", "worst"), EXTREMES)
def test_what_a_metric_says_about_itself(cls, best, worst):
    """Which direction is better, and the ends of its axis, are those of the extreme cases."""
    metric, values = cls(), []
    for case in (best, worst):
        metric.reset()
        metric.update(*case)
        values.append(metric.compute().max().item())
    assert values[0] != values[1]
    if metric.higher_is_better is not None:
        assert metric.higher_is_better == (values[0] > values[1])
    low, high = metric.plot_lower_bound, metric.plot_upper_bound
    assert low is None or min(values) == pytest.approx(low, abs=1e-12) or cls is M.AUPR
    assert high is None or max(values) == pytest.approx(high, abs=1e-12)


def stored(metric, case):
    """Another metric with the states of a file."""
    metric.persistent(True)
    buffer, other = io.BytesIO(), case.build()
    torch.save(metric.state_dict(), buffer)
    buffer.seek(0)
    other.persistent(True)
    other.load_state_dict(torch.load(buffer), strict=False)
    return other


COPIES = {
    "itself": lambda metric, case: metric,
    "clone": lambda metric, case: metric.clone(),
    "pickle": lambda metric, case: pickle.loads(pickle.dumps(metric)),
    "file": stored,
    # both reach metrics inside of a module, whose sums stay exact
    "half": lambda metric, case: torch.nn.ModuleList([metric]).half()[0],
    "bfloat16": lambda metric, case: torch.nn.ModuleList([metric]).to(torch.bfloat16)[0],
}


@CASES
@pytest.mark.parametrize("copy", COPIES)
def test_copies_go_on_where_the_original_was(case, copy):
    metric = case.build()
    metric.update(*case.batches[0])
    metric.reset()
    assert metric.state_dict() == {}
    for batch in case.batches[:2]:
        metric.update(*batch)
    metric = COPIES[copy](metric, case)
    for batch in case.batches[2:]:
        metric.update(*batch)
    close(metric.compute(), value(case, case.batches))


@CASES
def test_state_size(case):
    """Constant memory where the mathematics allows it, one-dimensional lists where not."""

    def numbers(repeats):
        metric = case.build()
        for _ in range(repeats):
            for batch in case.batches:
                metric.update(*batch)
        states = [getattr(metric, name) for name in metric._defaults]
        for state in states:
            assert isinstance(state, torch.Tensor) or all(s.ndim == 1 for s in state)
        return sum(s.numel() if isinstance(s, torch.Tensor) else sum(map(len, s)) for s in states)

    if case.name == "MMD":
        # per layer: kernels, size, number; and one name for all
        assert numbers(1) == 5 * (20 + 1 + 1) + 8
    else:
        grown = numbers(150) - numbers(50)
        waiting = 64 * max(SIZES)  # some batches are counted together
        assert abs(grown) <= waiting if case.constant else grown >= 100 * sum(SIZES)


# ------------------------------------------------------------ two processes
SPLITS = "uneven", "one empty", "forward"


def computed_twice(rank, case, split):
    """By one of two processes, before and after a reset."""
    mine = case.batches if rank == 0 else ()
    if split != "one empty":
        mine = case.batches[rank::2]
    metric = torch.nn.ModuleList([case.build()]).to("cpu", torch.bfloat16)[0]
    for batch in mine:
        if split == "forward":
            torch.nn.Module.__call__(metric, *batch)
        else:
            metric.update(*batch)
    first = metric.compute()
    metric.reset()
    for batch in mine:
        metric.update(*batch)
    return first, metric.compute()


def every_case(rank):
    warnings.simplefilter("ignore")
    return {(c.name, split): computed_twice(rank, c, split) for c in METRICS for split in SPLITS}


@pytest.fixture(scope="module")
def on_both():
    return on_ranks(every_case)


@pytest.mark.e2e
@CASES
@pytest.mark.parametrize("split", SPLITS)
def test_two_processes_equal_one(case, split, on_both):
    expected = value(case, case.batches)
    for found in on_both:
        for each in found[case.name, split]:
            close(each, expected)


def collection():
    return MetricCollection(
        {
            "accuracy": Accuracy("multiclass", num_classes=4),
            "ece": M.ECE(),
            "ece7": M.ECE(7),
            "ece_again": M.ECE(),
            "ace": M.ACE(),
            "nll": M.NLL(),
            "brier": M.BrierScore(),
            "agreement": M.Agreement(),
            "total_variation": M.TotalVariation(),
        }
    )


def test_collection():
    """Compute groups share states only of metrics whose states are the same for ever."""
    together = collection()
    alone = {name: metric.clone() for name, metric in collection().items()}
    for probs, labels, reference in (
        (torch.eye(4), torch.arange(4), torch.eye(4)),
        (PROBS, LABELS, REFERENCE),
    ):
        together.update(probs=probs, labels=labels, reference=reference, preds=probs, target=labels)
        for name, metric in alone.items():
            other = reference if name in ("agreement", "total_variation") else labels
            metric.update(probs, other)
    for name, found in together.compute().items():
        close(found, alone[name].compute())
    groups = [set(g) for g in together.compute_groups.values()]
    assert {"ece", "ece_again"} in groups
    assert {"brier"} in groups  # on a perfect first batch it is zero, as are others


def test_options_keep_metrics_apart():
    """Metrics that would have the same states after one batch, and not after the next."""
    certain, doubtful = torch.eye(4), torch.full((4, 4), 0.1) + 0.6 * torch.eye(4)
    probs = torch.cat([doubtful, doubtful])
    detectors = {"all": M.OODDetection("entropy"), "largest": M.OODDetection("max_probability")}
    together = MetricCollection({k: m.clone() for k, m in detectors.items()})
    for args in ((certain, None), (probs, None), (PROBS, "ood")):
        together.update(*args)
        for metric in detectors.values():
            metric.update(*args)
    found = together.compute()
    for name, metric in detectors.items():
        for key, expected in metric.compute().items():
            close(found[f"{name}_{key}"], expected)
    x, y = (dict(stack) for stack in METRICS[-1].batches[0][:2])
    x["tight"], y["tight"] = torch.randn(8, 3) / 50, torch.randn(5, 3) / 50
    grids = {"mmdagg": M.MMD(), "free": M.MMD(grid=M.KernelGrid(10, None, None))}
    together = MetricCollection({k: m.clone() for k, m in grids.items()})
    together.update(x, y, ["layer4"])
    together.update(x, y, ["tight"])
    found = together.compute()
    assert found["mmdagg"] != found["free"]
    for name, metric in grids.items():
        metric.update(x, y, ["layer4", "tight"])
        close(found[name], metric.compute())


def compared(rank):
    x, y = METRICS[-1].batches[0][:2]
    replica, shared = M.MMD(), M.MMD()
    replica.update(x, y)
    shared.update(x, y, layers=list(x)[rank::2])
    return replica.compute(), shared.compute()


@pytest.mark.e2e
def test_replicas_compare_the_same_layers():
    """Every process compares everything, or its share: the same number."""
    expected = M.mmd(*METRICS[-1].batches[0][:2])
    for replica, shared in on_ranks(compared):
        close(replica, expected)
        close(shared, expected)


def all_undefined(rank):
    metrics = [case.build() for case in METRICS]
    found = [metric.compute() for metric in metrics]
    values = [v for f in found for v in (f.values() if isinstance(f, dict) else [f])]
    return all(math.isnan(v.flatten()[0].item()) for v in values)


@pytest.mark.e2e
def test_nothing_anywhere():
    """A metric that no process has updated is NaN on all of them."""
    with pytest.warns(UserWarning, match="before the ``update`` method"):
        M.ECE().compute()
    assert on_ranks(all_undefined) == [True, True]

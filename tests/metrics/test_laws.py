"""What every metric class must do, in batches, as copies and on several processes."""

import io
import math
import pickle
import warnings

import lightning as L
import pytest
import torch
from metric_cases import LABELS, METRICS, PROBS, REFERENCE, SCORES, SIZES, WEIGHTS
from processes import on_devices, on_ranks
from torch.utils.data import DataLoader, Subset, TensorDataset
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
def test_forward_equals_update(case):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # batches of one class
        close(value(case, case.batches, "__call__"), value(case, case.batches))


@CASES
def test_forward_costs_one_update(case, monkeypatch):
    """That of the batch joins the rest; torchmetrics would otherwise go through it twice."""
    calls, cls = [], type(case.build())
    update = cls.update
    monkeypatch.setattr(cls, "update", lambda self, *args: calls.append(1) or update(self, *args))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # batches of one class
        value(case, case.batches, "__call__")
    assert len(calls) == len(case.batches)


SURE = torch.eye(4).double()[LABELS]
RIGHT, WRONG = SURE, SURE.roll(1, -1)
EYE = torch.eye(3).double()[:, None]
ZEROS, ONES = torch.zeros(1, 5).double(), torch.ones(1, 5).double()
NORMAL = torch.special.ndtri(torch.arange(1, 401).double() / 401)
TRUE = torch.zeros(1, 400).double(), torch.ones(1, 400).double()
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


@CASES
def test_order_of_batches(case):
    if not case.name.startswith("MMD"):
        close(value(case, case.batches[::-1]), value(case, case.batches))


@CASES
def test_reset_clone_pickle(case):
    metric = case.build()
    metric.update(*case.batches[0])
    metric.reset()
    for batch in case.batches[:2]:
        metric.update(*batch)
    copies = [metric.clone(), pickle.loads(pickle.dumps(metric))]
    assert metric.state_dict() == {}
    expected = value(case, case.batches)
    for each in (metric, *copies):
        for batch in case.batches[2:]:
            each.update(*batch)
        close(each.compute(), expected)


@CASES
def test_half_precision_modules_keep_the_state(case):
    """``module.half()`` and ``.to(bfloat16)`` reach metrics inside a module; sums stay exact."""
    metric = case.build()
    holder = torch.nn.ModuleDict({"metric": metric}).half()
    metric.update(*case.batches[0])
    holder.to(torch.bfloat16)
    for batch in case.batches[1:]:
        metric.update(*batch)
    close(metric.compute(), value(case, case.batches))


@CASES
def test_persistent_state(case):
    metric = case.build()
    metric.persistent(True)
    for batch in case.batches:
        metric.update(*batch)
    buffer = io.BytesIO()
    torch.save(metric.state_dict(), buffer)
    buffer.seek(0)
    other = case.build()
    other.persistent(True)
    other.load_state_dict(torch.load(buffer), strict=False)
    other._update_count = 1
    close(other.compute(), metric.compute())


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


@CASES
def test_plots(case):
    metric = case.build()
    for batch in case.batches:
        metric.update(*batch)
    figure, _ = metric.plot()
    figure.canvas.draw()


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
    detectors = {
        "all": M.OODDetection("entropy"),
        "largest": M.OODDetection("max_probability"),
    }
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


class User(L.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Linear(6, 4)
        self.ece, self.nll = M.ECE(from_logits=True), M.NLL(from_logits=True)
        self.auroc = M.AUROC()
        self.ood = M.OODDetection("energy", ["shifted"], from_logits=True)
        self.mmd = M.MMD()

    def test_step(self, batch, index, dataloader_idx=0):
        x, y = batch
        z = self.net(x)
        self.ece(z, y)
        self.nll.update(z, y)
        self.auroc.update(M.energy_score(z), torch.full((len(z),), index % 2 == 1))
        self.ood.update(z, None if index % 2 == 0 else "shifted")
        self.log("ece", self.ece)
        self.log_dict({"nll": self.nll, "auroc": self.auroc})

    def on_test_epoch_end(self):
        self.log_dict(self.ood.compute(), sync_dist=True)
        self.ood.reset()
        g = torch.Generator().manual_seed(0)
        x = {"net.weight": torch.randn(9, 4, 6, generator=g)}
        self.mmd.update(x, {"net.weight": x["net.weight"][:4] + 1})
        self.log("mmd", self.mmd)


def _order(devices):
    """Rows such that odd batches hold the same examples on any number of processes."""
    order = torch.arange(48).reshape(-1, 12)
    if devices == 2:  # rank r takes every second one
        order = order.reshape(-1, 6, 2).transpose(1, 2).reshape(-1, 6)
        order = order.reshape(-1, 2, 6).transpose(1, 2).reshape(-1)
    return order.flatten().tolist()


def numbers_on(devices, accelerator):
    warnings.simplefilter("ignore")
    g = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(48, 6, generator=g), torch.randint(4, (48,), generator=g))
    trainer = L.Trainer(
        devices=devices, accelerator=accelerator, strategy="ddp" if devices > 1 else "auto",
        logger=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    loader = DataLoader(Subset(data, _order(devices)), batch_size=12 // devices)
    trainer.test(User(), loader, verbose=False)
    trainer.strategy.barrier()
    return {k: v.item() for k, v in trainer.callback_metrics.items()}


@pytest.mark.e2e
@pytest.mark.parametrize(
    "accelerator",
    [
        "cpu",
        pytest.param(
            "gpu",
            marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
        ),
    ],
)
def test_trainer_with_two_processes(accelerator):
    """The same numbers from ``Trainer(devices=2, strategy="ddp")`` and from one process."""
    (alone,) = on_devices(1, numbers_on, 1, accelerator)
    together, _ = on_devices(2, numbers_on, 2, accelerator)
    assert set(alone) >= {"ece", "nll", "auroc", "mmd", "AUROC/shifted", "FPR95/shifted"}
    tolerance = 1e-6 if accelerator == "cpu" else 1e-5
    assert together == pytest.approx(alone, abs=tolerance)  # Lightning logs float32

"""PermutationTau and MassGap against weights recorded by hand, on every kind of run."""

import warnings

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.loggers import TensorBoardLogger
from runs import Attention, Gan, Plain, Recorder, Stacked, Unreadable, built, fit
from scipy.stats import kendalltau
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_callback_laws import order
from torch import nn
from torch.nn.utils import parametrizations

from lightning_bnn import callbacks as C
from lightning_bnn.callbacks import MassGap, PermutationTau, watching
from weightsym import discover, min_mass
from weightsym import params as P

pytestmark = pytest.mark.usefixtures("undrawn")


def test_tau_is_averaged_between_logs():
    every, some = PermutationTau(), PermutationTau(by="max", every_n_steps=1, module="net")
    fit(built(Plain), every)
    trainer = fit(built(Plain), some, log_every_n_steps=4)
    rows = torch.tensor([row for _, row in every.history])
    expected = [rows[k : k + 4].mean(0).tolist() for k in (0, 4, 8)]
    for (_, found), mean in zip(some.history, expected, strict=True):
        assert found == pytest.approx(mean)
    assert trainer.global_step == 12


@pytest.fixture
def searches(monkeypatch):
    """Counts how often symmetries are looked for in the runs of some callbacks."""
    found = []
    monkeypatch.setattr(
        watching.weightsym,
        "discover",
        lambda *args, **more: found.append(1) or discover(*args, **more),
    )

    def count(module, *looks):
        found.clear()
        fit(module, *looks)
        return len(found)

    return count


@pytest.mark.parametrize(
    ("cls", "second", "times"), [(Plain, {"batch_norm": "eval"}, 2), (Stacked, {}, 1)]
)
def test_callbacks_of_one_run_find_its_network_once(cls, second, times, searches):
    tau, gap, module = PermutationTau(), MassGap(2, **second), built(cls)
    assert searches(module, tau, gap) == times
    assert (tau.network is gap.network) == (times == 1)
    assert searches(module, tau, gap) == times  # another run looks again


@pytest.mark.filterwarnings("ignore:.*is switched off")
def test_callbacks_of_one_run_share_why_they_find_nothing(searches):
    """Not one that asks otherwise, which is the negative control, and not another run."""
    looks = [PermutationTau(), PermutationTau(every_n_steps=2), MassGap(3)]
    with pytest.warns(UserWarning, match="is switched off: net: Net cannot be traced"):
        once = searches(Unreadable(), PermutationTau())
    assert once == searches(Unreadable(), *looks) == searches(Unreadable(), *looks) > 0
    assert searches(Unreadable(), *looks[:2], MassGap(3, batch_norm="eval")) > once


def test_several_networks_side_by_side():
    tau, gap, recorder = PermutationTau(), MassGap(3), Recorder("")
    fit(built(Stacked), tau, gap, recorder)
    pairs = [*zip(*map(P.unstack, recorder.weights[:2]), strict=True)]  # before and after a step
    for layer, found in zip(tau.layers, tau.history[0][1], strict=True):
        members = [kendalltau(*(order(w, layer) for w in pair)).statistic for pair in pairs]
        assert found == pytest.approx(sum(members) / 3, abs=1e-9)
    assert len(gap.history) == 4


@pytest.mark.parametrize(("every", "others"), [(3, []), (1, [EMAWeightAveraging(decay=0.5)])])
def test_tau_of_orders_further_apart_and_beside_weight_averaging(every, others):
    """Kendall's tau of scipy, of weights that were recorded step by step."""
    tau, recorder = PermutationTau(every_n_steps=every), Recorder()
    assert fit(built(Plain), *others, tau, recorder).global_step == 12
    names = [name.removeprefix("net.") for name in tau.layers]
    assert len(tau.history) == 12 // every
    for k, (_, found) in enumerate(tau.history):
        before, after = recorder.weights[every * k], recorder.weights[every * (k + 1)]
        expected = [kendalltau(order(before, n), order(after, n)).statistic for n in names]
        assert found == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(("look", "what"), [(PermutationTau, "exchanged"), (MassGap, "rescaled")])
def test_nothing_to_move(look, what):
    module = built(Plain)
    module.net = torch.nn.Linear(6, 3)
    with pytest.warns(UserWarning, match=f"no units that can be {what}"):
        fit(module, look())


def test_scales_that_nothing_compensates_are_named_once():
    gap = MassGap(3)
    for normed in (False, True):  # the first is the negative control
        module = built(Plain)
        if normed:
            parametrizations.weight_norm(module.net[0])
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            fit(module, gap)
        limits = [str(w.message) for w in said if "nothing compensates" in str(w.message)]
        assert len(limits) == normed
    assert "the scales of 0.parametrizations.weight.original1, so " in limits[0]
    assert len(gap.history) == 4


@pytest.mark.parametrize(("every", "steps"), [(5, [4, 9]), (1000, [11])])
def test_a_run_that_is_shorter_than_the_period_is_looked_at_once(every, steps):
    gap = MassGap(every)
    fit(built(Plain), gap)
    assert [step for step, _ in gap.history] == steps


# ------------------------------------------------------------ two of a kind
KINDS = {
    C.PosteriorDoctor: {},
    C.PermutationTau: {},
    C.MassGap: {"every_n_steps": 3},
    C.CheckpointHarvester: {},
    C.PosteriorFigures: {"every_n_steps": 3, "draw_every": 2},
}


def traces(folder, kind, *networks):
    """Count the files of a run, the tags of its events, and the states in its checkpoint."""
    watching = [kind(module=name, **KINDS[kind]) for name in networks]
    logger = TensorBoardLogger(folder, "", "")
    run = fit(Gan(), *watching, logger=logger, default_root_dir=folder, max_epochs=1)
    run.save_checkpoint(folder / "run.ckpt")
    states = torch.load(folder / "run.ckpt", weights_only=False)["callbacks"]
    (events,) = folder.glob("events*")
    seen = EventAccumulator(str(events)).Reload().Tags()
    tags = [tag for kind in ("scalars", "images", "tensors") for tag in seen[kind]]
    files = [path for path in folder.rglob("*") if path.is_file() and path != events]
    return [len(files), len([t for t in tags if "custom_scalars" not in t]), len(states)]


@pytest.fixture(scope="module")
def none(tmp_path_factory):
    return traces(tmp_path_factory.mktemp("none"), C.PermutationTau)


@pytest.mark.parametrize("kind", KINDS)
def test_both_leave_traces_and_none_in_common(kind, none, tmp_path):
    """Twice as many as one of them, as both networks have as many layers."""
    runs = ("generator",), ("generator", "discriminator")
    seen = [traces(tmp_path / "-".join(names), kind, *names) for names in runs]
    one, both = ([n - m for n, m in zip(run, none, strict=True)] for run in seen)
    assert both == [2 * n for n in one]
    assert both[2] == 2


# ------------------------------------------------------------ heads
@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh])  # with units to scale, and without
def test_excess_by_kind_of_group(activation):
    module, gap = built(Plain), MassGap(3)
    module.net = nn.Sequential(Attention(), nn.Linear(3, 5), activation(), nn.Linear(5, 3))
    trainer = fit(module, gap, max_epochs=1)
    sym, params = discover(module.net.eval(), torch.randn(2, 6)), P.of(module.net)
    expected = [min_mass(params, sym, mixing=m).excess.item() for m in (False, "only", True)]
    names = ("mass_excess", "mass_excess/heads", "mass_excess/joint")
    found = [trainer.callback_metrics[n].item() for n in names]
    assert found == pytest.approx(expected, rel=1e-3)
    assert expected[2] >= expected[1] > 0
    assert [len(row) for _, row in gap.history] == [5] * 2

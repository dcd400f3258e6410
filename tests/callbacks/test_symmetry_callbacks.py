"""PermutationTau and MassGap against weights recorded by hand, on every kind of run."""

import pickle
import warnings
from dataclasses import dataclass

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from runs import RUNS, Attributes, Plain, Recorder, Stacked, Unreadable, built, fit
from scipy.stats import kendalltau

from lightning_bnn.callbacks import (
    CheckpointHarvester,
    MassGap,
    PermutationTau,
    PosteriorFigures,
    watching,
)
from weightsym import discover, min_mass
from weightsym import params as P

pytestmark = pytest.mark.usefixtures("undrawn")
DRAWN = "plain", "bf16", "compiled", "dict batches"
"""Runs with figures: it takes longer to make them than to train."""


@dataclass
class Run:
    """One kind of run with all callbacks and what they should have seen, and one without."""

    name: str
    alone: L.LightningModule
    module: L.LightningModule
    trainer: L.Trainer
    recorder: Recorder
    tau: PermutationTau
    gap: MassGap


@pytest.fixture(scope="module", params=RUNS)
def run(request, tmp_path_factory):
    cls, options = RUNS[request.param]
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("run")
    alone, module = built(cls), built(cls)
    fit(alone, **options)
    recorder = Recorder("" if cls is Attributes else "net")
    tau, gap = PermutationTau(), MassGap(every_n_steps=2)
    others = [CheckpointHarvester(folder / "bank", every_n_steps=1)]
    others += [PosteriorFigures(4, 100)] if request.param in DRAWN else []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = fit(module, recorder, tau, gap, *others, default_root_dir=folder, **options)
    return Run(request.param, alone, module, trainer, recorder, tau, gap)


def layers(recorder):
    return [k for k in recorder.weights[0] if k.endswith("weight") and "scale" not in k][:-1]


def order(weights, layer):
    return (-weights[layer].amax(1)).argsort(stable=True).argsort()


def follows(tau, recorder, every=1):
    """Kendall's tau of scipy, of weights that were recorded step by step."""
    names = [name.removeprefix("net.") for name in tau.layers]
    for k, (_, found) in enumerate(tau.history):
        before, after = recorder.weights[every * k], recorder.weights[every * (k + 1)]
        expected = [kendalltau(order(before, n), order(after, n)).statistic for n in names]
        assert found == pytest.approx(expected, abs=1e-9)


def test_tau_of_every_step(run):
    tau, trainer, recorder = run.tau, run.trainer, run.recorder
    names = layers(recorder)
    assert tau.layers == tuple(names)
    assert len(tau.history) == len(recorder.weights) - 1 >= 4
    follows(tau, recorder)
    found = tau.history[-1][1]
    assert min(t for _, row in tau.history for t in row) < 1  # something moved
    metrics = trainer.callback_metrics
    assert metrics["tau"].item() == pytest.approx(sum(found) / len(found), abs=1e-6)
    ranks = [[order(recorder.weights[k], n) for k in (-2, -1)] for n in names]
    moved = [(a != b).double().mean().item() for a, b in ranks]
    assert metrics["tau_moved"].item() == pytest.approx(sum(moved) / len(moved), abs=1e-6)
    assert metrics["tau_transpositions"] >= 0


def test_tau_is_averaged_between_logs():
    every, some = PermutationTau(), PermutationTau(by="max", every_n_steps=1, module="net")
    fit(built(Plain), every)
    trainer = fit(built(Plain), some, log_every_n_steps=4)
    rows = torch.tensor([row for _, row in every.history])
    expected = [rows[k : k + 4].mean(0).tolist() for k in (0, 4, 8)]
    for (_, found), mean in zip(some.history, expected, strict=True):
        assert found == pytest.approx(mean)
    assert trainer.global_step == 12


def test_tau_of_orders_further_apart():
    tau, recorder = PermutationTau(every_n_steps=3), Recorder()
    fit(built(Plain), tau, recorder)
    follows(tau, recorder, every=3)


def test_mass_gap(run):
    gap, trainer, module, recorder = run.gap, run.trainer, run.module, run.recorder
    root = (
        module
        if run.name == "layers as attributes"
        else getattr(module.net, "_orig_mod", module.net)
    )
    sym = discover(root.eval(), torch.randn(2, 6))
    seen = [
        w
        for before, step, w in zip(
            recorder.steps, recorder.steps[1:], recorder.weights[1:], strict=False
        )
        if step // 2 > before // 2
    ]
    assert len(gap.history) == len(seen) >= 2
    for weights, (_, (mass, minimum, excess)) in zip(seen, gap.history, strict=True):
        expected = min_mass(weights, sym)
        assert mass == pytest.approx(expected.mass.item(), rel=1e-6)
        assert minimum == pytest.approx(expected.minimum.item(), rel=1e-6)
        assert excess == pytest.approx(expected.excess.item(), rel=1e-4, abs=1e-4)
    metrics = trainer.callback_metrics
    last = layers(recorder)[0]
    largest = seen[-1][last].abs().max().item()
    assert metrics[f"largest_weight/{last}"].item() == pytest.approx(largest, rel=1e-6)
    assert metrics[f"largest_weight_at_minimum/{last}"] > 0
    assert metrics["mass"] > metrics["mass_minimum"]


def test_training_is_what_it_would_have_been(run):
    """Looking changes no weight: dropout, shuffling and momentum go on as without callbacks."""
    watched = run.module.state_dict().values()
    for (name, a), b in zip(run.alone.state_dict().items(), watched, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("cls", [Plain, Stacked])
@pytest.mark.parametrize(("second", "times"), [({}, 1), ({"batch_norm": "eval"}, 2)])
def test_callbacks_of_one_run_find_its_network_once(cls, second, times, monkeypatch):
    found = []
    monkeypatch.setattr(
        watching, "discover", lambda *args, **more: found.append(1) or discover(*args, **more)
    )
    tau, gap, module = PermutationTau(), MassGap(2, **second), built(cls)
    fit(module, tau, gap)
    assert len(found) == times
    assert (tau.network is gap.network) == (times == 1)
    fit(module, tau, gap)  # another run looks again
    assert len(found) == 2 * times


def test_several_networks_side_by_side():
    tau, gap, recorder = PermutationTau(), MassGap(3), Recorder("")
    fit(built(Stacked), tau, gap, recorder)
    before, after = recorder.weights[0], recorder.weights[1]
    for layer, found in zip(tau.layers, tau.history[0][1], strict=True):
        members = [
            kendalltau(
                order(P.unstack(before)[m], layer), order(P.unstack(after)[m], layer)
            ).statistic
            for m in range(3)
        ]
        assert found == pytest.approx(sum(members) / 3, abs=1e-9)
    assert len(gap.history) == 4


def test_beside_weight_averaging():
    tau, recorder = PermutationTau(), Recorder()
    trainer = fit(built(Plain), EMAWeightAveraging(decay=0.5), tau, recorder)
    assert trainer.global_step == 12
    follows(tau, recorder)


def test_applying_the_minimum():
    """The function stays when the weights are replaced, and the mass is the least."""
    module = built(Plain, 0.0)
    outputs = []

    class Compare(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, *_):
            outputs.append(pl_module.net(torch.ones(2, 6)).detach())

    class After(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, *_):
            outputs.append(pl_module.net(torch.ones(2, 6)).detach())

    gap = MassGap(1, apply=True)
    fit(module, After(), gap, Compare())
    for after_step, before_next in zip(outputs[1::2], outputs[2::2], strict=False):
        torch.testing.assert_close(after_step, before_next, rtol=1e-4, atol=1e-5)
    sym = discover(module.net, torch.randn(2, 6))
    assert min_mass(P.of(module.net), sym).excess < 1e-3
    plain = MassGap(1)
    fit(built(Plain, 0.0), plain)
    assert gap.history[-1][1][0] < plain.history[-1][1][0]


def test_the_first_step_of_an_encoder_and_a_head():
    """Several submodules: which one is the network is known after the first step."""

    class Encoder(Plain):
        def __init__(self):
            super().__init__()
            self.head = torch.nn.Linear(3, 3)

        def training_step(self, batch, _):
            return torch.nn.functional.cross_entropy(self.head(self.net(batch[0])), batch[1])

    tau, recorder = PermutationTau(), Recorder()
    fit(built(Encoder), tau, recorder)
    follows(tau, recorder)


def test_two_networks_keep_their_names_apart():
    class Two(Plain):
        def __init__(self):
            super().__init__()
            self.other = Plain(0.0).net

        def training_step(self, batch, index):
            x, y = batch
            loss = torch.nn.functional.cross_entropy
            return loss(self.net(x), y) + loss(self.other(x), y)

    trainer = fit(built(Two), PermutationTau(module="net"), PermutationTau(module="other"))
    assert {"net/tau", "other/tau", "net/tau/0.weight"} <= set(trainer.callback_metrics)


@pytest.mark.parametrize("make", [PermutationTau, lambda: MassGap(1), lambda: PosteriorFigures(1)])
def test_the_same_callback_in_another_run(tmp_path, make, monkeypatch):
    """What was seen of one module is forgotten for the next, and kept if the same goes on."""
    monkeypatch.setattr(PosteriorFigures, "_draw", lambda *_: None)
    callback, module = make(), built(Plain)

    def looks():
        return len(getattr(callback, "history", None) or callback._steps)

    fit(module, callback, max_epochs=1, default_root_dir=tmp_path)
    fit(module, callback, max_epochs=1, default_root_dir=tmp_path)
    assert looks() == 12
    other = built(Plain)
    other.net[0] = torch.nn.Linear(6, 10)
    other.net[3] = torch.nn.Linear(10, 5)
    fit(other, callback, max_epochs=1, default_root_dir=tmp_path)
    assert looks() == 6
    assert pickle.loads(pickle.dumps(callback)).network is None


def test_a_diverged_run_goes_on(tmp_path):
    class Diverged(Plain):
        def training_step(self, batch, index):
            if index == 2:
                torch.nn.init.constant_(self.net[0].weight, torch.inf)
            return super().training_step(batch, index)

    with pytest.warns(UserWarning, match="weights that are not finite"):
        trainer = fit(
            built(Diverged),
            PermutationTau(),
            MassGap(1),
            PosteriorFigures(1, 2),
            default_root_dir=tmp_path,
        )
    assert trainer.global_step == 12


def test_momentum_is_carried_along():
    """Weights are scaled, momentum inversely: their products stay, element by element."""
    seen = []

    class Products(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, *_):
            state = trainer.optimizers[0].state
            rows = [(p.detach().clone(), state[p]["momentum_buffer"].clone()) for p in state]
            seen.append(rows)

    fit(built(Plain, 0.0), Products(), MassGap(1, apply=True), Products(), max_epochs=1)
    for before, after in zip(seen[::2], seen[1::2], strict=True):
        for (w, m), (v, n) in zip(before, after, strict=True):
            torch.testing.assert_close(w * m, v * n, rtol=1e-4, atol=1e-7)
    assert any(not torch.allclose(a[1], b[1]) for a, b in zip(seen[0], seen[1], strict=True))


# ------------------------------------------------------------ what cannot be watched
@pytest.mark.parametrize("callback", [PermutationTau, MassGap, PosteriorFigures])
def test_an_unreadable_network_is_left_alone(callback):
    alone = built(Unreadable)
    fit(alone)
    watched = built(Unreadable)
    with pytest.warns(UserWarning, match=f"{callback.__name__} is switched off: "):
        trainer = fit(watched, callback())
    assert trainer.global_step == 12
    for a, b in zip(alone.parameters(), watched.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_whatever_a_forward_raises_on_two_rows():
    class Picky(Plain):
        def training_step(self, batch, _):
            return torch.nn.functional.cross_entropy(self.pick(batch[0]), batch[1][[0, 1, 2, 5]])

        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.a, self.b = torch.nn.Linear(6, 8), torch.nn.Linear(8, 3)

            def forward(self, x, *, rows):
                return self.b(torch.relu(self.a(x)))[rows]

        def __init__(self):
            super().__init__()
            self.net = self.Net()

        def pick(self, x):
            return self.net(x, rows=[0, 1, 2, 5])

    by_name = PermutationTau()
    fit(built(Picky), by_name)
    assert by_name.network is not None

    class Indexing(Picky):
        class Net(Picky.Net):
            def forward(self, x):
                return self.b(torch.relu(self.a(x)))[[0, 1, 2, 5]]

        def pick(self, x):
            return self.net(x)

    tau = PermutationTau()
    fit(built(Indexing), tau)  # two rows fail, the whole batch does not
    assert len(tau.history) == 12


def test_nothing_to_exchange():
    class Linear(Plain):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(6, 3)

    with pytest.warns(UserWarning, match="no units that could be exchanged"):
        fit(built(Linear), PermutationTau())
    with pytest.warns(UserWarning, match="no units that could be rescaled"):
        fit(built(Linear), MassGap())


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: PermutationTau("largest"), "`by` must be one of max"),
        (lambda: PermutationTau(every_n_steps=0), "`every_n_steps` must be at least 1, got 0"),
        (lambda: MassGap(batch_norm="train"), "`batch_norm` must be 'carrier' or 'eval'"),
        (lambda: PosteriorFigures(draw_every=0), "`draw_every` must be at least 1, got 0"),
        (lambda: PosteriorFigures(weights=1), "`weights` must be at least 2, got 1"),
        (
            lambda: fit(built(Plain), PermutationTau(module="body")),
            "no submodule 'body'; it has net",
        ),
    ],
)
def test_errors(build, message):
    with pytest.raises(ValueError, match=message):
        build()


# ------------------------------------------------------------ resume
@pytest.mark.parametrize("make", [PermutationTau, lambda: MassGap(1), lambda: PosteriorFigures(1)])
def test_resumed_equals_uninterrupted(tmp_path, make, monkeypatch):
    monkeypatch.setattr(PosteriorFigures, "_draw", lambda *_: None)
    whole = make()
    fit(built(Plain, 0.0), whole, max_epochs=3, default_root_dir=tmp_path / "a")
    first = make()
    trainer = fit(built(Plain, 0.0), first, max_epochs=1, default_root_dir=tmp_path / "b")
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    second = make()
    fit(
        built(Plain, 0.0),
        second,
        max_epochs=3,
        ckpt_path=tmp_path / "x.ckpt",
        default_root_dir=tmp_path / "b",
    )
    if isinstance(whole, PosteriorFigures):
        assert second._steps == whole._steps
        torch.testing.assert_close(torch.stack(second._followed), torch.stack(whole._followed))
        return
    assert [s for s, _ in second.history] == [s for s, _ in whole.history]
    for (_, a), (_, b) in zip(second.history, whole.history, strict=True):
        assert a == pytest.approx(b, rel=1e-6)
    if isinstance(whole, PermutationTau):
        assert torch.equal(second._state["start"], whole._state["start"])

"""PermutationTau and MassGap against weights recorded by hand, on every kind of run."""

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from runs import Plain, Recorder, Stacked, built, fit
from scipy.stats import kendalltau
from test_callback_laws import order

from lightning_bnn.callbacks import MassGap, PermutationTau, watching
from weightsym import discover
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


class Branching(torch.nn.Sequential):
    """Cannot be traced, since what it computes depends on its numbers."""

    def forward(self, x):
        return super().forward(x if x.sum() > 0 else -x)


class Alone(Plain):
    def __init__(self, _=None):
        super().__init__()
        self.net = Branching(*self.net)


class Several(Stacked):
    def __init__(self, _=None):
        super().__init__()
        self.__dict__["template"] = Branching(*self.template)


@pytest.mark.parametrize("cls", [Alone, Several])
def test_callbacks_of_one_run_share_why_they_find_nothing(cls, monkeypatch):
    """Not one that asks otherwise, which is the negative control, and not another run."""
    attempts = []
    monkeypatch.setattr(
        watching, "discover", lambda *args, **more: attempts.append(1) or discover(*args, **more)
    )

    def attempts_of(*looks):
        attempts.clear()
        with pytest.warns(UserWarning, match="switched off") as said:
            fit(cls(), *looks)
        reasons = [str(w.message) for w in said if "switched off" in str(w.message)]
        assert len(reasons) == len(looks)
        assert len({reason.partition(":")[2] for reason in reasons}) == 1
        return len(attempts)

    looks = [PermutationTau(), PermutationTau(every_n_steps=2), MassGap(3)]
    once = attempts_of(PermutationTau())
    assert once == attempts_of(*looks) == attempts_of(*looks) > 0
    assert attempts_of(*looks[:2], MassGap(3, batch_norm="eval")) > once


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


# ------------------------------------------------------------ what cannot be watched


def test_nothing_to_exchange():
    class Linear(Plain):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(6, 3)

    with pytest.warns(UserWarning, match="no units that could be exchanged"):
        fit(built(Linear), PermutationTau())
    with pytest.warns(UserWarning, match="no units that could be rescaled"):
        fit(built(Linear), MassGap())


@pytest.mark.parametrize(("every", "steps"), [(5, [4, 9]), (12, [11]), (1000, [11])])
def test_a_run_that_is_shorter_than_the_period_is_looked_at_once(every, steps):
    gap = MassGap(every)
    fit(built(Plain), gap)
    assert [step for step, _ in gap.history] == steps

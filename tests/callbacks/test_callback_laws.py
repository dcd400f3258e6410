"""Laws of callbacks: what they see on every kind of run, and what they owe to any run."""

import pickle
from types import SimpleNamespace

import lightning as L
import pytest
import runs
import torch
from module_cases import Blobs, adam
from module_cases import network as small_network
from runs import (
    RUNS,
    Attributes,
    Encoder,
    Normed,
    Plain,
    Recorder,
    Stacked,
    TwoOptimizers,
    Unreadable,
    built,
    fit,
)
from scipy.stats import kendalltau
from torch.utils._pytree import tree_flatten_with_path

from lightning_bnn import callbacks, samplers
from lightning_bnn.bank import CheckpointBank
from lightning_bnn.callbacks import (
    ChainDiagnostics,
    CheckpointHarvester,
    DrawnWeights,
    LearningCoefficient,
    MassGap,
    OrbitDrift,
    PermutationTau,
    PosteriorDoctor,
    PosteriorFigures,
    SymmetricAverage,
    TrainingCost,
)
from lightning_bnn.modules import SGHMC, DeepEnsemble
from weightsym import discover, min_mass
from weightsym import params as P

pytestmark = [pytest.mark.usefixtures("undrawn"), pytest.mark.filterwarnings("ignore")]
DRAWN = "bf16", "compiled"
"""Runs with more: it takes longer to look at them than to train."""
KINDS = {**RUNS, "batch norm": (Normed, {}), "unreadable": (Unreadable, {})}


# ------------------------------------------------------------ every kind of run
@pytest.fixture(scope="module", params=KINDS)
def run(request, tmp_path_factory):
    """One kind of run with all callbacks and a record of its weights, and one without."""
    cls, options = KINDS[request.param]
    folder, alone, module = tmp_path_factory.mktemp("run"), built(cls), built(cls)
    fit(alone, **options)
    recorder = Recorder("" if cls in (Attributes, Encoder, TwoOptimizers) else "net")
    tau, gap = PermutationTau(), MassGap(every_n_steps=2)
    looks = [tau, gap, CheckpointHarvester(folder / "bank", every_n_steps=1)]
    if request.param in DRAWN:
        looks += [PosteriorFigures(4, 100), LearningCoefficient(steps=16)]
    trainer = fit(module, recorder, *looks, default_root_dir=folder, **options)
    return SimpleNamespace(
        name=request.param, alone=alone, module=module, trainer=trainer, recorder=recorder,
        folder=folder, tau=tau, gap=gap,
    )  # fmt: skip


@pytest.fixture
def readable(run):
    """A run whose network could be read, and the recorded weights of that network."""
    if run.name == "unreadable":
        pytest.skip("callbacks were switched off")
    rows = [{n.removeprefix("net."): t for n, t in w.items()} for w in run.recorder.weights]
    return run, [{n: t for n, t in row.items() if "scale" not in n} for row in rows]


def test_training_is_what_it_would_have_been(run):
    """Looking changes no weight: dropout, shuffling and momentum go on as without callbacks."""
    watched = run.module.state_dict().values()
    for (name, a), b in zip(run.alone.state_dict().items(), watched, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, msg=name, equal_nan=True)


def test_what_cannot_be_read_is_not_looked_at(run):
    assert (run.tau.history + run.gap.history == []) == (run.name == "unreadable")


def test_the_bank_has_every_step(run):
    bank = CheckpointBank(run.folder / "bank", "r")
    assert [r["step"] for r in bank.records] == run.recorder.steps[1:]
    for found, expected in zip(bank, run.recorder.weights[1:], strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    bank.verify()


def layers(weights):
    return [k for k, t in weights.items() if k.endswith("weight") and t.ndim > 1][:-1]


def order(weights, layer):
    return (-weights[layer].amax(1)).argsort(stable=True).argsort()


def test_tau_of_every_step(readable):
    run, weights = readable
    names, metrics = layers(weights[0]), run.trainer.callback_metrics
    assert [name.removeprefix("net.") for name in run.tau.layers] == names
    assert len(run.tau.history) == len(weights) - 1 >= 4
    for k, (_, found) in enumerate(run.tau.history):
        pairs = [[order(weights[k + more], n) for more in (0, 1)] for n in names]
        assert found == pytest.approx([kendalltau(*pair).statistic for pair in pairs], abs=1e-9)
    assert min(t for _, row in run.tau.history for t in row) < 1  # something moved
    assert metrics["tau"].item() == pytest.approx(sum(found) / len(found), abs=1e-6)
    moved = [(a != b).double().mean().item() for a, b in pairs]
    assert metrics["tau_moved"].item() == pytest.approx(sum(moved) / len(moved), abs=1e-6)
    assert metrics["tau_transpositions"] >= 0


def symmetries_of(cls, example):
    """Some forwards take arguments by name."""
    module = built(cls).eval()
    net = getattr(module, "net", module)
    return discover(getattr(net, "_orig_mod", net), *example.args, **example.named)


def test_mass_gap(readable):
    run, weights = readable
    sym = symmetries_of(KINDS[run.name][0], run.gap.network.inputs)
    steps, metrics = run.recorder.steps, run.trainer.callback_metrics
    seen = [w for a, b, w in zip(steps, steps[1:], weights[1:], strict=False) if b // 2 > a // 2]
    assert len(run.gap.history) == len(seen) >= 2
    for w, (_, (mass, minimum, excess)) in zip(seen, run.gap.history, strict=True):
        expected = min_mass(w, sym)
        assert mass == pytest.approx(expected.mass.item(), rel=1e-6)
        assert minimum == pytest.approx(expected.minimum.item(), rel=1e-6)
        assert excess == pytest.approx(expected.excess.item(), rel=1e-4, abs=1e-4)
    largest = {name: seen[-1][name].abs().max().item() for name in sym.weights}
    assert {n: v for n, (v, _) in run.gap.largest.items()} == pytest.approx(largest, rel=1e-6)
    assert metrics["largest_weight"].item() == pytest.approx(max(largest.values()), rel=1e-6)
    assert metrics["largest_weight_at_minimum"] > 0
    assert metrics["mass"] > metrics["mass_minimum"]


# ------------------------------------------------------------ every callback
def chains():
    return SGHMC(small_network(), every_n_steps=2, optimizer=lambda p: samplers.SGHMC(p, lr=0.02))


def plain():
    return built(Plain, 0.0)


def drawn():
    module = built(Plain, 0.0)
    module.configure_optimizers = lambda: samplers.IVON(
        module.parameters(), num_data=60, prior_precision=1.0
    )
    return module


CALLBACKS = {
    "DrawnWeights": (drawn, lambda folder: [DrawnWeights()]),
    "PermutationTau": (plain, lambda folder: [PermutationTau()]),
    "MassGap": (plain, lambda folder: [MassGap(1)]),
    "OrbitDrift": (plain, lambda folder: [OrbitDrift(3)]),
    "LearningCoefficient": (plain, lambda folder: [LearningCoefficient(steps=16)]),
    "PosteriorFigures": (plain, lambda folder: [PosteriorFigures(1)]),
    "CheckpointHarvester": (plain, lambda folder: [CheckpointHarvester(folder, every_n_steps=1)]),
    "PosteriorDoctor": (plain, lambda folder: [PosteriorDoctor(1)]),
    "SymmetricAverage": (plain, lambda folder: [SymmetricAverage()]),
    "ChainDiagnostics": (chains, lambda folder: [ChainDiagnostics()]),
    "TrainingCost": (
        lambda: DeepEnsemble(small_network(), members=2, optimizer=adam),
        lambda folder: [TrainingCost()],
    ),
}  # fmt: skip
"""A module, and a callback of every class."""


@pytest.fixture(params=CALLBACKS)
def one(request, monkeypatch, tmp_path):
    """Fits a module with callbacks of one class."""
    monkeypatch.setattr(PosteriorFigures, "_draw", lambda *_: None)
    make, looks = CALLBACKS[request.param]

    def fitted(epochs, module=None, found=None, name="it", data=None, **options):
        torch.manual_seed(0)
        module = module or make()
        found = found or looks(tmp_path / name)
        options = {"max_epochs": epochs, "default_root_dir": tmp_path / name, **options}
        data = data or (None if isinstance(module, Plain) else Blobs())
        return module, found, fit(module, *found, data=data, **options)

    return fitted


def numbers(callback):
    """The state of a callback as leaves by their places; times are others in every run."""
    state = {k: v for k, v in callback.state_dict().items() if k not in ("seconds", "path")}
    state["seen"] = getattr(callback, "values", {})
    params = [p for o in getattr(callback, "optimizers", ()) for p in o.state]
    state["learned"] = [(p.detach(), o.deviation(p)) for p in params for o in callback.optimizers]
    return dict(tree_flatten_with_path(state)[0])


def test_every_callback_has_its_laws():
    kinds = [n for n in callbacks.__all__ if issubclass(getattr(callbacks, n), L.Callback)]
    assert sorted(CALLBACKS) == sorted(kinds)


def test_a_resumed_run_has_seen_what_an_uninterrupted_one_has(one, tmp_path):
    _, (whole,), _ = one(2, name="whole")
    *_, trainer = one(1, name="half")
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    torch.load(tmp_path / "x.ckpt", weights_only=True)
    _, (resumed,), _ = one(2, name="half", ckpt_path=tmp_path / "x.ckpt")
    expected, found = numbers(whole), numbers(resumed)
    assert expected.keys() == found.keys() != set()
    for place, value in expected.items():
        if isinstance(value, torch.Tensor | float):
            torch.testing.assert_close(found[place], value, rtol=1e-5, atol=1e-6, msg=str(place))
        else:
            assert found[place] == value, place


LOOKS = {
    "PermutationTau": lambda c: len(c.history),
    "MassGap": lambda c: len(c.history),
    "OrbitDrift": lambda c: 3 * len(c.history),
    "LearningCoefficient": lambda c: 6 * len(c.history),
    "PosteriorFigures": lambda c: len(c._steps),
}
WATCHING = pytest.mark.parametrize("one", LOOKS, indirect=True)


class Noisy(torch.nn.Sequential):
    """Noise on all inputs, also in evaluations."""

    def forward(self, x):
        return super().forward(x + 0.1 * torch.randn_like(x))


class Drawing(L.Callback):
    def on_validation_end(self, *_):
        torch.rand(1)


@pytest.mark.parametrize(
    "one", sorted(CALLBACKS.keys() - {"DrawnWeights", "SymmetricAverage"}), indirect=True
)
def test_looks_at_a_network_that_draws_noise_change_no_weight(one, monkeypatch):
    for place, build in {"runs": runs.network, __name__: small_network}.items():
        name = "network" if place == "runs" else "small_network"
        monkeypatch.setattr(f"{place}.{name}", lambda *args, build=build: Noisy(*build(*args)))
    ends = []
    for looks in (None, [L.Callback()], [Drawing()]):
        weights = P.ravel(P.of(one(2, found=looks, data=Blobs())[0]))[0]
        ends.append((weights, torch.get_rng_state()))
    (watched, left), (alone, expected), (_, disturbed) = ends
    assert torch.equal(watched, alone)
    assert torch.equal(left, expected)
    assert not torch.equal(disturbed, expected)


@WATCHING
def test_the_same_callback_in_another_run(one):
    """What was seen of one module is forgotten for the next, and kept if the same goes on."""
    module, looks, _ = one(1)
    count = LOOKS[type(looks[0]).__name__]
    one(1, module, looks)
    assert count(looks[0]) == 12
    assert pickle.loads(pickle.dumps(looks[0])).network is None
    other = built(Plain)
    other.net[0], other.net[3] = torch.nn.Linear(6, 10), torch.nn.Linear(10, 5)
    one(1, other, looks)
    assert count(looks[0]) == 6


def test_a_diverged_run_goes_on(tmp_path):
    class Diverged(Plain):
        def training_step(self, batch, index):
            if index == 2:
                torch.nn.init.constant_(self.net[0].weight, torch.inf)
            return super().training_step(batch, index)

    tau, *others = PermutationTau(), MassGap(1), PosteriorFigures(1, 2)
    with (
        pytest.warns(UserWarning, match="skips weights that are not finite"),
        pytest.warns(UserWarning, match="PermutationTau is switched off: the weights are not fi"),
    ):
        trainer = fit(built(Diverged), tau, *others, default_root_dir=tmp_path)
    assert trainer.global_step == 12
    assert [step for step, _ in tau.history] == [0, 1]


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda p: PermutationTau("largest"), "`by` must be one of max"),
        (lambda p: MassGap(batch_norm="train"), "`batch_norm` must be 'carrier' or 'eval'"),
        (lambda p: PosteriorFigures(weights=1), "`weights` must be at least 2, got 1"),
        (lambda p: CheckpointHarvester(p, 1, 1), "exactly one of `every_n_steps`"),
        (lambda p: fit(plain(), CheckpointHarvester(p, module="x")), "no submodule 'x'"),
        (
            lambda p: [fit(built(cls), CheckpointHarvester(p)) for cls in (Plain, Normed)],
            "`bank` must be another folder than .* is in only one",
        ),
        (lambda p: fit(plain(), PermutationTau(module="x")), "no submodule 'x'; it has net"),
        *(
            (lambda p, c=c: fit(built(Stacked), c(module="nett")), "single network; omit 'nett'")
            for c in (PermutationTau, PosteriorDoctor, CheckpointHarvester)
        ),
        (lambda p: fit(plain(), ChainDiagnostics()), "Plain has none"),
        *(
            (lambda p, s=s: CheckpointHarvester("bank").load_state_dict(s), "checkpoint is damaged")
            for s in ({}, {"path": 3, "rows": 1}, {"path": "", "rows": -1})
        ),
    ],
)
def test_bad_input(tmp_path, build, message):
    with pytest.raises(ValueError, match=message):
        build(tmp_path)

"""What users do: frozen and tied weights, second fits, callbacks, odd loaders, mistakes."""

import gc
import os
import weakref
from functools import partial
from itertools import islice

import pytest
import torch
from cases import Forward
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    LambdaCallback,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.utilities import CombinedLoader
from module_cases import Blobs, adam, fitted, made, network, said, saved, trainer
from processes import on_devices
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from lightning_bnn import _compat
from lightning_bnn.likelihoods import Categorical, Gaussian, IsotropicGaussianPrior
from lightning_bnn.methods import MFVI as Method
from lightning_bnn.modules import MFVI, Bayesian, DeepEnsemble, Laplace, MCDropout, SymmetrizedVI
from lightning_bnn.modules.batches import only_loader
from lightning_bnn.modules.training_data import TrainingData, data_size
from weightsym import params as P

pytestmark = pytest.mark.filterwarnings("ignore")


def rows(n=30):
    return TensorDataset(*(t[:n] for t in Blobs().load().train))


def plain(n=30, **options):
    return DataLoader(rows(n), **{"batch_size": 10, **options})


# ------------------------------------------------------------ networks
def test_a_frozen_backbone_keeps_its_statistics():
    net = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))
    net[1].running_mean += 0.7
    net[:2].requires_grad_(False).eval()
    module = MFVI(net, members=2, optimizer=adam)
    fitted(module)
    assert module.member_stack().keys().isdisjoint(["0.weight", "1.weight"])
    assert torch.equal(module.member(1)[1].running_mean, net[1].running_mean)


class Tied(nn.Module):
    """One weight as embedding and as output layer."""

    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x):
        return self.out(torch.tanh(self.embed(x).mean(1)))


@pytest.mark.parametrize(("make", "members"), [(DeepEnsemble, 3), (MFVI, 1)])
def test_tied_weights_stay_tied(make, members):
    data = TensorDataset(torch.randint(7, (20, 5)), torch.randint(7, (20,)))
    module = make(Tied(), members=members, optimizer=adam)
    fitted(module, DataLoader(data, 5))
    net = module.member(0)
    assert net.out.weight is net.embed.weight
    x = data.tensors[0]
    torch.testing.assert_close(module.predictive()(x), module.eval()(x))


def test_tensors_that_no_state_dict_names_follow_to_the_precision():
    net = Forward(lambda s, x: s.layer(x) + s.offset, layer=nn.Linear(6, 3))
    net.register_buffer("offset", torch.ones(3), persistent=False)
    module = DeepEnsemble(net, members=2).double()
    x = torch.randn(4, 6).double()
    assert module.predictive().double()(x).dtype == module.eval()(x).dtype == torch.float64


def test_units_with_frozen_weights_are_not_exchanged():
    net = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 2))
    net[4].requires_grad_(False)
    module = SymmetrizedVI(net)
    module.example_input_array = torch.randn(2, 3)
    assert [
        g.units for g in module.method.units(module.state, module.run).symmetries.permutations
    ] == [5]


def test_input_gradients():
    module, x = made("mfvi").eval(), torch.randn(4, 6, requires_grad=True)
    module(x)[:, 0].sum().backward()
    assert x.grad.abs().max() > 0
    assert module.state.mean.grad is None


# ------------------------------------------------------------ runs


def test_the_size_of_the_data_is_read_anew_for_every_fit():
    module, given = made("mfvi"), MFVI(network(), num_data=7)
    for n in (30, 20):
        fitted(module, plain(n))
        assert module.num_data == n
    fitted(given, plain(20))
    assert given.num_data == 7
    fitted(made("ensemble"), DataLoader(Stream(), 10))  # N is not needed


def batched(sampler):
    return DataLoader(plain(30).dataset, batch_sampler=sampler)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(rows())


class CountedStream(Stream):
    def __len__(self):
        return 30


@pytest.mark.parametrize(
    ("loader", "batches", "expected"),
    [
        (DataLoader(CountedStream(), 10), None, 30),
        (plain(30, shuffle=True), 1, 30),  # other rows in every epoch
        (plain(30), 2, 20),
        (plain(30), 3, 30),
        (plain(30, drop_last=True, batch_size=8, shuffle=True), 3, 30),
        (plain(30, sampler=SubsetRandomSampler(range(12))), 2, 12),
        (Blobs().train_dataloader(), 2, 60),
        (plain(30, sampler=WeightedRandomSampler([0.0, 1.0, 2.0] * 10, 30)), 2, 20),
        (batched(BatchSampler(SubsetRandomSampler(range(12)), 5, False)), 2, 12),
        (batched(BatchSampler(SequentialSampler(range(30)), 5, False)), 2, 10),
        (plain(30, sampler=DistributedSampler(range(30), 2, 0)), 2, 30),
        (plain(30, sampler=DistributedSamplerWrapper(SubsetRandomSampler(range(13)), 2, 0)), 2, 13),
        (plain(30, sampler=[3, 3, *range(12)]), 1, 8),
        (plain(30, sampler=range(1, 30, 2), batch_size=4), float("inf"), 15),
        (plain(30, sampler=DistributedSamplerWrapper([*range(11)] * 2, 2, 0)), 1, 11),
        (batched([[0, 2], [4, 6, 2], [8]]), 2, 4),
        (batched([[0, 2], [4, 6, 2], [8]]), None, 5),
        (batched(BatchSampler([*range(9), 8], 4, False)), 2, 8),
        ([plain(30)], 2, 20),
        ({"a": plain(30, shuffle=True)}, 2, 30),
        (CombinedLoader([plain(30, sampler=[1, 2, 1])]), 2, 2),
    ],
)
def test_how_many_examples_a_loader_has(loader, batches, expected):
    assert data_size(loader, batches) == expected == len(seen_in(loader, batches))


def seen_in(loader, batches, epochs=40):
    """The examples that a loader gives, by brute force."""
    (loader, _), seen = only_loader(loader), set()
    for epoch in range(epochs):
        for part in (loader, getattr(loader, "sampler", None)):
            getattr(part, "set_epoch", int)(epoch)
        for inputs, *_ in islice(loader, None if batches == float("inf") else batches):
            seen |= set(map(tuple, inputs.tolist()))
    return seen


LOADERS = {
    "in order": {},
    "shuffled": {"shuffle": True},
    "a subset": {"sampler": SubsetRandomSampler(range(7, 24))},
    "without the last": {"drop_last": True},
}


def seen_by(devices, folder):
    """How many examples a method that takes all data sees, and the sum of what goes in."""
    found = {}
    for name, options in LOADERS.items():
        module, loader = made("mfvi"), plain(29, batch_size=4, **options)
        run = trainer(max_epochs=1, devices=devices, strategy="ddp" if devices > 1 else "auto")
        run.fit(module, loader)
        data = list(TrainingData(module, run.train_dataloader))
        sums = torch.cat([batch.inputs[0].double() for batch in data]).sum(0)
        found[name] = module.num_data, sum(batch.examples for batch in data), sums.tolist()
        run.strategy.barrier()
    return found


@pytest.mark.e2e
def test_two_processes_see_every_example_once(tmp_path):
    """Their sampler gives some of them twice: 29 examples are 30 for two."""
    (alone,) = on_devices(1, seen_by, 1, tmp_path)
    for found in on_devices(2, seen_by, 2, tmp_path):
        assert found["in order"][:2] == found["shuffled"][:2] == (29, 29)
        assert found["a subset"][:2] == (17, 17)
        for name in ("in order", "shuffled", "a subset"):
            assert found[name][2] == pytest.approx(alone[name][2], abs=1e-9)


# ------------------------------------------------------------ loaders that share out the data
class Stream(IterableDataset):
    """Examples one by one, of which a process may have its share only."""

    def __init__(self, rank=0, processes=1):
        self.rank, self.processes = rank, processes

    def __iter__(self):
        yield from list(rows(31))[self.rank :: self.processes]


class Turns(torch.utils.data.Sampler):
    """The share of a process, by a sampler that torch does not know."""

    def __init__(self, rank=0, processes=1):
        self.chosen = range(rank, 31, processes)

    def __iter__(self):
        return iter(self.chosen)

    def __len__(self):
        return len(self.chosen)


SHARING = {
    "a stream in parts": lambda *place: DataLoader(Stream(*place), 8 // place[1]),
    "a stream of all": lambda *place: DataLoader(Stream(), 8),
    "a sampler in parts": lambda *place: plain(31, batch_size=4, sampler=Turns(*place)),
    "a sampler of all": lambda *place: plain(31, batch_size=4, sampler=Turns()),
    "batches in parts": lambda *place: DataLoader(
        rows(31), batch_sampler=BatchSampler(Turns(*place), 4, False)
    ),
    "rows in parts": lambda rank, processes: DataLoader(
        Subset(rows(31), range(rank, 31, processes)), 4
    ),
    "all, in orders of their own": lambda *place: plain(
        31, batch_size=4, generator=torch.Generator().manual_seed(place[0]), shuffle=True
    ),
}
"""What a process has, by its number and how many there are."""
STANDING = partial(torch.optim.SGD, lr=1e-12)
AT_THE_END = {
    "laplace": {"optimizer": STANDING, "prior_std": 1.0},
    "multi-laplace": {"optimizer": STANDING},
    "laplace full": {"optimizer": STANDING},
    "laplace kron": {"optimizer": STANDING},
    "swag": {"optimizer": STANDING, "swa_lr": 1e-12},
    "hmc": {},
    "mile": {},
}
"""Methods that pass over all the data; where weights stand still, only the passes tell."""


def at_the_end(name, **options):
    if name != "laplace kron":
        return made(name, batch_norm=name == "swag", **AT_THE_END[name], **options)
    return Laplace(network(), structure="kron", prior_std=1.0, **AT_THE_END[name], **options)


def predicted(devices, folder, names, loaders):
    """What methods predict after an epoch on what a process has, and how many examples they see."""
    found, x = {}, rows(8).tensors[0]
    alone = {"strategy": "ddp", "use_distributed_sampler": False} if devices > 1 else {}
    for name, kind in ((n, k) for n in names for k in loaders):
        torch.manual_seed(0)
        module, run = (
            at_the_end(name, num_data=31),
            trainer(max_epochs=1 + (name == "swag"), devices=devices, **alone),
        )
        rank = int(os.environ.get("RANK", 0))
        run.fit(module, SHARING[kind](rank, devices))
        data = list(TrainingData(module, run.train_dataloader))
        modes = [P.ravel(m.state_dict())[0].tolist() for m in module.posterior().modes()]
        modes = [] if name == "laplace full" else modes  # eigenvectors are not unique
        found[name, kind] = sum(b.examples for b in data), modes, module.eval()(x).tolist()
        run.strategy.barrier()
    return found


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("names", "loaders"), [(["laplace"], [*SHARING]), ([*AT_THE_END], ["a stream in parts"])]
)
def test_two_processes_share_out_the_data_themselves(names, loaders, tmp_path):
    """Posteriors and predictions are those of one process that has all of them."""
    (alone,) = on_devices(1, predicted, 1, tmp_path, names, loaders)
    for found in on_devices(2, predicted, 2, tmp_path, names, loaders):
        for case, (count, *numbers) in found.items():
            assert count == alone[case][0] == 31, case
            for here, there in zip(numbers, alone[case][1:], strict=True):
                pair = torch.tensor(here), torch.tensor(there)
                torch.testing.assert_close(*pair, rtol=1e-3, atol=1e-3, msg=str(case))


def test_overfitting_sees_the_same_batches_in_every_epoch():
    module, seen = made("mfvi"), []
    sees = LambdaCallback(on_train_batch_start=lambda t, m, b, k: seen.append(float(b[0].sum())))
    fitted(module, None, sees, overfit_batches=2, max_epochs=3)
    assert seen[:2] == seen[2:4] == seen[4:]
    assert module.num_data == 20


def test_loaders_after_a_datamodule_are_what_they_are():
    module, run = made("ensemble"), trainer()
    run.fit(module, datamodule=Blobs())
    (found,) = run.test(module, dataloaders=plain(), verbose=False)
    assert "test/acc" in found
    assert not _compat.tests_datamodule(run)
    found = run.test(module, datamodule=Blobs(), verbose=False)[0]
    assert "test/far/AUROC" in found
    assert _compat.tests_datamodule(run)


def test_the_usual_callbacks(tmp_path):
    module = made("multi-mfvi")
    module.make_scheduler = lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0)
    usual = EarlyStopping("val/nll"), ModelCheckpoint(tmp_path, monitor="val/nll")
    options = {"enable_checkpointing": True, "logger": True, "default_root_dir": tmp_path}
    run = trainer(*usual, LearningRateMonitor(), val_check_interval=0.5, **options)
    run.fit(module, plain(), [plain(20), plain(10)])
    run.test(module, plain(), ckpt_path="best", weights_only=True, verbose=False)


def test_an_own_layout_of_batches_holds_in_every_stage():
    class Own(DeepEnsemble):
        def inputs_and_targets(self, batch):
            return (batch["pix"],), batch["cls"]

    loader = DataLoader([{"pix": x, "cls": y} for x, y in rows(20)], 5)
    module, run = Own(network(), optimizer=adam), trainer()
    run.fit(module, loader, loader)
    run.test(module, loader, verbose=False)
    assert len(run.predict(module, loader)) == 4


# ------------------------------------------------------------ parameters that members share
def test_what_members_share_learns_as_with_one_member():
    """Ten members that are equal, and one, give a learned noise the same gradient."""

    def gradient(members, **options):
        torch.manual_seed(0)
        net = nn.Linear(3, 1)
        module = DeepEnsemble(
            net, members=members, likelihood=Gaussian("learned", 0.1), optimizer=adam
        )
        with torch.no_grad():
            for p in module.state.networks.parameters():
                p.copy_(p[:1].expand_as(p).clone())
        seen = []
        sees = LambdaCallback(
            on_train_batch_end=lambda t, m, *_: seen.append(m.likelihood.log_std.grad.clone())
        )
        torch.manual_seed(1)
        x = torch.randn(10, 3)
        loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 10)
        fitted(module, loader, sees, max_epochs=1, **options)
        return seen[0]

    torch.testing.assert_close(gradient(10), gradient(1))
    assert gradient(10, gradient_clip_val=1.0).norm() <= 1 + 1e-5


class Widening(nn.Module):
    """A prior whose scale is learned."""

    def __init__(self):
        super().__init__()
        self.log_std = nn.Parameter(torch.zeros(()))

    def log_prob(self, params, names, stacked):
        squares = torch.stack([params[n].flatten(1).square().sum(1) for n in names]).sum(0)
        count = sum(params[n][0].numel() for n in names)
        return -squares * (-2 * self.log_std).exp() / 2 - count * self.log_std


def test_a_prior_may_learn():
    module = MFVI(network(), prior=Widening(), kl="sampled", members=2, optimizer=adam)
    fitted(module, gradient_clip_val=1.0)
    assert module.prior.log_std != 0


def test_deviations_may_underflow():
    module = made("mfvi")
    with torch.no_grad():
        module.state.log_std[0, 0] = -110
    trainer().validate(module, Blobs(), verbose=False)


# ------------------------------------------------------------ reload
@pytest.mark.bad_input
def test_a_checkpoint_of_another_prior_is_warned_of_and_of_another_likelihood_refused(tmp_path):
    def load(path, width, **options):
        return MFVI.load_from_checkpoint(path, network=nn.Linear(6, width), **options)

    priors = {"prior": IsotropicGaussianPrior(0.1), "kl": "sampled"}
    module = MFVI(nn.Linear(6, 3), optimizer=adam, **priors)
    path, words = saved(fitted(module), tmp_path / "prior.ckpt"), "prior IsotropicGaussianPrior("
    (found,) = said(words, load, path, 3, kl="closed")
    assert "(std=0.1)" in found
    assert not said("", load, path, 3, weights_only=True, **priors)
    module = MFVI(nn.Linear(6, 1), likelihood=Gaussian(std=0.3), optimizer=adam)
    loader = DataLoader(TensorDataset(torch.randn(10, 6), torch.randn(10, 1)), 5)
    path = saved(fitted(module, loader), tmp_path / "likelihood.ckpt")
    with pytest.raises(ValueError, match=r"likelihood Gaussian\(fixed\), but this module has Cat"):
        load(path, 1)
    loaded = load(path, 1, likelihood=Gaussian(), weights_only=True)
    assert loaded.likelihood.log_std.exp().item() == pytest.approx(0.3)


def test_equal_inputs_in_other_batches_lose_other_units():
    x = torch.ones(3, 6)
    module = MCDropout(network(), p=0.5)
    (one, two, other) = (module.outputs((x,), 0, k) for k in (0, 0, 1))
    assert torch.equal(one, two)
    assert not torch.allclose(one, other)
    loader = DataLoader(TensorDataset(torch.ones(6, 6)), batch_size=3)
    found = trainer().predict(module, loader)
    assert torch.equal(found[0].samples, one)
    assert torch.equal(found[1].samples, other)


def test_start_from_a_trained_network_that_is_gone_when_a_checkpoint_is_loaded(tmp_path):
    net, path = network(), tmp_path / "w.pt"
    torch.save(net.state_dict(), path)
    module = MFVI(network(), start_from=str(path), optimizer=adam)
    assert torch.equal(module.member_stack()["0.weight"][0], net[0].weight)
    checkpoint = saved(fitted(module, max_epochs=1), tmp_path / "it.ckpt")
    path.unlink()
    MFVI.load_from_checkpoint(checkpoint, network=network(), weights_only=True)


# ------------------------------------------------------------ mistakes


@pytest.mark.bad_input
def test_errors_of_a_likelihood_are_its_own():
    class Broken(Categorical):
        def log_prob(self, outputs, targets):
            raise RuntimeError("my table has the wrong size")

    with pytest.raises(RuntimeError, match="my table"):
        fitted(DeepEnsemble(network(), likelihood=Broken(), optimizer=adam))


@pytest.mark.bad_input
def test_wrong_inputs_do_not_change_how_a_network_runs():
    module = made("ensemble")
    with pytest.raises(ValueError, match=r"Sequential does not take inputs of shape \(4, 5\)"):
        module.eval()(torch.randn(4, 5))
    assert P.runs_at_once(module.template)


# ------------------------------------------------------------ tests of several loaders
def test_out_of_distribution_loaders_need_no_labels_and_may_have_names(capsys):
    module, run = made("ensemble"), trainer(max_epochs=1)
    run.fit(module, Blobs())
    unlabelled = DataLoader(TensorDataset(5 + torch.randn(20, 6)), 10)
    (found,) = run.test(module, [plain(), unlabelled], verbose=False)
    assert "test/ood/AUROC" in found
    (found,) = run.test(module, {"id": plain(), "far": unlabelled}, verbose=False)
    assert "test/far/AUROC" in found
    loaders = {"id": plain(), "svhn": unlabelled, "noise": unlabelled}
    (found,) = run.test(module, loaders)
    assert found["test/svhn/AUROC"] == found["test/noise/AUROC"]
    (accuracy,) = (line for line in capsys.readouterr().out.splitlines() if "test/acc" in line)
    assert accuracy.count(f"{found['test/acc']:.4f}"[:5]) == 1  # one column of three loaders


# ------------------------------------------------------------ averages of Lightning
AVERAGES = {
    "EMA": lambda: EMAWeightAveraging(decay=0.5),
    "SWA": lambda: StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1),
}


@pytest.mark.parametrize(("name", "average"), [("ensemble", "EMA"), ("mfvi", "SWA")])
def test_what_only_trains_weights_is_averaged(name, average, tmp_path):
    module, alone = made(name, seed=1), made(name, seed=1)
    for one, callbacks in ((module, [AVERAGES[average]()]), (alone, [])):
        torch.manual_seed(0)
        fitted(one, None, *callbacks, max_epochs=3, default_root_dir=tmp_path)
    assert not any(map(torch.equal, module.parameters(), alone.parameters()))


# ------------------------------------------------------------ what modules owe their users
def test_a_module_that_nobody_uses_is_freed_at_once():
    module = made("mfvi")
    seen = weakref.ref(module)
    gc.collect()
    gc.disable()
    try:
        del module
        assert seen() is None
    finally:
        gc.enable()


def test_what_is_not_there_is_missed_in_the_module_and_not_in_its_state():
    with pytest.raises(AttributeError, match="'DeepEnsemble' object has no attribute 'modez'"):
        _ = made("ensemble").modez


def test_losses_and_posterior_of_a_subclass_are_those_that_train_and_predict():
    asked = set()

    class Own(DeepEnsemble):
        def losses(self, inputs, targets, *more):
            asked.add("losses")
            return super().losses(inputs, targets, *more)

        def posterior(self):
            asked.add("posterior")
            return super().posterior()

    trainer(fast_dev_run=1).fit(Own(network(), members=2), Blobs())
    assert asked == {"losses", "posterior"}


def test_data_are_read_by_the_loader_alone():
    keyed = {key: (torch.ones(6), torch.tensor(1)) for key in "abcd"}
    fitted(made("ensemble"), DataLoader(keyed, batch_size=2, sampler=list("abcd")), max_epochs=1)


@pytest.mark.bad_input
@pytest.mark.parametrize("method", ["MFVI", Method, None])
def test_what_is_no_method_is_refused(method):
    with pytest.raises(ValueError, match="`method` must be one of lightning_bnn.methods"):
        Bayesian(network(), method)

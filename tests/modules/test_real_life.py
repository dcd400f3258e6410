"""What users do: frozen and tied weights, second fits, callbacks, odd loaders, mistakes."""

import copy
import pickle
from itertools import islice

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.utilities import CombinedLoader
from module_cases import MODULES, Blobs, adam, made, network, same, trainer
from processes import on_devices
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from lightning_bnn import _compat
from lightning_bnn.likelihoods import Categorical, Gaussian, IsotropicGaussianPrior
from lightning_bnn.modules import (
    HMC,
    MFVI,
    DeepEnsemble,
    Laplace,
    MCDropout,
    SymmetrizedVI,
)
from lightning_bnn.modules.batches import only_loader
from lightning_bnn.modules.training_data import TrainingData, data_size
from weightsym import params as P

pytestmark = pytest.mark.filterwarnings("ignore")
FEW = ["ensemble", "mfvi", "bethe"]


def rows(n=30):
    return TensorDataset(*(t[:n] for t in Blobs().load().train))


def plain(n=30, **options):
    return DataLoader(rows(n), **{"batch_size": 10, **options})


# ------------------------------------------------------------ networks
@pytest.mark.parametrize("make", [DeepEnsemble, MFVI, SymmetrizedVI])
def test_a_frozen_backbone_is_the_same_for_all_members(make):
    net = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 4), nn.ReLU())
    net = nn.Sequential(net.requires_grad_(False), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    net[0][1].running_mean += 0.7
    net[0].eval()
    module = make(net, members=3, optimizer=adam)
    trainer().fit(module, Blobs())
    fixed = {name for name, p in net.named_parameters() if not p.requires_grad}
    assert fixed
    assert fixed.isdisjoint(module.member_stack())
    for k in range(3):
        for name, tensor in net[0].state_dict(prefix="0.").items():
            assert torch.equal(module.member(k).state_dict()[name], tensor), name
    stack = module.member_stack()
    assert not torch.equal(stack["1.weight"][0], stack["1.weight"][1])


class Tied(nn.Module):
    """One weight as embedding and as output layer."""

    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x):
        return self.out(torch.tanh(self.embed(x).mean(1)))


@pytest.mark.parametrize("make", [DeepEnsemble, MFVI])
@pytest.mark.parametrize("members", [1, 3])
def test_tied_weights_stay_tied(make, members):
    data = TensorDataset(torch.randint(7, (20, 5)), torch.randint(7, (20,)))
    module = make(Tied(), members=members, optimizer=adam)
    trainer().fit(module, DataLoader(data, 5))
    net = module.member(0)
    assert net.out.weight is net.embed.weight
    x = data.tensors[0]
    torch.testing.assert_close(module.predictive()(x), module.eval()(x))


def test_tensors_that_no_state_dict_names_follow_to_the_precision():
    class Offset(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 3)
            self.register_buffer("offset", torch.ones(3), persistent=False)

        def forward(self, x):
            return self.layer(x) + self.offset

    module = DeepEnsemble(Offset(), members=2).double()
    x = torch.randn(4, 6).double()
    assert module.predictive().double()(x).dtype == module.eval()(x).dtype == torch.float64


def test_units_with_frozen_weights_are_not_exchanged():
    net = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 2))
    net[4].requires_grad_(False)
    module = SymmetrizedVI(net)
    module.example_input_array = torch.randn(2, 3)
    assert [g.units for g in module.symmetries.permutations] == [5]


def test_input_gradients():
    module, x = made("mfvi").eval(), torch.randn(4, 6, requires_grad=True)
    module(x)[:, 0].sum().backward()
    assert x.grad.abs().max() > 0
    assert module.mean.grad is None


# ------------------------------------------------------------ runs


@pytest.mark.parametrize("name", FEW)
def test_pickle_and_copy_after_predictions(name):
    module = made(name)
    run = trainer()
    run.fit(module, Blobs())
    run.predict(module, Blobs())
    x = torch.randn(3, 6)
    wanted = module.eval()(x)
    for other in (pickle.loads(pickle.dumps(module)), copy.deepcopy(module)):
        assert torch.equal(other(x), wanted)


def test_the_size_of_the_data_is_read_anew_for_every_fit():
    module = made("mfvi")
    trainer().fit(module, plain(30))
    assert module.num_data == 30
    trainer().fit(module, plain(20))
    assert module.num_data == 20
    given = MFVI(network(), num_data=7)
    trainer().fit(given, plain(20))
    assert given.num_data == 7


class Evens(Sampler):
    """Leaves examples out, and does not say which."""

    def __iter__(self):
        return iter(range(0, 30, 2))

    def __len__(self):
        return 30


class Sorted(BatchSampler):
    """Batches of its own."""


def batched(sampler):
    return DataLoader(plain(30).dataset, batch_sampler=sampler)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(rows())


class CountedStream(Stream):
    def __len__(self):
        return 30


def test_streams():
    trainer().fit(made("ensemble"), DataLoader(Stream(), 10))  # N is not needed
    trainer().fit(made("bethe", num_data=30), DataLoader(Stream(), 10))
    module = made("mfvi")
    trainer().fit(module, DataLoader(CountedStream(), 10))
    assert module.num_data == 30


@pytest.mark.bad_input
@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(Stream(), 10),
        DataLoader([(torch.randn(5, 6), torch.ones(5).long())], None),
        plain(30, sampler=Evens()),
        batched(BatchSampler(Evens(), 5, False)),
        [plain(30), plain(20)],
        batched(Sorted(SequentialSampler(range(30)), 10, False)),
    ],
)
def test_a_size_that_cannot_be_read_is_asked_for(loader):
    with pytest.raises(ValueError, match="`num_data` cannot be read"):
        trainer().fit(made("mfvi"), loader)


@pytest.mark.parametrize(
    ("loader", "batches", "expected"),
    [
        (plain(30, shuffle=True), 1, 30),  # other rows in every epoch
        (plain(30), 2, 20),
        (plain(30), 3, 30),
        (plain(30, drop_last=True, batch_size=8, shuffle=True), 3, 30),
        (plain(30, sampler=SubsetRandomSampler(range(12))), 2, 12),
        (plain(30, sampler=SequentialSampler(range(12))), 2, 12),
        (plain(30, sampler=RandomSampler(range(12))), 2, 12),
        (Blobs().train_dataloader(), 2, 60),
        (plain(30, sampler=WeightedRandomSampler([0.0, 1.0, 2.0] * 10, 30)), 2, 20),
        (batched(BatchSampler(SubsetRandomSampler(range(12)), 5, False)), 2, 12),
        (batched(BatchSampler(RandomSampler(range(30)), 5, False)), 2, 30),
        (batched(BatchSampler(SequentialSampler(range(30)), 5, False)), 2, 10),
        (plain(30, sampler=DistributedSampler(range(30), 2, 0)), 2, 30),
        (plain(30, sampler=DistributedSamplerWrapper(SubsetRandomSampler(range(13)), 2, 0)), 2, 13),
        (plain(30, sampler=SubsetRandomSampler([3, 3, 4])), 1, 2),
        (plain(30, sampler=[3, 3, *range(12)]), 1, 8),
        (plain(30, sampler=(3, 3, *range(12))), None, 12),
        (plain(30, sampler=range(1, 30, 2), batch_size=4), float("inf"), 15),
        (plain(30, sampler=DistributedSamplerWrapper([*range(11)] * 2, 2, 0)), 1, 11),
        (batched([[0, 2], [4, 6, 2], [8]]), 2, 4),
        (batched([[0, 2], [4, 6, 2], [8]]), None, 5),
        (batched(BatchSampler([*range(9), 8], 4, False)), 2, 8),
        ([plain(30)], 2, 20),
        ({"a": plain(30, shuffle=True)}, 2, 30),
        (CombinedLoader([plain(30, sampler=[1, 2, 1])]), 2, 2),
        (CombinedLoader(plain(30), "max_size"), 2, 20),
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


@pytest.mark.parametrize("collect", [list, CombinedLoader], ids=["a list", "combined"])
def test_one_loader_in_a_collection_is_that_loader(collect):
    """Also where all batches are gone through, whose layout is that of the collection."""

    class Unpacks(Laplace):
        def inputs_and_targets(self, batch):
            ((inputs, targets),) = batch
            return (inputs,), targets

    found, net = {}, network()
    for kind, loader in ((Laplace, plain()), (Unpacks, collect([plain()]))):
        found[kind] = kind(net, prior_std=1.0, structure="diag", optimizer=adam)
        trainer().fit(found[kind], loader)
    assert found[Unpacks].num_data == 30
    assert same(found[Laplace].state_dict(), found[Unpacks].state_dict())


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


def test_overfitting_sees_the_same_batches_in_every_epoch():
    seen = []

    class Sees(L.Callback):
        def on_train_batch_start(self, trainer, module, batch, _):
            seen.append(float(batch[0].sum()))

    module = made("mfvi")
    trainer(Sees(), overfit_batches=2, max_epochs=3).fit(module, Blobs())
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
    run = trainer(
        EarlyStopping("val/nll"),
        ModelCheckpoint(tmp_path, monitor="val/nll"),
        LearningRateMonitor(),
        enable_checkpointing=True,
        logger=True,
        default_root_dir=tmp_path,
        val_check_interval=0.5,
    )
    run.fit(module, plain(), [plain(20), plain(10)])
    run.test(module, plain(), ckpt_path="best", weights_only=True, verbose=False)


class Pictures(torch.utils.data.Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, k):
        return dict(zip(("pix", "cls"), rows()[k], strict=True))


def test_an_own_layout_of_batches_holds_in_every_stage():
    class Own(DeepEnsemble):
        def inputs_and_targets(self, batch):
            return (batch["pix"],), batch["cls"]

    module, run, loader = Own(network(), optimizer=adam), trainer(), DataLoader(Pictures(), 5)
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
            for p in module.networks.parameters():
                p.copy_(p[:1].expand_as(p).clone())
        seen = []

        class Sees(L.Callback):
            def on_train_batch_end(self, trainer, module, *_):
                seen.append(module.likelihood.log_std.grad.clone())

        torch.manual_seed(1)
        x = torch.randn(10, 3)
        loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 10)
        run = trainer(Sees(), max_epochs=1, limit_val_batches=0, **options)
        L.Trainer.fit(run, module, loader)
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
    trainer(gradient_clip_val=1.0).fit(module, Blobs())
    assert module.prior.log_std != 0


# ------------------------------------------------------------ divergence


def test_deviations_may_underflow():
    module = made("mfvi")
    with torch.no_grad():
        module.log_std[0, 0] = -110
    trainer().validate(module, Blobs(), verbose=False)


# ------------------------------------------------------------ reload
def test_another_posterior_than_the_saved_one_is_warned_about(tmp_path):
    prior = IsotropicGaussianPrior(0.1)
    module = MFVI(network(), prior=prior, kl="sampled", optimizer=adam)
    run = trainer(max_epochs=1)
    run.fit(module, Blobs())
    run.save_checkpoint(tmp_path / "it.ckpt")
    with pytest.warns(UserWarning, match=r"prior IsotropicGaussianPrior\(std=0.1\)"):
        MFVI.load_from_checkpoint(tmp_path / "it.ckpt", network=network(), kl="closed")
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        options = {"prior": prior, "kl": "sampled", "weights_only": True}
        MFVI.load_from_checkpoint(tmp_path / "it.ckpt", network=network(), **options)


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


def test_start_from_a_trained_network(tmp_path):
    net = network()
    torch.save(net.state_dict(), tmp_path / "w.pt")
    module = MFVI(network(), start_from=str(tmp_path / "w.pt"), optimizer=adam)
    assert torch.equal(module.member_stack()["0.weight"][0], net[0].weight)
    run = trainer(max_epochs=1)
    run.fit(module, Blobs())
    run.save_checkpoint(tmp_path / "it.ckpt")
    (tmp_path / "w.pt").unlink()
    MFVI.load_from_checkpoint(tmp_path / "it.ckpt", network=network(), weights_only=True)


# ------------------------------------------------------------ mistakes
class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.out = nn.Linear(6, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.out(torch.relu(self.layer(x))), x


@pytest.mark.bad_input
@pytest.mark.parametrize("name", FEW)
def test_networks_that_return_more_than_a_tensor(name):
    with pytest.raises(ValueError, match="must return one tensor, Two returns a tuple"):
        trainer(limit_val_batches=0).fit(MODULES[name](Two()), Blobs())


@pytest.mark.bad_input
def test_errors_of_a_likelihood_are_its_own():
    class Broken(Categorical):
        def log_prob(self, outputs, targets):
            raise RuntimeError("my table has the wrong size")

    module = DeepEnsemble(network(), likelihood=Broken(), optimizer=adam)
    with pytest.raises(RuntimeError, match="my table"):
        trainer(num_sanity_val_steps=0).fit(module, Blobs())


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


@pytest.mark.bad_input
def test_a_checkpoint_with_another_likelihood_is_refused(tmp_path):
    module = MFVI(nn.Linear(3, 1), likelihood=Gaussian(std=0.3), optimizer=adam)
    run = trainer(max_epochs=1, limit_val_batches=0)
    loader = DataLoader(TensorDataset(torch.randn(10, 3), torch.randn(10, 1)), 5)
    run.fit(module, loader)
    run.save_checkpoint(tmp_path / "it.ckpt")
    with pytest.raises(ValueError, match=r"likelihood Gaussian\(fixed\), this module has Cat"):
        MFVI.load_from_checkpoint(tmp_path / "it.ckpt", network=nn.Linear(3, 1))
    loaded = MFVI.load_from_checkpoint(
        tmp_path / "it.ckpt", network=nn.Linear(3, 1), likelihood=Gaussian(), weights_only=True
    )
    assert loaded.likelihood.log_std.exp().item() == pytest.approx(0.3)


# ------------------------------------------------------------ averages of Lightning
AVERAGES = {
    "EMA": lambda: EMAWeightAveraging(decay=0.5),
    "SWA": lambda: StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1),
}


@pytest.mark.bad_input
@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize("name", ["laplace", "swag", "sghmc", "sgld", "hmc", "mile"])
def test_what_keeps_networks_is_not_averaged(name, average):
    """Their weights would be exchanged after the posterior has been made of them."""
    with pytest.raises(ValueError, match="exchanges the weights that .* makes its posterior of"):
        trainer(AVERAGES[average]()).fit(made(name), Blobs())


@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize("name", ["ensemble", "dropout", "mfvi"])
def test_what_only_trains_weights_is_averaged(name, average, tmp_path):
    module, alone = made(name, seed=1), made(name, seed=1)
    for one, callbacks in ((module, [AVERAGES[average]()]), (alone, [])):
        torch.manual_seed(0)
        run = trainer(*callbacks, max_epochs=3, default_root_dir=tmp_path)
        run.fit(one, Blobs())
    assert not any(
        torch.equal(a, b) for a, b in zip(module.parameters(), alone.parameters(), strict=True)
    )


# ------------------------------------------------------------ what is wrong, in one sentence
@pytest.mark.parametrize("name", ["ensemble", "mfvi", "swag", "sgld"])
@pytest.mark.parametrize("where", ["inputs", "targets"])
def test_examples_that_are_not_finite_are_named(name, where):
    x, y = rows().tensors
    likelihood = {"likelihood": Gaussian()} if where == "targets" else {}
    if where == "targets":
        y = torch.randn(30, 3)
    x, y = x.clone(), y.clone()
    (x if where == "inputs" else y)[17, 1] = torch.inf
    loader = DataLoader(TensorDataset(x, y), 10)
    with pytest.warns(UserWarning, match=f"{where} of the training data .* first in example 17"):
        trainer().fit(made(name, **likelihood), loader)


class Endless(IterableDataset):
    """Rows without an end, of which some hold NaN; it notes how many were asked for."""

    def __init__(self):
        self.given = 0

    def __iter__(self):
        while True:
            self.given += 1
            x = torch.randn(6)
            yield (x * torch.nan if self.given % 3 == 0 else x), torch.tensor(1)


def test_data_are_not_looked_through_where_that_would_change_them():
    x, y = (t.clone() for t in rows().tensors)
    x[17, 1] = torch.nan
    shuffled = DataLoader(TensorDataset(x, y), 10, shuffle=True)
    with pytest.warns(
        UserWarning, match=r"inputs of the training data hold NaN or infinite .*\.$"
    ) as said:
        trainer().fit(made("ensemble"), shuffled)
    assert "in example" not in "".join(str(w.message) for w in said)
    stream = Endless()
    with pytest.warns(UserWarning, match="the learning rate is too large, or the data are not"):
        trainer(max_epochs=1, limit_train_batches=3, limit_val_batches=0).fit(
            made("ensemble"), DataLoader(stream, 10)
        )
    assert stream.given <= 50


class Told(Dataset):
    """Targets that are no numbers."""

    def __init__(self, target):
        self.target = target

    def __len__(self):
        return 30

    def __getitem__(self, k):
        return torch.randn(6), self.target


@pytest.mark.bad_input
@pytest.mark.parametrize("target", ["cat", {"a": 1}])
def test_targets_that_are_no_numbers(target):
    with pytest.raises(ValueError, match="The targets of a batch must be a tensor, got "):
        trainer().fit(made("ensemble"), DataLoader(Told(target), 10))


@pytest.mark.bad_input
def test_weights_that_are_not_finite_at_the_start():
    net = network()
    next(net.parameters()).data[0, 0] = torch.nan
    for make in (MFVI, HMC, Laplace):
        with pytest.raises(ValueError, match=f"{make.__name__} starts from weights that are not"):
            trainer(num_sanity_val_steps=0).fit(make(net), Blobs())
    with pytest.raises(ValueError, match="or the network that it began with, hold NaN"):
        trainer(num_sanity_val_steps=1).fit(MFVI(net), Blobs())

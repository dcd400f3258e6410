"""Posteriors out of what is trained already: banks, folders, single files; nothing is trained."""

import pytest
import torch
from module_cases import Blobs, adam, network, same, trainer
from torch.utils.data import DataLoader, TensorDataset

from lightning_bnn.bank import CheckpointBank, read_networks
from lightning_bnn.callbacks import CheckpointHarvester
from lightning_bnn.modules import DeepEnsemble, FromCheckpoints, Laplace
from lightning_bnn.modules.prediction import posterior_of
from lightning_bnn.posteriors import DiagonalGaussian, LowRankGaussian, Mixture
from weightsym import params as P

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a bank of two members over six epochs, and one of state dicts."""
    root = tmp_path_factory.mktemp("trained")
    module = DeepEnsemble(network(batch_norm=True), members=2, optimizer=adam)
    harvest = CheckpointHarvester(root / "bank", every_n_epochs=1)
    trainer(harvest, max_epochs=6).fit(module, Blobs())
    (root / "files").mkdir()
    for k, one in enumerate(P.unstack(module.member_stack())):
        torch.save({f"net.{n}": t.clone() for n, t in one.items()}, root / "files" / f"{k + 9}.pt")
    return root, module


def test_networks_of_any_source(trained):
    root, module = trained
    bank = CheckpointBank(root / "bank", "r")
    like = network(batch_norm=True)
    stack, records = read_networks(root / "bank", like)
    assert same(stack, bank[:])
    assert records == bank.records
    last, _ = read_networks(root / "bank", like, last=3)
    assert same(last, bank[-3:])
    files, found = read_networks(root / "files", like)
    assert same(files, module.member_stack())
    assert [r["file"] for r in found] == ["9.pt", "10.pt"]
    one, _ = read_networks(root / "files" / "10.pt", like, prefix="net.")
    assert same(one, {n: t[1:] for n, t in files.items()})


@pytest.mark.parametrize("source", ["bank", "files"])
def test_the_ensemble_of_a_folder_is_the_ensemble(trained, source):
    root, module = trained
    wanted = trainer().test(module, Blobs(), verbose=False)
    net = network(batch_norm=True)
    for other in (
        FromCheckpoints(net, str(root / source), last=2),
        DeepEnsemble(net, members=2, start_from=str(root / source)),
    ):
        found = trainer().test(other, Blobs(), verbose=False)
        for one, two in zip(found, wanted, strict=True):
            assert one == pytest.approx(two, abs=1e-6)


def test_gaussians_of_a_bank(trained):
    root, _ = trained
    bank = CheckpointBank(root / "bank", "r")
    for kind, fit in (("diagonal", DiagonalGaussian), ("low_rank", LowRankGaussian)):
        module = FromCheckpoints(network(batch_norm=True), str(root / "bank"), kind=kind)
        assert isinstance(module.posterior(), Mixture)
        for m, mode in enumerate(module.posterior().components):
            wanted = fit.fit(bank[list(range(m, 12, 2))])
            assert same(mode.state_dict(), wanted.state_dict())
        (found, *_) = trainer().test(module, Blobs(), verbose=False)
        assert found["test/acc"] > 0.6
        # the networks have statistics of their own: not those that the bank holds
        judged = posterior_of(module).networks["1.running_mean"]
        assert not torch.allclose(judged[0], judged[1])


@pytest.mark.frames
def test_laplace_without_training(trained, tmp_path):
    """The curvature is computed before the first test, saved, and the same as after a fit."""
    root, module = trained
    options = {"structure": "diag", "members": 2, "start_from": str(root / "files")}
    laplace = Laplace(network(batch_norm=True), **options)
    run = trainer()
    (found, *_) = run.test(laplace, Blobs(), verbose=False)
    assert same(laplace.member_stack(), module.member_stack())
    assert isinstance(laplace.posterior(), Mixture)
    run.save_checkpoint(tmp_path / "it.ckpt")
    other = Laplace.load_from_checkpoint(tmp_path / "it.ckpt", network=network(batch_norm=True))
    bare = DataLoader(TensorDataset(*Blobs().load().test), batch_size=16)  # no training data
    (retest, *_) = trainer().test(other, bare, verbose=False)
    assert retest["test/nll"] == pytest.approx(found["test/nll"])
    map_ = DeepEnsemble(network(batch_norm=True), members=2, start_from=str(root / "files"))
    (plain, *_) = trainer().test(map_, Blobs(), verbose=False)
    assert plain["test/nll"] != pytest.approx(found["test/nll"], abs=1e-3)


NORMED = {"batch_norm": True}
REFUSED = [
    ("no", NORMED, {}, "There are no networks at"),
    ("bank", {}, {}, "does not match: '2.weight'|'3"),
    ("files", {"width": 9}, {}, "does not fit"),
    (".", {}, {}, "does not fit"),
    ("files/9.pt", NORMED, {"kind": "low_rank"}, "`networks` must hold at least 2"),
    ("files", NORMED, {"kind": "swag"}, "`kind` must be"),
    ("files", NORMED, {"last": 0}, "`last` must be at least 1"),
]


@pytest.mark.bad_input
@pytest.mark.parametrize(("source", "net", "options", "message"), REFUSED)
def test_sources_that_do_not_fit(trained, source, net, options, message):
    with pytest.raises(ValueError, match=message):
        FromCheckpoints(network(**net), str(trained[0] / source), **options)


@pytest.mark.bad_input
def test_a_folder_of_fewer_networks_than_members_and_an_empty_bank(trained, tmp_path):
    with pytest.raises(ValueError, match="holds 2 networks, fewer than the 3 members"):
        DeepEnsemble(network(**NORMED), members=3, start_from=str(trained[0] / "files"))
    with CheckpointBank(tmp_path) as bank:
        bank.append(P.of(network()))
        bank.truncate(0)
    with pytest.raises(ValueError, match="The bank .* is empty"):
        FromCheckpoints(network(), str(tmp_path))


def test_checkpoints_of_our_own_modules_hold_all_members(trained, tmp_path):
    _, module = trained
    torch.save({"state_dict": module.state_dict(), "epoch": 3}, tmp_path / "it.ckpt")
    found, records = read_networks(tmp_path / "it.ckpt", network(batch_norm=True))
    assert same(found, module.member_stack())
    assert records == [{"epoch": 3, "file": "it.ckpt", "member": m} for m in range(2)]


def test_there_is_nothing_to_train(trained):
    module = FromCheckpoints(network(batch_norm=True), str(trained[0] / "files"))
    with pytest.raises(
        ValueError, match="has nothing to train: call `validate`, `test` or `predict`"
    ):
        trainer().fit(module, Blobs())


def test_the_last_checkpoint_of_lightning_counts_once(trained, tmp_path):
    """Per folder, and only if another one is of the same step."""
    state = P.unstack(trained[1].member_stack())[0]
    for name, step in (("a/epoch=0", 6), ("a/epoch=1", 12), ("a/last", 12), ("b/last", 12)):
        path = tmp_path / f"{name}.ckpt"
        path.parent.mkdir(exist_ok=True)
        held = {f"net.{n}": t for n, t in state.items()}
        torch.save({"state_dict": held, "global_step": step, "epoch": step // 6}, path)
    _, records = read_networks(tmp_path, network(batch_norm=True))
    assert [r["file"] for r in records] == ["a/epoch=0.ckpt", "a/epoch=1.ckpt", "b/last.ckpt"]

"""Two processes that share members out give what one process gives."""

from types import SimpleNamespace

import lightning as L
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import (
    DDPStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
)
from module_cases import Blobs, made, network, trainer
from processes import on_devices

from lightning_bnn.bank import CheckpointBank
from lightning_bnn.callbacks import CheckpointHarvester
from lightning_bnn.likelihoods import Gaussian
from lightning_bnn.modules import SWAG, DeepEnsemble
from lightning_bnn.strategies import MembersStrategy, sharding
from weightsym import params as P

MEMBERS = 5


def data():
    blobs = Blobs()
    blobs.orders = list(range(MEMBERS))
    return blobs


class Losses(L.Callback):
    def __init__(self):
        self.values, self.members = [], 0

    def on_train_batch_end(self, trainer, module, *_):
        self.members = module.members
        self.values.append(float(trainer.callback_metrics["train/loss"]))


class Break(L.Callback):
    """Spoils some members in the first epoch."""

    def __init__(self, members):
        self.broken = members

    @torch.no_grad()
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        own = [m - module.population.first for m in self.broken]
        here = [m for m in own if 0 <= m < module.members]
        next(iter(module.networks.parameters()))[here] = torch.nan


def ensemble():
    torch.manual_seed(0)
    return DeepEnsemble(
        network(batch_norm=True).double(), members=MEMBERS, max_loss=100.0,
        optimizer=lambda p: torch.optim.Adam(p, 1e-2),
    ).double()  # fmt: skip


def run(devices, strategy, folder, resumed, epochs, broken):
    module, losses = ensemble(), Losses()
    options = {"devices": devices, "strategy": strategy, "precision": "64-true"}
    harvester = CheckpointHarvester(folder / "bank", every_n_epochs=1)
    fitted = trainer(
        Break(broken), losses, harvester, max_epochs=epochs, num_sanity_val_steps=0, **options
    )
    fitted.fit(module, data(), ckpt_path=resumed)
    fitted.save_checkpoint(folder / "last.ckpt")
    module.eval()
    predicted = module(Blobs().load().test[0][:2].double())  # outside of a trainer
    tested = fitted.test(module, data(), verbose=False)[0]
    assert module.members == MEMBERS  # everybody has all of them again
    return {
        "test": tested, "losses": losses.values, "own": losses.members,
        "healthy": module.healthy().tolist(), "predicted": predicted.flatten().tolist(),
    }  # fmt: skip


def ran(tmp_path, name, devices, resumed=None, epochs=2, broken=()):
    folder = tmp_path / name
    folder.mkdir()
    strategy = "members" if devices > 1 else "auto"
    return folder, on_devices(devices, run, devices, strategy, folder, resumed, epochs, broken)[0]


def checkpoint(folder):
    return torch.load(folder / "last.ckpt", weights_only=False)


def close(a, b):
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name])


@pytest.mark.e2e
def test_two_processes_are_one(tmp_path):
    alone, one = ran(tmp_path, "alone", 1)
    shared, two = ran(tmp_path, "shared", 2)
    assert (one["own"], two["own"]) == (5, 2)
    assert one["healthy"] == two["healthy"] == list(range(MEMBERS))
    first, second = checkpoint(alone), checkpoint(shared)
    close(first["state_dict"], second["state_dict"])
    for a, b in zip(
        first["optimizer_states"][0]["state"].values(),
        second["optimizer_states"][0]["state"].values(),
        strict=True,
    ):
        close(a, b)
    assert two["losses"] == pytest.approx(one["losses"])
    assert two["test"].keys() == one["test"].keys()
    for key, value in one["test"].items():
        assert two["test"][key] == pytest.approx(value, abs=1e-6), key
    banks = [CheckpointBank(folder / "bank", "r") for folder in (alone, shared)]
    assert [r["member"] for r in banks[0].records] == [r["member"] for r in banks[1].records]
    close(banks[0][:], banks[1][:])
    # checkpoints do not know how many processes there were
    whole, _ = ran(tmp_path, "whole", 1, epochs=4)
    for name, devices, begun in (("a", 1, shared), ("b", 2, alone)):
        resumed, _ = ran(tmp_path, name, devices, begun / "last.ckpt", 4)
        close(checkpoint(resumed)["state_dict"], checkpoint(whole)["state_dict"])
        kept = checkpoint(resumed)["lightning_bnn"]["divergence"]["left_out"]
        assert kept.tolist() == [False] * MEMBERS


@pytest.mark.e2e
def test_a_process_whose_members_have_all_diverged_leaves_the_word_to_the_other(tmp_path):
    _, one = ran(tmp_path, "alone", 1, broken=(0, 1))
    _, two = ran(tmp_path, "shared", 2, broken=(0, 1))
    assert one["healthy"] == two["healthy"] == [2, 3, 4]
    assert one["test"] == pytest.approx(two["test"])
    assert one["predicted"] == pytest.approx(two["predicted"])
    assert one["losses"] == pytest.approx(two["losses"])  # of those that are well


@pytest.mark.parametrize("members", [2, 5, 7])
@pytest.mark.parametrize("world_size", [1, 2])
def test_shares_are_all_members_once(members, world_size, monkeypatch):
    found = []
    for rank in range(world_size):
        monkeypatch.setattr(MembersStrategy, "world_size", world_size)
        monkeypatch.setattr(MembersStrategy, "global_rank", rank)
        found += range(*MembersStrategy().share(members))
    assert found == list(range(members))


@pytest.mark.parametrize("name", ["ensemble", "multi-mfvi", "multi-dropout"])
def test_a_share_is_a_part_of_the_whole(name):
    whole, part = made(name, batch_norm=True), made(name, batch_norm=True)
    members = whole.members
    part.take_share(members - 1, members)
    assert (part.members, part.population.first) == (1, members - 1)
    names = part.state.state_dict().keys()
    for key, tensor in part.state_dict().items():
        expected = whole.state_dict()[key]
        assert torch.equal(tensor, expected[members - 1 :] if key in names else expected)
    assert P.stack_size(part.member_stack()) == 1


def test_a_share_and_back():
    module, whole = made("population", batch_norm=True), made("population", batch_norm=True)
    module.take_share(1, 3)
    missing = {k: t for k, t in whole.state_dict().items() if k in module.state.state_dict()}
    tensors = iter([*missing.values(), *whole.divergence.state_dict().values()])

    def gather(part):
        found = next(t for t in tensors if isinstance(t, torch.Tensor))
        assert torch.equal(found[1:3], part)
        return found

    module.take_whole(gather)
    close(module.state_dict(), whole.state_dict())
    assert (module.members, module.population.first, module.population.share) == (4, 0, None)
    assert module.healthy().tolist() == [0, 1, 2, 3]


# ------------------------------------------------------------ pieces of weights
class DeepSpeedStrategy(SingleDeviceStrategy):
    """Has the name of the one whose package is not there."""


SHARDING = [
    ("FSDP", lambda: object.__new__(FSDPStrategy)),
    ("FSDP2", ModelParallelStrategy),
    ("DeepSpeed", lambda: DeepSpeedStrategy("cpu")),
    (None, DDPStrategy),
    (None, MembersStrategy),
    (None, lambda: SingleDeviceStrategy("cpu")),
]


@pytest.mark.parametrize(("name", "strategy"), SHARDING)
def test_what_cuts_weights_into_pieces_has_a_name(name, strategy):
    assert sharding(SimpleNamespace(strategy=strategy())) == name


def refused(method):
    """What a module says to a strategy of pieces, in each of its stages."""
    cut = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    fitted, module = trainer(strategy=cut, devices=2), made(method)
    for stage in (fitted.fit, fitted.test, fitted.predict):
        with pytest.raises(ValueError, match="not supported under FSDP2: .* take `strategy='ddp'`"):
            stage(module, Blobs())
    return True


@pytest.mark.e2e
def test_our_modules_refuse_pieces_in_one_sentence():
    """Whatever they do with whole networks, they would do with a piece of each."""
    assert on_devices(2, refused, "mfvi") == [True, True]


# ------------------------------------------------------------ bad input
def setup_of(module):
    strategy = MembersStrategy()
    strategy._lightning_module = module
    strategy.setup(None)


REFUSED = {
    "`strategy` members: the likelihood learns": lambda: setup_of(
        DeepEnsemble(network(), members=4, likelihood=Gaussian("learned"))
    ),
    "`strategy` members needs a module": lambda: setup_of(BoringModel()),
    "`members` must be at least the number of processes, 3": lambda: MembersStrategy().share(2),
    "lightning-bnn population": lambda: SWAG(network(), members=4).take_share(0, 2),
    "DeepEnsemble is not supported under DeepSpeed": lambda: trainer(
        strategy=DeepSpeedStrategy("cpu")
    ).fit(made("ensemble"), Blobs()),
}


@pytest.mark.bad_input
@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_shared_out_is_refused(message, monkeypatch):
    monkeypatch.setattr(MembersStrategy, "world_size", 3)
    with pytest.raises(ValueError, match=message):
        REFUSED[message]()

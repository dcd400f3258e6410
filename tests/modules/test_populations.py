"""Members of a population against runs of their own."""

import functools

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, LambdaCallback, ModelCheckpoint
from module_cases import Blobs, fitted, network, saved

from lightning_bnn import models
from lightning_bnn.bank import CheckpointBank
from lightning_bnn.datamodules import Digits
from lightning_bnn.member_batch import MemberBatch
from lightning_bnn.modules import DeepEnsemble
from weightsym import params as P

SGD = lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=1e-2)  # noqa: E731
ADAM = lambda p: torch.optim.Adam(p, 1e-2)  # noqa: E731


class Orders(Blobs):
    def __init__(self, orders=None, noise=True):
        super().__init__()
        self.orders = orders
        self.augmentation = Shake() if noise else None


class Shake:
    """An augmentation of vectors, to see whose random numbers are used."""

    def draw(self, n, generator):
        return torch.randn(n, 6, generator=generator, dtype=torch.float64)

    def __call__(self, x, draws):
        return x + 0.1 * draws.to(x)


def net(batch_norm=False):
    torch.manual_seed(0)
    return network(batch_norm=batch_norm).double()


def trained(module, data, *callbacks, **options):
    options = {"precision": "64-true", "max_epochs": 3, **options}
    fitted(module.double(), data, *callbacks, **options)
    return module


@functools.cache
def alone(number, batch_norm, optimizer):
    """What a run of its own makes of a member."""
    options = {"optimizer": optimizer, "seed": 3, "prior_std": 0.5}
    module = DeepEnsemble(net(batch_norm), members=(number, number + 1), **options)
    return trained(module, Orders([number]), gradient_clip_val=1.0).member_stack()


@pytest.mark.parametrize(
    ("batch_norm", "optimizer", "chunk_size", "first"),
    [(False, SGD, 1, 0), (True, ADAM, None, 0), (True, ADAM, 2, 4)],
)
def test_members_are_what_separate_runs_give(batch_norm, optimizer, chunk_size, first):
    options = {"optimizer": optimizer, "seed": 3, "prior_std": 0.5}
    numbers = range(first, first + 3)
    module = DeepEnsemble(net(batch_norm), members=(first, first + 3), **options)
    module.run.chunk_size = chunk_size
    together = trained(module, Orders(list(numbers)), gradient_clip_val=1.0).member_stack()
    for k, number in enumerate(numbers):
        for name, tensor in alone(number, batch_norm, optimizer).items():
            torch.testing.assert_close(together[name][k], tensor[0])


def test_orders_are_their_own():
    """Negative control of the law above: without orders all members see the same batches."""
    shared = trained(DeepEnsemble(net(), members=2, optimizer=SGD), Orders())
    own = trained(DeepEnsemble(net(), members=2, optimizer=SGD), Orders([0, 1]))
    assert not torch.allclose(shared.member_stack()["0.weight"], own.member_stack()["0.weight"])
    loader = Orders([0, 1]).train_dataloader()
    first = next(iter(loader))
    assert first.inputs.shape == (2, 10, 6)
    assert not torch.equal(first.inputs[0], first.inputs[1])


# ------------------------------------------------------------ divergence
def breaks(member, epoch=0):
    """Spoils one member in the middle of an epoch."""

    def spoil(trainer, module, outputs, batch, batch_idx):
        if trainer.current_epoch == epoch and batch_idx == 2:
            next(iter(module.state.networks.parameters())).data[member] = torch.nan

    return LambdaCallback(on_train_batch_end=spoil)


@pytest.mark.filterwarnings("ignore:Members")
def test_the_others_do_not_notice_a_member_that_diverges():
    """Nor does a limit of zero clip, as Lightning has it."""
    fine = trained(DeepEnsemble(net(True), members=3, optimizer=ADAM), Blobs())
    module = DeepEnsemble(net(True), members=3, optimizer=ADAM)
    trained(module, Blobs(), breaks(1), gradient_clip_val=0.0)
    for name, tensor in module.member_stack().items():
        torch.testing.assert_close(tensor[[0, 2]], fine.member_stack()[name][[0, 2]])
    assert module.state.healthy().tolist() == [0, 2]


@pytest.mark.filterwarnings("ignore:Members")
def test_the_loss_that_is_logged_is_that_of_the_members_that_are_well():
    seen = []
    for members, callbacks in ((2, [breaks(1)]), (1, [])):
        values = []
        log = lambda t, *_, v=values: v.append(float(t.callback_metrics["train/loss"]))  # noqa: E731
        module = DeepEnsemble(net(), members=members, optimizer=SGD)
        trained(module, Blobs(), LambdaCallback(on_train_batch_end=log), *callbacks)
        seen.append(values)
    assert seen[0][0] != pytest.approx(seen[1][0])
    assert seen[0][3:] == pytest.approx(seen[1][3:])


def test_members_with_a_high_loss_at_the_end_are_left_out(tmp_path):
    losses, module = [], DeepEnsemble(net(), members=8, max_loss=1e-9, optimizer=SGD)

    def see(trainer, module, batch, _):
        if trainer.current_epoch == 2:
            outputs = P.apply(module.template, module.member_stack(), batch[0]).detach()
            losses.append(-outputs.log_softmax(-1)[:, range(10), batch[1]].mean(1))

    trained(module, Blobs(), LambdaCallback(on_train_batch_start=see))
    means = torch.stack(losses).mean(0)
    limit = float(means.median()) + 1e-9
    with pytest.raises(ValueError, match="`max_loss`"):
        module.state.healthy()
    module = DeepEnsemble(net(), members=8, max_loss=limit, optimizer=SGD).double()
    run = fitted(module, precision="64-true", max_epochs=3)
    kept = (means <= limit).nonzero().flatten().tolist()
    assert module.state.healthy().tolist() == kept
    assert P.stack_size(module.posterior().networks) == len(kept) == 4
    again = DeepEnsemble.load_from_checkpoint(saved(run, tmp_path / "it.ckpt"), network=net())
    assert again.state.healthy().tolist() == kept


def test_a_checkpoint_of_the_last_validation_knows_who_is_left_out(tmp_path):
    """It is saved before the epoch ends; one member does not learn."""
    before = []

    def hold(trainer, module, *_):
        before[:] = [p[1].detach().clone() for p in module.state.networks.parameters()]

    def still(trainer, module, *_):
        for p, value in zip(module.state.networks.parameters(), before, strict=True):
            p.data[1] = value

    keep = ModelCheckpoint(tmp_path, monitor="val/nll", save_top_k=-1, filename="{step}")
    module = DeepEnsemble(net(), members=3, max_loss=0.9, optimizer=SGD)
    options = {"enable_checkpointing": True, "max_epochs": 6, "val_check_interval": 3}
    holding = LambdaCallback(on_train_batch_start=hold, on_train_batch_end=still)
    trained(module, Blobs(), keep, holding, **options)
    assert module.state.healthy().tolist() == [0, 2]
    for step, kept in ((36, [0, 2]), (33, [0, 1, 2])):
        path = tmp_path / f"step={step}.ckpt"
        again = DeepEnsemble.load_from_checkpoint(path, network=net())
        assert again.state.healthy().tolist() == kept


class StopNow(EarlyStopping):
    """Stops a run at the end of an epoch; such callbacks come when the module has seen it."""

    def __init__(self):
        super().__init__("val/nll")

    def on_validation_end(self, trainer, module):
        pass

    def on_train_epoch_end(self, trainer, module):
        trainer.should_stop = trainer.current_epoch == 1


@pytest.mark.filterwarnings("ignore:Members")
def test_a_run_that_is_stopped_early_is_judged_too():
    module = DeepEnsemble(net(), members=3, optimizer=SGD)
    trained(module, Blobs(), breaks(1, 1), StopNow(), max_epochs=9)
    assert module.trainer.current_epoch == 2
    assert module.state.healthy().tolist() == [0, 2]
    module = trained(
        DeepEnsemble(net(), members=3, max_loss=1e-9, optimizer=SGD), Blobs(), StopNow()
    )
    with pytest.raises(ValueError, match="`max_loss`"):
        module.state.healthy()


# ------------------------------------------------------------ bad input
@pytest.mark.bad_input
def test_a_folder_of_starts_has_no_parts(tmp_path):
    with CheckpointBank(tmp_path / "bank") as bank:
        bank.extend(P.populate(net(), 3))
    options = {"start_from": str(tmp_path / "bank")}
    with pytest.raises(ValueError, match="`start_from` with a folder"):
        DeepEnsemble(net(), members=(2, 4), **options)
    last = DeepEnsemble(net(), members=2, **options).member_stack()["0.weight"]
    torch.testing.assert_close(last, bank[1:3]["0.weight"])


@pytest.mark.bad_input
def test_as_many_orders_as_members():
    with pytest.raises(ValueError, match="A batch has examples for 2"):
        trained(DeepEnsemble(net(), members=3, optimizer=SGD), Orders([0, 1]))
    with pytest.raises(ValueError, match="`orders` must be"):
        Digits(orders=[])
    with pytest.raises(ValueError, match="`orders` must be"):
        Digits(orders=[1, 1])
    stack, x = P.populate(net(), 3), torch.zeros(2, 4, 6).double()
    with pytest.raises(ValueError, match="`x` must have inputs for 3 members"):
        P.apply_each(net(), stack, x)


def test_a_loader_of_ones_own_may_give_batches_for_members():
    def collate(rows):
        x, y = map(torch.stack, zip(*rows, strict=True))
        return MemberBatch(torch.stack([x, x.flip(0)]), torch.stack([y, y.flip(0)]))

    x, y = Blobs().load().train
    loader = torch.utils.data.DataLoader(
        list(zip(x.double(), y, strict=True)), batch_size=10, collate_fn=collate
    )
    module = trained(DeepEnsemble(net(), members=2, optimizer=SGD), loader)
    assert module.example()[0].shape == (2, 6)


class Own(torch.nn.Sequential):
    """A network that says how its parts are drawn."""

    def _init_weights(self, part):
        if isinstance(part, torch.nn.Linear):
            torch.nn.init.xavier_uniform_(part.weight, 3.0)
            torch.nn.init.zeros_(part.bias)


@pytest.mark.parametrize(("width", "name"), [(32, "0.weight"), (8, "0.bias")])
def test_members_that_do_not_start_like_the_given_network(width, name, recwarn):
    """Small tensors differ by chance, but for constants."""
    theirs = network(width=width)
    DeepEnsemble(theirs, members=3)  # the negative control
    theirs.apply(lambda part: Own._init_weights(None, part))
    DeepEnsemble(Own(*theirs), members=3)
    DeepEnsemble(theirs, members=1)
    assert not recwarn
    message = f"Members after the first do not start .* {name!r} has standard"
    with pytest.warns(UserWarning, match=message) as caught:
        DeepEnsemble(theirs, members=3)
    assert len(caught) == 1


def gpt2():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_embd=32, n_layer=2, n_head=2, vocab_size=50, bos_token_id=None, eos_token_id=None
    )
    return transformers.GPT2LMHeadModel(config)


@pytest.mark.parametrize(
    "build",
    [
        gpt2,
        models.resnet18,
        lambda: torch.nn.Transformer(32, 2, 1, 1, 64),
        lambda: torch.nn.TransformerEncoderLayer(32, 2, 64),
    ],
)
def test_what_is_initialised_as_a_whole_is_drawn_so(build, recwarn):
    """Parts come first: what is made of them has the last word."""
    torch.manual_seed(0)
    net = build()
    stack = P.populate(net, 2)
    DeepEnsemble(net, members=2)
    assert not [w for w in recwarn if "do not start like" in str(w.message)]
    weights = [n for n, p in net.named_parameters() if p.std() > 0]
    assert len(weights) > 4
    assert not any(torch.equal(*stack[name]) for name in weights)
    for name, p in net.named_parameters():
        torch.testing.assert_close(stack[name].std(), p.std(), rtol=0.5, atol=1e-9)

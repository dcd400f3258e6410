"""Where variational inference starts: the warm-up of complexity, and too large deviations."""

import math

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from module_cases import Blobs, adam, fitted, made, network, same, state, trainer

from lightning_bnn import methods, modules, params
from lightning_bnn.methods import Batch, Fit, Progress, Run

X, Y = Blobs().load().train
ALL = [Batch((X[k : k + 10],), Y[k : k + 10], number=k // 10) for k in range(0, len(X), 10)]
KINDS = {"mfvi": methods.MFVI, "symmetrized": methods.SymmetrizedVI}


def begun(kind="mfvi", fit=None, net=None, members=2, **options):
    net = network() if net is None else net
    method, messages = KINDS[kind](**options), []
    run = Run(net, num_data=len(X), inform=messages.append, warn=messages.append)
    found = method.init(net, params.populate(net, members, torch.Generator().manual_seed(1)))
    method.before_fit(found, fit or Fit(epochs=9, epoch_steps=6, batches=lambda: ALL), run)
    return method, found, run, messages


def terms(method, found, run, seed=0):
    torch.manual_seed(seed)
    return method.losses(found, ALL[0], run)


# ------------------------------------------------------------ warm-up
@pytest.mark.parametrize("kind", KINDS)
def test_complexity_counts_linearly_more_and_the_elbo_is_whole(kind):
    method, found, run, _ = begun(kind, kl_warmup=2, init_std=0.3)
    plain, same_start, its_run, _ = begun(kind, init_std=0.3)
    whole = terms(plain, same_start, its_run)
    for step in (0, 3, 7, 12, 40):
        if step:
            progress = Progress(step, (step - 1) // 6, step % 6 == 0)
            assert not method.after_step(found, progress, run)
        now, share = terms(method, found, run), min(1, step / 12)
        torch.testing.assert_close(now["elbo"], whole["elbo"])
        mixed = torch.lerp(whole["nll"], whole["loss"], share)
        torch.testing.assert_close(now["loss"], mixed)


def shares(kl_warmup, epoch_steps, steps):
    """What complexity terms count after each of some steps, of epochs of three."""
    method, found, run, _ = begun(kl_warmup=kl_warmup, fit=Fit(epoch_steps=epoch_steps))
    result = [found.notes["kl_share"]]
    for k in range(1, steps):
        method.after_step(found, Progress(k, (k - 1) // 3, k % 3 == 0), run)
        result.append(found.notes["kl_share"])
    return result


WARM_UPS = [
    (2, math.inf, [0, 0, 0, 0.5, 0.5, 0.5, 1, 1]),  # streams go by epochs
    (0.5, 4, [0, 0.5, 1, 1]),
    (3, 4, [min(1.0, k / 12) for k in range(20)]),
]


@pytest.mark.parametrize(("kl_warmup", "epoch_steps", "wanted"), WARM_UPS)
def test_parts_of_epochs_and_the_end(kl_warmup, epoch_steps, wanted):
    assert shares(kl_warmup, epoch_steps, len(wanted)) == wanted


@pytest.mark.parametrize("name", ["mfvi", "multi-capacity"])
def test_a_resumed_run_is_the_uninterrupted_one(name, tmp_path):
    options, half = {"kl_warmup": 1.7}, tmp_path / "half.ckpt"
    whole, resumed, other = made(name, **options), made(name, **options), made(name)

    def save(run, *_):
        if run.global_step == 8:
            run.save_checkpoint(half)

    fitted(whole, None, LambdaCallback(on_train_batch_end=save), max_epochs=3)
    trainer(max_epochs=3).fit(resumed, Blobs(), ckpt_path=half, weights_only=True)
    assert same(state(resumed), state(whole))
    assert resumed.state.notes == whole.state.notes
    fitted(other, max_epochs=3)
    assert not same(state(other), state(whole))


@pytest.mark.filterwarnings("ignore:.*as long as the run")
def test_a_trainer_counts_optimizer_steps():
    module = made("mfvi", kl_warmup=1)
    fitted(module, max_epochs=1, accumulate_grad_batches=4)
    assert module.state.notes["kl_share"] == 1
    assert module.state.epoch_steps == 2


def test_without_a_fit_it_says_what_is_missing():
    net = network()
    method, run = methods.MFVI(kl_warmup=1), Run(net, num_data=60)
    with pytest.raises(ValueError, match="`kl_warmup` needs the current step"):
        method.losses(method.init(net, params.populate(net, 1)), ALL[0], run)


@pytest.mark.parametrize(("epochs", "said"), [(9, 1), (8, 0), (0, 0)])
def test_a_warm_up_that_never_ends_is_said(epochs, said):
    assert sum("as long as the run" in m for m in begun(kl_warmup=epochs)[-1]) == said


# ------------------------------------------------------------ the warning
@pytest.mark.parametrize(("init_std", "said"), [(1.5, 1), (0.01, 0)])
@pytest.mark.parametrize("kind", KINDS)
def test_more_noise_than_the_data_allow_is_said_once(kind, init_std, said):
    method, found, run, messages = begun(kind, init_std=init_std)
    torch.manual_seed(0)
    expected = torch.randn(2, found.mean.shape[1]), torch.rand(1)
    torch.manual_seed(0)
    method.losses(found, ALL[0], run)
    torch.randn(0)
    assert expected[1] == torch.rand(1)  # looking takes no random numbers
    method.losses(found, ALL[1], run)
    assert sum("too large for the data" in m for m in messages) == said


def test_a_run_that_goes_on_is_not_warned():
    fit = Fit(anew=False, epochs=9, batches=lambda: ALL)
    method, found, run, messages = begun(init_std=1.5, fit=fit)
    method.losses(found, ALL[0], run)
    assert not messages


# ------------------------------------------------------------ what is refused
@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kl_warmup": -1}, "`kl_warmup` must not be negative"),
        ({"kl_warmup": math.nan}, "`kl_warmup` must not be negative"),
        ({"kl_warmup": math.inf}, "`kl_warmup` must not be negative"),
        ({"kl_warmup": True}, "`kl_warmup` must not be negative"),
        ({"init_std": "large"}, "`init_std` must be positive"),
    ],
)
@pytest.mark.parametrize("kind", [modules.MFVI, modules.SymmetrizedVI])
def test_nonsense_is_refused(kind, options, message):
    with pytest.raises(ValueError, match=message):
        kind(network(), optimizer=adam, **options)

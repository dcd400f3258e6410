"""What modules refuse, at once or before the first step, and what they say of a fit."""

import warnings

import pytest
import torch
from cases import Forward
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging
from module_cases import (
    MODULES,
    OF_EACH_CLASS,
    Blobs,
    adam,
    fitted,
    made,
    network,
    said,
    saved,
    trainer,
)
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    Sampler,
    SequentialSampler,
    TensorDataset,
)

from lightning_bnn import samplers
from lightning_bnn.likelihoods import Categorical, Gaussian
from lightning_bnn.methods.mc_dropout import with_dropout
from lightning_bnn.models import mlp
from lightning_bnn.modules import HMC, MFVI, MILE, SGHMC, SWAG, DeepEnsemble, Laplace, MCDropout

LEARNED = Gaussian("learned")
NOT_HMC = "`optimizer` SGHMC is not lightning_bnn.samplers.HMC"


def decaying(parameters):
    return samplers.SGLD(parameters, weight_decay=1e-3)


def precise(parameters):
    return samplers.SGLD(parameters, prior_precision=1.0)


def one_cycle(optimizer):
    return OneCycleLR(optimizer, 0.1, total_steps=9)


REFUSED = [
    (HMC, {"network": network(0.2)}, "`network` has dropout"),
    (HMC, {"likelihood": LEARNED}, "parameters of its own"),
    (HMC, {"optimizer": samplers.SGHMC}, NOT_HMC),
    (HMC, {"optimizer": samplers.MCLMC}, "MCLMC is not lightning_bnn.samplers.HMC"),
    (HMC, {"lr_scheduler": lambda o: o}, "`lr_scheduler` has no effect on HMC"),
    (HMC, {"max_loss": 1.0}, "unexpected keyword argument 'max_loss'"),
    (MILE, {"network": network(0.2)}, "`network` has dropout"),
    (MILE, {"optimizer": samplers.HMC}, "`optimizer` HMC is not lightning_bnn.samplers.MCLMC"),
    (SGHMC, {"every_n_steps": 2, "every_n_epochs": 1}, "Set exactly one of"),
    (SGHMC, {"likelihood": LEARNED}, "`likelihood` has parameters of its own"),
    (SGHMC, {"optimizer": torch.optim.Adam}, "`optimizer` Adam is not a sampler"),
    (SGHMC, {"optimizer": decaying}, "Both `prior_std` of the module and `weight_decay`"),
    (DeepEnsemble, {"prior_std": 1.0, "optimizer": precise}, "`prior_std` .* `prior_precision`"),
    (Laplace, {"prior_precision": 0.0}, "`prior_precision` must be positive"),
    (SWAG, {"rank": 1}, "`rank` must be at least 2"),
    (SWAG, {"swa_lr": 0.1, "lr_interval": "step"}, "SWAG counts epochs: omit `lr_interval`"),
    (DeepEnsemble, {"lr_interval": "batch"}, "`lr_interval` must be one of epoch, step"),
    (DeepEnsemble, {"members": (2, 2)}, "`members` must be a number, or a range from the first"),
    (DeepEnsemble, {"members": (1, 2, 3)}, "`members` must be a number, or a range from the first"),
    *(
        (SWAG, {"swa_lr": 0.1, "lr_scheduler": schedule}, "cannot precede the high rate")
        for schedule in (ReduceLROnPlateau, one_cycle)
    ),
    (DeepEnsemble, {"network": nn.Sequential(nn.LazyLinear(3))}, "lazy parameters"),
    (DeepEnsemble, {"network": nn.Linear(2, 2, dtype=torch.complex64)}, "complex parameters"),
    (DeepEnsemble, {"start_from": "no.pt"}, "no networks at no.pt"),
    (MFVI, {"network": "net"}, "`network` must be a torch.nn.Module"),
    (MFVI, {"network": nn.ReLU()}, "no weights"),
    *(
        (kind, {"optimizer": samplers.SGHMC}, f"SGHMC samples, but {kind.__name__} opti")
        for kind in (MFVI, SWAG, Laplace, MCDropout)
    ),
]


@pytest.mark.bad_input
@pytest.mark.parametrize(("kind", "options", "message"), REFUSED)
def test_options_that_do_not_fit_a_module(kind, options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        kind(**{"network": network(), **options}).configure_optimizers()


# ------------------------------------------------------------ fits that are refused
X, Y = (t[:30] for t in Blobs().load().train)


def plain(x=X, y=Y, **options):
    return DataLoader(TensorDataset(x, y), **{"batch_size": 10, **options})


def spoiled(tensor, value=torch.nan):
    tensor = tensor.clone()
    tensor[17, 1] = value
    return tensor


class Evens(Sampler):
    """Leaves examples out, and does not say which."""

    def __iter__(self):
        return iter(range(0, 30, 2))

    def __len__(self):
        return 30


class Sorted(BatchSampler):
    """Batches of its own."""


class Stream(IterableDataset):
    """Rows without an end, of which some hold NaN; it notes how many were asked for."""

    given = 0

    def __iter__(self):
        while True:
            self.given += 1
            yield torch.full((6,), torch.nan if self.given % 3 == 0 else 1.0), torch.tensor(1)


def batched(sampler):
    return DataLoader(TensorDataset(X, Y), batch_sampler=sampler)


def misnamed():
    """The linear layer that is defined last comes first."""
    out, first = nn.Linear(4, 3), nn.Linear(6, 4)
    return Forward(lambda s, x: s.out(torch.relu(s.first(x))), out=out, first=first)


class NormScaled(torch.optim.SGD):
    """A step whose length depends on the whole tensor, as that of LARS and LAMB."""

    def step(self, closure):
        closure()
        for group in self.param_groups:
            for p in group["params"]:
                p.data -= group["lr"] * p.grad * p.norm() / p.grad.norm()


class Two(nn.Linear):
    """More than a tensor."""

    def forward(self, x):
        return super().forward(x), x


def laplace(net=None, **options):
    return Laplace(net or network(), **{"structure": "diag", "optimizer": adam, **options})


def broken():
    """A network whose weights are not finite."""
    net = network()
    next(net.parameters()).data[0, 0] = torch.nan
    return net


CONVOLUTIONS = nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 2, 2), nn.Flatten(), nn.Linear(10, 3)
UNREADABLE = [
    DataLoader(Stream(), 10), DataLoader([(X[:5], Y[:5])], None), plain(sampler=Evens()),
    batched(BatchSampler(Evens(), 5, False)), [plain(), plain()],
    batched(Sorted(SequentialSampler(range(30)), 10, False)),
]  # fmt: skip
AVERAGES = {
    "EMA": EMAWeightAveraging(decay=0.5),
    "SWA": StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1),
}
KEEPERS = [("laplace", "EMA"), ("swag", "SWA"), ("sghmc", "EMA"), ("hmc", "SWA")]
WHOLE = [
    (name, net, kind)
    for name, net in [(n, network()) for n in ("ensemble", "mfvi", "mfvi local", "hmc")]
    + [("ensemble", nn.Sequential(*CONVOLUTIONS))]
    for kind in (torch.int64, torch.bool)
]
REFUSED_FITS = [
    *((made("mfvi"), loader, {}, "`num_data` cannot be read") for loader in UNREADABLE),
    *(
        (MODULES[name](Two(6, 3)), None, {}, "one tensor, but Two returns a tuple: wrap it")
        for name in ("ensemble", "mfvi")
    ),
    *(
        (made(name), None, {"callbacks": [AVERAGES[average]]}, "swaps the weights of which")
        for name, average in KEEPERS
    ),
    *(
        (MODULES[name](net), plain((10 * X).to(kind)), {}, f"of type {kind}: .*`x.float..`.$")
        for name, net, kind in WHOLE
    ),
    *(
        (made("ensemble"), DataLoader([(X[0], target)] * 30, 10), {}, "targets of a batch must be")
        for target in ("cat", {"a": 1})
    ),
    *(
        (
            DeepEnsemble(network(), members=2, optimizer=lambda p, o=o: o(p, lr=1e-2)), None, {},
            "cannot train members side by side",
        )
        for o in (torch.optim.LBFGS, torch.optim.Adafactor, NormScaled)
    ),
    *(
        (kind(broken()), None, {}, f"{kind.__name__} starts from weights that are not")
        for kind in (MFVI, HMC, Laplace)
    ),
    (MFVI(broken()), None, {"num_sanity_val_steps": 1}, "or the initial network contain"),
    (HMC(network()), None, {"precision": "bf16-true"}, "HMC needs exact energies"),
    (SWAG(network(), optimizer=adam), None, {"max_epochs": -1, "max_steps": 5}, "`start` must be"),
    (laplace(likelihood=nn.Identity()), None, {}, "`likelihood` must have a `curvature_root`"),
    (
        laplace(network(batch_norm=True), structure="kron", layers="all"), None, {},
        "it has BatchNorm1d.*`layers='last'`",
    ),
    (laplace(misnamed(), layers="last"), None, {}, "'first' is not the last"),
    (laplace(network(width=3000), structure="full"), None, {}, "A full curvature of 30003"),
    (
        Laplace(nn.Sequential(*network(), nn.Linear(3, 3), nn.Softmax(-1)), layers="last"),
        None, {}, "'4' is not the last",
    ),
]  # fmt: skip


@pytest.mark.bad_input
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("module", "data", "options", "message"), REFUSED_FITS)
def test_a_fit_that_is_refused_has_not_begun(module, data, options, message):
    run = trainer(**{"num_sanity_val_steps": 0, **options})
    with pytest.raises(ValueError, match=message):
        run.fit(module, Blobs() if data is None else data)
    assert run.global_step == 0


def test_one_member_may_have_an_optimizer_that_mixes_members():
    fitted(DeepEnsemble(network(), members=1, optimizer=lambda p: NormScaled(p, 1e-2)))


# ------------------------------------------------------------ fits of which something is said
class Smoothed(nn.Module):
    """A likelihood of the user's own."""

    def __init__(self):
        super().__init__()
        self.loss = nn.CrossEntropyLoss(label_smoothing=0.1, reduction="none")

    def log_prob(self, outputs, targets):
        return torch.stack([-self.loss(o, targets) for o in outputs])

    def predictive(self, outputs):
        return outputs.softmax(-1).mean(0)


def ending(last):
    return nn.Sequential(*network(), last)


def hmc(step_size=0.02, net=None, **options):
    sampler = lambda p: samplers.HMC(p, step_size, 3)  # noqa: E731
    return HMC(net or network(), optimizer=sampler, **{"members": 2, "every_n_steps": 1, **options})


def mile(burn_in, descent=2, adapt=3, wanted=5e-4):
    def sampler(parameters):
        return samplers.MCLMC(parameters, 0.05, 2, wanted, descent_steps=descent, adapt_steps=adapt)

    return MILE(network(), members=2, optimizer=sampler, burn_in=burn_in)


def sghmc(net=None, rule=samplers.SGHMC, lr=0.05, **options):
    options = {"optimizer": lambda p: rule(p, lr=lr), **options}
    return SGHMC(net or network(), **options)


def stuck():
    """A chain that can never move beside one that can."""
    module = hmc()
    next(module.state.parameters()).data[1] = torch.nan
    return module


CYCLES = {"lr_scheduler": lambda o: samplers.CyclicalSchedule(o, 6, 0.0)}
LONG = {"max_epochs": 20, "limit_val_batches": 0}
FULL = Blobs(batch_size=60)
REGRESSION = {"likelihood": Gaussian(), "optimizer": adam}
INFINITE = plain(y=spoiled(torch.randn(30, 3), torch.inf))
DROPS = plain(X[:20], Y[:20], batch_size=8, drop_last=True, shuffle=True)
SAID = [
    *(
        (MODULES[name](ending(nn.Softmax(-1))), None, {}, "returns probabilities", "the softmax")
        for name in ("ensemble", "mfvi", "sghmc", "laplace")
    ),
    (sghmc(lr=1e4, prior_std=0.1, **CYCLES), None, LONG, "not finite", "learning rate"),
    (sghmc(rule=samplers.SGLD, lr=1e38), None, LONG, "not finite", "or the data"),
    (hmc(1e3, nn.Linear(6, 3)), None, {}, "have hardly moved", "step_size"),
    (stuck(), FULL, {}, "ever be accepted", "chains [1] of 2 "),
    (hmc(), DROPS, {}, "yields 16 of 20 examples", ""),
    (mile(4), FULL, {"max_epochs": 5}, "MILE will collect no networks: its sampler", "for 5 steps"),
    (mile(0, 0, 0, 1e-12), FULL, {}, "more than 10 times", "chains [0, 1] of 2"),
    (sghmc(burn_in=50), None, {}, "SGHMC will collect no networks: `burn_in`", ""),
    (sghmc(), None, {"gradient_clip_val": 1.0}, "Gradient clipping changes the target", ""),
    (sghmc(prior_std=None), None, {}, "There is no prior", ""),
    (sghmc(network(0.2)), None, {}, "Dropout changes the target", ""),
    (sghmc(with_dropout(network(), 0.2, "all")), None, {}, "Dropout changes the target", ""),
    (sghmc(likelihood=Smoothed()), None, {}, "Label smoothing changes the target", ""),
    (SWAG(network(), start=5, optimizer=adam), None, {}, "SWAG will collect weights fewer", ""),
    (made("ensemble"), plain(spoiled(X)), {}, "inputs of the training data", "in example 17"),
    (made("sgld"), plain(spoiled(X)), {}, "inputs of the training data", "in example 17"),
    (
        DeepEnsemble(network(), **REGRESSION), INFINITE, {},
        "targets of the training data", "in example 17",
    ),
    (made("ensemble"), plain(spoiled(X), shuffle=True), {}, "inputs of the training", "values."),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("module", "data", "options", "words", "more"), SAID)
def test_what_is_said_of_a_fit_is_said_once(module, data, options, words, more):
    (found,) = said(words, fitted, module, data, **options)
    assert more in found
    assert module.trainer.global_step < 20 * 6  # what diverges is not trained to the end


SILENT = [
    *(
        (DeepEnsemble(ending(last), members=2), None, {}, "returns probabilities")
        for last in (nn.LogSoftmax(-1), nn.Sigmoid())
    ),
    (hmc(0.01, nn.Linear(6, 3)), None, {}, "have hardly moved"),
    (mile(4), FULL, {"max_epochs": 6}, "will collect no networks"),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("module", "data", "options", "words"), SILENT)
def test_what_does_not_apply_is_not_said(module, data, options, words):
    assert not said(words, fitted, module, data, **options)


@pytest.mark.filterwarnings("ignore")
def test_streams_are_not_looked_through():
    stream = Stream()
    few = {"max_epochs": 1, "limit_train_batches": 3, "limit_val_batches": 0}
    assert said("or the data are not", fitted, made("ensemble"), DataLoader(stream, 10), **few)
    assert stream.given <= 50


def test_what_was_trained_elsewhere_is_looked_at_in_a_test():
    run, words = trainer(), "returns probabilities"
    assert said(words, run.test, DeepEnsemble(ending(nn.Softmax(-1)), members=1), Blobs())
    assert not said(words, run.test, made("ensemble"), Blobs())


def test_targets_of_a_regression_may_sum_to_one():
    net = ending(nn.Softmax(-1))
    module = DeepEnsemble(net, members=2, likelihood=Gaussian())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module.run.nll(net(torch.randn(5, 6))[None], torch.zeros(5, 3))


@pytest.mark.parametrize("members", [1, 2])
def test_networks_that_embed_take_whole_numbers(members):
    x = torch.randint(5, (20, 6))
    net = nn.Sequential(nn.Embedding(5, 2), nn.Flatten(), nn.Linear(12, 3))
    module = DeepEnsemble(net, members=members)
    fitted(module, DataLoader(TensorDataset(x, Y[:20]), batch_size=10), max_epochs=1)
    assert module(x).shape == (20, 3)
    with pytest.raises(ValueError, match="does not take inputs of type torch.float32"):
        module(torch.zeros(2, 6))


@pytest.mark.bad_input
def test_labels_in_the_place_of_inputs_are_named():
    with pytest.raises(ValueError, match=r"does not take inputs of shape \(10,\)"):
        trainer(max_epochs=1).fit(DeepEnsemble(mlp(6, [8], 3)), plain(Y, X))


def test_the_only_input_may_be_a_tensor():
    module, x = made("ensemble"), torch.randn(3, 6)
    assert torch.equal(module.outputs(x), module.outputs((x,)))


# ------------------------------------------------------------ tokens that are their own targets
TOKENS = torch.randint(5, (30, 4), generator=torch.Generator().manual_seed(0))
PADDED = TOKENS.masked_fill(TOKENS == 0, -100)


@pytest.mark.parametrize(
    ("likelihood", "targets", "times"),
    [
        (Categorical(), TOKENS, 1),
        (Categorical(ignore_index=-100), PADDED, 1),
        (Categorical(next_token=True), TOKENS, 0),
        (Categorical(), TOKENS.roll(1, 1), 0),
    ],
)
def test_a_language_model_that_would_copy_is_told_once(likelihood, targets, times):
    net = nn.Sequential(nn.Embedding(5, 8), nn.Linear(8, 5))
    module = DeepEnsemble(net, likelihood=likelihood, members=2, optimizer=adam)
    found = said("would learn to copy", trainer(max_epochs=2).fit, module, plain(TOKENS, targets))
    assert len(found) == times


# ------------------------------------------------------------ modules that were not fitted
GIVEN_AS_IT_IS = {"map", "dropout", "tfb"}
"""One network, which the user may have trained."""


def unfitted(run, module):
    return said("has not been fitted", run, module, Blobs(n=20), verbose=False)


@pytest.mark.filterwarnings("ignore:.* yet")
@pytest.mark.parametrize("name", [*OF_EACH_CLASS, *sorted(GIVEN_AS_IT_IS)])
def test_an_unfitted_module_says_so(name):
    run, module = trainer(max_epochs=1, limit_test_batches=1), made(name)
    found = unfitted(run.test, module)
    assert len(found) == (name not in GIVEN_AS_IT_IS)
    assert all(text.startswith(f"{type(module).__name__} has not been fitted: ") for text in found)
    if found:
        with pytest.raises(ValueError, match="has not been fitted"):
            made(name).posterior()
    other = made(name)
    other.load_state_dict(module.state_dict(), strict=False)
    assert not unfitted(run.test, other)
    other.example_input_array = torch.zeros(2, 6)
    other.posterior()


@pytest.mark.frames
@pytest.mark.parametrize("name", ["mfvi", "multi-laplace"])
def test_after_a_fit_it_is_quiet(name, tmp_path):
    module = made(name)
    assert not said("has not been fitted", fitted, module, max_epochs=1)
    run = trainer()
    assert not unfitted(run.test, module)
    assert unfitted(run.validate, made(name))
    loaded = type(module).load_from_checkpoint(
        saved(fitted(module, max_epochs=1), tmp_path / "it.ckpt"), network=network()
    )
    assert not unfitted(run.test, loaded)


def test_what_starts_from_a_file_is_quiet(tmp_path):
    torch.save(network().state_dict(), tmp_path / "start.pt")
    module = SWAG(network(), start=0, start_from=str(tmp_path / "start.pt"))
    assert not unfitted(trainer().test, module)


MOVED_BY_CLIPPING = {"multi-mfvi", "bethe", "chains", "sghmc", "smile"}


@pytest.mark.parametrize("name", sorted({*OF_EACH_CLASS, "chains"} - {"hmc", "mile"}))
def test_clipping_that_moves_a_posterior_is_said(name):
    """Maxima stay where they are, and IVON learns from whole gradients."""
    options = {"max_epochs": 1, "gradient_clip_val": 1.0, "limit_val_batches": 0}
    assert bool(said("Gradient clipping", fitted, made(name), **options)) == (
        name in MOVED_BY_CLIPPING
    )

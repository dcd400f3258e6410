"""Which checkpoints a module takes, and what it says of those that it does not take."""

import warnings
from contextlib import nullcontext
from functools import partial

import lightning as L
import pytest
import torch
from module_cases import OF_EACH_CLASS, Blobs, made, network, saved, trainer
from torch import nn

from lightning_bnn import methods
from lightning_bnn.modules import MFVI, SWAG, Bayesian, DeepEnsemble, by_method, checkpoints

CLASSES = {type(made(name)).__name__: name for name in OF_EACH_CLASS}


def test_laws_of_modules_hold_for_every_class():
    assert CLASSES.keys() == {*by_method.__all__} - {"FromCheckpoints", "lightning_class"}


"""The name of one module of each class."""


def unfitted(module, path):
    """A checkpoint of a module that is not trained."""
    run = trainer()
    run.strategy.connect(module)
    return saved(run, path)


@pytest.fixture(scope="module")
def of_each_class(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    return {k: unfitted(made(name), folder / f"{k}.ckpt") for k, name in CLASSES.items()}


@pytest.fixture(scope="module")
def contents(of_each_class):
    return {k: torch.load(path, weights_only=True) for k, path in of_each_class.items()}


class Plain(L.LightningModule):
    def __init__(self, width=8):
        super().__init__()
        self.save_hyperparameters()
        self.networks = network(width=width)


# ------------------------------------------------------------ other classes
def loads_as(kind):
    """The classes whose checkpoints are Gaussians, or networks, as this one has them."""
    bases = {"SymmetrizedVI": "MFVI", "SMILE": "SGHMC", "Distillation": "DeepEnsemble"}
    return {kind, bases.get(kind, kind)}


@pytest.mark.parametrize("kind", CLASSES)
def test_checkpoints_of_other_classes_are_named(kind, of_each_class, contents):
    """However it is loaded. Where parameters have the same names and shapes, too."""
    module, own = made(CLASSES[kind]), network(dropout=0.2 * (kind[:2] == "MC"))
    for other in loads_as(kind) - {kind}:
        type(module).load_from_checkpoint(of_each_class[other], network=own)
    for other in of_each_class.keys() - loads_as(kind):
        words = f"^The checkpoint is of {other}, but this module is {kind}.$"
        with pytest.raises(ValueError, match=words):
            module.on_load_checkpoint(dict(contents[other]))
    with pytest.raises(ValueError, match=words):
        type(module).load_from_checkpoint(of_each_class[other], network=network())
    if kind == "MILE":  # only their notes tell these two apart
        notes = {**contents["HMC"][checkpoints.NOTES], "method": None}
        module.on_load_checkpoint({**contents["HMC"], checkpoints.NOTES: notes})


class Own(MFVI):
    """A class of a user."""


class Faster(methods.MFVI):
    """A method of a user."""


def test_classes_of_users_load_as_what_they_are_made_of(tmp_path):
    path = unfitted(Own(network()), tmp_path / "it.ckpt")
    for load in (Own, MFVI):
        load.load_from_checkpoint(path, network=network())
    for method in (methods.MFVI(), Faster()):
        Bayesian(network(), method).on_load_checkpoint(torch.load(path))
    general = unfitted(Bayesian(network(), methods.SGMCMC()), tmp_path / "general.ckpt")
    with pytest.raises(ValueError, match="is of SGHMC, but this module is HMC"):
        Bayesian(network(), methods.HamiltonianMonteCarlo()).on_load_checkpoint(torch.load(general))


# ------------------------------------------------------------ other files
@pytest.mark.bad_input
def test_what_is_no_checkpoint_of_ours_is_said(tmp_path):
    path, load = tmp_path / "it.ckpt", partial(MFVI.load_from_checkpoint, network=network())
    for content in ({"state_dict": network().state_dict()}, [1, 2]):
        torch.save(content, path)
        with pytest.raises(ValueError, match="is not a checkpoint written by Lightning"):
            load(path)
    for text in (b"", unfitted(MFVI(network()), path).read_bytes()[:900]):
        path.write_bytes(text)
        with pytest.raises(ValueError, match="holds no plain tensors that torch can read"):
            load(path)
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "nowhere.ckpt")
    unfitted(Plain(), path)
    for refused in (
        lambda: load(path),
        lambda: MFVI(network()).on_load_checkpoint(torch.load(path)),
    ):
        with pytest.raises(ValueError, match="is of another LightningModule, but this"):
            refused()


@pytest.mark.bad_input
def test_other_mistakes_keep_their_words(tmp_path, of_each_class):
    """The negative control: of the same class, what went wrong is said as it is."""
    path = of_each_class["MFVI"]
    with pytest.raises(TypeError, match="MFVI has no argument `rank`"):
        MFVI.load_from_checkpoint(path, network=network(), rank=3)
    with pytest.raises(ValueError, match="for 'state.mean' it has numbers of shape"):
        MFVI.load_from_checkpoint(path, network=network(width=9))
    with pytest.raises(TypeError, match="cannot be called on an instance"):
        MFVI(network()).load_from_checkpoint(path)
    odd = torch.load(path) | {"callbacks": {"odd": Odd()}}
    torch.save(odd, tmp_path / "odd.ckpt")
    with pytest.raises(TypeError, match="MFVI has no argument `rank`"):
        MFVI.load_from_checkpoint(
            tmp_path / "odd.ckpt", network=network(), rank=3, weights_only=False
        )


class Odd:
    """No plain data."""


# ------------------------------------------------------------ other networks
@pytest.mark.bad_input
def test_a_run_does_not_go_on_from_checkpoints_of_others(tmp_path):
    path = unfitted(SWAG(network(), members=2, start=0), tmp_path / "it.ckpt")
    longer = nn.Sequential(*network(), nn.Linear(3, 3))
    for other, words in (
        (MFVI(network(), members=2), "is of SWAG, but this module is MFVI"),
        (SWAG(network(), members=3), "for 'state.networks.0.weight' it has .*2, 8, 6"),
        (SWAG(longer, members=2), "it has nothing"),
    ):
        with pytest.raises(ValueError, match=words):
            trainer().fit(other, Blobs(), ckpt_path=path)


class Adapted(DeepEnsemble):
    """A class of a user that has got another parameter since."""

    def __init__(self, network, **kwargs):
        super().__init__(network, **kwargs)
        self.scale = nn.Parameter(torch.full((2,), 3.0))


@pytest.mark.parametrize("missing", ["a new parameter", "a weight"])
def test_checkpoints_without_some_weights_load_where_that_is_allowed(missing, tmp_path):
    """As Lightning does for networks of which only adapters are saved."""
    options = {"network": network(), "members": 2}
    path = unfitted(DeepEnsemble(**options), tmp_path / "it.ckpt")
    content = torch.load(path, weights_only=True)
    if missing == "a weight":
        del content["state_dict"]["state.networks.0.weight"]
        torch.save(content, path)
    kind = Adapted if missing == "a new parameter" else DeepEnsemble
    with pytest.raises(ValueError, match="it has nothing"):
        kind.load_from_checkpoint(path, **options)
    with pytest.warns(UserWarning, match="in the model state dict but not in the checkpoint"):
        loaded = kind.load_from_checkpoint(path, strict=False, **options)
    bias = content["state_dict"]["state.networks.0.bias"]
    assert torch.equal(loaded.state_dict()["state.networks.0.bias"], bias)
    for strict in (True, False):
        module = kind(**options)
        module.strict_loading = strict
        with pytest.raises(ValueError, match="it has nothing") if strict else nullcontext():
            trainer(max_epochs=0).fit(module, Blobs(), ckpt_path=path)
    with pytest.raises(ValueError, match="it has numbers of shape"):  # as torch has it
        kind.load_from_checkpoint(path, **options | {"network": network(width=9)}, strict=False)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "lacks"), [("laplace", "curvature"), ("swag", "collection")])
def test_a_posterior_without_its_gaussians_says_so(name, lacks, tmp_path):
    every = L.pytorch.callbacks.ModelCheckpoint(tmp_path, save_top_k=-1)
    run = trainer(every, max_epochs=3, enable_checkpointing=True)
    whole = made(name)
    with warnings.catch_warnings(record=True) as said:
        run.fit(whole, Blobs())
        whole.posterior()
    assert not [w for w in said if "predict without it" in str(w.message)]
    early = min(tmp_path.glob("*.ckpt"))
    loaded = type(whole).load_from_checkpoint(early, network=network(), weights_only=True)
    for ask in (loaded.posterior, loaded.predictive, lambda: loaded(torch.randn(2, 6))):
        with pytest.warns(UserWarning, match=f"no .*{lacks}.*predict without it"):
            ask()

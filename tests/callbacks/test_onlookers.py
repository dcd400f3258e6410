"""A callback may fail in any way at any hook, beside any change of a network: the run goes on."""

import sys
from functools import partial

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelPruning
from module_cases import Blobs, said
from runs import Plain, built, fit, network
from test_callback_laws import CALLBACKS
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune

from lightning_bnn import callbacks
from lightning_bnn.callbacks import MassGap, OrbitDrift, PermutationTau, PosteriorFigures
from lightning_bnn.callbacks.onlooker import Onlooker
from weightsym import discover
from weightsym import params as P

pytestmark = [pytest.mark.usefixtures("undrawn"), pytest.mark.filterwarnings("ignore")]
ONLOOKERS = [n for n in CALLBACKS if n not in ("DrawnWeights", "SymmetricAverage")]
"""All that only look."""
HOOKS = [n for n, f in vars(L.Callback).items() if callable(f) and n[0] != "_"]
ERRORS = KeyError, TypeError, OSError, RuntimeError, AttributeError, RecursionError, ValueError

FAULTS = [kind for kind in ERRORS if kind not in (OSError, ValueError)]
"""Those that do not say that a folder is no bank, which is refused."""


def hooks_of(cls):
    mine = cls.__mro__[: cls.__mro__.index(Onlooker)]
    return [name for name in HOOKS if any(name in vars(base) for base in mine)]


EVERY = [(name, hook) for name in ONLOOKERS for hook in hooks_of(getattr(callbacks, name))]
NEW = [
    (name, hook)
    for k, (name, hook) in enumerate(EVERY)
    if name not in dict(EVERY[:k]) or hook not in dict(map(reversed, EVERY[:k]))
]
"""Each callback once, and each hook: the base wraps all in one way."""


def overridden(callback, hooks, around):
    """The same callback of a class of a user's, whose hooks a function calls."""
    kind, ways = type(callback), {}
    for name in hooks:

        def way(self, *args, name=name, **kwargs):
            return around(getattr(kind, name), self, *args, **kwargs)

        way.__name__ = name
        ways[name] = way
    callback.__class__ = type(f"Faulty{kind.__name__}", (kind,), ways)  # a name of its own
    return callback


def ended(name, folder, around=None, hooks=()):
    """The weights after two epochs, the second of which goes on from a checkpoint of the first."""
    make, looks = CALLBACKS[name]
    folder.mkdir(exist_ok=True)
    for options in ({}, {"max_epochs": 2, "ckpt_path": folder / "first.ckpt"}):
        torch.manual_seed(0)
        module, found = make(), looks(folder / "bank") if around else []
        found = [overridden(callback, hooks, around) for callback in found]
        options = {"max_epochs": 1, "default_root_dir": folder, **options}
        trainer = fit(module, *found, data=Blobs(), **options)
        trainer.save_checkpoint(folder / "first.ckpt")
    return P.ravel(P.of(module))[0], torch.get_rng_state()


@pytest.fixture(scope="module")
def unwatched(tmp_path_factory):
    known = {}

    def of(name):
        if name not in known:
            known[name] = ended(name, tmp_path_factory.mktemp("alone"))
        return known[name]

    return of


def same(a, b):
    return all(map(torch.equal, a, b))


def test_every_hook_is_wrapped():
    assert all(
        hasattr(getattr(getattr(callbacks, name), hook), "__wrapped__") for name, hook in EVERY
    )


@pytest.mark.parametrize(("name", "hook"), NEW)
def test_what_fails_is_named_once_and_training_goes_on(name, hook, unwatched, tmp_path):
    error, fits = ERRORS[EVERY.index((name, hook)) % len(ERRORS)], {}

    def fail(plain, self, *args, **kwargs):
        if len(fits) % 2:  # after it has done what it does, or at once
            plain(self, *args, **kwargs)
        fits[id(self)] = self
        raise error("what it could not read")

    ends = []
    sentences = said(
        "what it could not read", lambda: ends.append(ended(name, tmp_path, fail, [hook]))
    )
    assert same(ends[0], unwatched(name))
    assert len(sentences) == len(fits)
    assert bool(fits) == (hook != "on_exception")
    assert all(s.startswith(f"Faulty{name} is switched off: ") for s in sentences)
    assert all(hook in s and error.__name__ in s for s in sentences) or error is ValueError


def faulty(count):
    """Calls hooks, and fails in the n-th call of a function of ours; how many there were."""
    calls, ours = [0], ("lightning_bnn", "weightsym")

    def fail(frame, event, _):
        if event == "call" and frame.f_globals.get("__name__", "").startswith(ours):
            calls[0] += 1
            if calls[0] == count:
                raise FAULTS[count % len(FAULTS)]("a fault")

    def around(plain, self, *args, **kwargs):
        sys.setprofile(fail)
        try:
            return plain(self, *args, **kwargs)
        finally:
            sys.setprofile(None)

    return around, calls


@pytest.mark.e2e
@pytest.mark.parametrize("name", ONLOOKERS)
def test_a_fault_anywhere_inside_leaves_no_trace(name, unwatched, tmp_path):
    hooks = [h for h in hooks_of(getattr(callbacks, name)) if h not in ("setup", "load_state_dict")]
    around, calls = faulty(0)
    ended(name, tmp_path / "all", around, hooks)
    g = torch.Generator().manual_seed(5)
    for place in torch.randint(calls[0], (3,), generator=g).tolist():
        assert same(ended(name, tmp_path / f"{place}", faulty(place)[0], hooks), unwatched(name))


@pytest.mark.parametrize(
    ("name", "error"), [*((n, KeyboardInterrupt) for n in ONLOOKERS), ("MassGap", SystemExit)]
)
def test_interrupts_end_a_run(name, error, tmp_path):
    def interrupt(*_, **__):
        raise error

    hook = "on_train_epoch_end" if name == "TrainingCost" else "on_train_batch_end"
    with pytest.raises(SystemExit):
        ended(name, tmp_path, interrupt, [hook])


@pytest.mark.parametrize("name", ONLOOKERS)
def test_an_error_of_the_user_is_the_one_that_is_seen(name, tmp_path):
    make, looks = CALLBACKS[name]
    module = make()
    module.training_step = lambda *_: 1 / 0

    def fail(*_, **__):
        raise KeyError("another")

    found = [overridden(c, ["on_exception"], fail) for c in looks(tmp_path)]
    with pytest.raises(ZeroDivisionError):
        fit(module, *found, data=Blobs(), default_root_dir=tmp_path)


# ------------------------------------------------------------ unusual runs
class Fetching(Plain):
    """Takes the batches itself."""

    def training_step(self, dataloader_iter):
        return super().training_step(next(dataloader_iter)[0], 0)


RUNS = {
    "batches are fetched": (Fetching, {}),
    "validation in batches": (Plain, {"check_val_every_n_epoch": None, "val_check_interval": 3}),
    "nothing is logged": (Plain, {"log_every_n_steps": 0}),
    "bare bones": (Plain, {"log_every_n_steps": 0, "barebones": True}),
}


@pytest.mark.parametrize("kind", RUNS)
def test_unusual_runs_are_seen_like_others(kind, tmp_path):
    cls, options = RUNS[kind]
    names = [n for n in ONLOOKERS if CALLBACKS[n][0] is CALLBACKS["MassGap"][0]]
    looks = [c for n in names for c in CALLBACKS[n][1](tmp_path / "bank")]
    looks.append(callbacks.TrainingCost())
    alone, module = built(cls, 0.0), built(cls, 0.0)
    fit(alone, **options)
    run = partial(fit, module, *looks, default_root_dir=tmp_path, **options)
    assert said("is switched off", run) == []
    assert same(module.state_dict().values(), alone.state_dict().values())
    seen = {type(c): len(getattr(c, "history", ())) for c in looks}
    assert seen[MassGap] == 12
    assert seen[OrbitDrift] == 4
    assert seen[PermutationTau] == (12 if options.get("log_every_n_steps", 1) else 0)


# ------------------------------------------------------------ networks that change
class Adapter(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base
        self.a, self.b = nn.Linear(8, 2, bias=False), nn.Linear(2, 5, bias=False)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))


class Rounded(nn.Module):
    """Weights as quantisation-aware training sees them."""

    def forward(self, w):
        return w + ((8 * w).round() / 8 - w).detach()


class Change(L.Callback):
    """Changes the network before the third batch of an epoch, or within it."""

    def __init__(self, change, hook):
        self.change = change
        setattr(self, hook, self._at)

    def _at(self, trainer, module, *_):
        if trainer.global_step == 3:
            self.change(module)


def widen(module):
    module.net[3], module.net[5] = nn.Linear(8, 7), nn.Linear(7, 3)


def rename(module):
    module.other = module.net
    del module.net
    module.training_step = lambda batch, batch_idx: F.cross_entropy(
        module.other(batch[0]), batch[1]
    )


CHANGES = {
    "pruned": lambda m: prune.l1_unstructured(m.net[0], "weight", 0.3),
    "normed": lambda m: parametrizations.weight_norm(m.net[0]),
    "normed as of old": lambda m: nn.utils.weight_norm(m.net[0]),
    "orthogonal": lambda m: parametrizations.orthogonal(m.net[0]),
    "rounded": lambda m: nn.utils.parametrize.register_parametrization(
        m.net[0], "weight", Rounded()
    ),
    "adapted": lambda m: m.net.__setitem__(3, Adapter(m.net[3])),
    "frozen": lambda m: m.net[0].requires_grad_(False),
    "another head": lambda m: m.net.__setitem__(5, nn.Linear(5, 3)),
    "another activation": lambda m: m.net.__setitem__(1, nn.Tanh()),
    "wider": widen,
    "a layer more": lambda m: m.net.append(nn.Linear(3, 3)),
    "renamed": rename,
    "exchanged": lambda m: setattr(m, "net", network()),
    "wrapped": lambda m: setattr(m, "net", nn.Sequential(m.net)),
    "compiled": lambda m: setattr(m, "net", torch.compile(m.net, backend="eager")),
}


@pytest.mark.parametrize(
    ("change", "hook"),
    [*((change, "on_train_batch_start") for change in CHANGES),
     *((change, "on_train_batch_end") for change in ("pruned", "wider", "compiled"))],
)  # fmt: skip
def test_a_network_that_changes_is_found_anew(change, hook, tmp_path):
    """Its groups are those of the network at the end, and looks go on; weights are the same."""
    looks = [PermutationTau(), MassGap(1), OrbitDrift(1), PosteriorFigures(1, 100)]
    modules = built(Plain, 0.0), built(Plain, 0.0)
    fit(modules[0], Change(CHANGES[change], hook))
    changes = Change(CHANGES[change], hook)
    run = partial(fit, modules[1], changes, *looks, default_root_dir=tmp_path)
    assert said("is switched off", run) == []
    a, b = (module.state_dict() for module in modules)
    assert list(a) == list(b)
    assert same(a.values(), b.values())
    now = getattr(modules[1], "other", None) or modules[1].net
    now = getattr(now, "_orig_mod", now)
    expected = discover(now, torch.randn(2, 6))
    for callback in looks:
        found = callback.network
        assert found.module is now
        assert [g.name for g in found.symmetries.permutations] == [
            g.name for g in expected.permutations
        ]
        assert found.symmetries.scaling_dof == expected.scaling_dof
    assert len(looks[1].history) in (11, 12)  # one look is left out at most


@pytest.mark.parametrize("name", ONLOOKERS)
@pytest.mark.parametrize("first", [True, False])
def test_beside_pruning(name, first, tmp_path):
    """Every epoch renames tensors, and the end takes their names back."""
    make, looks = CALLBACKS[name]
    if make is not CALLBACKS["MassGap"][0]:
        pytest.skip("Lightning prunes layers, which stacks have none of")
    pruning = partial(ModelPruning, "l1_unstructured", amount=0.2)
    alone, module = make(), make()
    fit(alone, pruning(), max_epochs=3)
    looks = [pruning(), *looks(tmp_path)]
    looks = looks[:: 1 if first else -1]
    run = partial(fit, module, *looks, max_epochs=3, default_root_dir=tmp_path)
    sentences = said("is switched off", run)
    assert same(module.state_dict().values(), alone.state_dict().values())
    assert not [s for s in sentences if "bank" not in s and "no units" not in s]

"""Classes that are made of methods: arguments, texts, files."""

import inspect
import pickle
from dataclasses import dataclass, fields, is_dataclass

import pytest
import torch
from docstring_parser import parse
from module_cases import OF_EACH_CLASS, Blobs, made, network, same, saved, trainer

from lightning_bnn import methods
from lightning_bnn.modules import MFVI, Bayesian, by_method, lightning_class

pytestmark = pytest.mark.frames
CLASSES = {name: getattr(by_method, name) for name in by_method.__all__}
del CLASSES["lightning_class"]


def settings_of(method):
    """Every argument of a method with its value, by another way than signatures."""
    values = {}
    for field in fields(method):
        value = getattr(method, field.name)
        values |= settings_of(value) if is_dataclass(value) else {field.name: value}
    return values


@pytest.mark.parametrize("name", CLASSES)
def test_every_argument_has_a_type_and_a_text(name):
    parameters = inspect.signature(CLASSES[name]).parameters
    texts = {p.arg_name: p.description for p in parse(CLASSES[name].__doc__).params}
    assert parameters.keys() == texts.keys()
    assert all(texts.values())
    assert not any(isinstance(p.annotation, str) for p in parameters.values())
    assert all(p.annotation is not p.empty for p in parameters.values())


@pytest.mark.parametrize("name", OF_EACH_CLASS)
def test_arguments_are_those_of_the_method_and_of_every_module(name):
    module = made(name)
    parameters = inspect.signature(type(module)).parameters
    settings = settings_of(module.method)
    shared = inspect.signature(Bayesian).parameters.keys() - {"method"}
    assert parameters.keys() == settings.keys() | shared
    saved_settings = {n: v for n, v in settings.items() if n in module.hparams}
    assert settings.keys() - saved_settings.keys() <= {"prior", "teacher"}  # not plain data
    changed = {"every_n_steps"} if name == "mile" else set()  # a transition is a draw
    for argument in saved_settings.keys() - changed:
        assert module.hparams[argument] == settings[argument]


@pytest.mark.filterwarnings("ignore:.* has ")
@pytest.mark.parametrize("name", OF_EACH_CLASS)
def test_modules_can_be_pickled_after_predictions(name):
    module, x = made(name, seed=3), torch.ones(2, 6)
    module.make_optimizer = torch.optim.Adam  # those of the cases are local functions
    module.example_input_array = x
    trainer().predict(module, Blobs(n=20))
    copied = pickle.loads(pickle.dumps(module))
    assert type(copied) is type(module)
    assert same(copied.state_dict(), module.state_dict())
    assert torch.equal(copied(x), module(x))


class Wider(MFVI):
    """A class of a user, with an argument of its own."""

    def __init__(self, network, width=1, **kwargs):
        super().__init__(network, **kwargs)
        self.width = width


def test_arguments_of_a_class_of_a_user_are_saved_too(tmp_path):
    run = trainer()
    run.strategy.connect(Wider(network(), width=4, prior_std=0.3))
    path = saved(run, tmp_path / "it.ckpt")
    module = Wider.load_from_checkpoint(path, network=network())
    assert (module.width, module.method.prior_std) == (4, 0.3)


@dataclass(eq=False, kw_only=True)
class Needing(methods.MFVI):
    """A method that cannot do without an argument.

    Args:
        scale: of something.
    """

    scale: float


def test_what_a_method_needs_comes_after_the_network():
    made_of = lightning_class(Needing, members=2)
    module = made_of(network(), 0.5)
    assert (module.method.scale, module.members) == (0.5, 2)
    assert (made_of.__name__, made_of.__module__) == ("Needing", __name__)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'scale'"):
        made_of(network())
    with pytest.raises(TypeError, match="unexpected keyword argument 'rank'"):
        made_of(network(), 0.5, rank=3)

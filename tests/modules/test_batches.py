"""Dict batches go to the network by name, in every module and at every stage."""

import pytest
import torch
from module_cases import MODULES, Blobs, fitted, network, said, same, state, trainer
from torch import nn
from torch.utils.data import DataLoader

from lightning_bnn.modules import DeepEnsemble
from lightning_bnn.modules.batches import inputs_and_targets, inputs_only, left_over

pytestmark = pytest.mark.filterwarnings("ignore")


class Masked(nn.Sequential):
    """Sees what a mask leaves of its input; another option stands before the mask."""

    def forward(self, x, shift=0.0, mask=None):
        return super().forward((x if mask is None else x * mask) + shift)


LAYOUTS = {
    "tuple": lambda x, y, mask: (x, torch.zeros(6), mask, y),
    "dict": lambda x, y, mask: {"mask": mask, "label": y, "x": x},
    "more": lambda x, y, mask: {"x": x, "index": y, "mask": mask, "y": y},
}


def masked_rows(layout, full=False):
    """Examples with a mask, in any layout."""
    x, y = (t[:20] for t in Blobs().load().train)
    drawn = torch.rand(20, 6, generator=torch.Generator().manual_seed(1)) < 0.5
    rows = zip(x, y, (drawn | full).float(), strict=True)
    return DataLoader([LAYOUTS[layout](*row) for row in rows], batch_size=10)


def masked(name):
    torch.manual_seed(0)
    return MODULES[name](Masked(*network()))


def after_a_run(name, layout, full=False):
    module, run, loader = masked(name), trainer(max_epochs=1), masked_rows(layout, full)
    run.fit(module, loader, loader)
    numbers = run.test(module, [loader, loader], verbose=False)[0]
    predictions = torch.cat([p.samples for p in run.predict(module, loader)], 1)
    return state(module), {**numbers, **run.callback_metrics}, predictions


@pytest.mark.parametrize("name", ["ensemble", "bethe", "laplace", "hmc"])
def test_a_dict_is_the_tuple_with_names(name):
    """Training, validation, test and prediction; a mask of ones gives other networks."""
    wanted, numbers, predicted = after_a_run(name, "tuple")
    found, own_numbers, own_predicted = after_a_run(name, "dict")
    assert same(found, wanted)
    assert own_numbers == numbers
    assert torch.equal(own_predicted, predicted)
    if name == "ensemble":
        assert not same(after_a_run(name, "dict", full=True)[0], wanted)


def test_plain_calls_take_names_too():
    module = DeepEnsemble(Masked(*network()), members=2).eval()
    x, mask = torch.randn(4, 6), (torch.rand(4, 6) < 0.5).float()
    wanted = module(x * mask)
    torch.testing.assert_close(module(x, mask=mask), wanted)
    torch.testing.assert_close(module.predictive()(x, mask=mask), wanted)
    assert not torch.allclose(module(x), wanted)


@pytest.mark.bad_input
@pytest.mark.parametrize("named", [{"maske": 1}, {"x": 1}])
def test_names_that_the_network_does_not_have(named):
    with pytest.raises(ValueError, match="Masked takes x, shift, mask"):
        DeepEnsemble(Masked(*network()))(torch.zeros(1, 6), **named)


def test_what_is_left_over_is_said_once():
    module, loader = masked("ensemble"), masked_rows("more")
    (told,) = said("is not used", lambda: fitted(module, loader).predict(module, loader))
    assert "'index'" in told
    assert "mask" not in told


# ------------------------------------------------------------ which name is what
def with_forward(forward):
    return type("Net", (nn.Module,), {"forward": forward})()


NETS = {
    "(x)": with_forward(lambda self, x: x),
    "(x, y)": with_forward(lambda self, x, y: x),
    "(y)": with_forward(lambda self, y: y),
    "(ids, mask=None, labels=None)": with_forward(lambda self, ids, mask=None, labels=None: ids),
    "(ids=None, embeds=None)": with_forward(lambda self, ids=None, embeds=None: embeds),
    "(*inputs)": with_forward(lambda self, *inputs: inputs),
    "(x, *, mask=None)": with_forward(lambda self, x, *, mask=None: x),
}
ROWS = [
    ("(x)", "image label", "image", "label", ""),
    ("(x)", "x y index", "x", "y", "index"),
    ("(x)", "x image y", "x", "y", "image"),
    ("(x, y)", "x y label", "x y", "label", ""),
    ("(y)", "x y", "x", "y", ""),
    ("(ids, mask=None, labels=None)", "ids mask labels", "ids mask", "labels", ""),
    ("(ids, mask=None, labels=None)", "labels ids", "ids", "labels", ""),
    ("(ids, mask=None, labels=None)", "mask labels data", "data mask", "labels", ""),
    ("(ids=None, embeds=None)", "embeds y", "- embeds", "y", ""),
    ("(*inputs)", "x mask y", "x", "y", "mask"),
    ("(x, *, mask=None)", "x mask y", "x", "y", "mask"),
]


@pytest.mark.parametrize(("net", "held", "inputs", "target", "left"), ROWS)
def test_which_name_is_what(net, held, inputs, target, left):
    batch = {name: torch.tensor(k) for k, name in enumerate(held.split())}
    wanted = tuple(None if name == "-" else batch[name] for name in inputs.split())
    assert inputs_and_targets(batch, NETS[net]) == (wanted, batch[target])
    assert inputs_only(batch, NETS[net]) == wanted
    assert left_over(batch, NETS[net]) == left.split()


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("net", "held", "message"),
    [
        ("(x, y)", "x y", "it needs 'y' and the batch has 'x', 'y', of which 'y' is the target"),
        ("(x)", "mask y", "The inputs of a dict batch must have one of the names x"),
        ("(x)", "x", "The targets of a dict batch must have one of the names y"),
        ("(x)", "image data y", "must have one of the names x.* it has 'image', 'data', 'y'"),
    ],
)
def test_dicts_that_do_not_fit(net, held, message):
    with pytest.raises(ValueError, match=message):
        inputs_and_targets({name: name for name in held.split()}, NETS[net])

"""The tensors of a network are found in a file, or the first that does not fit is named."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from weightsym.files import NetworkNames, fit, open_network


class Tied(nn.Module):
    """Tokens in and out by one table, as language models have it."""

    def __init__(self):
        super().__init__()
        self.body = nn.Module()
        self.body.table = nn.Embedding(5, 4)
        self.body.layer = nn.Linear(4, 4)
        self.body.register_buffer("mask", torch.ones(3, 3), persistent=False)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.body.table.weight

    def forward(self, x):
        return self.head(self.body.layer(self.body.table(x)).tanh())


NAMES = NetworkNames.of(Tied(), base="body", ignored=("old",))
TABLE, WEIGHT, BIAS = torch.randn(5, 4), torch.randn(4, 4), torch.randn(4)
WHOLE = {"body.table.weight": TABLE, "body.layer.weight": WEIGHT, "body.layer.bias": BIAS}


def stored(folder, state):
    save_file({n: t.clone() for n, t in state.items()}, folder / "a.safetensors")
    return open_network(folder / "a.safetensors")


def renamed(old, new, state=None):
    return {name.replace(old, new, 1): tensor for name, tensor in (state or WHOLE).items()}


@pytest.mark.parametrize(
    "state",
    [
        WHOLE,
        renamed("body.", "net.body."),
        renamed("body.", ""),
        renamed("body.table", "head"),
        {**WHOLE, "head.weight": TABLE},
        {**renamed("body.", "net.body."), "net.head.weight": TABLE},
        {**WHOLE, "body.mask": torch.zeros(3, 3), "steps": torch.tensor(3), "body.old": TABLE},
    ],
    ids=["plain", "prefix", "base left out", "other name", "both names", "prefix, both", "others"],
)
def test_tensors_are_found(state, tmp_path):
    fitted = fit(stored(tmp_path, state), NAMES)
    for name, tensor in WHOLE.items():
        assert torch.equal(fitted.read(name), tensor)
    assert set(fitted.names) | set(fitted.others) == set(state)
    assert all(name in WHOLE for name in fitted.names.values())
    assert all("head" not in name and "table" not in name for name in fitted.others)


def without(name):
    return {n: t for n, t in WHOLE.items() if n != name}


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("state", "message"),
    [
        (without("body.layer.bias"), "does not fit: it lacks 'body.layer.bias'"),
        (without("body.table.weight"), "lacks 'body.table.weight'"),
        ({**WHOLE, "body.layer.bias": torch.ones(3)}, r"'body.layer.bias' has shape \(3,\), the"),
        ({**WHOLE, "body.layer.bias": torch.ones(4).int()}, "is of type int32, and the network"),
        ({**WHOLE, "body.layer.bias": torch.ones(4).to(torch.float8_e5m2)}, "quantised"),
        ({**WHOLE, "head.weight": TABLE + 1}, "are one tensor in the network, but differ"),
        ({**WHOLE, "ema.weight": TABLE}, "contains 'ema.weight', which is not part of the network"),
        ({**WHOLE, **renamed("body.", "ema.body.")}, "Several networks in .* fit"),
    ],
)
def test_what_does_not_fit_is_named(state, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        fit(stored(tmp_path, state), NAMES)


def test_the_user_may_choose(tmp_path):
    both = {**WHOLE, **{f"ema.{n}": t + 1 for n, t in WHOLE.items()}}
    network = stored(tmp_path, both)
    fitted = fit(network, NAMES, prefix="ema.", others="copy")
    assert torch.equal(fitted.read("body.layer.bias"), BIAS + 1)
    assert set(fitted.others) == set(WHOLE)


@pytest.mark.bad_input
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e300])
def test_numbers_are_finite_in_float32(bad, tmp_path):
    state = {**WHOLE, "body.layer.bias": torch.tensor([0, 0, bad, 0], dtype=torch.float64)}
    fitted = fit(stored(tmp_path, state), NAMES)
    with pytest.raises(ValueError, match="'body.layer.bias' holds NaN or infinite values"):
        fitted.number("body.layer.bias")
    assert fitted.number("body.layer.weight").dtype == torch.float32

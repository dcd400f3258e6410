"""Strategies that leave every process with a piece of the weights are refused in one sentence."""

from types import SimpleNamespace

import pytest
from lightning.pytorch.strategies import (
    DDPStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
)
from module_cases import Blobs, made, trainer
from processes import on_devices

from lightning_bnn._compat import sharding


class DeepSpeedStrategy(SingleDeviceStrategy):
    """Has the name of the one whose package is not there."""


SHARDING = [
    ("FSDP", lambda: object.__new__(FSDPStrategy)),
    ("FSDP2", ModelParallelStrategy),
    ("DeepSpeed", lambda: DeepSpeedStrategy("cpu")),
    (None, DDPStrategy),
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

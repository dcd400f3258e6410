"""Random numbers, memory and streams of devices other than the CPU, of any kind."""

import contextlib
import types

import device_cases as D
import pytest
import torch
from processes import serving
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_bnn import methods, models, testing
from lightning_bnn.bank import writer
from lightning_bnn.metrics.remembered_mmd import MMDReference
from weightsym import params as P
from weightsym.networks import devices
from weightsym.networks.forward import same_noise
from weightsym.networks.randomness import keyed_randomness

EMPTY, GENERATOR = torch.empty, torch.Generator


class Kind:
    """Two devices of a kind, each with random numbers of its own."""

    def __init__(self):
        self.generators = [GENERATOR().manual_seed(k) for k in (10, 20)]

    def get_rng_state(self, device):
        return self.generators[device.index].get_state()

    def set_rng_state(self, state, device):
        self.generators[device.index].set_state(state)

    def mem_get_info(self, device):
        return 100 + device.index, 200

    def drawn(self):
        """Numbers of the CPU and of both devices."""
        every = torch.default_generator, *self.generators
        return [torch.rand(3, generator=generator).tolist() for generator in every]


@pytest.fixture
def kind(monkeypatch):
    known = Kind()
    monkeypatch.setattr(torch, "get_device_module", lambda _: known)
    monkeypatch.setattr(torch, "Generator", lambda _="cpu": GENERATOR())
    monkeypatch.setattr(torch, "empty", lambda *_, device: on(device)[0])
    return known


def on(*places):
    with FakeTensorMode():
        return [EMPTY(2, device=place) for place in places]


def test_devices_are_found_whatever_their_kind():
    tensors = on("xpu:1", "cpu", "cuda:0", "meta", "xpu:1")
    assert devices.elsewhere([*tensors, 3]) == [torch.device("cuda:0"), torch.device("xpu:1")]


STARTS = {
    "noise": lambda: same_noise(on("xpu:1")),
    "key": lambda: keyed_randomness(4, "x", device="xpu:1"),
    "seed": lambda: devices.random_numbers([torch.device("xpu:1")], seed=2**62),
}


@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS)
def test_numbers_of_a_device_start_anew_and_afterwards_go_on_as_before(kind, start):
    restore = devices.remember_randomness([torch.device("xpu", k) for k in (0, 1)])
    undisturbed = kind.drawn()
    restore()
    with start():
        here, other, there = kind.drawn()
    assert other == undisturbed[1]
    assert [here, there] != undisturbed[::2]
    assert kind.drawn()[::2] == undisturbed[::2]
    with start():
        assert kind.drawn()[::2] == [here, there]


ACCELERATORS = {"cuda": "cuda", "mps": "cpu", None: "cpu"}
"""Where is computed what needs float64."""


@pytest.mark.parametrize("kind", ACCELERATORS)
def test_what_is_precise_runs_on_the_accelerator_if_that_has_float64(monkeypatch, kind):
    monkeypatch.setattr(devices, "_has_float64", lambda kind: kind != "mps")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: kind is not None)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(kind))
    assert devices.fastest() == torch.device(ACCELERATORS[kind])


def test_a_device_without_float64_has_float32(monkeypatch):
    zeros = torch.zeros

    def refusing(*size, dtype=None, device="cpu"):
        if (torch.device(device).type, dtype) == ("mps", torch.float64):
            raise TypeError("no float64")
        return zeros(*size, dtype=dtype)

    monkeypatch.setattr(torch, "zeros", refusing)
    devices._has_float64.cache_clear()
    found = {place: devices.widest(torch.device(place)) for place in ("cpu", "xpu", "mps")}
    devices._has_float64.cache_clear()
    assert found == {"cpu": torch.float64, "xpu": torch.float64, "mps": torch.float32}
    assert devices.precise(zeros(1)).dtype == torch.float64


def test_a_device_that_does_not_tell_its_memory_has_none(kind, monkeypatch):
    assert devices.free_memory(torch.device("xpu:1")) == 101
    monkeypatch.delattr(Kind, "mem_get_info")
    assert devices.free_memory(torch.device("xpu:1")) == 0


class Large:
    """The rows of a source that would never fit."""

    rows, shapes = 10**7, {"w": torch.Size([1])}

    def read(self, name, rows, columns):
        raise AssertionError("nothing is read")


def keep_often(times):
    net = models.mlp(2, [8], 2)
    state = methods.SGMCMC(keeping=methods.Keeping(every_n_steps=1)).init(net, P.populate(net, 5))
    fit = methods.Fit(steps=times, epochs=1)
    methods.Keeping(every_n_steps=1).begin(state, fit, methods.Run(net), "SGHMC")


IMPOSSIBLE = {
    "Drawing 1000000000000 networks": lambda: P.populate(models.mlp(64, [32], 10), 10**12),
    "Distances of 10000000 networks in 1 layers": lambda: MMDReference(Large()),
    "Keeping 5 chains 1000000000000 times": lambda: keep_often(10**12),
}


@pytest.mark.bad_input
@pytest.mark.parametrize("what", IMPOSSIBLE)
def test_what_no_memory_can_hold_is_refused_before_it_is_tried(what):
    keep_often(3)  # which fits
    with pytest.raises(ValueError, match=rf"{what}.* takes \d+ TB of memory, and cpu has \d+ GB"):
        IMPOSSIBLE[what]()


def test_what_fits_or_cannot_be_known_is_not_refused(kind, monkeypatch):
    device = torch.device("xpu:1")
    with pytest.raises(ValueError, match="It takes 0 GB of memory, and xpu:1 has 0 GB: wait"):
        devices.check_memory(201, device, "It", "wait")
    devices.check_memory(200, device, "It", "wait")
    monkeypatch.delattr(Kind, "mem_get_info")
    devices.check_memory(201, device, "It", "wait")


def test_copies_of_a_device_with_streams_are_waited_for(kind, monkeypatch):
    """Without streams everything is done at once."""
    event, tensors = object(), {"w": torch.ones(3)}
    stream = types.SimpleNamespace(record_event=lambda: event)
    monkeypatch.setattr(writer, "elsewhere", lambda _: [torch.device("xpu:1")])
    assert writer._host_copy(tensors)[1] == []
    monkeypatch.setattr(Kind, "current_stream", lambda *_: stream, raising=False)
    assert writer._host_copy(tensors)[1] == [event]


# ------------------------------------------------------------ no float64
@contextlib.contextmanager
def no_float64():
    """A pretended device that refuses it, as MPS does."""
    new = testing.PretendedTensor.__new__

    def refusing(cls, memory, device):
        if memory.dtype == torch.float64:
            raise TypeError("no float64 there")
        return new(cls, memory, device)

    testing.PretendedTensor.__new__ = staticmethod(refusing)
    with D.ready():
        yield


@pytest.fixture(scope="module")
def computed_without():
    with serving(D.compared, no_float64) as ask:
        yield ask


TRAINED = {"ensemble": 0.0, "bethe": 0.0, "hmc": 1e-6, "laplace": 1e-3, "callbacks": 0.0}
MEASURED = {"ECE": 0.0, "CRPS": 0.0, "MMD": 0.0}
"""Metrics are computed on the CPU, and so are the numbers of callbacks."""


@pytest.mark.e2e
@pytest.mark.parametrize(("name", "most"), {**TRAINED, **MEASURED}.items())
def test_a_device_without_float64_trains_and_measures(computed_without, name, most):
    answer = computed_without(name)
    assert not isinstance(answer, str), answer
    assert answer <= most


@pytest.mark.e2e
def test_a_tensor_in_float64_is_refused_there(computed_without):
    assert "no float64 there" in computed_without("symmetries")

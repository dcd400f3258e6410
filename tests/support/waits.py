"""Where the host waits for a device: every question that is asked of numbers there.

On a pretended device operations are looked at; on a GPU, torch itself tells.
"""

import contextlib
import sys
import tempfile
import warnings
from pathlib import Path

import device_cases as D
import lightning as L
import torch
from metric_cases import METRICS
from module_cases import OF_EACH_CLASS, Blobs, made
from runs import Plain, fit

import lightning_bnn
import weightsym
from lightning_bnn import testing
from lightning_bnn.callbacks import CheckpointHarvester, MassGap, PermutationTau, TrainingCost
from lightning_bnn.methods.health import Divergence

PACKAGES = [Path(package.__file__).parent for package in (lightning_bnn, weightsym)]
READS = (
    "aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::masked_select",
    "aten::_unique", "aten::unique", "aten::bincount", "aten::repeat_interleave.Tensor",
)  # fmt: skip
"""Operations whose result, or its size, the host must know."""
found = set()
"""File and function of every wait, while somebody listens."""
_listens = False
_computed = testing._computed


def listen(on):
    global _listens
    _listens = on
    if D.REAL:
        torch.cuda.set_sync_debug_mode("warn" if on else "default")


@contextlib.contextmanager
def ready():
    """The device, with somebody who hears its host wait."""
    testing._computed = computed
    with D.ready(), warnings.catch_warnings():
        if D.REAL:
            warnings.simplefilter("always")
            warnings.showwarning = heard
        yield


def heard(message, *_):
    if "called a synchronizing" in str(message):
        note()


def computed(operation, *args, **kwargs):
    if _listens and waits(operation.name(), args, kwargs):
        note()
    return _computed(operation, *args, **kwargs)


def waits(name, args, kwargs):
    """Tell whether an operation reads numbers of the device, or sends it some at once."""
    if name.startswith(READS):
        return True
    if name.startswith(("aten::index.", "aten::index_put", "aten::_index_put")):
        return any(t is not None and t.dtype == torch.bool for t in args[1])
    if name.startswith("aten::copy_"):
        return args[0].device != args[1].device and True not in args[2:]
    if name.startswith("aten::_to_copy"):
        return args[0].device.type != torch.device(kwargs.get("device") or args[0].device).type
    return False


def note():
    """Note the innermost function of ours, beyond those of the device."""
    frame = sys._getframe(1)
    while frame is not None:
        path, name = Path(frame.f_code.co_filename), frame.f_code.co_name
        for package in PACKAGES:
            ours = path.is_relative_to(package) and path.name != "testing.py"
            if ours and not name.startswith("<"):
                found.add(f"{path.relative_to(package.parent)} {name}")
                return
        frame = frame.f_back


# ------------------------------------------------------------ what runs
class Listener(L.Callback):
    """Listens to steps in the middle of an epoch, between two of this kind."""

    def __init__(self, begins):
        self.begins = begins

    def on_train_batch_start(self, trainer, module, batch, index):
        if self.begins and index in (3, 4):
            listen(True)

    def on_train_batch_end(self, *_):
        if not self.begins:
            listen(False)


def training(name):
    torch.manual_seed(0)
    L.Trainer(**options(Listener(True), Listener(False))).fit(made(name), Blobs())


def watching(make):
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        given = options(Listener(True), make(folder), Listener(False))
        fit(Plain(0.0), **given, default_root_dir=folder)


def options(*callbacks):
    silent = {"log_every_n_steps": 10**6, "limit_val_batches": 0, "max_epochs": 1}
    return {**D.options(D.DEVICE), **silent, "callbacks": list(callbacks)}


def measuring(case):
    measured = case.build().to(D.DEVICE)
    for k, batch in enumerate(case.batches):
        there = D.moved(batch, D.DEVICE)
        listen(k > 0)
        measured.update(*there)
        listen(False)


def reading():
    """A question on purpose: what the members' losses have been."""
    divergence = Divergence(2)
    divergence.add(torch.ones(2, device=D.DEVICE))
    listen(True)
    divergence.take()
    listen(False)


CALLBACKS = {
    "PermutationTau": lambda _: PermutationTau(),
    "MassGap": lambda _: MassGap(every_n_steps=1),
    "TrainingCost": lambda _: TrainingCost(),
}
if D.REAL:  # the tensors of a pretended device are of a class that is not written
    CALLBACKS["CheckpointHarvester"] = lambda folder: CheckpointHarvester(
        f"{folder}/bank", every_n_steps=2
    )
PATHS = {
    **{name: lambda name=name: training(name) for name in OF_EACH_CLASS},
    **{name: lambda make=make: watching(make) for name, make in CALLBACKS.items()},
    **{case.name: lambda case=case: measuring(case) for case in METRICS},
    "reading": reading,
}


def waits_of(name):
    found.clear()
    PATHS[name]()
    return sorted(found)

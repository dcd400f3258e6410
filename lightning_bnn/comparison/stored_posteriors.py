"""Posteriors from wherever they are: checkpoints of modules, runs, banks, folders of networks."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import nn

from lightning_bnn import modules
from lightning_bnn.bank import read_networks
from lightning_bnn.comparison.problem import Surroundings
from lightning_bnn.loading import load
from lightning_bnn.modules.judged_module import JudgedModule
from lightning_bnn.params import Params
from lightning_bnn.posteriors import Empirical, Posterior

__all__ = [
    "Contender",
    "Place",
    "chains_of",
    "contender_of",
    "find_config",
    "fingerprint",
    "read_contender",
    "read_module",
    "stack_of",
]


@dataclass(frozen=True)
class Contender:
    """A posterior, mode by mode.

    Attributes:
        name: in tables.
        modes: to draw weights from.
        judged: for each mode, what predicts as it does.
        template: gives the computation.
        likelihood: what outputs say about targets.
        origin: where it is from, so that its numbers can be traced.
    """

    name: str
    modes: Sequence[Posterior]
    judged: Sequence[Posterior]
    template: nn.Module
    likelihood: nn.Module
    origin: Mapping[str, Any] = field(default_factory=dict)


def contender_of(name: str, module: JudgedModule, samples: int = 100, **origin: Any) -> Contender:
    """A module that was trained.

    Args:
        name: in tables.
        module: of this package.
        samples: networks of each mode that will predict.
        **origin: where it is from.
    """
    with torch.no_grad():
        own, judged = module.posterior().modes(), module.judged_modes(samples)
    return Contender(name, own, judged, module.template, module.likelihood, origin)


# ------------------------------------------------------------ places on disk
@dataclass(frozen=True)
class Place:
    """A path, and which of its networks are meant.

    >>> Place.of("runs/bank[10:40]")
    Place(path=PosixPath('runs/bank'), rows=slice(10, 40, None))
    """

    path: Path
    rows: slice | None = None

    @classmethod
    def of(cls, text: str) -> Place:
        """From what a user writes: a path, with rows in brackets if not all are meant."""
        found = re.fullmatch(r"(.+)\[(-?\d*):(-?\d*)\]", text)
        if found is None:
            return cls(Path(text).expanduser())
        first, last = (int(t) if t else None for t in found.groups()[1:])
        return cls(Path(found[1]).expanduser(), slice(first, last))

    def file(self) -> Path:
        """The checkpoint, bank or folder of networks itself; of a run, its newest checkpoint."""
        if not self.path.exists():
            raise ValueError(f"There is nothing at {self.path}.")
        if self.path.is_file() or (self.path / "manifest.jsonl").is_file():
            return self.path
        versions = [config.parent for config in self.path.rglob("config.yaml")]
        banks = [manifest.parent for manifest in self.path.rglob("manifest.jsonl")]
        if not versions and not banks:
            return self.path
        if not versions:
            return _only(self.path, banks)
        runs = sorted({v.parent if v != self.path else v for v in versions})
        files = sorted(self.path.rglob("*.ckpt"), key=lambda p: p.stat().st_mtime)
        outside = [f for f in files if not any(run in f.parents for run in runs)]
        _only(self.path, [*runs, *outside])
        if not files:
            raise ValueError(f"The run {self.path} has no checkpoint yet.")
        return files[-1]


def _only(path: Path, found: Sequence[Path]) -> Path:
    if len(found) > 1:
        held = ", ".join(str(p) for p in sorted(found)[:4])
        raise ValueError(f"{path} holds several things, name one of them: {held}.")
    return found[0]


def find_config(place: Place) -> Path | None:
    """The configuration of the run that a checkpoint or a bank belongs to, if there is one."""
    file = place.file()
    for folder in (file, *list(file.parents)[:3]):
        if (folder / "config.yaml").is_file():
            return folder / "config.yaml"
    return None


def read_contender(name: str, place: Place, around: Surroundings, samples: int = 100) -> Contender:
    """A posterior from disk.

    Args:
        name: in tables.
        place: where it is.
        around: a network of its kind, and data for what needs them to predict.
        samples: networks of each mode that will predict.
    """
    file = place.file()
    origin: dict[str, Any] = {"path": str(file), "sha256": fingerprint(file)}
    if place.rows is not None:
        origin["rows"] = f"{place.rows.start or 0}:{place.rows.stop or ''}"
    module = read_module(file, around) if file.is_file() else None
    if module is not None:
        kind = type(module).__name__
        return _chosen(contender_of(name, module, samples, **origin, kind=kind), place)
    stack, records = read_networks(file, around.template)
    rows = place.rows or slice(None)
    stack, records = {n: t[rows] for n, t in stack.items()}, records[rows]
    if not records:
        raise _nothing(place, "networks")
    own = Empirical(stack, chains_of(records)).modes()
    origin["kind"] = "networks"
    return Contender(name, own, own, around.template, around.likelihood, origin)


def _chosen(contender: Contender, place: Place) -> Contender:
    """Only some members."""
    rows = place.rows or slice(None)
    own, judged = (list(p)[rows] for p in (contender.modes, contender.judged))
    if not own:
        raise _nothing(place, f"{len(contender.modes)} members")
    return replace(contender, modes=own, judged=judged)


def _nothing(place: Place, held: str) -> ValueError:
    return ValueError(f"{place.path} has {held}, none of them in the rows that are asked for.")


def chains_of(records: Sequence[Mapping[str, Any]]) -> list[int] | None:
    """Which networks belong together: those of one member, or all that one run went through.

    Networks of different folders are of different runs; those of one folder, or of a bank, are of
    one run if each is of another step.

    >>> chains_of([{"step": 1}, {"step": 2}]), chains_of([{"step": 2}, {"step": 2}])
    ([0, 0], None)
    """
    members = [record.get("member", 0) for record in records]
    if len(set(members)) > 1:
        return members
    folders = [str(Path(record.get("file", "")).parent) for record in records]
    steps: dict[str, list[Any]] = {}
    for folder, record in zip(folders, records, strict=True):
        steps.setdefault(folder, []).append(record.get("step"))
    names = list(steps)
    one_run = [None not in own and len(set(own)) == len(own) for own in steps.values()]
    if len(records) == 1 or not all(one_run) or len(names) == len(records):
        return None
    return [names.index(folder) for folder in folders]


def read_module(file: Path, around: Surroundings) -> JudgedModule | None:
    """The module that made a checkpoint, if it is one of ours.

    Args:
        file: a checkpoint.
        around: data for what needs them to predict.
    """
    if file.suffix != ".ckpt":
        return None
    held = load(file, mmap=True)
    given = held.get("hyper_parameters") or {} if isinstance(held, dict) else {}
    kind = _kind(held)
    del held
    options: dict[str, Any] = {"map_location": "cpu", "weights_only": True}
    if "_class_path" in given:
        _check_maker(given.get("_instantiator"), file)
        module = L.LightningModule.load_from_checkpoint(file, **options)
    elif kind is not None:
        options |= {"network": around.template, "likelihood": around.likelihood}
        module = kind.load_from_checkpoint(file, **options)
    else:
        return None
    if not isinstance(module, JudgedModule):
        return None
    module.use_training_data(around.source)
    module.example_input_array = around.example()
    return module.eval()


def _kind(held: Any) -> type[JudgedModule] | None:
    """The class of this package that has written a checkpoint."""
    ours = held.get("lightning_bnn") if isinstance(held, dict) else None
    name = ours.get("class") if isinstance(ours, dict) else None
    found = getattr(modules, name) if name in modules.__all__ else None
    return found if isinstance(found, type) and issubclass(found, JudgedModule) else None


def _check_maker(name: Any, file: Path) -> None:
    """Checkpoints name the function that makes their module: only that of Lightning is called."""
    if name not in (None, "lightning.pytorch.cli.instantiate_module"):
        raise ValueError(f"{file} asks for {name} to be called, which is not done.")


def fingerprint(file: Path) -> str:
    """SHA-256 of a file; of a bank that of its manifest, of a folder that of all its files.

    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile() as empty:
    ...     fingerprint(Path(empty.name))
    'e3b0c44298fc'
    """
    digest = hashlib.sha256()
    if (file / "manifest.jsonl").is_file():
        files = [file / "manifest.jsonl"]
    else:
        files = [file] if file.is_file() else sorted(p for p in file.rglob("*") if p.is_file())
    for one in files:
        with one.open("rb") as stream:
            while block := stream.read(2**24):
                digest.update(block)
    return digest.hexdigest()[:12]


def stack_of(contender: Contender) -> Params:
    """All networks of a contender that is made of networks."""
    if not all(isinstance(mode, Empirical) for mode in contender.modes):
        raise ValueError(
            f"{contender.name} must be networks (a bank, a folder of checkpoints, an ensemble or "
            "chains), not a distribution."
        )
    stacks = [mode.networks for mode in contender.modes if isinstance(mode, Empirical)]
    return {name: torch.cat([stack[name] for stack in stacks]) for name in stacks[0]}

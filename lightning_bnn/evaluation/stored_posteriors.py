"""Posteriors on disk: checkpoints of modules, runs, banks, folders of networks."""

from __future__ import annotations

import copy
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
from lightning_bnn.bank import chains_of, read_networks
from lightning_bnn.bank.shipped import shipped_path
from lightning_bnn.evaluation.problem import Problem
from lightning_bnn.methods import Samples
from lightning_bnn.modules.checkpoints import kind_of
from lightning_bnn.posteriors import Empirical, Posterior
from weightsym.files import load
from weightsym.params import Params


@dataclass(frozen=True)
class Location:
    """A path, and a selection of its networks.

    >>> Location.of("runs/bank[10:40]")
    Location(path=PosixPath('runs/bank'), rows=slice(10, 40, None))
    """

    path: Path
    rows: slice | None = None

    @classmethod
    def of(cls, text: str) -> Location:
        """Parse a path, or the name of a shipped bank, with optional rows."""
        match = re.fullmatch(r"(.+)\[(-?\d+)?:(-?\d+)?\]", text)
        if match is None:
            return cls(shipped_path(text))
        first, last = (int(number) if number else None for number in match.groups()[1:])
        return cls(shipped_path(match[1]), slice(first, last))

    def file(self) -> Path:
        """Find the checkpoint, bank or folder of networks, or the newest checkpoint of a run."""
        if not self.path.exists():
            raise ValueError(f"There is nothing at {self.path}.{_other_places()}")
        if self.path.is_file() or (self.path / "manifest.jsonl").is_file():
            return self.path
        is_run = (self.path / "config.yaml").is_file()  # what lies below a run belongs to it
        versions = [self.path] if is_run else [c.parent for c in self.path.rglob("config.yaml")]
        banks = [manifest.parent for manifest in self.path.rglob("manifest.jsonl")]
        if not versions:
            return self._only(banks) if banks else self.path
        runs = sorted({v.parent if v != self.path else v for v in versions})
        files = sorted(self.path.rglob("*.ckpt"), key=lambda p: p.stat().st_mtime)
        outside = [f for f in files if not any(run in f.parents for run in runs)]
        self._only([*runs, *outside])
        if not files:
            raise ValueError(f"The run {self.path} has no checkpoint yet.")
        return files[-1]

    def _only(self, candidates: Sequence[Path]) -> Path:
        if len(candidates) > 1:
            names = ", ".join(str(path) for path in sorted(candidates)[:4])
            raise ValueError(f"{self.path} holds several posteriors, name one of them: {names}.")
        return candidates[0]

    def beside(self, name: str) -> Path | None:
        """Find a file of the run that a checkpoint or a bank belongs to, if it exists."""
        file = self.file()
        files = (folder / name for folder in (file, *list(file.parents)[:3]))
        return next((path for path in files if path.is_file()), None)

    def config(self) -> Path | None:
        """Return the configuration of the run, if it exists."""
        return self.beside("config.yaml")

    def config_or(self, data: str | None) -> Path:
        """Return the configuration that a user names, else that of the run, which must exist."""
        config = self.config() if data is None else Path(data)
        if config is None:
            if self.path.is_dir() and not any(self.path.iterdir()):
                raise ValueError(f"There is no posterior in {self.path}.{_other_places()}")
            raise ValueError(
                f"{self.path} has no `config.yaml` beside it: pass a configuration with network "
                "and data as `--data`."
            )
        return config

    def digest(self) -> str:
        """Return a digest of the file, to detect changes."""
        return digest_of_file(self.file())


def _other_places() -> str:
    """Name folders with checkpoints below the current one, in a sentence."""
    patterns = "*.ckpt", "*/*.ckpt", "*/*/*.ckpt", "*/*/*/*.ckpt"
    files = (file for pattern in patterns for file in Path().glob(pattern))
    folders = sorted({str(file.parent).removesuffix("/checkpoints") for file in files})
    return f" Checkpoints are in {', '.join(folders[:4])}." if folders else ""


def digest_of_file(file: Path) -> str:
    """Compute the start of the SHA-256 of a file, a bank's manifest, or all files of a folder.

    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile() as empty:
    ...     digest_of_file(Path(empty.name))
    'e3b0c44298fc'
    """
    digest = hashlib.sha256()
    if (file / "manifest.jsonl").is_file():
        files = [file / "manifest.jsonl"]
    else:
        files = [file] if file.is_file() else sorted(p for p in file.rglob("*") if p.is_file())
    for path in files:
        with path.open("rb") as stream:
            while block := stream.read(2**24):
                digest.update(block)
    return digest.hexdigest()[:12]


@dataclass(frozen=True)
class StoredPosterior:
    """A posterior, mode by mode.

    Attributes:
        name: in tables.
        modes: to draw weights from.
        predictors: for each mode, what predicts as it does.
        network: gives the computation.
        likelihood: what outputs say about targets.
        origin: where it is from, so that its numbers can be traced.
    """

    name: str
    modes: Sequence[Posterior]
    predictors: Sequence[Posterior]
    network: nn.Module
    likelihood: nn.Module
    origin: Mapping[str, Any] = field(default_factory=dict)

    def only(self, rows: slice | Sequence[int]) -> StoredPosterior:
        """Return the posterior with some of its modes only."""
        chosen = range(len(self.modes))[rows] if isinstance(rows, slice) else rows
        return replace(
            self,
            modes=[self.modes[k] for k in chosen],
            predictors=[self.predictors[k] for k in chosen],
        )

    def thinned(self, most: int | None) -> StoredPosterior:
        """Keep some evenly spaced networks of each mode that consists of networks.

        Args:
            most: maximal number of networks; None keeps all.
        """
        if most is None:
            return self
        return replace(
            self,
            modes=[_thinned(mode, most) for mode in self.modes],
            predictors=[_thinned(mode, most) for mode in self.predictors],
        )

    def stacks(self) -> list[Params]:
        """Return the networks of every mode that consists of networks."""
        return [mode.networks for mode in self.modes if isinstance(mode, Empirical)]

    def networks(self) -> Params:
        """Return all networks of a posterior that consists of networks, as one stack."""
        stacks = self.stacks()
        if len(stacks) < len(self.modes):
            raise ValueError(
                f"{self.name} must be networks (a bank, a folder of checkpoints, an ensemble or "
                "chains), not a distribution."
            )
        return {name: torch.cat([stack[name] for stack in stacks]) for name in stacks[0]}

    def knows_its_noise(self) -> bool:
        """Return whether the likelihood belongs to these networks: banks store no learned noise."""
        learned = getattr(self.likelihood, "noise", None) == "learned"
        return not (learned and self.origin.get("kind") == "networks")

    def chains(self) -> list[int] | None:
        """Number the chain of every network of `networks`, or return None for single networks."""
        sizes = [mode.size for mode in self.modes if isinstance(mode, Empirical)]
        if max(sizes, default=1) == 1:
            return None
        if len(sizes) == 1:
            raise ValueError(
                f"{self.name} is one chain of {sizes[0]} networks, which are not independent: take "
                "several chains, or networks of several runs."
            )
        return [chain for chain, size in enumerate(sizes) for _ in range(size)]


def _thinned(mode: Posterior, most: int) -> Posterior:
    if not isinstance(mode, Empirical) or mode.size <= most:
        return mode
    rows = torch.linspace(0, mode.size - 1, most).round().long()
    return Empirical({name: tensor[rows] for name, tensor in mode.networks.items()})


def posterior_of(name: str, module: Any, samples: int = 100, **origin: Any) -> StoredPosterior:
    """Return the posterior of a trained module.

    Args:
        name: in tables.
        module: of this package.
        samples: networks of each mode that will predict.
        **origin: where it is from.
    """
    with torch.no_grad():
        modes, predictors = module.posterior().modes(), module.judged_modes(samples)
    origin["made"] = "sampled" if isinstance(module.method, Samples) else "trained"
    return StoredPosterior(name, modes, predictors, module.template, module.likelihood, origin)


def read_posterior(
    name: str, source: Location | Any, problem: Problem, samples: int = 100
) -> StoredPosterior:
    """Read a posterior from disk, or from a source for `Posterior.of`.

    Args:
        name: in tables.
        source: where it is, or what holds its networks.
        problem: a network of its kind, and data for what needs them to predict.
        samples: networks of each mode that will predict.
    """
    if not isinstance(source, Location):
        return _in_memory(name, source, problem, samples)
    location, file, rows = source, source.file(), source.rows or slice(None)
    origin: dict[str, Any] = {"path": str(file), "sha256": location.digest()}
    if location.rows is not None:
        origin["rows"] = f"{rows.start or 0}:{rows.stop or ''}"
    module = read_module(file, problem) if file.is_file() else None
    if module is not None:
        posterior = posterior_of(name, module, samples, **origin, kind=type(module).__name__)
        chosen = posterior.only(rows)
        if not chosen.modes:
            raise _no_rows(location, f"{len(posterior.modes)} members")
        return chosen
    stack, records = read_networks(file, problem.network)
    stack, records = {n: t[rows] for n, t in stack.items()}, records[rows]
    if not records:
        raise _no_rows(location, "networks")
    modes = Empirical(stack, chains_of(records)).modes()
    origin["kind"] = "networks"
    return StoredPosterior(name, modes, modes, problem.network, problem.likelihood, origin)


def _in_memory(name: str, source: Any, problem: Problem, samples: int) -> StoredPosterior:
    """Build a posterior from a source in memory."""
    if _is_ours(source):
        return posterior_of(name, source, samples, kind=type(source).__name__)
    posterior = Posterior.of(source, problem.network)
    modes, class_name = posterior.modes(), type(source).__name__
    return StoredPosterior(
        name, modes, modes, problem.network, problem.likelihood, {"kind": class_name}
    )


def _no_rows(location: Location, content: str) -> ValueError:
    return ValueError(f"{location.path} has {content}, none of them in the rows asked for.")


def read_module(file: Path, problem: Problem) -> Any:
    """Load the module of a checkpoint, or return None if it is not of this package.

    Args:
        file: a checkpoint.
        problem: its network, and data for what needs them to predict.
    """
    if file.suffix != ".ckpt":
        return None
    options: dict[str, Any] = {"map_location": "cpu", "weights_only": True}
    content = load(file, mmap=True)
    content = content if isinstance(content, dict) else {}
    arguments = content.get("hyper_parameters") or {}
    if not isinstance(arguments, Mapping):
        raise ValueError(
            f"{file} has hyper-parameters of type {type(arguments).__name__}, not a dict."
        )
    _check_maker(arguments.get("_instantiator"), file)
    module_class: Any = _class_of(content)
    del content
    if "_class_path" in arguments:
        module_class = L.LightningModule
    elif module_class is not None:
        parts = {"network": problem.network, "likelihood": problem.likelihood}
        options |= copy.deepcopy(parts)  # the checkpoint is loaded into them
    else:
        return None
    module = module_class.load_from_checkpoint(file, **options)
    if not _is_ours(module):
        return None
    module.use_training_data(problem.source)
    module.example_input_array = problem.example()
    return module.eval()


def _class_of(content: Mapping[str, Any]) -> type | None:
    """Return the class of this package that has written a checkpoint."""
    module_class = getattr(modules, str(kind_of(content)), None)
    return module_class if _is_ours(module_class) else None


def _is_ours(module: Any) -> bool:
    """Return whether a module, or a class of modules, has a posterior that can be evaluated."""
    return hasattr(module, "judged_modes")


def _check_maker(name: Any, file: Path) -> None:
    """Refuse checkpoints that name any function but Lightning's to build their module."""
    if name not in (None, "lightning.pytorch.cli.instantiate_module"):
        raise ValueError(f"{file} requests a call of {name}, which is refused.")

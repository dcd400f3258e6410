"""Networks that commands read: files, the architecture that they share, their symmetries."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from lightning_bnn.commands.mistakes import building
from lightning_bnn.commands.named_networks import example_of, network_of
from lightning_bnn.commands.transformers_networks import (
    names_in_files,
    transformers_example,
    transformers_network,
)
from lightning_bnn.evaluation.problem import read_problem
from lightning_bnn.params import Params
from lightning_bnn.symmetry import Symmetries, discover
from lightning_bnn.weight_files import (
    FittedNetwork,
    NetworkNames,
    StoredNetwork,
    check_target,
    fit,
)

__all__ = ["DiskNetworks", "architecture", "disk_networks", "prefixes", "shown", "target_of"]

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class DiskNetworks:
    """Networks of one architecture in files.

    Attributes:
        network: gives the computation.
        files: where the networks are, the first of which gives the form of what is written.
        sym: what `discover` says about them.
        example: inputs that the network takes.
    """

    network: nn.Module
    files: tuple[FittedNetwork, ...]
    sym: Symmetries
    example: tuple[Tensor, ...]

    def read(self, k: int) -> Params:
        """One network in float32, to be matched and judged; all numbers are finite."""
        file = self.files[k]
        return {name: file.number(name) for name in shown(file.places, f"reading {k + 1}")}

    def describe(self, others: str = "copied as they are") -> str:
        """How large the networks are, what is in the first besides, and the groups.

        Args:
            others: what becomes of that, in the past participle.
        """
        first, sizes = self.files[0], self.files[0].stored.tensors
        types = sorted({str(sizes[p].dtype).removeprefix("torch.") for p in first.places.values()})
        count = sum(sizes[place].shape.numel() for place in first.places.values())
        lines = [f"parameters: {count} in {len(first.places)} tensors ({', '.join(types)})"]
        if first.others:
            many = f" and {len(first.others) - 1} more" if len(first.others) > 1 else ""
            lines.append(
                f"{others} from {first.stored.path}: {first.others[0]!r}{many}, "
                "which are none of the network"
            )
        return "\n".join([*lines, "", str(self.sym), ""])

    def forget_network(self) -> None:
        """Free what only computing needs, before files are written."""
        self.network.to("meta")


def disk_networks(
    stored: Sequence[StoredNetwork],
    network: str | None,
    input: str,
    init: Mapping[str, Any] | None,
    prefix: str | None,
    batch_norm: Literal["carrier", "eval"],
    others: Literal["refuse", "copy"],
    seed: int,
) -> DiskNetworks:
    """Find the tensors of a network in files, and read its symmetries.

    Args:
        stored: files or folders that were opened.
        network: import path of a class or function, a configuration (.yaml), or nothing for
            folders of Hugging Face.
        input: shape of the input.
        init: arguments of the class.
        prefix: what stands before the names of the network in the files that have it.
        batch_norm: as for `discover`.
        others: what becomes of tensors that are none of the network.
        seed: of the initialisation and of the example input.
    """
    folder = next((s.path for s in stored if s.is_folder), None)
    torch.manual_seed(seed)
    module, example, names = architecture(network, folder, input, init or {})
    files = tuple(
        fit(one, names, start, others)
        for one, start in zip(stored, prefixes(stored, prefix), strict=True)
    )
    sym = discover(module, *example, batch_norm=batch_norm)
    return DiskNetworks(module.eval(), files, sym, example)


def prefixes(stored: Sequence[StoredNetwork], prefix: str | None) -> list[str | None]:
    """The prefix for the files that have it; other files may do without, unless none has it.

    Args:
        stored: files or folders that were opened.
        prefix: what stands before the names of the network in some of them.
    """
    having = [prefix and any(n.startswith(prefix) for n in one.tensors) for one in stored]
    return [prefix if there or not any(having) else None for there in having]


def architecture(
    network: str | None, folder: Path | None, input: str, init: Mapping[str, Any]
) -> tuple[nn.Module, tuple[Tensor, ...], NetworkNames]:
    """A network that a user names, an example of its input, and its names in files.

    Args:
        network: import path of a class or function, or a configuration (.yaml).
        folder: of Hugging Face, where nothing else says what the network is.
        input: shape of the input.
        init: arguments of the class.
    """
    if network is None:
        if folder is None:
            raise ValueError(
                "`--network` is missing: give the import path of the class of the networks, e.g. "
                "--network torchvision.models.resnet18 --input 1,3,224,224"
            )
        module = transformers_network(folder)
        return module, transformers_example(module, input), names_in_files(module)
    if Path(network).suffix in (".yaml", ".yml"):
        with building(f"What {network} describes"):
            problem = read_problem(Path(network))
            example = example_of(input) if input else (problem.example(),)
        return problem.network, example, names_in_files(problem.network)
    example = example_of(input)
    module = network_of(network, init)
    return module, example, names_in_files(module)


def target_of(
    out: str | None, stored: Sequence[StoredNetwork], overwrite: bool, dry_run: bool
) -> Path | None:
    """Where to write; None where only numbers are asked for.

    Args:
        out: what the user has written.
        stored: the networks that are read, the first of which gives the form.
        overwrite: whether what is there may be replaced.
        dry_run: whether only numbers are asked for.
    """
    if out is None:
        if not dry_run:
            raise ValueError("`--out` is missing: say where to write, or `--dry_run true`.")
        return None
    target = Path(out)
    for one in stored:
        if target.exists() and os.path.samefile(target, one.path):
            raise ValueError(f"`--out`: {target} is one of the networks that are read.")
    check_target(target, stored[0], overwrite)
    return None if dry_run else target


def shown(steps: Iterable[T], what: str) -> Iterable[T]:
    """The same steps, with a progress bar on a terminal."""
    return tqdm(list(steps), desc=what, leave=False, disable=not sys.stderr.isatty())

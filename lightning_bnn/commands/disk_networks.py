"""Networks that commands read: files, the architecture that they share, their symmetries."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from torch import Tensor, nn
from tqdm.auto import tqdm

from lightning_bnn.commands.architecture import Architecture
from lightning_bnn.commands.named_networks import build
from lightning_bnn.params import Params
from lightning_bnn.symmetry import Symmetries, discover
from lightning_bnn.weight_files import NetworkNames, fit
from lightning_bnn.weight_files.fitting import FittedNetwork, Others
from lightning_bnn.weight_files.stored import StoredNetwork
from lightning_bnn.weight_files.writing import check_target

__all__ = ["DiskNetworks", "fit_all", "shown", "target_of"]

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class DiskNetworks:
    """Networks of one architecture in files.

    Attributes:
        network: gives the computation.
        files: where the networks are, the first of which gives the form of what is written.
        sym: their symmetries.
        example: inputs that the network takes.
    """

    network: nn.Module
    files: tuple[FittedNetwork, ...]
    sym: Symmetries
    example: tuple[Tensor, ...]

    @classmethod
    def of(
        cls, stored: Sequence[StoredNetwork], architecture: Architecture, others: Others
    ) -> DiskNetworks:
        """Find the tensors of a network in files, and its symmetries.

        Args:
            stored: files or folders that were opened.
            architecture: of all of them.
            others: what becomes of tensors that do not belong to the network.
        """
        folder = next((s.path for s in stored if s.is_folder), None)
        module, example, names = build(architecture, folder)
        files = fit_all(stored, names, architecture.prefix, others)
        sym = discover(module, *example, batch_norm=architecture.batch_norm)
        return cls(module, tuple(files), sym, example)

    def read(self, k: int) -> Params:
        """Read one network in float32, to be matched and judged, if all numbers are finite."""
        file = self.files[k]
        return {name: file.number(name) for name in shown(file.places, f"reading {k + 1}")}

    def describe(self, others: str = "copied as they are") -> str:
        """Describe the size of the networks, other tensors in the first file, and the groups.

        Args:
            others: what becomes of those tensors, in the past participle.
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


def fit_all(
    stored: Sequence[StoredNetwork], names: NetworkNames, prefix: str | None, others: Others
) -> list[FittedNetwork]:
    """Find the tensors of a network in every file.

    Args:
        stored: files or folders that were opened.
        names: of the network.
        prefix: what stands before them in the files that have it, unless none has it.
        others: what becomes of tensors that do not belong to the network.
    """
    having = [prefix and any(n.startswith(prefix) for n in one.tensors) for one in stored]
    return [
        fit(one, names, prefix if there or not any(having) else None, others)
        for one, there in zip(stored, having, strict=True)
    ]


def target_of(out: str | None, stored: Sequence[StoredNetwork], overwrite: bool) -> Path | None:
    """Check where to write, or return None where only numbers are asked for.

    Args:
        out: what the user has written.
        stored: the networks that are read, the first of which gives the form.
        overwrite: whether what is there may be replaced.
    """
    if out is None:
        return None
    target = Path(out)
    for one in stored:
        if target.exists() and os.path.samefile(target, one.path):
            raise ValueError(f"`--out`: {target} is one of the networks that are read.")
    check_target(target, stored[0], overwrite)
    return target


def shown(steps: Iterable[T], what: str) -> Iterable[T]:
    """Go through steps with a progress bar on a terminal."""
    return tqdm(list(steps), desc=what, leave=False, disable=not sys.stderr.isatty())

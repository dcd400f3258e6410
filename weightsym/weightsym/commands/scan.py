"""`weightsym scan`: which networks of a folder were made from which, as a family tree."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

import weightsym
from weightsym import Symmetries, kinship, likeness, relation
from weightsym.commands.architecture import Architecture
from weightsym.commands.merge import is_bank
from weightsym.commands.networks import build, fit_all, numbers, shown, symmetries_in
from weightsym.commands.reports import Outcome, report_file, write_report
from weightsym.discovery.folding import folding
from weightsym.extras import of_the_plug_in
from weightsym.files import NetworkNames, draft_of, open_network, read_file, save_tensors
from weightsym.matching.moved import parked
from weightsym.matching.relation import Verdict
from weightsym.networks.files.fitting import FittedNetwork
from weightsym.networks.files.stored import StoredNetwork
from weightsym.networks.forward import first_line

_SUFFIXES = (".safetensors", ".ckpt", ".pt", ".pth", ".bin")
_RELATED: Sequence[Verdict] = ("same function", "made from it", "parts of it")


def scan(
    folder: str,
    architecture: Architecture,
    suspect: str | None = None,
    nearest: int = 3,
    sketches: str | None = None,
    out: str | None = None,
    overwrite: bool = False,
) -> Outcome:
    """Draw the family tree of the networks in a folder, or find the parents of one network.

    Every network is reduced to thousands of numbers that no symmetry changes. Networks whose
    numbers agree most, beyond what all networks of the folder have in common, are then compared in
    full, as `weightsym diff` compares them. Which of two relatives came first is not said. Networks
    of another architecture are named and left out. Nothing in the files is executed.

    Args:
        folder: with .safetensors, .ckpt and .pt files, or folders of Hugging Face; or a bank. E.g.:
            weightsym scan checkpoints --network torchvision.models.resnet18 --input 1,3,224,224
        architecture: options that name the network.
        suspect: a network whose parents are looked for, in the folder or elsewhere; by default
            all networks are compared with each other.
        nearest: how many of the most similar networks each is compared with in full.
        sketches: file that keeps the numbers of all networks for the next scan, e.g.
            shelf.safetensors; files that are new or have changed are read again.
        out: file for all numbers, e.g. family.json; a tree is drawn beside it, family.png.
        overwrite: replace an existing file at --out (true or false).
    """
    target = report_file(out, overwrite)
    if nearest < 1:
        raise ValueError(f"`--nearest` must be at least 1, got {nearest}.")
    if sketches is not None and Path(sketches).suffix != ".safetensors":
        raise ValueError(f"`--sketches` must be a .safetensors file, got {sketches}.")
    with _files(Path(folder)) as files:
        return _scanned(files, architecture, suspect, nearest, sketches, target)


@contextlib.contextmanager
def _files(folder: Path) -> Iterator[Path]:
    """A folder of networks, those of a bank in temporary files."""
    if not is_bank(folder):
        yield folder
        return
    bank = of_the_plug_in("bank", f"The bank {folder}")
    with TemporaryDirectory() as files:
        bank.export_files(bank.CheckpointBank(folder, "r"), files)
        yield Path(files)


def _scanned(
    folder: Path,
    architecture: Architecture,
    suspect: str | None,
    nearest: int,
    sketches: str | None,
    target: Path | None,
) -> Outcome:
    """Compare all networks of a folder, print what is found, and write it."""
    shelf = _Shelf.of(folder, suspect, architecture, Path(sketches) if sketches else None)
    names, similar = list(shelf.networks), kinship(shelf.sketches)
    pairs = _candidates(similar, nearest, None if suspect is None else len(names) - 1)
    found = [shelf.link(*pair, similar) for pair in shown(pairs, "comparing in full")]
    links = [link for link in found if link.verdict in _RELATED]
    print("\n".join(_lines(names, found, links, suspect)))
    for name, reason in shelf.others.items():
        print(f"left out: {name}: {reason}")
    content = {
        "networks": names,
        "others": shelf.others,
        "kinship": similar.tolist(),
        "links": [vars(link) for link in found],
        "families": [[names[k] for k in family] for family in families(len(names), links)],
    }
    if target is not None:
        print(write_report(target, content, lambda plots: _figure(plots, names, links)))
    return Outcome(content)


@dataclass(frozen=True)
class Link:
    """Two networks that were compared in full.

    Attributes:
        a: number of the one.
        b: number of the other.
        kinship: the correlation of their sketches.
        verdict: of `relation`.
        p: the least probability that it found.
        rest: the distance that is left between them.
    """

    a: int
    b: int
    kinship: float
    verdict: Verdict
    p: float
    rest: float


@dataclass(frozen=True, eq=False)
class _Shelf:
    """Networks of one architecture, with the symmetries that they share."""

    fold: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]
    sym: Symmetries
    networks: Mapping[str, FittedNetwork]
    sketches: Sequence[Mapping[str, Tensor]]
    others: Mapping[str, str]
    seed: int

    @classmethod
    def of(
        cls, folder: Path, suspect: str | None, architecture: Architecture, kept: Path | None
    ) -> _Shelf:
        """Open all networks of a folder, and reduce each to its sketch."""
        stored, others = _opened([p for p in _paths(folder) if p != kept])
        if suspect is not None:
            same = Path(suspect).resolve()
            stored = {n: s for n, s in stored.items() if (folder / n).resolve() != same}
            stored[suspect] = open_network(Path(suspect))
        first = [*stored.values()][::-1] if suspect else [*stored.values()]
        whole = next((file.path for file in first if file.is_folder), None)
        model, example, names = build(architecture, whole)
        if suspect is not None:
            fit_all([stored[suspect]], names, architecture.prefix, "copy")
        networks, misfits = _fitting(stored, names, architecture.prefix)
        others |= misfits
        if len(networks) < 2:
            reasons = (f"{name}: {reason}" for name, reason in others.items())
            raise ValueError(
                f"{folder} must hold at least two networks of one architecture, got "
                f"{len(networks)}. {' '.join(reasons)}".rstrip()
            )
        folded, fold = folding(model, *example)
        sym = symmetries_in(folded, *example, batch_norm=architecture.batch_norm)
        library = _Library(kept, repr((weightsym.__version__, architecture, sym.shapes)))
        sketches = [
            library.sketch(file, lambda file: likeness(fold(numbers(file)), sym))
            for file in shown(networks.values(), "reading")
        ]
        library.save()
        if not sketches[0]:
            raise ValueError(
                "Nothing of these networks has an order of its own that could be compared: use "
                "`weightsym diff` for two of them."
            )
        return cls(fold, sym, networks, sketches, others, architecture.seed)

    def link(self, a: int, b: int, similar: Tensor) -> Link:
        """Compare two networks in full."""
        files = list(self.networks.values())
        first, second = (parked(self.fold(numbers(files[k]))) for k in (a, b))
        found = relation(first, second, self.sym, seed=self.seed)
        p = min(found.p_exact, found.p_robust, found.p_close)
        return Link(a, b, float(similar[a, b]), found.verdict, p, found.difference.rest)


class _Library:
    """Sketches of networks by the content of their files, for the next scan.

    Args:
        path: of the file, None to keep nothing.
        settings: everything but the files that sketches depend on.
    """

    def __init__(self, path: Path | None, settings: str) -> None:
        self.path, self.settings = path, hashlib.sha256(settings.encode()).hexdigest()
        self.known, self.used = dict[str, dict[str, Tensor]](), dict[str, Mapping[str, Tensor]]()
        file = read_file(path) if path is not None and path.exists() else None
        if file is not None and "sketches" not in file.metadata:
            raise ValueError(f"`--sketches` {path} holds other tensors than those of a scan.")
        if file is not None and file.metadata["sketches"] == self.settings:
            for name, tensor in file.tensors.items():
                key, _, frame = name.partition("/")
                self.known.setdefault(key, {})[frame] = tensor.read()

    def sketch(
        self, file: FittedNetwork, make: Callable[[FittedNetwork], Mapping[str, Tensor]]
    ) -> Mapping[str, Tensor]:
        """The sketch of a network, which is made only if its file is new."""
        if self.path is None:
            return make(file)
        key = _digest(file.stored)
        self.used[key] = self.known[key] if key in self.known else make(file)
        return self.used[key]

    def save(self) -> None:
        """Write all sketches, those of files that were not in this scan, too."""
        if self.path is None or self.used.keys() <= self.known.keys():
            return
        every = {f"{key}/{n}": t for key, row in (self.known | self.used).items()
                 for n, t in row.items()}  # fmt: skip
        with draft_of(self.path, wait=False) as draft:
            save_tensors(draft, every, {"sketches": self.settings})


def _digest(stored: StoredNetwork) -> str:
    """A hash of the content of all files of a network."""
    digest = hashlib.sha256()
    for shard in stored.shards:
        path = stored.path / shard.name if stored.is_folder else stored.path
        with path.open("rb") as file:
            while block := file.read(2**22):
                digest.update(block)
    return digest.hexdigest()


def _paths(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise ValueError(f"`folder` must be a folder with networks, got {folder}.")
    return sorted(
        path
        for path in folder.iterdir()
        if path.suffix in _SUFFIXES or (path.is_dir() and (path / "config.json").is_file())
    )


def _opened(paths: Sequence[Path]) -> tuple[dict[str, StoredNetwork], dict[str, str]]:
    """Networks by the name of their file, and why other files cannot be read."""
    stored, others = dict[str, StoredNetwork](), dict[str, str]()
    for path in paths:
        try:
            stored[path.name] = open_network(path)
        except ValueError as error:
            others[path.name] = first_line(error)
    return stored, others


def _fitting(
    stored: Mapping[str, StoredNetwork], names: NetworkNames, prefix: str | None
) -> tuple[dict[str, FittedNetwork], dict[str, str]]:
    """The networks that fit an architecture, and why others do not."""
    networks, others = dict[str, FittedNetwork](), dict[str, str]()
    for name, file in stored.items():
        try:
            (networks[name],) = fit_all([file], names, prefix, "copy")
        except ValueError as error:
            others[name] = first_line(error)
    return networks, others


def _candidates(similar: Tensor, nearest: int, suspect: int | None) -> list[tuple[int, int]]:
    """Pairs to compare in full: every network, or the suspect, with those that are most similar."""
    count = len(similar)
    scores = similar.clone().fill_diagonal_(-torch.inf)
    best = scores.topk(min(nearest, count - 1)).indices.tolist()
    chosen = range(count) if suspect is None else [suspect]
    return sorted({(min(k, j), max(k, j)) for k in chosen for j in best[k]})


def families(count: int, links: Sequence[Link]) -> list[list[int]]:
    """Networks that are connected by links, the largest family first.

    Args:
        count: how many networks there are.
        links: between relatives.

    >>> families(4, [Link(0, 2, 0.9, "made from it", 0.0, 0.1)])
    [[0, 2], [1], [3]]
    """
    family = list(range(count))
    for link in links:
        old, new = family[link.b], family[link.a]
        family = [new if f == old else f for f in family]
    members = [[k for k in range(count) if family[k] == f] for f in dict.fromkeys(family)]
    return sorted(members, key=len, reverse=True)


# ------------------------------------------------------------ text and figure
def _lines(
    names: Sequence[str], found: Sequence[Link], links: Sequence[Link], suspect: str | None
) -> Iterator[str]:
    yield f"{len(names)} networks of one architecture, {len(found)} pairs compared in full"
    width = max(map(len, names))
    for link in sorted(found if suspect is not None else links, key=lambda each: each.rest):
        yield (
            f"{names[link.a]:<{width}}  {names[link.b]:<{width}}  {link.verdict:<14}"
            f"  left {link.rest:.2g}  p <= {link.p:.1g}"
        )
    if suspect is not None:
        return
    groups = families(len(names), links)
    for family in (group for group in groups if len(group) > 1):
        yield f"family: {', '.join(names[k] for k in family)}"
    alone = [names[k] for (k, *more) in groups if not more]
    if alone:
        yield f"no relatives: {', '.join(alone)}"


def _figure(plots: Any, names: Sequence[str], links: Sequence[Link]) -> Any:
    """Draw the tree of all networks by the distances of those that are related."""
    apart = torch.full((len(names), len(names)), torch.inf).fill_diagonal_(0)
    for link in links:
        apart[link.a, link.b] = apart[link.b, link.a] = link.rest
    return plots.family_figure(names, apart)

"""Where networks are on disk: a run, a checkpoint, a bank, a folder, and which rows of it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_bnn.bank import shipped_path

__all__ = ["Place", "digest_of_file"]


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
        """From what a user writes: a path or the name of a bank of the package, maybe with rows."""
        match = re.fullmatch(r"(.+)\[(-?\d*):(-?\d*)\]", text)
        if match is None:
            return cls(shipped_path(text))
        first, last = (int(part) if part else None for part in match.groups()[1:])
        return cls(shipped_path(match[1]), slice(first, last))

    def file(self) -> Path:
        """The checkpoint, bank or folder of networks itself; of a run, its newest checkpoint."""
        if not self.path.exists():
            raise ValueError(f"There is nothing at {self.path}.")
        if self.path.is_file() or (self.path / "manifest.jsonl").is_file():
            return self.path
        versions = [config.parent for config in self.path.rglob("config.yaml")]
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
            raise ValueError(f"{self.path} holds several things, name one of them: {names}.")
        return candidates[0]

    def config(self) -> Path | None:
        """The configuration of the run that a checkpoint or a bank belongs to, if there is one."""
        file = self.file()
        folders = (file, *list(file.parents)[:3])
        configs = (folder / "config.yaml" for folder in folders)
        return next((config for config in configs if config.is_file()), None)

    def digest(self) -> str:
        """A digest of the file, to tell whether it has changed."""
        return digest_of_file(self.file())


def digest_of_file(file: Path) -> str:
    """The start of the SHA-256 of a file; of a bank of its manifest, of a folder of all its files.

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

"""Banks that come with the package, each with a card that says where its networks come from."""

from __future__ import annotations

import hashlib
from importlib.resources import files
from pathlib import Path

import yaml

from lightning_bnn.bank.checkpoint_bank import CheckpointBank

__all__ = ["bank_card", "digest_of_networks", "shipped_bank", "shipped_banks", "shipped_path"]

_CARD = "card.yaml"


def shipped_banks() -> list[str]:
    """The names of all banks of the package, sorted.

    >>> shipped_banks()
    ['mnist_optunets']
    """
    return sorted(path.parent.name for path in _root().glob(f"*/{_CARD}"))


def shipped_path(path: str | Path) -> Path:
    """Find a bank of the package by its name, unless something else is at that path.

    Args:
        path: of a user's networks, or the name of a bank of the package.

    >>> shipped_path("runs/ensemble")
    PosixPath('runs/ensemble')
    """
    chosen = Path(path).expanduser()
    return _root() / chosen if str(path) in shipped_banks() and not chosen.exists() else chosen


def shipped_bank(name: str) -> CheckpointBank:
    """The networks of a bank of the package, to be read.

    >>> networks = shipped_bank("mnist_optunets")[:3]
    >>> networks["0.weight"].shape
    torch.Size([3, 2, 1, 4, 4])
    """
    if name not in shipped_banks():
        names = ", ".join(shipped_banks())
        raise ValueError(f"There is no bank {name!r} in the package; there are: {names}.")
    return CheckpointBank(_root() / name, "r")


def bank_card(path: Path) -> dict[str, str]:
    """Read the card of a bank of the package, empty for a bank of the user's own.

    >>> card = bank_card(shipped_path("mnist_optunets"))
    >>> card["network"]
    'lightning_bnn.models.optunet(), 392 weights'
    """
    card = path / _CARD
    if path.parent != _root() or not card.is_file():  # a stranger's says what it likes
        return {}
    content: dict[str, str] = yaml.safe_load(card.read_text(encoding="utf-8"))
    return content


def digest_of_networks(bank: Path) -> str:
    """SHA-256 of all numbers of a bank, as networks have them.

    >>> path = shipped_path("mnist_optunets")
    >>> bank_card(path)["sha256"].startswith(digest_of_networks(path))
    True
    """
    digest = hashlib.sha256()
    with CheckpointBank(bank, "r") as stored:
        for name, tensor in sorted(stored[:].items()):
            digest.update(name.encode())
            digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def _root() -> Path:
    return Path(str(files("lightning_bnn") / "bank"))

"""The data distribution, its banks, and their cards of origin."""

from __future__ import annotations

import hashlib
from importlib.util import find_spec
from pathlib import Path

import yaml

from lightning_bnn.bank.checkpoint_bank import CheckpointBank
from weightsym import MissingPackage

_CARD = "card.yaml"
_BANKS = ("mnist_optunets",)
"""Banks of the data distribution, whose names are known without it, too."""
_INSTALL = "pip install lightning-bnn-data (in a clone: pip install -e ./bnn-data)"


def data_folder() -> Path | None:
    """Return the folder of `lightning-bnn-data`, or None if it is not installed.

    >>> (data_folder() / "references" / "sine" / "card.json").is_file()
    True
    """
    spec = find_spec("lightning_bnn_data")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def missing_data(title: str) -> MissingPackage:
    """Return an error that explains how to install missing data.

    >>> print(missing_data("The reference 'sine'"))
    The reference 'sine' needs lightning-bnn-data: pip install lightning-bnn-data (in a clone: \
pip install -e ./bnn-data)

    Args:
        title: name of the feature that needs them.
    """
    return MissingPackage(f"{title} needs lightning-bnn-data: {_INSTALL}")


def shipped_banks() -> list[str]:
    """Return the sorted names of all banks of the data distribution.

    >>> shipped_banks()
    ['mnist_optunets']
    """
    folder = data_folder()
    return [] if folder is None else sorted(card.parent.name for card in folder.glob(f"*/{_CARD}"))


def shipped_path(path: str | Path) -> Path:
    """Find a bank of the data distribution by name, unless that path exists.

    Args:
        path: of a user's networks, or the name of a bank.

    >>> shipped_path("runs/ensemble")
    PosixPath('runs/ensemble')
    """
    chosen = Path(path).expanduser()
    return _found(str(path)) if str(path) in _BANKS and not chosen.exists() else chosen


def shipped_bank(name: str) -> CheckpointBank:
    """Open a bank of the data distribution for reading.

    >>> networks = shipped_bank("mnist_optunets")[:3]
    >>> networks["0.weight"].shape
    torch.Size([3, 2, 1, 4, 4])
    """
    if name not in _BANKS:
        names = ", ".join(_BANKS)
        raise ValueError(f"There is no bank {name!r} in lightning-bnn-data; choose from: {names}.")
    return CheckpointBank(_found(name), "r")


def bank_card(path: Path) -> dict[str, str]:
    """Read the card of a bank of the data distribution, empty for other banks.

    >>> card = bank_card(shipped_path("mnist_optunets"))
    >>> card["network"]
    'lightning_bnn.models.optunet(), 392 weights'
    """
    card = path / _CARD
    if path.parent != data_folder() or not card.is_file():  # a stranger's says what it likes
        return {}
    content: dict[str, str] = yaml.safe_load(card.read_text(encoding="utf-8"))
    return content


def digest_of_networks(bank: Path) -> str:
    """Return the SHA-256 of all numbers in the networks of a bank.

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


def _found(name: str) -> Path:
    folder = data_folder()
    if folder is None:
        raise missing_data(f"The bank {name!r}")
    return folder / name

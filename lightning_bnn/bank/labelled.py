"""Banks as data sets for learning on weights."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import TensorDataset

from lightning_bnn.bank.checkpoint_bank import CheckpointBank
from weightsym import Symmetries, canonicalise
from weightsym import params as P


def labelled_networks(
    bank: CheckpointBank, label: str, sym: Symmetries | None = None
) -> TensorDataset:
    """Return the weights of every network as one row, with a number from its record.

    Args:
        bank: networks that fit into memory.
        label: a field of the records; that of a group is ``"metrics.val_acc"``.
        sym: symmetries to remove, so that networks with the same function have the same row.

    >>> from lightning_bnn.bank import shipped_bank
    >>> data = labelled_networks(shipped_bank("mnist_optunets"), "loss")
    >>> weights, loss = data[0]
    >>> len(data), weights.shape, round(float(loss), 3)
    (1000, torch.Size([392]), 0.537)
    """
    labels = torch.tensor([_field(record, label) for record in bank.records])
    networks = bank[:] if sym is None else canonicalise(bank[:], sym)
    return TensorDataset(P.ravel(networks, list(bank.shapes), stacked=True)[0], labels)


def _field(record: dict[str, Any], label: str) -> int | float:
    value: Any = record
    for key in label.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    if not isinstance(value, (int, float)):
        fields = ", ".join(record) or "none"
        raise ValueError(
            f"`label`: {label!r} is not a number in every record; fields are {fields}."
        )
    return value

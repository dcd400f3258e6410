"""What a posterior is tested on: usual sets, shifted ones, and those out of distribution."""

from __future__ import annotations

from typing import Any

__all__ = ["TestSet", "named_sets"]

TestSet = tuple[str, str]
"""Name of a set and its kind: ``id``, ``ood`` (no targets that mean anything) or ``shift``."""


def named_sets(datamodule: Any, loaders: Any) -> list[TestSet]:
    """What the test loaders are: what the datamodule's ``test_sets`` says, else ID and OOD sets.

    Args:
        datamodule: where the loaders are from, if it is known.
        loaders: one, a list of them, or a dict with their names.

    >>> from lightning_bnn.datamodules import TwoGaussians
    >>> data = TwoGaussians()
    >>> named_sets(data, data.test_dataloader())
    [('test', 'id'), ('ring', 'ood')]
    >>> named_sets(None, {"mnist": None, "fashion": None})
    [('test', 'id'), ('fashion', 'ood')]
    """
    count = len(loaders) if isinstance(loaders, (list, tuple, dict)) else 1
    stated = getattr(datamodule, "test_sets", None)
    if stated is not None:
        if len(stated) != count or stated[0][1] != "id":
            raise ValueError(
                f"`test_sets` of {type(datamodule).__name__} must name each of its {count} test "
                f"loaders, the first of kind 'id'; it is {stated}."
            )
        return list(stated)
    if isinstance(loaders, dict):
        names = list(loaders)[1:]
    else:
        names = [f"ood_{k}" for k in range(1, count)] if count > 2 else ["ood"] * (count - 1)
    return [("test", "id"), *((name, "ood") for name in names)]

"""Under what licence data are, and draws of posteriors that were sampled from them."""

from __future__ import annotations

__all__ = ["licence_of"]

_DRAWS = "draws: Apache 2.0"
_OF_UCI = {
    "Airfoil": "C5VW2C", "Concrete": "C5PK67", "Energy": "C51307", "Yacht": "C5XG7R",
}  # fmt: skip
"""Tables under CC BY 4.0, and where they are from."""
_OTHERS = {
    "Digits": f"data: those of scikit-learn, https://doi.org/10.24432/C50P49; {_DRAWS}",
    "NoisySine": "Apache 2.0, data and draws",
    "TwoGaussians": "Apache 2.0, data and draws",
}


def licence_of(data: str, table: str = "") -> str:
    """In one line, the licence of the data and of the draws; nothing is made up.

    >>> licence_of("UCI", "yacht")
    'data: CC BY 4.0, https://doi.org/10.24432/C5XG7R; draws: Apache 2.0'
    >>> licence_of("my.own.Data")
    'data: not known; draws: Apache 2.0'

    Args:
        data: the class of a datamodule, as configurations name it.
        table: which of its tables, where it has several.
    """
    name = data.rpartition(".")[2]
    source = _OF_UCI.get(table.capitalize() if name == "UCI" else name)
    if source is not None:
        return f"data: CC BY 4.0, https://doi.org/10.24432/{source}; {_DRAWS}"
    return _OTHERS.get(name, f"data: not known; {_DRAWS}")

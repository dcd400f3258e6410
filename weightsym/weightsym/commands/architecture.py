"""Options that specify the network in files, the same for every command."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Architecture:
    """A network, an example of its input, and the names of its tensors in files.

    Args:
        network: import path of a class or function that returns the network, or a configuration for
            fit (.yaml); not needed for folders of Hugging Face, if transformers is installed.
        input: shape of the input, e.g. 1,3,224,224; a type may follow a colon, e.g. 2,16:int64;
            separate several inputs by ;
        init: arguments of the class, e.g. --init.num_classes 10
        prefix: prefix of the network's tensor names in the files, dot included, e.g. net. (found
            automatically if only one fits); files that lack it everywhere are accepted.
        batch_norm: carrier leaves the weights before a batch norm unchanged; eval treats the norm
            as a fixed affine map.
        seed: random seed of the initialisation, the example input and all random choices.
    """

    network: str | None = None
    input: str = ""
    init: dict[str, Any] | None = None
    prefix: str | None = None
    batch_norm: Literal["carrier", "eval"] = "carrier"
    seed: int = 0

"""The options by which a user names the network that files hold, the same for every command."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor, nn

    from lightning_bnn.weight_files import NetworkNames

__all__ = ["Architecture"]


@dataclass(frozen=True)
class Architecture:
    """A network, an example of its input, and how its tensors are called in files.

    Args:
        network: import path of a class or function that returns the network, or a configuration for
            fit (.yaml); not needed for folders of Hugging Face, if transformers is installed.
        input: shape of the input, e.g. 1,3,224,224; a type may follow a colon, e.g. 2,16:int64;
            separate several inputs by ;
        init: arguments of the class, e.g. --init.num_classes 10
        prefix: prefix of the network's tensor names in the files, dot included, e.g. net. (found
            automatically if only one fits); files that lack it everywhere are accepted.
        batch_norm: carrier leaves the weights before a batch norm alone; eval treats the norm as a
            fixed affine map.
        seed: random seed of the initialisation, the example input and all random choices.
    """

    network: str | None = None
    input: str = ""
    init: dict[str, Any] | None = None
    prefix: str | None = None
    batch_norm: Literal["carrier", "eval"] = "carrier"
    seed: int = 0

    def build(self, folder: Path | None) -> tuple[nn.Module, tuple[Tensor, ...], NetworkNames]:
        """Build the network and an example of its input, and list its names in files.

        Args:
            folder: of Hugging Face, where nothing else says what the network is.
        """
        import torch

        from lightning_bnn.commands import named_networks as named
        from lightning_bnn.commands.mistakes import building
        from lightning_bnn.evaluation.problem import read_problem

        torch.manual_seed(self.seed)
        if self.network is None:
            if folder is None:
                raise ValueError(
                    "`--network` is missing: give the import path of the class of the networks, "
                    "e.g. --network torchvision.models.resnet18 --input 1,3,224,224"
                )
            module = named.transformers_network(folder)
            example = named.transformers_example(module, self.input)
        elif Path(self.network).suffix in (".yaml", ".yml"):
            with building(f"What {self.network} describes"):
                problem = read_problem(Path(self.network))
                module = problem.network
                example = named.example_of(self.input) if self.input else (problem.example(),)
        else:
            example = named.example_of(self.input)
            module = named.network_of(self.network, self.init or {})
        return module.eval(), example, named.names_in_files(module)

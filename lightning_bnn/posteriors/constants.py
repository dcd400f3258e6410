"""Tensors under the names of a network, held by a module so that they move, save and load."""

from __future__ import annotations

from torch import nn

from lightning_bnn.params import Params

__all__ = ["Constants"]


class Constants(nn.Module):
    """Named tensors that are not trained.

    Buffers cannot have dots in their names, so that they are numbered.

    Args:
        tensors: what to hold; copies are made.
    """

    def __init__(self, tensors: Params) -> None:
        super().__init__()
        self.names = tuple(tensors)
        for k, tensor in enumerate(tensors.values()):
            self.register_buffer(f"tensor_{k}", tensor.detach().clone())

    def tensors(self) -> Params:
        """The tensors by name."""
        return {name: getattr(self, f"tensor_{k}") for k, name in enumerate(self.names)}

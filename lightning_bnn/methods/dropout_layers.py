"""Dropout put into networks that have none."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from lightning_bnn.arguments import check_fraction
from lightning_bnn.posteriors.dropout import Layers

__all__ = ["LinearAfterDropout", "has_dropout", "with_dropout"]


def has_dropout(network: nn.Module) -> bool:
    """Whether some module of a network drops units in training."""
    layers = (m for m in network.modules() if isinstance(m, nn.modules.dropout._DropoutNd))
    return any(layer.p > 0 for layer in layers)


class LinearAfterDropout(nn.Linear):
    """A linear layer that drops some of its inputs in training.

    Args:
        *args: of the linear layer.
        p: how many.
        **kwargs: of the linear layer.
    """

    def __init__(self, *args: Any, p: float = 0.5, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.p = p

    def forward(self, input: Tensor) -> Tensor:
        """Drop some of the inputs in training, then multiply."""
        return super().forward(F.dropout(input, self.p, self.training))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, p={self.p:g}"


def with_dropout(network: nn.Module, p: float, layers: Layers) -> nn.Module:
    """A copy of a network with dropout before its linear layers; its names stay.

    Args:
        network: without dropout.
        p: the rate.
        layers: ``"all"`` but a first layer of the network, or the ``"last"``.
    """
    check_fraction("p", p)
    result = copy.deepcopy(network)
    if has_dropout(result):
        raise ValueError("`network` has dropout: leave `p` out, or take a network without it.")
    weighted = [name for name, m in result.named_modules() if hasattr(m, "weight")]
    linear = [n for n in weighted if type(result.get_submodule(n)) is nn.Linear]
    chosen = linear[-1:] if layers == "last" else [n for n in linear if n != weighted[0]]
    if not chosen or chosen == [""]:
        raise ValueError("`network` has no linear layer that dropout could come before.")
    for name in chosen:
        old = result.get_submodule(name)
        assert isinstance(old, nn.Linear)
        new = LinearAfterDropout(old.in_features, old.out_features, old.bias is not None, p=p)
        new.weight, new.bias = old.weight, old.bias
        path, _, leaf = name.rpartition(".")
        setattr(result.get_submodule(path), leaf, new.train(old.training))
    return result

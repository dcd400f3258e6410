"""Chains of stages: what a network computes, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightning_bnn.stacks.fused.elementwise import Elementwise
from lightning_bnn.stacks.fused.stage import Pads, Pair, Stage

__all__ = ["Chain", "Layer", "Unsuitable", "with_room"]


class Unsuitable(Exception):
    """The network is no chain of stages; the message says what it does."""


@dataclass(frozen=True)
class Layer:
    """A stage with the names of its weights and biases, empty if it has none."""

    stage: Stage
    weight: str = ""
    bias: str = ""


@dataclass(frozen=True)
class Chain:
    """What a network computes, layer by layer.

    Attributes:
        layers: in their order.
        out_shape: of the outputs of an example.
    """

    layers: tuple[Layer | Elementwise, ...]
    out_shape: tuple[int, ...]

    @property
    def uses(self) -> tuple[str, ...]:
        """Names of weights and biases, in the order in which layers use them."""
        layers = [layer for layer in self.layers if isinstance(layer, Layer)]
        return tuple(name for layer in layers for name in (layer.weight, layer.bias) if name)

    @property
    def weights(self) -> tuple[str, ...]:
        """The same names, each once."""
        return tuple(dict.fromkeys(self.uses))

    def earliest(self, names: Sequence[str]) -> int:
        """The first layer that uses one of some weights."""
        pairs = ((k, w) for k, w in enumerate(self.layers) if isinstance(w, Layer))
        return next(k for k, layer in pairs if {layer.weight, layer.bias} & {*names})

    @property
    def first(self) -> Stage:
        """The first stage: it says how inputs are laid out."""
        return next(layer.stage for layer in self.layers if isinstance(layer, Layer))

    @property
    def out_size(self) -> Pair:
        """Rows and columns of the last stage's outputs."""
        stages = [layer.stage for layer in self.layers if isinstance(layer, Layer)]
        return stages[-1].out_size

    def __deepcopy__(self, memo: Any) -> Chain:
        return self


def with_room(layers: list[Layer | Elementwise]) -> list[Layer | Elementwise]:
    """Let every stage leave the room around its outputs that the next one wants.

    Args:
        layers: in their order.
    """
    done: list[Layer | Elementwise] = []
    wanted: Pads = (0, 0, 0, 0)
    size: Pair | None = None
    for layer in reversed(layers):
        if isinstance(layer, Layer):
            stage = layer.stage
            if any(wanted) and stage.out_size != size:
                raise Unsuitable("it pads what it has reshaped")
            layer = replace(layer, stage=stage.leading_to(wanted))
            wanted, size = stage.pads, stage.size
        elif any(wanted) and not layer.keeps_zero:
            raise Unsuitable(f"it pads what comes out of {layer.name}")
        done.append(layer)
    return done[::-1]

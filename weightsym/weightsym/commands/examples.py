"""Examples for the evaluation of networks from files, and their loss."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves

from weightsym.commands.mistakes import building
from weightsym.commands.networks import code_of_the_user, imported
from weightsym.extras import of_the_plug_in
from weightsym.networks.files.checkpoints import read_state
from weightsym.networks.forward import in_precision_of
from weightsym.params import Params

_BATCH, _BATCHES = 64, 64


class _Unfit(ValueError):
    """Inputs or targets that do not fit a network."""


@dataclass(frozen=True)
class ExampleBatches:
    """Batches of inputs and targets.

    Attributes:
        batches: pairs of input and target.
        source: description of their origin.
    """

    batches: list[tuple[Any, Tensor]]
    source: str

    @property
    def inputs(self) -> Iterator[Any]:
        """Return the inputs of all batches."""
        return (x for x, _ in self.batches)

    @torch.no_grad()
    def fitted(self, network: nn.Module, params: Params) -> ExampleBatches:
        """Return the batches in the precision of a network that fits all of them.

        Args:
            network: gives the computation.
            params: its weights.
        """
        batches = [(in_precision_of(params, x), y) for x, y in self.batches]
        for x, y in batches:
            try:
                loss(functional_call(network, params, (x,)), y)
            except _Unfit:
                raise
            except Exception as error:  # whatever networks and torch say about numbers like these
                shapes = f"inputs {_described(x)}, targets {_described(y)}"
                raise _Unfit(
                    f"`--data`: {self.source} does not fit the network ({shapes}): "
                    f"{type(error).__name__}: {error}"
                ) from error
        return ExampleBatches(batches, self.source)

    def __str__(self) -> str:
        """Return their number and their source."""
        return f"{sum(len(y) for _, y in self.batches)} examples of {self.source}"


def examples_of(data: str) -> ExampleBatches:
    """Return the first batches of the user's training data.

    Args:
        data: import path of a LightningDataModule, a configuration for `fit` (YAML), or a file
            (.pt, .safetensors) with ``inputs`` and ``targets``.
    """
    path = Path(data)
    if path.suffix in (".pt", ".pth", ".safetensors"):
        batches = _of_file(path)
    elif path.suffix in (".yaml", ".yml"):
        problems = of_the_plug_in("evaluation.problem", f"`--data {data}`")
        with building(f"What {data} describes"):
            batches = list(problems.read_problem(path).training_set(_BATCHES))
    else:
        batches = _of_class(data)
    if not batches:
        raise ValueError(f"`--data`: {data} has no examples.")
    _check(batches, data)
    return ExampleBatches(batches, data)


def _of_file(path: Path) -> list[tuple[Any, Tensor]]:
    if not path.is_file():
        raise ValueError(f"`--data`: there is no file {path}.")
    state, _ = read_state(path)
    if not {"inputs", "targets"} <= state.keys():
        raise ValueError(f"`--data`: {path} must hold `inputs` and `targets`.")
    x, y = state["inputs"], state["targets"]
    if x.ndim < 1 or y.ndim < 1 or len(x) != len(y) or not len(x):
        raise ValueError(
            f"`--data`: `inputs` and `targets` of {path} must have equal lengths, got "
            f"shapes {tuple(x.shape)} and {tuple(y.shape)}."
        )
    return list(zip(x.split(_BATCH), y.split(_BATCH), strict=True))


def _of_class(data: str) -> list[tuple[Any, Tensor]]:
    data_class = imported(data)
    with code_of_the_user(f"`--data`: `{data}` raised"):
        source = data_class() if callable(data_class) else data_class
    if not all(hasattr(source, name) for name in ("train_dataloader", "on_after_batch_transfer")):
        raise ValueError(
            f"`--data` must be a LightningDataModule, a configuration (.yaml) or a file (.pt, "
            f".safetensors), got {data!r}."
        )
    problems = of_the_plug_in("evaluation.problem", f"`--data {data}`")
    with code_of_the_user(f"`--data`: `{data}` raised"):
        return list(problems.Problem(nn.Identity(), source).training_set(_BATCHES))


def _check(batches: list[tuple[Any, Tensor]], data: str) -> None:
    for tensor in itertools.chain.from_iterable(batches):
        if isinstance(tensor, Tensor) and not bool(torch.isfinite(tensor).all()):
            raise ValueError(f"`--data`: {data} holds NaN or infinite values.")


def loss(outputs: Any, targets: Tensor) -> Tensor:
    """Return the cross-entropy for whole-number targets, the mean squared error for others.

    Args:
        outputs: of a network; a model of transformers has them in ``logits``.
        targets: classes, possibly of every token or pixel, or numbers.
    """
    outputs = getattr(outputs, "logits", outputs[0] if isinstance(outputs, tuple) else outputs)
    if targets.is_floating_point():
        if outputs.shape != targets.shape and outputs.shape == (*targets.shape, 1):
            outputs = outputs.squeeze(-1)
        if outputs.shape != targets.shape:
            raise _Unfit(_unfit(outputs, targets))
        return nn.functional.mse_loss(outputs, targets.to(outputs))
    if outputs.shape[:-1] == targets.shape:
        outputs, targets = outputs.flatten(0, -2), targets.flatten()
    elif (*outputs.shape[:1], *outputs.shape[2:]) != targets.shape:
        raise _Unfit(_unfit(outputs, targets))
    return nn.functional.cross_entropy(outputs, targets.long())


def _described(values: Any) -> str:
    """Return shapes and types of the tensors in an input."""
    tensors = [t for t in tree_leaves(values) if isinstance(t, Tensor)]
    types = (str(t.dtype).removeprefix("torch.") for t in tensors)
    pairs = zip(tensors, types, strict=True)
    return ", ".join(f"{tuple(t.shape)} {dtype}" for t, dtype in pairs) or type(values).__name__


def _unfit(outputs: Tensor, targets: Tensor) -> str:
    shapes = f"{tuple(targets.shape)} for outputs of shape {tuple(outputs.shape)}"
    return f"`--data`: the targets do not fit the network: they have shape {shapes}."

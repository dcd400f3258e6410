"""A problem that posteriors share: a network, its data, and a likelihood of its outputs."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, TensorDataset

from lightning_bnn.calibration.calibrated import validation_loaders
from lightning_bnn.evaluation.evaluators import named_sets
from lightning_bnn.likelihoods import Categorical
from lightning_bnn.predictions import ClassPredictions, kind_of
from weightsym import Symmetries, discover
from weightsym import params as P
from weightsym.files import read_settings
from weightsym.params import Params, first_line

_AT_ONCE = 1000
_PROBED = 100
"""Number of test inputs by which functions are compared."""


class StoredBatches:
    """One set of a datamodule, prepared for networks, and read once, as loaders may shuffle.

    Args:
        source: the datamodule.
        loader: of the set.
        most: maximal number of batches.
    """

    def __init__(self, source: L.LightningDataModule, loader: Any, most: int | None = None) -> None:
        self._source, self._loader, self._most = source, loader, most
        self._batches: list[tuple[Any, Tensor]] | None = None

    def __iter__(self) -> Iterator[tuple[Any, Tensor]]:
        if self._batches is None:
            batches = itertools.islice(iter(self._loader), self._most)
            moved = (self._source.on_after_batch_transfer(batch, 0) for batch in batches)
            self._batches = [_pair(batch) for batch in moved]
        return iter(self._batches)

    def targets(self) -> Tensor:
        """Return the targets of all batches."""
        every = [targets for _, targets in self]
        if len({targets.shape[1:] for targets in every}) > 1:
            raise ValueError(
                "The targets of batches have different lengths: pad all to one, with "
                "`Categorical(ignore_index=-100)`."
            )
        return torch.cat(every)

    def target_std(self) -> Tensor | None:
        """Return the unit of standardised targets, if the datamodule knows it."""
        return getattr(self._source, "target_std", None)

    def digest(self) -> str:
        """Return a digest of all inputs and targets, to detect changed data."""
        digest = hashlib.sha256()
        for tensor in tree_leaves(list(self)):
            if isinstance(tensor, Tensor):
                content = tensor.detach().cpu().contiguous().view(torch.uint8)
                digest.update(content.numpy().tobytes())
        return digest.hexdigest()[:12]


def _pair(batch: Any) -> tuple[Any, Tensor]:
    """Return inputs and targets of a batch."""
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        size = f" of {len(batch)}" if isinstance(batch, (tuple, list)) else ""
        raise ValueError(
            "Batches must be (inputs, targets) for a comparison, got a "
            f"{type(batch).__name__}{size}: convert them in `on_after_batch_transfer` of the "
            "datamodule."
        )
    inputs, targets = batch
    return inputs, targets


class _OnlyTests(L.LightningDataModule):
    """A datamodule of test data alone.

    Args:
        data: a loader, or inputs and targets; or several by name, the first in distribution.
    """

    def __init__(self, data: Any) -> None:
        super().__init__()
        sets = data if isinstance(data, dict) and data else {"test": data}
        self._loaders = {name: _loader(examples) for name, examples in sets.items()}

    def test_dataloader(self) -> Any:
        return self._loaders


def _loader(data: Any) -> Any:
    """Return batches of inputs and targets from two tensors or from a loader."""
    pair = isinstance(data, (tuple, list)) and len(data) == 2
    if pair and all(isinstance(t, Tensor) for t in data):
        inputs, targets = data
        if len(inputs) != len(targets):
            raise ValueError(f"`data` has {len(inputs)} inputs, but {len(targets)} targets.")
        return DataLoader(TensorDataset(inputs, targets), _AT_ONCE)
    if not hasattr(data, "__iter__") or isinstance(data, (dict, Tensor, nn.Module)):
        raise ValueError(
            "`data` must be a datamodule, a loader, a pair (inputs, targets) or a configuration, "
            f"got {type(data).__name__}."
        )
    return data


@dataclass(frozen=True)
class Problem:
    """A network and the data that it is evaluated on.

    Attributes:
        network: gives the computation.
        source: the data.
        likelihood: what outputs say about targets.
    """

    network: nn.Module
    source: L.LightningDataModule
    likelihood: nn.Module = field(default_factory=Categorical)

    @classmethod
    def of(cls, data: Any, network: nn.Module, likelihood: nn.Module | None = None) -> Problem:
        """Return the problem of test data as a notebook has them.

        Args:
            data: a datamodule, a loader of inputs and targets, or both as two tensors; or a dict of
                such sets by name, of which all but the first are out of distribution.
            network: gives the computation.
            likelihood: what outputs say about targets, by default `Categorical`.
        """
        source = data if isinstance(data, L.LightningDataModule) else _OnlyTests(data)
        problem = cls(network.eval(), source, likelihood or Categorical())
        problem.check()
        return problem

    @torch.no_grad()
    def check(self) -> None:
        """Refuse data that do not fit the network."""
        try:
            inputs, targets = next(iter(self.test_set()))
            outputs = self.network(inputs[:2])
            cast(Any, self.likelihood).log_prob(outputs[None], targets[:2])
        except (RuntimeError, TypeError, ValueError, IndexError, StopIteration) as error:
            none = isinstance(error, StopIteration)
            reason = "there are no examples." if none else first_line(error)
            raise ValueError(f"`data` do not fit the network: {reason}") from None

    def training_set(self, most: int) -> StoredBatches:
        """Return the first batches of the training data."""
        self.source.prepare_data()
        self.source.setup("fit")
        return StoredBatches(self.source, self.source.train_dataloader(), most)

    def validation_data(self) -> StoredBatches:
        """Join all validation data, and refuse a datamodule without any."""
        loaders = validation_loaders(self.source)
        return StoredBatches(self.source, itertools.chain.from_iterable(loaders))

    def validation_set(self) -> StoredBatches | None:
        """Join all validation data, or return None for fewer than two examples."""
        try:
            every = self.validation_data()
            return every if len(every.targets()) > 1 else None
        except ValueError:
            return None

    def test_set(self) -> StoredBatches:
        """Return the in-distribution test set."""
        return next(iter(self._test_sets("id").values()))

    def ood_set(self, name: str | None = None) -> tuple[str, StoredBatches] | None:
        """Return one out-of-distribution set, by default the first, or None."""
        sets = self._test_sets("ood")
        if name is not None and name not in sets:
            raise ValueError(f"`ood` must be one of {', '.join(sets) or 'none'}, got {name!r}.")
        name = name or next(iter(sets), None)
        return None if name is None else (name, sets[name])

    def example(self) -> Any:
        """Return two rows of inputs for the network."""
        inputs, _ = next(iter(self.test_set()))
        return inputs[:2]

    def probe(self, likelihood: Any) -> Callable[[Params], Tensor]:
        """Return a function that predicts up to a hundred test inputs: probabilities, or outputs.

        Args:
            likelihood: says what outputs mean.
        """
        inputs, _ = next(iter(self.test_set()))
        classes = kind_of(likelihood) is ClassPredictions

        def predict(networks: Params) -> Tensor:
            outputs = P.apply(self.network, networks, inputs[:_PROBED])
            return ClassPredictions.of_each(likelihood, outputs).probs if classes else outputs

        return predict

    def symmetries(self) -> Symmetries:
        """Return the symmetries of the network."""
        return discover(self.network, self.example())

    def _test_sets(self, role: str) -> dict[str, StoredBatches]:
        self.source.prepare_data()
        self.source.setup("test")
        loaders = self.source.test_dataloader()
        names = getattr(self.source, "test_sets", None) or named_sets(None, loaders)
        if isinstance(loaders, dict):
            loaders = list(loaders.values())
        elif not isinstance(loaders, (list, tuple)):
            loaders = [loaders]
        sets = zip(names, loaders, strict=False)  # what is not there is not compared on
        return {name: StoredBatches(self.source, loader) for (name, k), loader in sets if k == role}


def read_problem(config: Path) -> Problem:
    """Read the network and data of a configuration for `lightning-bnn fit`.

    Args:
        config: a YAML file.
    """
    from jsonargparse import ArgumentParser

    from lightning_bnn import datamodules

    for name in dir(datamodules):  # so that YAML can name its classes
        getattr(datamodules, name)

    try:
        settings = read_settings(config)
        arguments = settings["model"]["init_args"]
        parts = {"network": arguments["network"], "data": settings["data"]}
    except (OSError, KeyError, TypeError) as error:
        raise ValueError(
            f"{config} must be a configuration with `model.init_args.network` and `data`, as for "
            f"`lightning-bnn fit` ({type(error).__name__}: {error})."
        ) from None
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(nn.Module, "network")
    parser.add_subclass_arguments(L.LightningDataModule, "data")
    if arguments.get("likelihood") is not None:
        parser.add_subclass_arguments(nn.Module, "likelihood")
        parts["likelihood"] = arguments["likelihood"]
    instantiate = getattr(parser, "instantiate", parser.instantiate_classes)  # its newer name
    objects = instantiate(parser.parse_object(parts))
    likelihood = objects.get("likelihood") or Categorical()
    return Problem(objects.network.eval(), objects.data, likelihood)

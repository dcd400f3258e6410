"""What a configuration says about networks and data."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from lightning_bnn.likelihoods import Categorical
from lightning_bnn.settings_files import read_settings

__all__ = ["Batches", "Surroundings", "read_surroundings"]


class Batches:
    """One set of a data module, as networks take it, read once: a loader may shuffle.

    Args:
        source: the data module.
        loader: of the set.
        most: so many batches only.
    """

    def __init__(self, source: L.LightningDataModule, loader: Any, most: int | None = None) -> None:
        self._source, self._loader, self._most = source, loader, most
        self._held: list[tuple[Any, Tensor]] | None = None

    def __iter__(self) -> Iterator[tuple[Any, Tensor]]:
        if self._held is None:
            batches = itertools.islice(iter(self._loader), self._most)
            self._held = [self._source.on_after_batch_transfer(b, 0)[:2] for b in batches]
        return iter(self._held)

    def targets(self) -> Tensor:
        """All of them."""
        return torch.cat([targets for _, targets in self])


@dataclass(frozen=True)
class Surroundings:
    """A network and the data that it is judged on.

    Attributes:
        template: gives the computation.
        source: the data.
        likelihood: what outputs say about targets.
    """

    template: nn.Module
    source: L.LightningDataModule
    likelihood: nn.Module = field(default_factory=Categorical)

    def inside(self) -> Batches:
        """The test set in distribution."""
        return Batches(self.source, self._loaders()[0])

    def training(self, most: int) -> Batches:
        """The first batches of the training data."""
        self.source.prepare_data()
        self.source.setup("fit")
        return Batches(self.source, self.source.train_dataloader(), most)

    def outside(self, name: str | None = None) -> tuple[str, Batches] | None:
        """One set that is out of distribution, by default the first; None if there is none."""
        sets = getattr(self.source, "test_sets", None)
        loaders = self._loaders()
        if sets is None:
            sets = [("test", "id"), *((f"ood_{k}", "ood") for k in range(1, len(loaders)))]
        known = {own: loaders[k] for k, (own, kind) in enumerate(sets) if kind == "ood"}
        if name is not None and name not in known:
            raise ValueError(f"`ood` must be one of {', '.join(known) or 'none'}, got {name!r}.")
        for own, loader in known.items():
            if name in (None, own):
                return own, Batches(self.source, loader)
        return None

    def example(self) -> Any:
        """Two inputs."""
        inputs, _ = next(iter(self.inside()))
        return inputs[:2]

    def _loaders(self) -> list[Any]:
        self.source.prepare_data()
        self.source.setup("test")
        loaders = self.source.test_dataloader()
        return list(loaders) if isinstance(loaders, (list, tuple)) else [loaders]


def read_surroundings(config: Path) -> Surroundings:
    """Network and data of a configuration as `lightning-bnn fit` takes it.

    Args:
        config: a YAML file.
    """
    from jsonargparse import ArgumentParser

    import lightning_bnn.datamodules  # noqa: F401  so that YAML can name its classes

    try:
        held = read_settings(config)
        arguments = held["model"]["init_args"]
        parts = {"network": arguments["network"], "data": held["data"]}
    except (OSError, KeyError, TypeError) as error:
        raise ValueError(
            f"{config} must be a configuration with `model.init_args.network` and `data`, as "
            f"`lightning-bnn fit` takes it ({type(error).__name__}: {error})."
        ) from None
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(nn.Module, "network")
    parser.add_subclass_arguments(L.LightningDataModule, "data")
    if arguments.get("likelihood") is not None:
        parser.add_subclass_arguments(nn.Module, "likelihood")
        parts["likelihood"] = arguments["likelihood"]
    instantiate = getattr(parser, "instantiate", parser.instantiate_classes)  # its newer name
    made = instantiate(parser.parse_object(parts))
    likelihood = made.get("likelihood") or Categorical()
    return Surroundings(made.network.eval(), made.data, likelihood)

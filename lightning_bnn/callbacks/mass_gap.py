"""The share of a network's squared weights that rescaling could save."""

from __future__ import annotations

from typing import Any, Literal

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_bnn._compat import figure_step
from lightning_bnn.callbacks.watching import Network, SymmetryCallback
from weightsym import Symmetries, excess, mass, mass_problem, min_mass, rescale
from weightsym.params import Params

__all__ = ["MassGap"]


class MassGap(SymmetryCallback):
    r"""Logs the mass of a network (its squared weights) beside its least mass over rescalings.

    .. math:: \text{excess} = 100 \Big(\frac{M(\theta)}{\min_s M(s \cdot \theta)} - 1\Big)

    Multiplying the weights that enter a unit and dividing those that leave it by the same number
    changes the penalty but not the function. Logged every n steps:

    - ``mass``, ``mass_minimum`` and ``mass_excess``, which is above the minimum in percent,
    - ``largest_weight``, and ``largest_weight_at_minimum`` once rescaled, of all layers; those of
      each are a picture of `PosteriorFigures`,
    - where matrices may mix channels, as in attention heads and adapters: ``mass_excess/heads``,
      what these matrices alone could save, and ``mass_excess/joint``, matrices and scales together.

    Where nothing compensates a scale, as under `weight_norm`, the minimum is a limit that no scales
    reach. The excess is then meaningless, and one warning names the weights.

    Works with any LightningModule. The network and its input are found in the first batch.

    Args:
        every_n_steps: number of optimizer steps between two values; a shorter run has one at its
            end.
        module: name of the network inside the LightningModule; by default it is found.
        batch_norm: ``"carrier"`` holds the weights before a batch norm and lets its gain carry the
            scale; ``"eval"`` treats it as a fixed affine map.

    References:
        | A Symmetry-Aware Exploration of BNN Posteriors (Laurent, Aldea, Franchi, 2024), 3.6

    >>> from lightning import Trainer
    >>> from lightning_bnn.datamodules import TwoGaussians
    >>> from lightning_bnn.models import mlp
    >>> from lightning_bnn.modules import DeepEnsemble
    >>> quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    >>> gap = MassGap(every_n_steps=1)
    >>> trainer = Trainer(max_steps=1, enable_model_summary=False, callbacks=[gap], **quiet)
    >>> trainer.fit(DeepEnsemble(mlp(2, [8], 2), members=1), TwoGaussians())
    >>> logged = trainer.logged_metrics
    >>> bool(logged["mass"] > logged["mass_minimum"]), bool(logged["mass_excess"] > 0)
    (True, True)
    """

    largest: dict[str, tuple[float, float]]
    """Largest absolute weight of every layer, and the same once rescaled, as of the last look."""
    persistent = {"history": list, "_scales": lambda: None}
    history: list[tuple[int, list[float]]]
    """Step and (mass, minimum, excess in percent), as logged; then, where there are matrices,
    excess over the matrices of heads, and over these and scales together."""
    _scales: tuple[Tensor, ...] | None

    def __init__(
        self,
        every_n_steps: int = 50,
        module: str | None = None,
        batch_norm: Literal["carrier", "eval"] = "carrier",
    ) -> None:
        super().__init__(module, every_n_steps, batch_norm)
        self.largest = {}

    def begin(self, weights: Params) -> None:
        assert self.network is not None
        self._warned = False
        device, before = next(iter(weights.values())).device, self._scales or ()
        sizes = [group.units for group in self.network.symmetries.scalings]
        fits = [scale.shape[-1] for scale in before] == sizes
        self._scales = tuple(scale.to(device) for scale in before) if fits else None

    def look(self, trainer: Any, pl_module: Any, weights: Params) -> None:
        assert self.network is not None
        if not bool(mass(weights, self.network.symmetries).isfinite().all()):
            rank_zero_warn("MassGap skips weights that are not finite.")
            return
        symmetries = self.network.symmetries
        result = min_mass(weights, symmetries, start=self._scales)
        if not (self._warned or bool(result.attained.all())):
            self._warned = True
            names = ", ".join(_uncompensated(weights, symmetries)) or "some units"
            rank_zero_warn(
                f"MassGap: nothing compensates the scales of {names}, so mass_minimum is a "
                "limit that no scales reach, and mass_excess is meaningless."
            )
        balanced = rescale(weights, symmetries, result.scales)
        self._scales = result.scales
        minima = [result.minimum]
        if _mixes(symmetries):
            heads = min_mass(weights, symmetries, mixing="only", tolerance=_TOLERANCE)
            joint = min_mass(weights, symmetries, mixing=True, tolerance=_TOLERANCE)
            minima += [heads.minimum, joint.minimum]
        self._log(trainer, pl_module, weights, balanced, result.mass, minima)

    def _check(self, network: Network) -> None:
        if not network.symmetries.scalings and not _mixes(network.symmetries):
            raise ValueError("the network has no units that can be rescaled.")

    def _log(
        self,
        trainer: Any,
        pl_module: Any,
        weights: Params,
        balanced: Params,
        before: Tensor,
        minima: list[Tensor],
    ) -> None:
        assert self.network is not None
        names = self.network.symmetries.weights
        excesses = [excess(before, least) for least in minima]
        numbers = torch.stack([before, minima[0], *excesses]).double()
        largest = torch.stack([_largest(w, names) for w in (weights, balanced)])
        row = numbers.flatten(1).mean(1).tolist() if numbers.ndim > 1 else numbers.tolist()
        values = dict(zip(_NAMES, row, strict=False))
        values |= dict(zip(_LARGEST, largest.amax(1).tolist(), strict=True))
        self.largest = dict(zip(names, map(tuple, largest.T.tolist()), strict=True))
        self._log_all(trainer, pl_module, values)
        self.history.append((figure_step(trainer), row))


_KINDS = ("mass_excess", "mass_excess/heads", "mass_excess/joint")
_NAMES = ("mass", "mass_minimum", *_KINDS)
_LARGEST = ("largest_weight", "largest_weight_at_minimum")
_TOLERANCE = 1e-6  # of the certified gap: what is missed is of the order of its square


def _mixes(symmetries: Symmetries) -> bool:
    """Check whether matrices that change the mass may mix channels."""
    return any(group.rescales for group in symmetries.linear)


def _uncompensated(weights: Params, symmetries: Symmetries) -> list[str]:
    """Name the groups whose units have weights on one side only, so that scales shrink them."""
    problem = mass_problem(weights, symmetries)
    one_sided = ((problem.inflow == 0) != (problem.outflow == 0)).flatten(0, -2).any(0)
    groups = one_sided.split([group.units for group in symmetries.scalings])
    pairs = zip(symmetries.scalings, groups, strict=True)
    return [group.name for group, units in pairs if bool(units.any())]


def _largest(weights: Params, names: Any) -> Tensor:
    return torch.stack([weights[name].abs().max().double() for name in names])

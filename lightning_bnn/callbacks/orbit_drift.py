"""The share of a run's path along which the function does not change."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_bnn._compat import figure_step
from lightning_bnn.callbacks.watching import Network, SymmetryCallback
from weightsym import orbit_directions
from weightsym import params as P
from weightsym.params import Params

__all__ = ["OrbitDrift"]

_TOLERANCE = 1e-6


class OrbitDrift(SymmetryCallback):
    r"""Logs the share of the steps along the orbit, where the function does not change.

    .. math:: \text{drift} = \frac{\|P \Delta\|^2}{\|\Delta\|^2}, \quad
        \Delta = \theta_{t + n} - \theta_t

    P projects onto the tangents of the orbit of all continuous symmetries at :math:`\theta_t`, see
    `weightsym.orbit_directions`. Gradients are orthogonal to it; penalties, momenta that were
    divided by their sizes (Adam) and noise are not. Logged every n steps:

    - ``orbit_drift``, for the last n steps,
    - ``orbit_drift/path``, of all steps so far, squares added up,
    - ``orbit_drift/chance``, the share of the dimensions, which a random direction would have.

    Works with any LightningModule; the network and its input are found in the first batch.

    Args:
        every_n_steps: number of optimizer steps between two values.
        module: name of the network inside the LightningModule; by default it is found.

    >>> from lightning import Trainer
    >>> from lightning_bnn.datamodules import TwoGaussians
    >>> from lightning_bnn.models import mlp
    >>> from lightning_bnn.modules import DeepEnsemble
    >>> quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    >>> drift = OrbitDrift(every_n_steps=1)
    >>> trainer = Trainer(max_steps=2, enable_model_summary=False, callbacks=[drift], **quiet)
    >>> trainer.fit(DeepEnsemble(mlp(2, [8], 2), members=1), TwoGaussians())
    >>> bool(0 < trainer.logged_metrics["orbit_drift"] < 1)
    True
    """

    persistent = {
        "history": list,
        "_last": dict,
        "_squares": lambda: torch.zeros(2, dtype=torch.float64),
    }
    history: list[tuple[int, list[float]]]
    """Step and (drift, drift of the path, chance), as logged."""
    _last: Params
    _squares: Tensor

    def __init__(self, every_n_steps: int = 50, module: str | None = None) -> None:
        super().__init__(module, every_n_steps)

    def begin(self, weights: Params) -> None:
        assert self.network is not None
        shapes, before = {n: t.shape for n, t in weights.items()}, self._last
        self._last = _copied(weights)
        if shapes == {
            n: t.shape for n, t in before.items()
        }:  # of a checkpoint, or as pruned before
            constants = self.network.symmetries.constants
            self._last |= {n: t.to(weights[n]) for n, t in before.items() if n not in constants}

    def look(self, trainer: Any, pl_module: Any, weights: Params) -> None:
        assert self.network is not None
        symmetries, last = self.network.symmetries, self._last
        names = [name for name, t in weights.items() if P.is_weight(name, t)]
        steps = {name: (weights[name] - last[name]).double() for name in names}
        orbit = orbit_directions(last, symmetries)
        along = orbit.onto({n: weights[n] - last[n] for n in orbit.names}, _TOLERANCE)
        squares = torch.stack([_size(along), _size(steps)]).cpu()
        if not bool(squares.isfinite().all()):
            raise ValueError("the weights are not finite.")
        self._last = _copied(weights)
        self._squares = self._squares + squares
        if squares[1] == 0:  # nothing has moved
            return
        numbers = sum(symmetries.shapes[name].numel() for name in names)
        row = [
            *(float(s[0] / s[1]) for s in (squares, self._squares)),
            symmetries.dimension / numbers,
        ]
        self._log_all(trainer, pl_module, dict(zip(_NAMES, row, strict=True)))
        self.history.append((figure_step(trainer), row))

    def _check(self, network: Network) -> None:
        if not network.symmetries.dimension:
            raise ValueError("the network has no continuous symmetries.")


_NAMES = ("orbit_drift", "orbit_drift/path", "orbit_drift/chance")


def _copied(weights: Params) -> Params:
    return {name: t.clone() for name, t in weights.items()}


def _size(tensors: Params) -> Tensor:
    return torch.stack([t.double().square().sum() for t in tensors.values()]).sum()

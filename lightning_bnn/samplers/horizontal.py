"""Optimizer steps without their part along the orbit, where the function does not change."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn

from lightning_bnn.metrics.validation import check_choice
from lightning_bnn.samplers.langevin import Tempered
from weightsym import Element, Symmetries, min_mass, orbit_directions, transform_optimizer_state
from weightsym import params as P
from weightsym.params import Params

__all__ = ["Horizontal"]


class Horizontal:
    r"""Removes from every step of an optimizer the part along the orbit of symmetries.

    .. math:: \Delta \leftarrow (1 - P)\, \Delta

    P projects onto the tangents of the orbit, see `weightsym.orbit_directions`. Steps of gradient
    descent have no part along it, but steps of Adam and of penalties do.

    Args:
        optimizer: of all parameters of the network, and possibly others; its ``step`` is replaced.
        network: with these symmetries.
        symmetries: result of `discover`.
        gauge: ``"min-mass"`` also rescales the network to its least mass after every step, which
            does not change its function, and moves the optimizer's state along.
        tolerance: of the projection, see `weightsym.groups.orbits.OrbitDirections.onto`.

    >>> from lightning_bnn.models import mlp
    >>> from weightsym import discover
    >>> net, x = mlp(2, [8], 1), torch.randn(16, 2)
    >>> optimizer = torch.optim.Adam(net.parameters())
    >>> horizontal = Horizontal(optimizer, net, discover(net, x))
    >>> before = P.of(net)
    >>> net(x).square().mean().backward(), optimizer.step()
    (None, None)
    >>> orbit = orbit_directions(before, discover(net, x))
    >>> step = {name: t - before[name] for name, t in P.of(net).items()}
    >>> bool(orbit.adjoint(step).abs().max() < 1e-6)
    True
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        network: nn.Module,
        symmetries: Symmetries,
        gauge: Literal["min-mass"] | None = None,
        tolerance: float = 1e-6,
    ) -> None:
        if gauge is not None:
            check_choice("gauge", gauge, ("min-mass",))
        if isinstance(optimizer, Tempered):
            raise ValueError(
                f"Noise of {type(optimizer).__name__} along the orbit belongs to the posterior: "
                "`Horizontal` is for optimizers; chains take `orbit_moves`."
            )
        if symmetries.evaluation_only:
            raise ValueError(
                f"`symmetries` hold in evaluation mode only: {symmetries.evaluation_only}."
            )
        self.parameters = dict(network.named_parameters())
        trained = {p for group in optimizer.param_groups for p in group["params"]}
        names = orbit_directions(P.of(network), symmetries).names
        fixed = [name for name in names if self.parameters.get(name) not in trained]
        if fixed:
            raise ValueError(f"`optimizer` does not move {fixed[0]!r}, but symmetries do.")
        self.network, self.symmetries, self.gauge = network, symmetries, gauge
        self.tolerance = tolerance
        self._before: Params = {}
        self._hooks = [
            optimizer.register_step_pre_hook(self._remember),
            optimizer.register_step_post_hook(self._remove),
        ]

    def detach(self) -> None:
        """Restore the optimizer's own step."""
        for hook in self._hooks:
            hook.remove()

    def _remember(self, *_: Any) -> None:
        self._before = {n: t.clone() for n, t in P.of(self.network).items()}

    @torch.no_grad()
    def _remove(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        orbit = orbit_directions(self._before, self.symmetries)
        steps = {n: self.parameters[n] - self._before[n] for n in orbit.names}
        for name, step in orbit.off(steps, self.tolerance).items():
            self.parameters[name].copy_(self._before[name] + step)
        if self.gauge is not None and self.symmetries.scalings:
            weights = P.of(self.network)
            scales = min_mass(weights, self.symmetries).scales
            element = Element.of_groups(self.symmetries, scales=scales)
            transform_optimizer_state(optimizer, self.parameters, element)
            for name, t in element(weights).items():
                if name in self.parameters:
                    self.parameters[name].copy_(t)

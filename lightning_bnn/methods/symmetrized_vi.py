"""Variational inference with a Gaussian averaged over all permutations of the units."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from lightning_bnn.methods.method import AS_IT_IS, Fit, Purpose
from lightning_bnn.methods.mfvi import MFVI, Gaussians
from lightning_bnn.methods.run import Batch, Run
from lightning_bnn.metrics.validation import check_choice
from lightning_bnn.named_tensors import NamedTensors
from lightning_bnn.posteriors import Posterior, Symmetrized
from lightning_bnn.posteriors.empirical import mixture_of
from lightning_bnn.posteriors.mutual_information import (
    Sampled,
    draw_information,
    information_bracket,
    interpolation,
    permanent_information,
)
from lightning_bnn.posteriors.permanents import log_bethe, log_capacity, log_permanent
from lightning_bnn.posteriors.perturbations import Draw, draw
from lightning_bnn.posteriors.unit_layers import UnitLayer, independent_sets, unit_layers
from weightsym import Symmetries, discover, permute, random_permutations
from weightsym import params as P
from weightsym.params import Params, at_least_single, check_count, keyed_generator

__all__ = ["SymmetrizedVI"]

Estimator = Literal["bethe", "capacity", "uniform"]
_BRACKET_SAMPLES = 8
_EXACT_UP_TO = 5
_EVERY, _MANY = 4, 128
"""Steps between two gradients where a layer of as many units would take most of a step."""


@dataclass(frozen=True)
class UnitsOfNetwork:
    """The units of a network that can be permuted.

    Attributes:
        symmetries: without units that fixed weights distinguish.
        sets: layers whose units are permuted independently of each other; each step uses one set.
    """

    symmetries: Symmetries
    sets: list[list[UnitLayer]]

    @property
    def layers(self) -> list[UnitLayer]:
        """The layers of all sets."""
        return [layer for layers in self.sets for layer in layers]

    @property
    def period(self) -> int:
        """The number of steps between two gradients while units can be confused, by default."""
        return _EVERY if any(layer.units >= _MANY for layer in self.layers) else 1


class SymmetrizedGaussians(Gaussians):
    """Gaussians whose exchangeable units are found from an example of the inputs.

    Attributes:
        held: the last estimate of the information and its gradient, if later steps reuse it.
    """

    units: UnitsOfNetwork | None = None

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.held = NamedTensors()


@dataclass(eq=False)
class SymmetrizedVI(MFVI):
    r"""`MFVI` whose posterior is the mixture of all permuted copies of each Gaussian.

    .. math:: L^G = L_{MFVI} - \frac{T}{N} I(g; \omega), \quad I = H(q^G) - H(q)

    Predictions are those of the Gaussian. Only the objective changes: a Gaussian between two modes
    that are permutations of each other no longer has an advantage.

    Args:
        estimator: of the information. ``"bethe"`` is the tightest approximation, an upper bound
            that is at most ``n/2 log 2`` too large (up to five units that can meet are summed
            exactly). ``"capacity"`` is a lower bound, so that the objective remains a bound of the
            evidence. ``"uniform"`` is the paper's, at most ``log(draws)``.
        draws: number of permutations of ``"uniform"``, the identity included.
        every: number of steps between two gradients of the information, which is reused in between;
            by default one, and four while units of a layer of 128 or more can be confused.

    References:
        | Variational Inference Failures Under Model Symmetries (Gelberg et al., 2024)
        | https://arxiv.org/abs/2408.05496

    >>> import torch
    >>> from lightning_bnn import methods, params
    >>> from lightning_bnn.models import mlp
    >>> net, x, y = mlp(2, [4], 2), torch.randn(50, 2), torch.arange(50) % 2
    >>> method, run = methods.SymmetrizedVI(), methods.Run(net, num_data=50)
    >>> state = method.init(net, params.populate(net, members=3))
    >>> terms = method.losses(state, methods.Batch((x,), y), run)
    >>> terms["permutation_info"].round(decimals=3)  # log 4!, as copies hardly overlap yet
    tensor([3.1780, 3.1780, 3.1780])
    """

    estimator: Estimator = "bethe"
    draws: int = 20
    every: int | None = None

    state_type: ClassVar[type[Gaussians]] = SymmetrizedGaussians

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("estimator", self.estimator, get_args(Estimator))
        check_count("draws", self.draws)
        check_count("every", self.every, optional=True)

    # ------------------------------------------------------------ symmetries
    def before_fit(self, state: SymmetrizedGaussians, fit: Fit, run: Run) -> None:
        super().before_fit(state, fit, run)
        self._find_units(state, fit.example(), run)

    def _find_units(self, state: SymmetrizedGaussians, example: Sequence[Any], run: Run) -> None:
        """Find the permutable units, if there is an example and they are not known yet."""
        if state.units is None and example:
            state.units = self._units(state, discover(run.network, *example), run)

    def _units(self, state: Gaussians, sym: Symmetries, run: Run) -> UnitsOfNetwork:
        sym, name = _of_trained_units(sym, run.network), type(run.network).__name__
        if not sym.permutations:
            raise ValueError(f"{name} has no units to permute.")
        _check_prior(self.prior, sym, state.stack(), state.spec.names)
        layers = unit_layers(sym, state.spec.names)
        if not layers and self.estimator != "uniform":
            raise ValueError(
                f"No layer of {name} has units that can be told apart: set `estimator='uniform'`."
            )
        units = UnitsOfNetwork(sym, independent_sets(layers))
        run.inform(
            f"{self.name}: 10^{sym.log10_permutations:.1f} permutations leave the "
            f"network as it is; {len(layers)} of {len(sym.permutations)} layers of units "
            f"{'enters' if len(layers) == 1 else 'enter'} the objective, "
            f"{max(map(len, units.sets), default=0)} per step, with a new gradient every "
            f"{self.every or units.period} steps while units can be confused."
        )
        return units

    def units(self, state: SymmetrizedGaussians, run: Run) -> UnitsOfNetwork:
        """Return the permutable units, and raise an error without an example of the inputs."""
        if state.units is None:
            self._find_units(state, run.example(), run)
        if state.units is None:
            raise ValueError(
                "An example of the inputs is needed to find the symmetries: set "
                "`module.example_input_array`, or train a step."
            )
        return state.units

    # ------------------------------------------------------------ objective
    def losses(self, state: SymmetrizedGaussians, batch: Batch, run: Run) -> dict[str, Tensor]:
        self._find_units(state, batch.example(), run)
        drawn = self.draw(state)
        terms = self.terms(state, drawn, batch, run)
        information = self._of_the_step(state, drawn, batch.number, run).to(terms["nll"])
        assert run.num_data is not None
        weight = self.complexity_weight(state)
        gain = weight * self.temperature * information / run.num_data
        return {
            **terms,
            "loss": terms["loss"] - gain,
            "permutation_info": information,
            "sym_elbo": terms["elbo"] + information,
        }

    def _of_the_step(
        self, state: SymmetrizedGaussians, drawn: Draw, number: int, run: Run
    ) -> Tensor:
        """Return the information for this step, computed or reused."""
        every = self.every or self.units(state, run).period
        if every == 1 or not torch.is_grad_enabled():
            return self.information(state, drawn, run, number)
        leaves = state.mean, state.log_std
        if number % every == 0 or not state.held.tensors():
            estimate = self.information(state, drawn, run, number // every)
            slopes = [torch.zeros_like(t) for t in leaves]
            if estimate.requires_grad:
                slopes = list(torch.autograd.grad(estimate.sum(), leaves, retain_graph=True))
            elif self.every is None:  # all units can be told apart, which takes little time
                state.held.hold({})
                return estimate
            tensors = {"value": estimate, "of_mean": slopes[0], "of_log_std": slopes[1]}
            state.held.hold({name: t.detach() for name, t in tensors.items()})
        value, *slopes = state.held.tensors().values()
        moved = [((t - t.detach()) * slope).sum(1) for t, slope in zip(leaves, slopes, strict=True)]
        return value + moved[0] + moved[1]

    def information(
        self, state: SymmetrizedGaussians, drawn: Draw, run: Run, turn: int = 0
    ) -> Tensor:
        """Estimate the information, ``(members,)``. The sets of layers take turns."""
        units, sampled = self.units(state, run), _sampled(state, drawn)
        if self.estimator == "uniform":
            nats = draw_information(units.symmetries, sampled, self.draws)
        else:
            layers = units.sets[turn % len(units.sets)]
            bound = _best if self.estimator == "bethe" else log_capacity
            nats = torch.stack(
                [permanent_information(layer, sampled, bound) for layer in layers]
            ).sum(0)
        return nats.view(len(drawn.noise), -1).mean(0)

    def after_validation(self, state: SymmetrizedGaussians, run: Run) -> dict[str, Tensor]:
        self._find_units(state, run.example(), run)
        return self.bracket(state, run) if state.units is not None else {}

    @torch.no_grad()
    def bracket(
        self, state: SymmetrizedGaussians, run: Run, samples: int = _BRACKET_SAMPLES
    ) -> dict[str, Tensor]:
        """Return bounds of the information and the interpolation, as means over members."""
        units = self.units(state, run)
        drawn = draw(state.mean, state.log_std, state.spec, self.prior_std, samples)
        if not units.sets:
            return {}
        bounds = information_bracket(units.symmetries, units.sets[0], _sampled(state, drawn))
        mean, log_std = (P.unravel(t, state.spec) for t in (state.mean, state.log_std))
        return {
            "permutation_info_lower": bounds.lower,
            "permutation_info_upper": bounds.upper,
            "permutation_info_bethe": bounds.bethe.mean(),
            "permutation_info_capacity": bounds.capacity.mean(),
            "interpolation": interpolation(units.layers, mean, log_std).mean(),
        }

    # ------------------------------------------------------------ the posterior
    def posterior(
        self, state: SymmetrizedGaussians, run: Run, purpose: Purpose = AS_IT_IS
    ) -> Posterior:
        if purpose.predicts:
            return super().posterior(state, run, purpose)
        symmetries = self.units(state, run).symmetries
        return mixture_of([Symmetrized(mode, symmetries) for mode in state.modes()])


def _sampled(state: Gaussians, drawn: Draw) -> Sampled:
    """Pair every drawn network with its Gaussian."""
    samples = len(drawn.noise)
    mean, log_std = (
        P.unravel(t.repeat(samples, 1) if samples > 1 else t, state.spec)
        for t in (state.mean, state.log_std)
    )
    noise = P.unravel(drawn.noise.flatten(0, 1), state.spec)
    parts = (drawn.weights, mean, log_std, noise)
    return Sampled(*({n: at_least_single(t) for n, t in stack.items()} for stack in parts))


def _of_trained_units(sym: Symmetries, network: nn.Module) -> Symmetries:
    """Remove units that fixed weights distinguish."""
    fixed = {name for name, p in network.named_parameters() if not p.requires_grad}
    groups = [
        replace(group, inner=())
        for group in sym.permutations
        if not any(sym.axes[placement.axis].tensor in fixed for placement in group.placements)
        and not any(name in fixed for row in group.tensors for name in row)
    ]
    return replace(sym, permutations=tuple(groups)) if fixed else sym


def _best(logs: Tensor) -> Tensor:
    """Return the Bethe permanent, or the exact one for few units."""
    if logs.shape[-1] <= _EXACT_UP_TO:
        return log_permanent(logs)
    return log_bethe(logs, iterations=32, tolerance=1e-5)


def _check_prior(prior: Any, sym: Symmetries, networks: Params, names: tuple[str, ...]) -> None:
    """Require a prior that is invariant to the order of the units."""
    network = {name: t[:1] for name, t in networks.items()}
    generator = keyed_generator("prior")
    noisy = {
        name: t + torch.randn(t.shape, generator=generator).to(t) if t.is_floating_point() else t
        for name, t in network.items()
    }
    moved = permute(noisy, sym, random_permutations(sym, generator, 1))
    before, after = (prior.log_prob(p, names, stacked=True) for p in (noisy, moved))
    if not torch.allclose(before, after, rtol=1e-4):
        raise ValueError(
            f"`prior` {type(prior).__name__} is not invariant to permutations of units "
            f"(log-density {float(before):.6g} and {float(after):.6g}), as the symmetrized "
            "posterior requires: use an isotropic Gaussian, for example."
        )

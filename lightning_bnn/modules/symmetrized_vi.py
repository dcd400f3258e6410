"""Variational inference with a Gaussian that is averaged over all permutations of the units."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, get_args

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn

from lightning_bnn import params as P
from lightning_bnn.arguments import count
from lightning_bnn.metrics.validation import option
from lightning_bnn.modules.mfvi import MFVI
from lightning_bnn.params import Params
from lightning_bnn.posteriors import Mixture, Posterior, Symmetrized
from lightning_bnn.posteriors.interpolation import interpolation
from lightning_bnn.posteriors.mutual_information import (
    Sampled,
    draw_information,
    information_bracket,
    permanent_information,
)
from lightning_bnn.posteriors.permanents import log_bethe, log_capacity, log_permanent
from lightning_bnn.posteriors.reparameterised import Draw, Scratch, draw
from lightning_bnn.posteriors.unit_layers import UnitLayer, independent_sets, unit_layers
from lightning_bnn.randomness import keyed_generator
from lightning_bnn.symmetry import Symmetries, discover, permute, random_permutations

__all__ = ["SymmetrizedVI"]

Estimator = Literal["bethe", "capacity", "uniform"]
_BRACKET_SAMPLES = 8
_EXACT_UP_TO = 5


class SymmetrizedVI(MFVI):
    r"""Mean-field VI whose posterior is the mixture of all permuted copies of the Gaussian.

    .. math:: L^G = L_{MFVI} - \frac{T}{N} I(g; \omega), \quad I = H(q^G) - H(q)

    Predictions are those of the Gaussian. What changes is the objective: it no longer pays to sit
    between modes that are permutations of each other.

    Args:
        network: gives the computation and the first means; it is copied, not changed.
        estimator: of the information: ``"bethe"``, the tightest approximation, an upper bound that
            is at most ``n/2 log 2`` too large (up to five units that can meet are summed exactly);
            ``"capacity"``, a lower bound, so that the objective
            stays a bound of the evidence; ``"uniform"``, the paper's, at most ``log(draws)``.
        draws: permutations of ``"uniform"``, the identity included.
        **kwargs: what `MFVI` takes.

    References:
        | Variational Inference Failures Under Model Symmetries (Gelberg et al., 2024)
        | https://arxiv.org/abs/2408.05496
    """

    def __init__(
        self, network: nn.Module, estimator: Estimator = "bethe", draws: int = 20, **kwargs: Any
    ) -> None:
        super().__init__(network, **kwargs)
        option("estimator", estimator, get_args(Estimator))
        count("draws", draws)
        self.estimator, self.draws = estimator, draws
        self._symmetries: Symmetries | None = None
        self._sets: list[list[UnitLayer]] = []
        self._step = 0

    # -------------------------------------------------------- symmetries
    @property
    def symmetries(self) -> Symmetries:
        """What can be permuted in the network; found with the first batch."""
        if self._symmetries is None:
            example = self.example()
            if not example:
                raise ValueError(
                    "The symmetries are found with an example of the input: set "
                    "`module.example_input_array`, or train a step."
                )
            sym = discover(self.template, *example)
            self._adopt(_of_trained_units(sym, self.template))
        assert self._symmetries is not None
        return self._symmetries

    def _adopt(self, sym: Symmetries) -> None:
        if not sym.permutations:
            raise ValueError(f"{type(self.template).__name__} has no units to permute.")
        _check_prior(self.prior, sym, self.member_stack(), self.spec.names)
        layers = unit_layers(sym, self.spec.names)
        if not layers and self.estimator != "uniform":
            raise ValueError(
                f"No layer of {type(self.template).__name__} has units that can be told one by "
                "one: take `estimator='uniform'`."
            )
        self._symmetries, self._sets = sym, independent_sets(layers)
        rank_zero_info(
            f"{type(self).__name__}: 10^{sym.log10_permutations:.1f} permutations leave the "
            f"network as it is; of {len(sym.permutations)} layers of units {len(layers)} enter the "
            f"objective, {max(map(len, self._sets), default=0)} in a step."
        )

    def on_train_start(self) -> None:
        """Find the symmetries before the first step."""
        super().on_train_start()
        if self.example():
            self.symmetries  # noqa: B018

    def posterior(self) -> Posterior:
        """The Gaussians, each averaged over all permutations."""
        modes = [Symmetrized(mode, self.symmetries) for mode in self.modes()]
        return modes[0] if len(modes) == 1 else Mixture(modes)

    def judged_posterior(self) -> Posterior:
        """Permutations do not change predictions."""
        return super().posterior()

    # -------------------------------------------------------- objective
    def objective(
        self, nll: Tensor, cross: Tensor, entropy: Tensor, drawn: Draw
    ) -> dict[str, Tensor]:
        """That of `MFVI`, with the information as further entropy."""
        information = self.information(drawn).to(nll)
        terms = super().objective(nll, cross, entropy, drawn)
        assert self.num_data is not None
        gain = self.kl_weight * self.temperature * information / self.num_data
        return {
            **terms,
            "loss": terms["loss"] - gain,
            "permutation_info": information,
            "sym_elbo": terms["elbo"] + information,
        }

    def information(self, drawn: Draw) -> Tensor:
        """Estimate of the information, ``(members,)``; steps take turns with the sets of layers."""
        sym, sampled = self.symmetries, self._sampled(drawn)
        samples = len(drawn.noise)
        if self.estimator == "uniform":
            found = draw_information(sym, sampled, self.draws)
        else:
            layers = self._sets[self._step % len(self._sets)]
            bound = _best if self.estimator == "bethe" else log_capacity
            found = torch.stack(
                [permanent_information(layer, sampled, bound) for layer in layers]
            ).sum(0)
        return found.view(samples, self.members).mean(0)

    def _sampled(self, drawn: Draw) -> Sampled:
        """Every drawn network with the Gaussian it is from."""
        samples = len(drawn.noise)
        mean, log_std = (
            P.unravel(t.repeat(samples, 1) if samples > 1 else t, self.spec)
            for t in (self.mean, self.log_std)
        )
        noise = P.unravel(drawn.noise.flatten(0, 1), self.spec)
        return Sampled(drawn.weights, mean, log_std, noise)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        """One step for all members."""
        self._step = self.trainer.fit_loop.total_batch_idx
        return super().training_step(batch, batch_idx)

    # -------------------------------------------------------- the bracket
    def on_validation_epoch_end(self) -> None:
        """Log the numbers of every module, the bounds of the information, and interpolation."""
        super().on_validation_epoch_end()
        if self.example():
            for name, value in self.bracket().items():
                self.log(f"val/{name}", self._over_members(value).float(), sync_dist=True)

    def _over_members(self, value: Tensor) -> Tensor:
        """A mean over members, or a bound of it, from the means of processes that share them."""
        if self.whole is None:
            return value
        strategy: Any = self.trainer.strategy
        return strategy.reduce(value * self.members, reduce_op="sum") / self._everyone

    @torch.no_grad()
    def bracket(self, samples: int = _BRACKET_SAMPLES) -> dict[str, Tensor]:
        """Lower and upper bound of the information, and interpolation; means over members."""
        sym = self.symmetries
        with self._randomness("bracket"):
            drawn = draw(self.mean, self.log_std, self.spec, self.prior_std, Scratch(), samples)
        values: dict[str, Tensor] = {}
        if self._sets:
            bounds = information_bracket(sym, self._sets[0], self._sampled(drawn))
            values = {
                "permutation_info_lower": bounds.lower,
                "permutation_info_upper": bounds.upper,
                "permutation_info_bethe": bounds.bethe.mean(),
                "permutation_info_capacity": bounds.capacity.mean(),
            }
            layers = [layer for chosen in self._sets for layer in chosen]
            mean, log_std = (P.unravel(t, self.spec) for t in (self.mean, self.log_std))
            values["interpolation"] = interpolation(layers, mean, log_std).mean()
        return values


def _of_trained_units(sym: Symmetries, template: nn.Module) -> Symmetries:
    """Without units that have weights which are not trained: those tell the units apart."""
    fixed = {name for name, p in template.named_parameters() if not p.requires_grad}
    kept = [
        replace(group, inner=())
        for group in sym.permutations
        if not any(sym.axes[place.axis].tensor in fixed for place in group.placements)
    ]
    return replace(sym, permutations=tuple(kept)) if fixed else sym


def _best(logs: Tensor) -> Tensor:
    """The Bethe permanent; for a few units the exact one."""
    if logs.shape[-1] <= _EXACT_UP_TO:
        return log_permanent(logs)
    return log_bethe(logs, iterations=32, tolerance=1e-5)


def _check_prior(prior: Any, sym: Symmetries, networks: Params, names: tuple[str, ...]) -> None:
    """Refuse a prior that prefers some order of the units."""
    one = {name: t[:1] for name, t in networks.items()}
    generator = keyed_generator("prior")
    noise = {
        name: t + torch.randn(t.shape, generator=generator).to(t) if t.is_floating_point() else t
        for name, t in one.items()
    }
    moved = permute(noise, sym, random_permutations(sym, generator, 1))
    before, after = (prior.log_prob(p, names, stacked=True) for p in (noise, moved))
    if not torch.allclose(before, after, rtol=1e-4):
        raise ValueError(
            f"`prior` {type(prior).__name__} changes when units are permuted (log-density "
            f"{float(before):.6g} and {float(after):.6g}); the symmetrized posterior needs one "
            "that does not, such as an isotropic Gaussian."
        )

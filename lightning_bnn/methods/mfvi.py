"""Mean-field variational inference: independent Gaussians over all weights."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from lightning_bnn.likelihoods import IsotropicGaussianPrior
from lightning_bnn.methods.method import AS_IT_IS, Fit, Method, Progress, Purpose, State
from lightning_bnn.methods.run import Batch, Run, evaluation
from lightning_bnn.metrics.validation import check_choice
from lightning_bnn.named_tensors import NamedTensors
from lightning_bnn.posteriors import DiagonalGaussian, Posterior
from lightning_bnn.posteriors.empirical import mixture_of
from lightning_bnn.posteriors.perturbations import (
    Draw,
    Perturbed,
    Reparameterisation,
    draw,
    tied_names,
)
from weightsym import params as P
from weightsym.params import (
    Params,
    apply_in_place,
    at_least_single,
    check_count,
    check_not_negative,
    check_positive,
)

__all__ = ["MFVI"]

_SHARE_OF_IGNORANCE = 0.5


@torch.no_grad()
def describe_noise_cost(state: Any, nll: Tensor, batch: Batch, run: Run) -> str:
    """Describe the cost of deviations that add more than half of the loss of a constant prediction.

    The constant prediction is the output zero: equal probabilities, or the mean of standardised
    targets.

    Args:
        state: initial state of `MFVI`.
        nll: loss of the networks drawn for a batch.
        batch: the batch.
        run: computes losses.
    """
    first = batch.of(0)
    first_network = {name: t[0] for name, t in state.stack().items()}
    with evaluation(run.network):
        outputs = run.one_tensor(P.apply(run.network, first_network, *first.inputs))[None]
    without, ignorant = (
        float(run.nll(o, first.targets)[0]) for o in (outputs, torch.zeros_like(outputs))
    )
    cost = float(nll.mean()) - without
    if not cost > _SHARE_OF_IGNORANCE * abs(ignorant):
        return ""
    return (
        "`init_std` is too large for the data: at the first step the noise of the weights "
        f"costs {cost:.3g} nats per example, while a constant prediction loses "
        f"{ignorant:.3g}, and predictions may never recover; set a smaller one."
    )


Initialisation = Literal["network", "blitz"]
KL = Literal["closed", "sampled"]
_LOG_2PI = math.log(2 * math.pi)


class Means(State):
    """Flat means of every member, the centres of independent Gaussians.

    Args:
        stack: the members, whose weights are the means.
        names: weights that have a distribution; all other tensors are constants.
    """

    def __init__(self, stack: Params, names: Sequence[str]) -> None:
        super().__init__()
        rows, self.spec = P.ravel(stack, names, stacked=True)
        self.mean = nn.Parameter(rows.clone())
        self.order = tuple(stack)
        self.constants = NamedTensors({n: t for n, t in stack.items() if n not in set(names)})

    def stack(self) -> Params:
        """Return the networks of the means."""
        every = {**P.unravel(self.mean.detach(), self.spec), **self.constants.tensors()}
        return {name: every[name] for name in self.order}

    @abstractmethod
    def flat_deviations(self) -> Tensor:
        """Return the standard deviations of all weights, ``(members, weights)``."""

    def deviations(self) -> Params:
        """Return the standard deviations of all weights, as a stack."""
        std = self.flat_deviations()
        return P.unravel(std.clamp(min=torch.finfo(std.dtype).tiny), self.spec)

    def modes(self) -> list[DiagonalGaussian]:
        """Return the posterior of each healthy member."""
        means, stds = P.unstack(self.stack()), P.unstack(self.deviations())
        return [
            DiagonalGaussian(means[k], stds[k], self.spec.names) for k in self.healthy().tolist()
        ]


def trained_names(network: nn.Module, stack: Params) -> list[str]:
    """Return the names of the weights with a distribution: those that require gradients."""
    trained = [n for n, p in network.named_parameters() if p.requires_grad]
    names = [n for n in trained if n in stack and stack[n].is_floating_point()]
    if not names:
        raise ValueError("`network` has no weights that require gradients.")
    return names


class Gaussians(Means):
    """A mean and the logarithm of a standard deviation for every weight of every member.

    Args:
        stack: the members, whose weights are the means.
        names: weights that have a distribution; all other tensors are constants.
        init_std: initial standard deviation.

    Attributes:
        notes: ``kl_share``, the share of the complexity terms in the next step, once a fit has
            begun.
        epoch_steps: optimizer steps per epoch of this fit.
        is_new: whether the first step of a fit is still to come.
    """

    def __init__(self, stack: Params, names: Sequence[str], init_std: float) -> None:
        super().__init__(stack, names)
        self.log_std = nn.Parameter(torch.full_like(self.mean.data, math.log(init_std)))
        self.tied: set[str] = set()
        self.notes.update(kl_share=None)
        self.epoch_steps: int | float = math.inf
        self.is_new = False

    def flat_deviations(self) -> Tensor:
        return self.log_std.detach().exp()


@dataclass(eq=False)
class MFVI(Method):
    r"""A diagonal Gaussian over the weights of any network, or a mixture of them.

    .. math:: L = E_q\Big[-\frac{1}{B} \sum_i \log p(y_i | x_i, \omega)\Big]
        + \frac{1}{N} \big(E_q[-\log p(\omega)] - T H(q)\big)

    Complexity terms are sums over weights; at T = 1 they are the KL divergence. Weights that do not
    require gradients stay fixed.

    Args:
        prior_std: standard deviation of the Gaussian prior.
        prior: another prior: a module with ``log_prob(params, names, stacked)``.
        init_std: initial standard deviation of all weights.
        initialisation: of the means: the weights of the ``"network"``, or the initialisation of
            BLiTZ (``"blitz"``: means from N(0, 0.1^2), deviations softplus(-7), for convolutions
            softplus(-6), instead of ``init_std``).
        elbo_samples: number of weight samples per step.
        temperature: T, of the tempered posterior.
        kl_weight: factor of all complexity terms, a departure from Bayes.
        kl: ``"closed"`` form, or ``"sampled"`` with the weights of the step.
        reparameterisation: ``"weight"`` draws one noise of the weights per batch; ``"local"`` and
            ``"flipout"`` draw noise for every example, and run the networks one by one.
        kl_warmup: number of initial epochs in which the factor of all complexity terms rises
            linearly from zero; the logged ``elbo`` is the whole one.

    References:
        | Weight Uncertainty in Neural Networks (Blundell et al., 2015)
        | https://arxiv.org/abs/1505.05424

    >>> import torch
    >>> from lightning_bnn import methods, params
    >>> from lightning_bnn.models import mlp
    >>> net, x, y = mlp(2, [8], 2), torch.randn(50, 2), torch.arange(50) % 2
    >>> method, run = methods.MFVI(prior_std=1.0), methods.Run(net, num_data=50)
    >>> state = method.init(net, params.populate(net, members=3))
    >>> terms = method.losses(state, methods.Batch((x,), y), run)
    >>> torch.allclose(terms["loss"], terms["nll"] + terms["kl"] / 50)
    True
    """

    prior_std: float = 1.0
    prior: nn.Module | None = None
    init_std: float = 0.01
    initialisation: Initialisation = "network"
    elbo_samples: int = 1
    temperature: float = 1.0
    kl_weight: float = 1.0
    kl: KL = "closed"
    reparameterisation: Reparameterisation = "weight"
    kl_warmup: int | float = 0

    state_type: ClassVar[type[Gaussians]] = Gaussians
    unfitted = "its Gaussians are used as initialised"

    def __post_init__(self) -> None:
        check_positive("prior_std", self.prior_std)
        check_positive("init_std", self.init_std)
        check_count("elbo_samples", self.elbo_samples)
        check_not_negative("temperature", self.temperature)
        check_not_negative("kl_weight", self.kl_weight)
        check_not_negative("kl_warmup", self.kl_warmup)
        check_choice("initialisation", self.initialisation, get_args(Initialisation))
        check_choice("kl", self.kl, get_args(KL))
        check_choice("reparameterisation", self.reparameterisation, get_args(Reparameterisation))
        if self.prior is None:
            self.prior = IsotropicGaussianPrior(self.prior_std)
        elif self.kl == "closed":
            raise ValueError("a custom `prior` has no closed form: pass `kl='sampled'`.")

    def init(self, network: nn.Module, stack: Params) -> Any:
        names = trained_names(network, stack)
        state = self.state_type(stack, names, self.init_std)
        state.tied = tied_names(network)
        if self.initialisation == "blitz":
            _start_as_blitz(state, network)
        return state

    # ------------------------------------------------------------ objective
    def losses(self, state: Any, batch: Batch, run: Run) -> dict[str, Tensor]:
        return self.terms(state, self.draw(state), batch, run)

    def draw(self, state: Gaussians) -> Draw:
        """Draw weights of every member, ``elbo_samples`` times."""
        return draw(state.mean, state.log_std, state.spec, self.prior_std, self.elbo_samples)

    def terms(self, state: Gaussians, drawn: Draw, batch: Batch, run: Run) -> dict[str, Tensor]:
        """Return the negative ELBO per example of every member and its parts, for drawn weights."""
        assert run.num_data is not None
        self._require_progress(state)
        nll = self._nll(state, drawn, batch, run).view(self.elbo_samples, -1).mean(0)
        self._look_at_start(state, nll, batch, run)
        cross, entropy = self._complexity(state, drawn)
        weight = self.complexity_weight(state)
        loss = nll + weight * (cross - self.temperature * entropy) / run.num_data
        elbo = -run.num_data * nll - (cross - entropy)
        return {"loss": loss, "nll": nll, "kl": cross - entropy, "elbo": elbo}

    def complexity_weight(self, state: Gaussians) -> float:
        share = state.notes["kl_share"] if self.kl_warmup else 1.0
        return self.kl_weight * (1.0 if share is None else share)

    def _require_progress(self, state: Gaussians) -> None:
        if self.kl_warmup and state.notes["kl_share"] is None:
            raise ValueError(
                "`kl_warmup` needs the current step: call `before_fit` of the method "
                "before the first step, and `after_step` after each, as a trainer does."
            )

    def _complexity(self, state: Gaussians, drawn: Draw) -> tuple[Tensor, Tensor]:
        """Return the cross-entropy with the prior and the entropy of every member."""
        if self.kl == "closed":
            return drawn.cross_entropy, drawn.entropy
        prior: Any = self.prior
        log_prior = prior.log_prob(drawn.weights, state.spec.names, stacked=True)
        cross = -log_prior.view(self.elbo_samples, -1).mean(0)
        noise, log_std = at_least_single(drawn.noise), at_least_single(state.log_std)
        squares = noise.square().sum(-1).mean(0) / 2
        entropy = squares + log_std.sum(1) + state.mean.shape[1] * _LOG_2PI / 2
        return cross, entropy

    def _nll(self, state: Gaussians, drawn: Draw, batch: Batch, run: Run) -> Tensor:
        """Return the mean negative log-likelihood of drawn networks, ``(samples * members,)``."""
        constants = self._constants(state)
        stack = {**drawn.weights, **constants}
        if batch.per_member:  # the samples of a member see its examples
            batch = batch.of(torch.arange(len(state.mean)).repeat(self.elbo_samples))
        if self.reparameterisation == "weight":
            nll = run.losses(stack, batch)
        else:
            nll = self._perturbed(state, stack, drawn, batch, run)
        if self.elbo_samples > 1 and run.network.training:
            _average_statistics(state, constants, self.elbo_samples)
        return nll

    def _perturbed(
        self, state: Gaussians, stack: Params, drawn: Draw, batch: Batch, run: Run
    ) -> Tensor:
        """Run networks one by one, each with noise for every example."""
        means, stds = (P.unravel(t, state.spec) for t in (state.mean, state.log_std.exp()))
        noise = P.unravel(drawn.noise.flatten(0, 1), state.spec)
        losses = []
        for k, network in enumerate(P.unstack(stack)):
            m = k % len(state.mean)
            mean, std = ({n: t[m] for n, t in rows.items()} for rows in (means, stds))
            noise_of_one = {n: t[k] for n, t in noise.items()}
            batch_of_one = batch.of(k)
            with Perturbed(
                network,
                mean,
                std,
                noise_of_one,
                self.reparameterisation,
                len(batch_of_one.targets),
                state.tied,
            ):
                outputs = apply_in_place(run.network, network, *batch_of_one.inputs)
            losses.append(run.nll(outputs[None], batch_of_one.targets)[0])
        return torch.stack(losses)

    def _constants(self, state: Gaussians) -> Params:
        """Return buffers and fixed weights for every drawn network."""
        tensors = state.constants.tensors()
        if self.elbo_samples == 1:
            return tensors
        return {n: t.repeat(self.elbo_samples, *(1,) * (t.ndim - 1)) for n, t in tensors.items()}

    # ------------------------------------------------------------ the run
    def before_fit(self, state: Any, fit: Fit, run: Run) -> None:
        if state.mean.dtype in (torch.bfloat16, torch.float16):
            run.warn(
                f"Standard deviations hardly train in {state.mean.dtype}: use a mixed precision."
            )
        if fit.clips_gradients:
            run.warn(
                "Gradient clipping makes the standard deviations of variational "
                "posteriors too large."
            )
        if 0 < fit.epochs <= self.kl_warmup and not fit.trial:
            run.warn(
                f"`kl_warmup` {self.kl_warmup} is as long as the run of {fit.epochs} "
                "epochs, which never trains on the whole objective: set a shorter one."
            )
        if fit.anew or state.notes["kl_share"] is None:
            state.notes["kl_share"] = 0.0
        state.epoch_steps = fit.epoch_steps
        state.is_new = fit.anew and not fit.trial

    def _look_at_start(self, state: Gaussians, nll: Tensor, batch: Batch, run: Run) -> None:
        """Warn in the first step of a fit if the initial deviations are too large for the data."""
        if not state.is_new:
            return
        state.is_new = False
        advice = describe_noise_cost(state, nll.detach(), batch, run)
        if advice:
            run.warn(advice)

    def after_step(self, state: Gaussians, progress: Progress, run: Run) -> bool:
        done = progress.step / state.epoch_steps  # of streams, whose epochs have no length, zero
        done = done or progress.epoch + progress.epoch_ends
        is_over = done >= self.kl_warmup
        state.notes["kl_share"] = 1.0 if is_over else float(done / self.kl_warmup)
        return False

    # ------------------------------------------------------------ the posterior
    def posterior(self, state: Any, run: Run, purpose: Purpose = AS_IT_IS) -> Posterior:
        return mixture_of(state.modes())


@torch.no_grad()
def _start_as_blitz(state: Gaussians, network: nn.Module) -> None:
    """Initialise like BLiTZ, the library of P1's experiments."""
    modules = dict(network.named_modules())
    raw = [
        -6.0 if isinstance(modules[name.rpartition(".")[0]], nn.modules.conv._ConvNd) else -7.0
        for name in state.spec.names
    ]
    sizes = torch.tensor([shape.numel() for shape in state.spec.shapes])
    std = nn.functional.softplus(torch.tensor(raw)).repeat_interleave(sizes)
    state.mean.copy_(0.1 * torch.randn_like(state.mean))
    state.log_std.copy_(std.log().to(state.log_std))


def _average_statistics(state: Gaussians, statistics: Params, samples: int) -> None:
    """Average the buffers of each member over its samples."""
    for name, tensor in state.constants.tensors().items():
        values = statistics[name].view(samples, *tensor.shape)
        tensor.copy_(values.mean(0) if tensor.is_floating_point() else values[0])

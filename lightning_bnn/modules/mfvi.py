"""Mean-field variational inference: independent Gaussians over all weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, Protocol, cast, get_args

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_bnn import params as P
from lightning_bnn.arguments import count, not_negative, positive
from lightning_bnn.likelihoods import IsotropicGaussianPrior
from lightning_bnn.metrics.validation import option
from lightning_bnn.modules.base import BayesianModule
from lightning_bnn.modules.member_losses import Examples, member_losses
from lightning_bnn.named_tensors import NamedTensors
from lightning_bnn.params import Params
from lightning_bnn.posteriors import DiagonalGaussian, Mixture, Posterior
from lightning_bnn.posteriors.perturbations import Perturbed, Reparameterisation, tied_names
from lightning_bnn.posteriors.reparameterised import Draw, Scratch, draw

__all__ = ["MFVI"]

Initialisation = Literal["network", "blitz"]
KL = Literal["closed", "sampled"]
_LOG_2PI = math.log(2 * math.pi)


class MFVI(BayesianModule):
    r"""A diagonal Gaussian over the weights of any network; with members, a mixture of them.

    .. math:: L = E_q\Big[-\frac{1}{B} \sum_i \log p(y_i | x_i, \omega)\Big]
        + \frac{1}{N} \big(E_q[-\log p(\omega)] - T H(q)\big)

    Complexity terms are sums over weights; at T = 1 they are the KL divergence. Weights that do not
    require gradients stay fixed.

    Args:
        network: gives the computation and the first means; it is copied, not changed.
        prior_std: standard deviation of the Gaussian prior.
        prior: another prior: a module with ``log_prob(params, names, stacked)``.
        init_std: standard deviation of all weights at the start.
        initialisation: where means start: at the weights of the ``"network"``, or as BLiTZ does
            (``"blitz"``: means from N(0, 0.1^2), deviations softplus(-7), of convolutions
            softplus(-6); ``init_std`` is not used).
        elbo_samples: weight samples of every step.
        temperature: T, of the tempered posterior.
        kl_weight: multiplies all complexity terms, a departure from Bayes.
        kl: ``"closed"`` form, or ``"sampled"`` with the weights of the step.
        reparameterisation: noise in ``"weight"`` space, the same for a batch, or for every example,
            ``"local"`` or ``"flipout"`` (networks then run one by one).
        **kwargs: what every module takes, see `BayesianModule`.

    References:
        | Weight Uncertainty in Neural Networks (Blundell et al., 2015)
        | https://arxiv.org/abs/1505.05424
    """

    def __init__(
        self,
        network: nn.Module,
        prior_std: float = 1.0,
        prior: nn.Module | None = None,
        init_std: float = 0.01,
        initialisation: Initialisation = "network",
        elbo_samples: int = 1,
        temperature: float = 1.0,
        kl_weight: float = 1.0,
        kl: KL = "closed",
        reparameterisation: Reparameterisation = "weight",
        **kwargs: Any,
    ) -> None:
        super().__init__(network, **kwargs)
        positive("prior_std", prior_std)
        positive("init_std", init_std)
        count("elbo_samples", elbo_samples)
        not_negative("temperature", temperature)
        not_negative("kl_weight", kl_weight)
        option("initialisation", initialisation, get_args(Initialisation))
        option("kl", kl, get_args(KL))
        option("reparameterisation", reparameterisation, get_args(Reparameterisation))
        if prior is not None and kl == "closed":
            raise ValueError("`prior` of your own has no closed form: pass `kl='sampled'`.")
        self.prior: _Prior = (
            IsotropicGaussianPrior(prior_std) if prior is None else cast(_Prior, prior)
        )
        self.prior_std, self.kl = prior_std, kl
        self.temperature, self.kl_weight = temperature, kl_weight
        self.elbo_samples, self.reparameterisation = elbo_samples, reparameterisation
        self._start_modes(initialisation, init_std)
        self._scratch = Scratch()
        self._tied = tied_names(self.template)

    def _start_modes(self, initialisation: Initialisation, init_std: float) -> None:
        networks = self.first_networks()
        names = [n for n, p in self.template.named_parameters() if p.requires_grad]
        names = [n for n in names if n in networks and networks[n].is_floating_point()]
        if not names:
            raise ValueError("`network` has no weights that require gradients.")
        rows, self.spec = P.ravel(networks, names, stacked=True)
        std = torch.full_like(rows, init_std)
        if initialisation == "blitz":
            rows, std = self._blitz(rows)
        self.mean, self.log_std = nn.Parameter(rows.clone()), nn.Parameter(std.log())
        self.order = tuple(networks)
        self.constants = NamedTensors({n: t for n, t in networks.items() if n not in set(names)})

    def _blitz(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The library's start, which P1's experiments used."""
        with self._randomness("blitz", *self._part()):
            mean = 0.1 * torch.randn_like(rows)
        modules = dict(self.template.named_modules())
        raw = [
            -6.0 if isinstance(modules[name.rpartition(".")[0]], nn.modules.conv._ConvNd) else -7.0
            for name in self.spec.names
        ]
        sizes = torch.tensor([shape.numel() for shape in self.spec.shapes])
        row = nn.functional.softplus(torch.tensor(raw)).repeat_interleave(sizes)
        return mean, row.to(rows).expand_as(rows).clone()

    def on_fit_start(self) -> None:
        """Small steps of the deviations are lost in half precision."""
        if self.mean.dtype in (torch.bfloat16, torch.float16):
            rank_zero_warn(
                f"Standard deviations hardly train in {self.mean.dtype}: take a mixed precision."
            )

    # -------------------------------------------------------- members
    def unfitted(self) -> str:
        """Also of one member."""
        return "its Gaussians are where they start"

    def stacked_parameters(self) -> list[Tensor]:
        """Means and logarithms of standard deviations."""
        return [self.mean, self.log_std]

    def take_share(self, first: int, last: int) -> None:
        """Let go of all members but some."""
        for tensor in (self.mean, self.log_std, *self.constants.buffers()):
            tensor.data = tensor.data[first:last].clone()
        self._keep_share(first, last)

    def member_names(self) -> set[str]:
        """Tables, and statistics."""
        return {"mean", "log_std", *(f"constants.{name}" for name in self.constants.state_dict())}

    def member_stack(self) -> Params:
        """The means."""
        every = {**P.unravel(self.mean.detach(), self.spec), **self.constants.tensors()}
        return {name: every[name] for name in self.order}

    def deviations(self) -> Params:
        """Standard deviations of all weights, as a stack."""
        std = self.log_std.detach().exp()
        return P.unravel(std.clamp(min=torch.finfo(std.dtype).tiny), self.spec)

    def modes(self) -> list[DiagonalGaussian]:
        """The posterior of each member."""
        means, stds = P.unstack(self.member_stack()), P.unstack(self.deviations())
        return [
            DiagonalGaussian(means[k], stds[k], self.spec.names) for k in self.healthy().tolist()
        ]

    def posterior(self) -> Posterior:
        """The Gaussian, or the mixture of the members' Gaussians."""
        modes = self.modes()
        return modes[0] if len(modes) == 1 else Mixture(modes)

    # -------------------------------------------------------- objective
    def losses(self, inputs: tuple[Any, ...], targets: Tensor) -> dict[str, Tensor]:
        """Negative ELBO per example of every member, and its parts."""
        drawn = draw(
            self.mean, self.log_std, self.spec, self.prior_std, self._scratch, self.elbo_samples
        )
        nll = self._nll(drawn, inputs, targets).view(self.elbo_samples, self.members).mean(0)
        cross, entropy = self.complexity(drawn)
        return self.objective(nll, cross, entropy, drawn)

    def objective(
        self, nll: Tensor, cross: Tensor, entropy: Tensor, drawn: Draw
    ) -> dict[str, Tensor]:
        """The terms of the objective; entropies count with the temperature."""
        assert self.num_data is not None
        loss = nll + self.kl_weight * (cross - self.temperature * entropy) / self.num_data
        elbo = -self.num_data * nll - (cross - entropy)
        return {"loss": loss, "nll": nll, "kl": cross - entropy, "elbo": elbo}

    def complexity(self, drawn: Draw) -> tuple[Tensor, Tensor]:
        """Cross-entropy with the prior and entropy of every member."""
        if self.kl == "closed":
            return drawn.cross_entropy, drawn.entropy
        names = self.spec.names
        log_prior = self.prior.log_prob(drawn.weights, names, stacked=True)
        cross = -log_prior.view(self.elbo_samples, self.members).mean(0)
        squares = drawn.noise.square().sum(-1).mean(0) / 2
        entropy = squares + self.log_std.sum(1) + self.mean.shape[1] * _LOG_2PI / 2
        return cross, entropy

    def _nll(self, drawn: Draw, inputs: tuple[Any, ...], targets: Tensor) -> Tensor:
        """Of every drawn network, ``(samples * members,)``."""
        constants = self._constants()
        stack = {**drawn.weights, **constants}

        examples = Examples(inputs, targets, self.own_examples)
        if self.own_examples:  # the samples of a member see its examples
            examples = examples.of(torch.arange(self.members).repeat(self.elbo_samples))
        if self.reparameterisation == "weight":
            loss = self.nll_each if self.own_examples else self.nll
            shared = list(self.likelihood.parameters())
            nll = member_losses(self.template, stack, examples, loss, shared, self.chunk_size)
        else:
            nll = self._perturbed(stack, drawn, examples)
        self._keep_statistics(constants)
        return nll

    def _perturbed(self, stack: Params, drawn: Draw, examples: Examples) -> Tensor:
        """Networks one by one, each with noise for every example."""
        means, stds = (P.unravel(t, self.spec) for t in (self.mean, self.log_std.exp()))
        noise = P.unravel(drawn.noise.flatten(0, 1), self.spec)
        values = []
        for k, network in enumerate(P.unstack(stack)):
            m = k % self.members
            mean, std = ({n: t[m] for n, t in d.items()} for d in (means, stds))
            own = {n: t[k] for n, t in noise.items()}
            seen = examples.of(k)
            count = len(seen.targets)
            with Perturbed(network, mean, std, own, self.reparameterisation, count, self._tied):
                outputs = P.apply(self.template, network, *seen.inputs)
            values.append(self.nll(outputs[None], seen.targets)[0])
        return torch.stack(values)

    # -------------------------------------------------------- statistics of normalisation layers
    def _constants(self) -> Params:
        """Buffers and fixed weights for every drawn network."""
        tensors = self.constants.tensors()
        if self.elbo_samples == 1:
            return tensors
        return {n: t.repeat(self.elbo_samples, *(1,) * (t.ndim - 1)) for n, t in tensors.items()}

    def _keep_statistics(self, constants: Params) -> None:
        """What the samples of a member have made of its buffers, on average."""
        if self.elbo_samples == 1 or not self.training:
            return
        for name, tensor in self.constants.tensors().items():
            samples = constants[name].view(self.elbo_samples, *tensor.shape)
            tensor.copy_(samples.mean(0) if tensor.is_floating_point() else samples[0])


class _Prior(Protocol):
    """What is asked of a prior."""

    def log_prob(self, params: Params, names: Sequence[str], stacked: bool) -> Tensor:
        """Log-density of every network of a stack."""

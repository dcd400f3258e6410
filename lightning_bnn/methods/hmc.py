r"""Hamiltonian Monte Carlo over the weights of small networks, with all the data.

.. math:: U(\omega) = -\sum_i \log p(y_i | x_i, \omega) - \log p(\omega)

References:
    | What Are Bayesian Neural Network Posteriors Really Like? (Izmailov et al., 2021)
    | https://arxiv.org/abs/2104.14421
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from lightning_bnn import samplers
from lightning_bnn.arguments import positive
from lightning_bnn.likelihoods import IsotropicGaussianPrior
from lightning_bnn.methods.batch import Batch
from lightning_bnn.methods.chains import Chains, Keeping
from lightning_bnn.methods.dropout_layers import has_dropout
from lightning_bnn.methods.method import Choice, Fit, Method, Progress
from lightning_bnn.methods.run import Run
from lightning_bnn.params import Params
from lightning_bnn.posteriors import Empirical

__all__ = ["HMC", "HamiltonianChains"]

_LEAST_ACCEPTANCE = 0.01


class HamiltonianChains(Chains):
    """Chains, the data that their energies are sums over, and how often they have moved.

    Attributes:
        data: the share of this process of all batches.
        processes: how many processes share the data.
        acceptance: sum of the acceptance probabilities of every chain.
        transitions: how many they are of.
        stuck: chains whose energy was no number, as far as the user was warned of them.
    """

    def __init__(self, network: nn.Module, stack: Params, keeping: Keeping) -> None:
        super().__init__(network, stack, keeping)
        self.data: list[Batch] = []
        self.processes = 1
        self.start_counting()

    def start_counting(self) -> None:
        """Forget how often the chains have moved, and who was stuck."""
        self.acceptance, self.transitions = torch.zeros(self.count), 0
        self.stuck: set[int] = set()


@dataclass(eq=False)
class HMC(Method):
    """Samples of the posterior, exact but for the length of the chains.

    Every step is one transition, with the gradients of all the data. BatchNorm uses the statistics
    of the given network; dropout is refused. Several processes share the data.

    Args:
        prior_std: standard deviation of a Gaussian prior over all weights.
        keeping: when and where the members are kept.
    """

    prior_std: float = 1.0
    keeping: Keeping = field(default_factory=Keeping)

    takes_samplers = True
    is_sampler = True
    takes_all_data = True
    unfitted = "its chains are judged where they start"

    def __post_init__(self) -> None:
        positive("prior_std", self.prior_std)
        self.prior = IsotropicGaussianPrior(self.prior_std)

    def init(self, network: nn.Module, stack: Params) -> HamiltonianChains:
        if has_dropout(network):
            raise ValueError(
                "`network` has dropout, which would make the energy random: set its rates to 0, or "
                "take SGHMC."
            )
        trained = {name for name, _ in network.named_parameters()}
        common = {n: t if n in trained else t[:1].expand_as(t) for n, t in stack.items()}
        return HamiltonianChains(network, common, self.keeping)

    def losses(self, state: HamiltonianChains, batch: Batch, run: Run) -> dict[str, Tensor]:
        return {"loss": run.losses(state.trained_stack(), batch)}

    # ------------------------------------------------------------ the run
    def check(self, likelihood: Any) -> None:
        self.keeping.check(likelihood)

    def adopt(self, optimizer: Any) -> None:
        if not isinstance(optimizer, samplers.HMC):
            raise ValueError(
                f"`optimizer` {type(optimizer).__name__} is not lightning_bnn.samplers.HMC."
            )

    def begin(self, state: HamiltonianChains, fit: Fit, run: Run) -> None:
        self.keeping.begin(state, fit, run, "HMC")
        if any(p.dtype in (torch.bfloat16, torch.float16) for p in state.parameters()):
            raise ValueError("HMC needs exact energies: take `precision` 32-true or 64-true.")
        batches = list(fit.batches())
        examples = sum(batch.examples for batch in batches)
        if examples != run.num_data:
            run.warn(
                f"The train loader gives {examples} of {run.num_data} examples (`drop_last`?): "
                "these are the data of the posterior."
            )
        state.data = [_share(batch, fit) for batch in batches]
        state.processes = fit.processes
        state.start_counting()
        run.inform(
            f"HMC: every gradient takes {examples} examples, {batches[0].examples} at a time."
        )
        if fit.trial:
            for group in fit.optimizer.param_groups:
                group["leapfrog_steps"] = 1

    def step(
        self, state: HamiltonianChains, run: Run, move: Callable[..., Tensor]
    ) -> dict[str, Tensor]:
        energies = move(closure=lambda: self.energies(state, run))
        self._check(energies, state, run)
        return {"energy": energies}

    def energies(self, state: HamiltonianChains, run: Run) -> Tensor:
        """Negative log posterior of every chain; its gradients become those of the parameters."""
        run.network.eval()
        params = [p for p in state.parameters() if p.requires_grad]
        device = params[0].device
        total = torch.zeros(state.count, dtype=torch.float64, device=device)
        grads = [torch.zeros_like(p) for p in params]
        with torch.autocast(device.type, enabled=False):  # Metropolis' test needs exact energies
            for batch in state.data:
                if batch.examples:
                    nll = batch.examples * run.losses(state.trained_stack(), batch)
                    torch._foreach_add_(grads, torch.autograd.grad(nll.sum(), params))
                    total += nll.detach().double()
        if state.processes > 1:
            for tensor in (total, *grads):
                dist.all_reduce(tensor)
        torch._foreach_add_(grads, [p.detach() for p in params], alpha=self.prior.std**-2)
        for p, grad in zip(params, grads, strict=True):
            p.grad = grad
        with torch.no_grad():
            squares = [p.double().square().flatten(1).sum(1) for p in params]
            return total + torch.stack(squares).sum(0) / (2 * self.prior.std**2)

    def observed(self, optimizer: Any) -> dict[str, Tensor | float]:
        return {"acceptance": optimizer.acceptance.mean(), "step_size": optimizer.step_size}

    def _check(self, energies: Tensor, state: HamiltonianChains, run: Run) -> None:
        """A chain whose energy is no number never moves: every proposal is refused."""
        broken = (~energies.isfinite()).nonzero().flatten().tolist()
        message = (
            f"The energy of chains {broken} of {state.count} is not finite, so that no step will "
            "ever be accepted: look for NaN and huge values in the data, and in the weights that "
            "the chains start from."
        )
        if len(broken) == state.count:
            raise ValueError(message)
        if set(broken) - state.stuck:
            state.stuck |= set(broken)
            run.warn(message)

    # ------------------------------------------------------------ what is kept
    def after_step(self, state: HamiltonianChains, progress: Progress, run: Run) -> bool:
        state.acceptance = state.acceptance + progress.optimizer.acceptance.cpu()
        state.transitions += 1
        return self.keeping.keep_if_due(state, progress, run)

    def close(self, state: HamiltonianChains, run: Run) -> None:
        self.keeping.close(state, run, "HMC")
        state.data = []
        few = state.acceptance < _LEAST_ACCEPTANCE * state.transitions
        stuck = few.nonzero().flatten().tolist()
        if stuck:
            run.warn(
                f"Chains {stuck} of {state.count} have hardly moved, as nearly all proposals were "
                "refused: take a smaller `step_size`, or let `adapt_steps` find one."
            )

    def posterior(self, state: HamiltonianChains) -> Empirical:
        return state.kept()

    def judged(self, state: Chains, choose: Choice = list, fitting: bool = False) -> Empirical:
        return state.kept(choose)


def _share(batch: Batch, fit: Fit) -> Batch:
    """The examples of this process."""
    share = slice(fit.rank, None, fit.processes)
    rows = (slice(None), share) if batch.per_member else share
    inputs = tuple(x[rows] if isinstance(x, Tensor) else x for x in batch.inputs)
    return Batch(inputs, batch.targets[rows], batch.per_member)

r"""Chains whose every step sees all the data.

.. math:: U(\omega) = -\sum_i \log p(y_i | x_i, \omega) - \log p(\omega)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch import distributed as dist

from lightning_bnn.arguments import check_positive
from lightning_bnn.likelihoods import IsotropicGaussianPrior
from lightning_bnn.methods.batch import Batch
from lightning_bnn.methods.chains import Chains, Keeping
from lightning_bnn.methods.dropout_layers import has_dropout
from lightning_bnn.methods.method import AS_IT_IS, Fit, Method, Progress, Purpose
from lightning_bnn.methods.run import Run
from lightning_bnn.params import Params
from lightning_bnn.posteriors import Empirical

__all__ = ["AllDataChains", "AllDataSampling"]


class AllDataChains(Chains):
    """Chains, and the data that their energies are sums over.

    Attributes:
        data: the share of this process of all batches.
        processes: how many processes share the data.
        stuck: chains whose energy was no number, as far as the user was warned of them.
    """

    def __init__(self, network: nn.Module, stack: Params, keeping: Keeping) -> None:
        super().__init__(network, stack, keeping)
        self.data: list[Batch] = []
        self.processes = 1
        self.start_counting()

    def start_counting(self) -> None:
        """Forget what an earlier run has counted."""
        self.stuck: set[int] = set()


@dataclass(eq=False)
class AllDataSampling(Method):
    """Samples of the posterior by transitions with the gradients of all the data.

    BatchNorm uses the statistics of the given network; dropout is refused. Several processes share
    the data.

    Args:
        prior_std: standard deviation of a Gaussian prior over all weights.
        keeping: when and where the members are kept.
    """

    prior_std: float = 1.0
    keeping: Keeping = field(default_factory=Keeping)

    sampler: ClassVar[type]
    """Of `lightning_bnn.samplers`, which moves the chains."""
    takes_samplers = True
    is_sampler = True
    takes_all_data = True
    unfitted = "its chains are judged where they start"

    def __post_init__(self) -> None:
        check_positive("prior_std", self.prior_std)
        self.prior = IsotropicGaussianPrior(self.prior_std)

    def init(self, network: nn.Module, stack: Params) -> AllDataChains:
        if has_dropout(network):
            raise ValueError(
                "`network` has dropout, which would make the energy random: set its rates to 0, or "
                "take SGHMC."
            )
        trained = {name for name, _ in network.named_parameters()}
        common = {n: t if n in trained else t[:1].expand_as(t) for n, t in stack.items()}
        return self.chains(network, common)

    def chains(self, network: nn.Module, stack: Params) -> AllDataChains:
        """The state.

        Args:
            network: gives the computation.
            stack: where the chains start; they have their buffers in common.
        """
        return AllDataChains(network, stack, self.keeping)

    def losses(self, state: AllDataChains, batch: Batch, run: Run) -> dict[str, Tensor]:
        return {"loss": run.losses(state.trained_stack(), batch)}

    # ------------------------------------------------------------ the run
    def configure_optimizer(
        self, state: AllDataChains, optimizer: Any, run: Run, scheduler: Any = None, *fit: Any
    ) -> None:
        self.keeping.check(run.likelihood)
        if not isinstance(optimizer, self.sampler):
            raise ValueError(
                f"`optimizer` {type(optimizer).__name__} is not lightning_bnn.samplers."
                f"{self.sampler.__name__}."
            )
        if scheduler is not None:
            raise ValueError(
                f"`lr_scheduler` means nothing to {type(self).__name__}, whose sampler adapts its "
                "step size: leave it out."
            )

    def before_fit(self, state: AllDataChains, fit: Fit, run: Run) -> None:
        name = type(self).__name__
        self.keeping.begin(state, fit, run, name)
        if any(p.dtype in (torch.bfloat16, torch.float16) for p in state.parameters()):
            raise ValueError(f"{name} needs exact energies: take `precision` 32-true or 64-true.")
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
            f"{name}: every gradient takes {examples} examples, {batches[0].examples} at a time."
        )

    def transition(
        self, state: AllDataChains, run: Run, move: Callable[..., Tensor]
    ) -> dict[str, Tensor]:
        """Move all chains once.

        Args:
            state: of this method.
            run: computes losses.
            move: takes a transition, given a closure that returns energies and leaves gradients.

        Returns:
            Terms that are worth logging.
        """
        energies = move(closure=lambda: self.energies(state, run))
        self._check(energies, state, run)
        return {"energy": energies}

    def energies(self, state: AllDataChains, run: Run) -> Tensor:
        """Negative log posterior of every chain; its gradients become those of the parameters."""
        run.network.eval()
        params = [p for p in state.parameters() if p.requires_grad]
        device = params[0].device
        total = torch.zeros(state.count, dtype=torch.float64, device=device)
        grads = [torch.zeros_like(p) for p in params]
        with torch.autocast(device.type, enabled=False):  # energies of two places are compared
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

    def _check(self, energies: Tensor, state: AllDataChains, run: Run) -> None:
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
    def after_step(self, state: AllDataChains, progress: Progress, run: Run) -> bool:
        return self.keeping.keep_if_due(state, progress, run)

    def after_fit(self, state: AllDataChains, run: Run) -> None:
        self.keeping.close(state, run, type(self).__name__)
        state.data = []

    def posterior(self, state: Chains, run: Run, purpose: Purpose = AS_IT_IS) -> Empirical:
        return state.kept(purpose.choose)


def _share(batch: Batch, fit: Fit) -> Batch:
    """The examples of this process."""
    share = slice(fit.rank, None, fit.processes)
    rows = (slice(None), share) if batch.per_member else share
    inputs = tuple(x[rows] if isinstance(x, Tensor) else x for x in batch.inputs)
    return Batch(inputs, batch.targets[rows], batch.per_member)

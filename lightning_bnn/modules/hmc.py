"""Hamiltonian Monte Carlo over the weights of small networks, with all the data."""

from __future__ import annotations

import functools
from typing import Any

import torch
from lightning.pytorch.cli import OptimizerCallable
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch import distributed as dist

from lightning_bnn import samplers
from lightning_bnn.modules.chains import Chains
from lightning_bnn.modules.template_module import EXAMPLE_ROWS
from lightning_bnn.modules.templates import has_dropout
from lightning_bnn.modules.training_data import Batch, training_batches, training_source
from lightning_bnn.params import Params

__all__ = ["HMC"]

_LEAST_ACCEPTANCE = 0.01
_OF_OTHERS = {
    "max_loss": None, "restarts": 0,
    "lr_scheduler": None, "lr_interval": "epoch", "member_rates": None,
}  # fmt: skip


class HMC(Chains):
    r"""Samples of the posterior, exact but for the length of the chains.

    .. math:: U(\omega) = -\sum_i \log p(y_i | x_i, \omega) - \log p(\omega)

    Every training step is one transition, with the gradients of all the data; what batch the loader
    gives at that step does not matter, its batch size says how many examples are computed at a
    time. The data are read once, whole and without augmentation. BatchNorm uses the statistics of
    the given network; dropout is refused. Several processes share the data.

    Args:
        network: gives the computation, and where the first chain starts.
        members: how many chains.
        prior_std: standard deviation of a Gaussian prior over all weights.
        optimizer: makes the sampler, given parameters.
        **kwargs: what all chains take, see `Chains`, and all modules, see `BayesianModule`.

    References:
        | What Are Bayesian Neural Network Posteriors Really Like? (Izmailov et al., 2021)
        | https://arxiv.org/abs/2104.14421
    """

    def __init__(
        self,
        network: nn.Module,
        members: int = 1,
        prior_std: float = 1.0,
        optimizer: OptimizerCallable = samplers.HMC,
        **kwargs: Any,
    ) -> None:
        _leave_out(kwargs)
        super().__init__(
            network, members=members, prior_std=prior_std, optimizer=optimizer,
            max_loss=None, restarts=0, lr_scheduler=None, lr_interval="epoch", member_rates=None,
            **kwargs,
        )  # fmt: skip
        if has_dropout(self.template):
            raise ValueError(
                "`network` has dropout, which would make the energy random: set its rates to 0, or "
                "take SGHMC."
            )
        self.automatic_optimization = False
        self._data: list[Batch] = []
        self._acceptance, self._transitions = torch.zeros(()), 0

    def first_networks(self) -> Params:
        """Further chains start from weights of their own, and from the same statistics."""
        networks = super().first_networks()
        trained = {name for name, _ in self.template.named_parameters()}
        return {n: t if n in trained else t[:1].expand_as(t) for n, t in networks.items()}

    def configure_optimizers(self) -> Any:
        """The sampler."""
        sampler = super().configure_optimizers()
        if not isinstance(sampler, samplers.HMC):
            raise ValueError(
                f"`optimizer` {type(sampler).__name__} is not lightning_bnn.samplers.HMC."
            )
        return sampler

    # -------------------------------------------------------- the energy
    def on_train_start(self) -> None:
        """Read all the data."""
        super().on_train_start()
        if any(p.dtype in (torch.bfloat16, torch.float16) for p in self.networks.parameters()):
            raise ValueError("HMC needs exact energies: take `precision` 32-true or 64-true.")
        batches = list(training_batches(self, training_source(self)))
        count = sum(len(targets) for _, targets in batches)
        if count != self.num_data:
            rank_zero_warn(
                f"The train loader gives {count} of {self.num_data} examples (`drop_last`?): these "
                "are the data of the posterior."
            )
        if not self._example:
            first = batches[0][0]
            self._example = tuple(x[:EXAMPLE_ROWS] if isinstance(x, Tensor) else x for x in first)
        self._data = [self._share(batch) for batch in batches]
        self._acceptance, self._transitions = torch.zeros(()), 0
        rank_zero_info(
            f"HMC: every gradient takes {count} examples, {len(batches[0][1])} at a time."
        )
        trainer: Any = self.trainer
        if trainer.fast_dev_run:
            for group in trainer.optimizers[0].param_groups:
                group["leapfrog_steps"] = 1

    def _share(self, batch: Batch) -> Batch:
        """The examples of this process."""
        inputs, targets = batch
        rows = slice(self.global_rank, None, self.trainer.world_size)
        return tuple(x[rows] if isinstance(x, Tensor) else x for x in inputs), targets[rows]

    def on_fit_end(self) -> None:
        """Let go of the data; what never moved is no sample."""
        super().on_fit_end()
        self._data = []
        few = self._acceptance < _LEAST_ACCEPTANCE * self._transitions
        stuck = few.nonzero().flatten().tolist()
        if stuck:
            rank_zero_warn(
                f"Chains {stuck} of {self.members} have hardly moved, as nearly all proposals were "
                "refused: take a smaller `step_size`, or let `adapt_steps` find one."
            )

    def _check_energies(self, energies: Tensor) -> None:
        """A chain whose energy is no number never moves: every proposal is refused."""
        broken = (~energies.isfinite()).nonzero().flatten().tolist()
        told = (
            f"The energy of chains {broken} of {self.members} is not finite, so that no step will "
            "ever be accepted: look for NaN and huge values in the data, and in the weights that "
            "the chains start from."
        )
        if len(broken) == self.members:
            raise ValueError(told)
        if set(broken) - self._warned_members:
            self._warned_members |= set(broken)
            rank_zero_warn(told)

    def energies(self) -> Tensor:
        """Negative log posterior of every chain; its gradients become those of the parameters."""
        self.template.eval()
        params = self.trained_parameters()
        total = torch.zeros(self.members, dtype=torch.float64, device=self.device)
        grads = [torch.zeros_like(p) for p in params]
        with torch.autocast(self.device.type, enabled=False):  # the test needs exact energies
            for inputs, targets in self._data:
                if not len(targets):
                    continue
                run = functools.partial(self.member_nll, inputs, targets)
                nll = len(targets) * self._checked(run, inputs)
                torch._foreach_add_(grads, torch.autograd.grad(nll.sum(), params))
                total += nll.detach().double()
        if self.trainer.world_size > 1:
            for tensor in (total, *grads):
                dist.all_reduce(tensor)
        assert self.prior is not None
        torch._foreach_add_(grads, [p.detach() for p in params], alpha=self.prior.std**-2)
        for p, grad in zip(params, grads, strict=True):
            p.grad = grad
        with torch.no_grad():
            squares = [p.double().square().flatten(1).sum(1) for p in params]
            return total + torch.stack(squares).sum(0) / (2 * self.prior.std**2)

    # -------------------------------------------------------- transitions
    def training_step(self, batch: Any, batch_idx: int) -> None:
        """One transition of every chain."""
        before = self.trainer.global_step
        sampler: Any = self.optimizers()
        energies = sampler.step(closure=self.energies)
        own: samplers.HMC = sampler.optimizer
        self._check_energies(energies)
        self._acceptance = self._acceptance + own.acceptance
        self._transitions += 1
        self.log("train/acceptance", own.acceptance.mean().float(), prog_bar=True, batch_size=1)
        self.log("train/energy", energies.mean().float(), batch_size=1)
        self.log("train/step_size", own.step_size, batch_size=1)
        self.keep_if_due(before)


def _leave_out(kwargs: dict[str, Any]) -> None:
    """Arguments of other methods may only be what they are by default, as in checkpoints."""
    for name, default in _OF_OTHERS.items():
        value = kwargs.pop(name, default)
        if value != default:
            raise ValueError(
                f"`{name}` means nothing to HMC, whose sampler adapts its step size and rejects "
                f"what diverges: leave it out, got {value}."
            )

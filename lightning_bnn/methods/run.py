"""How the networks of a stack are run on batches, and what their outputs say about targets."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bnn import params as P
from lightning_bnn.likelihoods import Categorical
from lightning_bnn.methods.batch import Batch
from lightning_bnn.methods.member_losses import member_losses
from lightning_bnn.metrics.validation import are_distributions
from lightning_bnn.params import Params

__all__ = ["Run"]

_log = logging.getLogger(__name__)


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=3)


class Run:
    """Runs networks for a method: it knows the computation, the likelihood and the data's size.

    Args:
        network: gives the computation.
        likelihood: what the outputs say about targets, by default ``Categorical``.
        num_data: number of training examples.
        chunk_size: networks that run at once, by default chosen by their size.
        inform: takes messages for the user.
        warn: takes warnings.
        shows_progress: whether long computations show a bar.
        in_common: makes tensors those of the first process, where there are several.
        example: the first rows of some inputs; nothing if none are known.

    Attributes:
        evaluated: examples that networks have seen for gradients, of all networks together.

    >>> from lightning_bnn.models import mlp
    >>> net, x, y = mlp(2, [8], 3), torch.randn(5, 2), torch.tensor([0, 1, 2, 0, 1])
    >>> run = Run(net, num_data=100)
    >>> losses = run.losses(P.populate(net, 4), Batch((x,), y))
    >>> losses.shape, run.evaluated
    (torch.Size([4]), 20)
    """

    def __init__(
        self,
        network: nn.Module,
        likelihood: nn.Module | None = None,
        num_data: int | None = None,
        chunk_size: int | None = None,
        inform: Callable[[str], None] = _log.info,
        warn: Callable[[str], None] = _warn,
        shows_progress: Callable[[], bool] = bool,
        in_common: Callable[[Params], Params] = dict,
        example: Callable[[], tuple[Any, ...]] = tuple,
    ) -> None:
        self.network = network
        self.likelihood: Any = Categorical() if likelihood is None else likelihood
        self.num_data, self.chunk_size = num_data, chunk_size
        self.inform, self.warn = inform, warn
        self.shows_progress, self.in_common = shows_progress, in_common
        self.example = example
        self.evaluated = 0
        self._outputs_seen = False

    def losses(self, stack: Params, batch: Batch) -> Tensor:
        """Mean negative log-likelihood of every network of a stack, with gradients."""
        self.evaluated += torch.is_grad_enabled() * P.stack_size(stack) * batch.examples
        return member_losses(
            self.network,
            stack,
            batch,
            self.nll_each if batch.per_member else self.nll,
            list(self.likelihood.parameters()),
            self.chunk_size,
        )

    def nll(self, outputs: Any, targets: Tensor) -> Tensor:
        """Mean negative log-likelihood of a batch, for outputs of every network."""
        return -self.likelihood.log_prob(self.one_tensor(outputs), targets).mean(-1)

    def nll_each(self, outputs: Any, targets: Tensor) -> Tensor:
        """The same where every network has targets of its own."""
        flat = self.one_tensor(outputs).flatten(0, 1), targets.flatten(0, 1)
        return -self.likelihood.log_prob(*flat).unflatten(0, targets.shape[:2]).mean(-1)

    def one_tensor(self, outputs: Any) -> Tensor:
        """The outputs of networks, if they are what a likelihood takes."""
        if not isinstance(outputs, Tensor):
            raise ValueError(
                f"`network` must return one tensor, {type(self.network).__name__} returns a "
                f"{type(outputs).__name__}: wrap it in a module that picks the outputs."
            )
        if not self._outputs_seen:
            self._outputs_seen = True
            self._refuse_probabilities(outputs)
        return outputs

    def _refuse_probabilities(self, outputs: Tensor) -> None:
        """They would train, too, as logits between 0 and 1; worse, and nothing else would tell."""
        if isinstance(self.likelihood, Categorical) and are_distributions(outputs.detach()):
            self.warn(
                f"{type(self.network).__name__} returns probabilities, rows that sum to one, and "
                "Categorical takes logits: leave out the softmax at the end of `network`."
            )

"""Batches of data, and the run of networks side by side on them."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from lightning_bnn.likelihoods import Categorical, Gaussian
from lightning_bnn.metrics.validation import are_distributions
from weightsym import params as P
from weightsym.params import (
    Formula,
    Loss,
    Losses,
    Memory,
    Params,
    apply_each_in_place,
    apply_in_place,
    at_least_single,
    compute,
    in_threads,
    keep_freed_memory,
    threads_for,
)

__all__ = ["Batch", "Run"]

EXAMPLE_ROWS = 2


@dataclass(frozen=True)
class Batch:
    """Inputs and targets.

    Attributes:
        inputs: of the networks, by position.
        targets: of the networks.
        per_member: whether the leading dimension of both counts members.
        number: index of the batch in the run.

    >>> import torch
    >>> batch = Batch((torch.randn(3, 10, 2),), torch.zeros(3, 10), per_member=True)
    >>> batch.examples, batch.of(0).inputs[0].shape, batch.example()[0].shape
    (10, torch.Size([10, 2]), torch.Size([2, 2]))
    """

    inputs: tuple[Any, ...]
    targets: Tensor
    per_member: bool = False
    number: int = 0

    def of(self, members: int | slice | Tensor) -> Batch:
        """Select the examples of some members, for one member without the leading dimension."""
        if not self.per_member:
            return self
        return Batch(_rows(self.inputs, members), self.targets[members], True, self.number)

    def example(self) -> tuple[Any, ...]:
        """Return the first rows of the inputs, for one network."""
        return _rows(self.of(0).inputs, slice(EXAMPLE_ROWS))

    @property
    def examples(self) -> int:
        """The number of examples per member."""
        return self.targets.shape[1] if self.per_member else len(self.targets)

    def outputs(self, network: nn.Module, stack: Params, chunk_size: int | None) -> Any:
        """Return the outputs of every network of a stack."""
        apply = apply_each_in_place if self.per_member else apply_in_place
        return apply(network, stack, *self.inputs, chunk_size=chunk_size)

    def outputs_of_one(self, network: nn.Module, params: Params) -> Any:
        """Return the outputs of a single network without ``vmap``, with a leading dimension."""
        inputs = _rows(self.inputs, 0) if self.per_member else self.inputs
        outputs = apply_in_place(network, params, *inputs)
        return tree_map(lambda t: t[None] if isinstance(t, Tensor) else t, outputs)


def _rows(inputs: tuple[Any, ...], members: int | slice | Tensor) -> tuple[Any, ...]:
    rows: tuple[Any, ...] = tree_map(lambda t: t[members] if isinstance(t, Tensor) else t, inputs)
    return rows


def member_losses(
    model: nn.Module,
    params: Params,
    batch: Batch,
    loss: Callable[[Any, Tensor], Tensor],
    shared: Sequence[Tensor] = (),
    chunk_size: int | None = None,
) -> Tensor:
    """Return the loss of every network of a stack with gradients, ``(members,)``.

    As many networks run at once as fit into the cache, and large ones run one by one. The gradient
    of each chunk is computed before the next one starts, so that only the activations of one chunk
    are in memory.

    Args:
        model: gives the computation.
        params: a stack.
        batch: data of the networks.
        loss: function of outputs ``(members, ...)`` and targets that returns ``(members,)``.
        shared: leaf tensors, besides the outputs, on which the loss depends.
        chunk_size: number of networks that run at once, see `weightsym.params.apply`.
    """
    members = P.stack_size(params)
    if members == 1:
        return _alone(model, params, batch, loss)
    leaves = [t for t in shared if t.requires_grad]
    size = P.chunk_of(model, params, batch.of(0).inputs, chunk_size)
    if leaves and size > 1:  # what is shared has a gradient of every member
        size = members
    if size >= members or not torch.is_grad_enabled() or _scaled(params):
        return loss(batch.outputs(model, params, chunk_size), batch.targets)
    keep_freed_memory()
    device = next(iter(params.values())).device
    threads = 1 if size == 1 else threads_for(model, device)
    if device.type == "cpu":
        size = min(size, -(-members // torch.get_num_threads()))
    names = list(params)

    def losses_of_some(copied: nn.Module, first: int, tensors: Sequence[Tensor]) -> Tensor:
        stack = dict(zip(names, tensors, strict=True))
        examples = batch.of(slice(first, first + size))
        if size == 1:
            return _alone(copied, stack, examples, loss)
        return loss(examples.outputs(copied, stack, None), examples.targets)

    chunks = _Chunks(model, losses_of_some, size, threads)
    return _ByChunks.apply(chunks, len(leaves), *leaves, *params.values())


def _scaled(params: Params) -> bool:
    """Return whether losses are scaled before the backward pass, as float16 requires."""
    device = next(iter(params.values())).device.type
    half = torch.get_autocast_dtype(device) == torch.float16
    return torch.is_autocast_enabled(device) and half


@dataclass(frozen=True)
class _Chunks:
    """Chunks of members, and the number of threads for each."""

    model: nn.Module
    losses: Callable[[nn.Module, int, Sequence[Tensor]], Tensor]
    size: int
    threads: int


def _alone(
    model: nn.Module, stack: Params, batch: Batch, loss: Callable[[Any, Tensor], Tensor]
) -> Tensor:
    """Return the loss of a stack of one network."""
    network = {name: t.squeeze(0) for name, t in stack.items()}
    return loss(batch.outputs_of_one(model, network), batch.targets)


class _ByChunks(torch.autograd.Function):
    """A function of autograd that runs members in chunks, with gradients in the forward pass."""

    @staticmethod
    def forward(ctx: Any, chunks: _Chunks, count: int, *tensors: Tensor) -> Tensor:
        shared, stacked = tensors[:count], tensors[count:]
        wanted = [k for k, needed in enumerate(ctx.needs_input_grad[2 + count :]) if needed]
        grads = {k: torch.empty_like(stacked[k]) for k in wanted}

        def work(model: nn.Module, first: int) -> tuple[Tensor, list[Tensor]]:
            chunk = [t[first : first + chunks.size].detach() for t in stacked]
            for k in wanted:
                chunk[k].requires_grad_()
            with torch.enable_grad():
                values = chunks.losses(model, first, chunk)
                total = values.sum()
            leaves = [*(chunk[k] for k in wanted), *shared]
            gradients = torch.autograd.grad(
                total, leaves, materialize_grads=True, allow_unused=True
            )
            for k, grad in zip(wanted, gradients, strict=False):
                grads[k][first : first + chunks.size] = grad
            return values.detach(), list(gradients[len(wanted) :])

        starts = range(0, len(stacked[0]), chunks.size)
        losses, of_shared = zip(
            *in_threads(work, starts, chunks.model, chunks.threads), strict=True
        )
        ctx.count, ctx.total, ctx.grads = count, len(stacked), grads
        ctx.of_shared = [torch.stack(parts) for parts in zip(*of_shared, strict=True)]
        return torch.cat(losses)

    @staticmethod
    def backward(ctx: Any, weight: Tensor) -> tuple[Tensor | None, ...]:
        # as nearly always: spare a copy of all gradients, where it can be seen without waiting
        summed = weight.device.type == "cpu" and bool((weight == 1).all())

        def weighed(grad: Tensor) -> Tensor:
            return grad if summed else grad * weight.to(grad).reshape(-1, *(1,) * (grad.ndim - 1))

        shared = [weighed(parts).sum(0) for parts in ctx.of_shared]
        stacked = [weighed(ctx.grads[k]) if k in ctx.grads else None for k in range(ctx.total)]
        return (None, None, *shared, *stacked)


def formula_of(likelihood: nn.Module) -> Formula:
    """Describe a likelihood of this package for engines; a user's own may compute anything."""
    if type(likelihood) is Gaussian:
        return "squares" if likelihood.noise == "fixed" else "fixed"
    if type(likelihood) is Categorical:
        return "fixed" if likelihood.of_sequences else "cross-entropy"
    return "unknown"


def _losses_by_torch(job: Losses) -> Tensor:
    batch = Batch(job.inputs, job.targets, job.own_inputs)
    shared = job.loss.parameters
    return member_losses(job.network, job.stack, batch, job.loss.mean, shared, job.chunk_size)


_log = logging.getLogger(__name__)


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=3)


class Run:
    """Runs networks for a method, with the computation, the likelihood and the data's size.

    Args:
        network: gives the computation.
        likelihood: of targets, given outputs; by default ``Categorical``.
        num_data: number of training examples.
        chunk_size: number of networks that run at once, by default chosen by their size.
        inform: receives messages for the user.
        warn: receives warnings.
        rows: returns the first rows of some inputs, or None if none are known.

    Attributes:
        shows_progress: whether long computations show a progress bar.
        evaluated: number of examples in gradients so far, summed over networks.

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
        rows: tuple[Any, ...] = (),
    ) -> None:
        self.network = network
        self.likelihood: Any = Categorical() if likelihood is None else likelihood
        self.num_data, self.chunk_size = num_data, chunk_size
        self.inform, self.warn = inform, warn
        self.rows, self.shows_progress, self.evaluated = rows, False, 0
        self._outputs_seen = False
        self._memory = Memory()

    def example(self) -> tuple[Any, ...]:
        """Return rows of inputs in the precision of the network, or None if none are known."""
        weight = next(self.network.parameters(), torch.empty(0))
        return tuple(_like(x, weight) for x in self.rows)

    def losses(self, stack: Params, batch: Batch) -> Tensor:
        """Return the mean negative log-likelihood of every network of a stack, with gradients."""
        self.evaluated += torch.is_grad_enabled() * P.stack_size(stack) * batch.examples
        x, y, each = batch.inputs, batch.targets, batch.per_member
        job = Losses(
            self.network,
            stack,
            _losses_by_torch,
            x,
            y,
            self.loss(each),
            each,
            self.chunk_size,
        )
        losses: Tensor = compute(job)
        return losses

    def loss(self, per_member: bool = False) -> Loss:
        """Return the mean negative log-likelihood as a function for engines.

        Args:
            per_member: whether every network has targets of its own.
        """
        likelihood, mean = self.likelihood, self.nll_each if per_member else self.nll
        parameters = tuple(likelihood.parameters())
        return Loss(mean, parameters, formula_of(likelihood), self._memory)

    def nll(self, outputs: Any, targets: Tensor) -> Tensor:
        """Return the mean negative log-likelihood of a batch, given outputs of networks."""
        outputs = at_least_single(self.one_tensor(outputs))
        return -self.likelihood.log_prob(outputs, targets).mean(-1)

    def nll_each(self, outputs: Any, targets: Tensor) -> Tensor:
        """Return the mean negative log-likelihood where every network has targets of its own."""
        flat = at_least_single(self.one_tensor(outputs)).flatten(0, 1)
        logs = self.likelihood.log_prob(flat, targets.flatten(0, 1))
        return -logs.unflatten(0, targets.shape[:2]).mean(-1)

    def one_tensor(self, outputs: Any) -> Tensor:
        """Return the outputs of networks if they are one tensor, as a likelihood requires."""
        if not isinstance(outputs, Tensor):
            raise ValueError(
                f"`network` must return one tensor, but {type(self.network).__name__} "
                f"returns a {type(outputs).__name__}: wrap it in a module that selects the "
                "outputs."
            )
        if not self._outputs_seen:
            self._outputs_seen = True
            self._refuse_probabilities(outputs)
        return outputs

    def _refuse_probabilities(self, outputs: Tensor) -> None:
        """Refuse probabilities, which would train as logits between 0 and 1 without any error."""
        if isinstance(self.likelihood, Categorical) and are_distributions(outputs.detach()):
            self.warn(
                f"{type(self.network).__name__} returns probabilities (rows that sum to "
                "one), but Categorical expects logits: remove the softmax at the end of "
                "`network`."
            )


def _like(value: Any, weight: Tensor) -> Any:
    """Move an input to the device and the precision of a weight."""
    if not isinstance(value, Tensor):
        return value
    return value.to(weight if value.is_floating_point() else weight.device)


@contextmanager
def evaluation(network: nn.Module) -> Iterator[None]:
    """Put every module of a network into evaluation mode, then restore the mode of each.

    Args:
        network: whose modes change.
    """
    training = [module for module in network.modules() if module.training]
    network.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True

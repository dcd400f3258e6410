"""Batches as a network takes them: what is input and target, in which precision, and an example."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_bnn import _compat
from lightning_bnn.member_batch import MemberBatch
from lightning_bnn.methods import Batch
from lightning_bnn.methods.batch import EXAMPLE_ROWS
from lightning_bnn.modules.batches import left_over
from lightning_bnn.modules.data_size import first_rows
from lightning_bnn.modules.part import Bayesian
from lightning_bnn.randomness import keyed_randomness

__all__ = ["batch_for", "cast", "example_of", "warn_of_left_over"]


def batch_for(module: Bayesian, raw: Any, number: int = 0) -> Batch:
    """A batch of a loader as methods take it.

    Args:
        module: says what is input and what is target.
        raw: of the loader; of a `MemberBatch` the examples of the members that are here.
        number: how many batches of the run came before.
    """
    inputs, targets = module.inputs_and_targets(raw)
    batch = Batch(module.cast(inputs), targets, isinstance(raw, MemberBatch), number)
    if not batch.per_member:
        return batch
    if module.share is not None and len(targets) == module.share.everyone:
        return batch.of(slice(module.share.first, module.share.last))
    if len(targets) != module.members:
        raise ValueError(
            f"A batch has examples for {len(targets)} members, the module has {module.members}: "
            "give the data as many `orders`."
        )
    return batch


def cast(module: Bayesian, inputs: Sequence[Any]) -> tuple[Any, ...]:
    """Floating inputs in the precision of the weights."""
    dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), None)
    return tuple(
        x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs
    )


def example_of(module: Bayesian) -> tuple[Any, ...]:
    """Two rows of input: those that the user names, or the first of the train loader's data."""
    trainer, given = _compat.trainer_of(module), module.example_input_array
    if given is not None:
        return given if isinstance(given, tuple) else (given,)
    if trainer is None or trainer.train_dataloader is None:
        return ()
    with keyed_randomness(module.seed, "example", device=module.device):  # nobody else's numbers
        raw = first_rows(trainer.train_dataloader, EXAMPLE_ROWS)
        if raw is None:
            return ()
        raw = trainer.strategy.batch_to_device(raw, dataloader_idx=0)
        if isinstance(raw, MemberBatch):
            raw = tuple(x[0] for x in raw)
    return cast(module, module.inputs_and_targets(raw)[0])


def warn_of_left_over(module: Bayesian, raw: Any, known: set[str]) -> None:
    """Say once what a batch holds that nothing reads.

    Args:
        module: what the batch is for.
        raw: of the loader.
        known: names that were mentioned; new ones are added.
    """
    names = [name for name in left_over(raw, module.template) if name not in known]
    if names:
        known |= set(names)
        rank_zero_warn(
            f"{', '.join(map(repr, names))} of the batches is not used: "
            f"{type(module.template).__name__}.forward has no positional parameter of that name."
        )

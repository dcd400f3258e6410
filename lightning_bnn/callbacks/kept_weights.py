"""Which tensors of a run are kept: a network's under its own names, or those of all members."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_bnn import params as P
from lightning_bnn.callbacks.network import stack_of, whole_network
from lightning_bnn.params import Params

__all__ = ["bytes_of", "kept_weights", "names_of_weights", "refuse_parts"]


def kept_weights(
    trainer: Any, pl_module: Any, module: str | None, members: Sequence[int] | None
) -> Params:
    """The tensors to keep; processes other than the first may get none.

    Args:
        trainer: all of its processes must take part.
        pl_module: what is trained.
        module: name of the network inside.
        members: which networks of a module that trains several.
    """
    stack = stack_of(pl_module)
    if stack is not None:
        weights = _of_all(trainer, stack.weights)
        return weights if members is None else _chosen(weights, list(members))
    if members is not None:
        raise ValueError(
            f"`members` is for modules that train several networks; {type(pl_module).__name__} "
            "trains one."
        )
    name, network = whole_network(pl_module, module)
    prefix = f"{name}." if name else ""
    state = trainer.strategy.lightning_module_state_dict()
    state = {key.replace("_orig_mod.", ""): tensor for key, tensor in state.items()}
    wanted = (key.replace("_orig_mod.", "") for key in P.of(network))
    return {key: state[prefix + key] for key in wanted if prefix + key in state}


def refuse_parts(weights: Params) -> None:
    """Refuse networks without tensors, and tensors of which each process has only a part."""
    sharded = [n for n, t in weights.items() if type(t) not in (Tensor, torch.nn.Parameter)]
    if not weights:
        raise ValueError("CheckpointHarvester: the network has no tensors to keep.")
    if sharded:
        raise ValueError(
            "CheckpointHarvester needs whole tensors, and this strategy keeps shards: choose "
            "one that saves full state dicts (`save_distributed_checkpoint=False`, "
            "`state_dict_type='full'`)."
        )


def names_of_weights(pl_module: Any, weights: Params) -> list[str]:
    """Names of the weights among the tensors that are kept."""
    stack = stack_of(pl_module)
    root = pl_module if stack is None else stack.template
    known = [name.replace("_orig_mod.", "") for name in P.weight_names(root)]
    return [n for n in weights if any(k == n or k.endswith(f".{n}") for k in known)]


def bytes_of(tensors: Params, dtype: torch.dtype | None) -> int:
    """The size of tensors if floating ones are stored in some type."""
    return sum(
        t.numel() * (dtype if dtype and t.is_floating_point() else t.dtype).itemsize
        for t in tensors.values()
    )


def _of_all(trainer: Any, weights: Params) -> Params:
    """Weights of all members, also of those that other processes train."""
    gather = getattr(trainer.strategy, "gather_members", None)
    return weights if gather is None else {name: gather(t) for name, t in weights.items()}


def _chosen(stack: Params, members: list[int]) -> Params:
    count = len(next(iter(stack.values())))
    if not all(0 <= m < count for m in members):
        raise ValueError(f"`members` must be in 0..{count - 1}, got {members}.")
    return {name: tensor[members] for name, tensor in stack.items()}

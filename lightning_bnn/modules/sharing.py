"""Members that processes share: who has which, and what all of them predict together."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from lightning_bnn._compat import trainer_of
from lightning_bnn.harvest import ends
from lightning_bnn.methods.health import Diverged
from lightning_bnn.modules.core import Core
from lightning_bnn.posteriors import Dropout, Empirical, Posterior, Predictor
from lightning_bnn.posteriors.empirical import spread
from weightsym.params import Params

__all__ = ["divergence_state", "shared_predictor", "take_share", "take_whole"]


def take_share(module: Core, first: int, last: int) -> None:
    """Let a module go of all members but some.

    Args:
        module: has all of them.
        first: the first that it keeps.
        last: the one after the last.
    """
    if not module.method.can_be_shared:
        raise ValueError(
            f"`strategy` members: the members of {type(module).__name__} cannot be shared out; "
            "train it in parts, by `lightning-bnn population`."
        )
    for tensor in module.state.state_dict(keep_vars=True).values():
        tensor.data = tensor.data[first:last].clone()
    module.population.take_share(first, last)
    if module.divergence is not None:
        module.divergence.take_share(first, last)


def take_whole(module: Core, gather: Callable[[Tensor], Tensor]) -> None:
    """Let a module have the members of all processes again.

    Args:
        module: has a share of them.
        gather: from the members that are here to all.
    """
    for tensor in module.state.state_dict(keep_vars=True).values():
        tensor.data, tensor.grad = gather(tensor.data), None
    if module.divergence is not None:
        module.divergence.load_state_dict(divergence_state(module, gather))
    module.population.take_whole()


def divergence_state(module: Core, gather: Callable[[Tensor], Tensor] | None) -> dict[str, Any]:
    """State who has diverged, also among the members of other processes.

    Args:
        module: whose members are judged by their losses.
        gather: from the members that are here to all; None if these are all.
    """
    trainer, divergence = trainer_of(module), module.divergence
    assert divergence is not None
    state = divergence.state_dict(last=trainer is not None and ends(trainer))
    if gather is None:
        return state
    return {
        name: gather(value.to(module.device)).cpu() if isinstance(value, Tensor) else value
        for name, value in state.items()
    }


class _Part(NamedTuple):
    """The predictor of one process, if any, and the order of the draws of all, if it matters."""

    predictor: Predictor | None
    order: Tensor | None = None


def shared_predictor(
    module: Core, posterior_here: Callable[[], Posterior], generator: torch.Generator
) -> Predictor:
    """Predicts with the members of all processes. Every process must call it.

    Args:
        module: has a share of the members.
        posterior_here: the posterior of the members that are here.
        generator: the same on all processes.
    """
    share = module.population.share
    assert share is not None
    strategy: Any = module.trainer.strategy
    well = torch.zeros(module.members, dtype=torch.long, device=module.device)
    with contextlib.suppress(Diverged):  # their process leaves the predictions to others
        well[module.healthy()] = 1
    everyone = strategy.gather_members(well)
    before, total = int(everyone[: share.first].sum()), int(everyone.sum())
    if total == 0:
        module.healthy()  # says why
    posterior = posterior_here() if int(well.sum()) else None
    share_of_draws = _part_of(posterior, before, int(well.sum()), total, module, generator)
    run_here = share_of_draws.predictor or _nothing_like(
        module.member_stack(), module.run.chunk_size
    )

    def predict(network: nn.Module, *inputs: Any) -> Tensor:
        every = strategy.gather_members(module.run.one_tensor(run_here(network, *inputs)))
        return (
            every if share_of_draws.order is None else every[share_of_draws.order.to(every.device)]
        )

    return predict


def _part_of(
    posterior: Posterior | None,
    before: int,
    local: int,
    total: int,
    module: Core,
    generator: torch.Generator,
) -> _Part:
    """The draws of the members that are here, by what they are draws of."""
    chunk_size, wanted = module.run.chunk_size, module.eval_samples
    if module.method.is_mixture:
        modes = [] if posterior is None else posterior.modes()
        return _part_of_mixture(modes, before, total, wanted, generator, chunk_size)
    if isinstance(posterior, Dropout):
        count = _even_share(wanted, before, local, total)
        return _Part(posterior.predictor(count, None, chunk_size) if count else None)
    if isinstance(posterior, Empirical):
        return _Part(posterior.predictor(posterior.size, None, chunk_size))
    return _Part(None)


def _part_of_mixture(
    modes: Sequence[Posterior],
    before: int,
    total: int,
    n: int,
    generator: torch.Generator,
    chunk_size: int | None,
) -> _Part:
    """The draws of some components of a mixture, which are those of the whole mixture.

    Args:
        modes: components that are here.
        before: how many come before them.
        total: how many there are everywhere.
        n: how many networks all of them draw.
        generator: the same on all processes.
        chunk_size: networks that run at once.
    """
    if total == 1:
        return _Part(modes[0].predictor(n, generator, chunk_size) if modes else None)
    counts, generators, order = spread(n, torch.ones(total), generator)
    parts = [
        mode.predictor(counts[k], generators[k], chunk_size)
        for k, mode in enumerate(modes, start=before)
        if counts[k]
    ]

    def predict(model: nn.Module, *x: Any) -> Any:
        return tree_map(
            lambda *ts: torch.cat(ts), *[share_of_draws(model, *x) for share_of_draws in parts]
        )

    return _Part(predict if parts else None, order)


def _even_share(n: int, before: int, count: int, total: int) -> int:
    """Of n draws that members take in turns, those of some successive members.

    >>> [_even_share(7, first, count, 3) for first, count in ((0, 1), (1, 2))]
    [3, 4]
    """
    each, more = divmod(n, total)
    return count * each + min(max(more - before, 0), count)


def _nothing_like(networks: Params, chunk_size: int | None) -> Predictor:
    """Outputs of no network, in the shape of those of the first of a stack."""
    first = Empirical({name: t[:1].detach() for name, t in networks.items()})
    run = first.predictor(1, None, chunk_size)
    return lambda *args: tree_map(lambda t: t[:0], run(*args))

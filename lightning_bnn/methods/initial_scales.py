r"""Standard deviations at the start of variational inference: found by a race, or warned of.

Large deviations drown the gradient of the means in noise, and the posterior stays between modes;
small ones take long to grow, and the ELBO pays for each of them until they have.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lightning_bnn import params as P
from lightning_bnn.methods.method import Fit
from lightning_bnn.methods.run import Batch, Run, evaluation
from lightning_bnn.randomness import keyed_randomness

__all__ = ["CANDIDATES", "choose_scale", "describe_noise_cost"]

CANDIDATES = (0.003, 0.01, 0.03, 0.1, 0.3)
_STEPS, _JUDGED, _RATE = 100, 25, 0.02
_SHARE_OF_IGNORANCE = 0.5


@torch.enable_grad()
def choose_scale(method: Any, state: Any, fit: Fit, run: Run) -> float:
    """The candidate whose objective is best after a short race.

    Copies of the first member, one for each candidate, train side by side for a hundred steps of
    Adam at a rate of 0.02 on the first batches of the training data (in the order of the loader,
    from the front again if there are fewer). The means of the objective over the last quarter of
    the steps decide. Random numbers are the race's own; neither the state nor the likelihood moves.

    Args:
        method: `MFVI`.
        state: of that method; it is not changed.
        fit: gives the batches.
        run: computes losses.
    """
    candidates = _candidates(state)
    optimizer = torch.optim.Adam([candidates.mean, candidates.log_std], _RATE)
    steps = 1 if fit.trial else _STEPS
    total = torch.zeros(len(CANDIDATES), dtype=torch.float64, device=candidates.mean.device)
    with keyed_randomness("init_std", device=candidates.mean.device):
        for step, batch in enumerate(itertools.islice(_batches(fit), steps)):
            losses = method.terms(candidates, method.draw(candidates), batch, run)["loss"]
            grads = torch.autograd.grad(losses.sum(), [candidates.mean, candidates.log_std])
            candidates.mean.grad, candidates.log_std.grad = grads
            optimizer.step()
            if step >= steps - _JUDGED:
                total += losses.detach()
    totals = run.in_common({"losses": total})["losses"].nan_to_num(math.inf)
    return CANDIDATES[int(totals.argmin())]


def _candidates(state: Any) -> Any:
    """Copies of the first member, each with one of the candidates."""
    first = {name: t[:1] for name, t in state.stack().items()}
    stack = {n: t.repeat(len(CANDIDATES), *(1,) * (t.ndim - 1)) for n, t in first.items()}
    candidates = type(state)(stack, state.spec.names, 1.0)
    logs = torch.tensor(CANDIDATES).log().to(candidates.log_std)
    candidates.log_std.data.copy_(logs[:, None].expand_as(candidates.log_std))
    candidates.tied, candidates.notes["kl_share"] = state.tied, 1.0
    return candidates


def _batches(fit: Fit) -> Iterator[Batch]:
    """The batches that the first member sees, again and again."""
    while True:
        batch = None
        for batch in fit.batches():
            first = batch.of(0)
            yield Batch(first.inputs, first.targets, number=batch.number)
        if batch is None:
            raise ValueError(
                "`init_std` 'auto' looks at the training data: pass `batches` of `Fit` to "
                "`before_fit`, or give a number."
            )


@torch.no_grad()
def describe_noise_cost(state: Any, nll: Tensor, batch: Batch, run: Run) -> str:
    """Describe deviations that cost more than half of what knowing nothing does.

    The loss of outputs that are all zero stands for knowing nothing: equal probabilities, or the
    mean of standardised targets.

    Args:
        state: of `MFVI`, where it starts.
        nll: of the networks that were drawn for a batch.
        batch: that batch.
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
        "`init_std` is more than the data allow: at the first step the noise of the weights costs "
        f"{cost:.3g} nats per example, where a network that knows nothing loses {ignorant:.3g}, "
        "and predictions may never recover; take a smaller one."
    )

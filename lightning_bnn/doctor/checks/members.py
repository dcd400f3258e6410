"""Whether members are different, are alive, and are enough."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_bnn.doctor.baselines import constant_log_density
from lightning_bnn.doctor.evidence import Evidence, NotPossible
from lightning_bnn.doctor.findings import Finding

__all__ = [
    "draws_alike",
    "duplicate_draws",
    "duplicate_members",
    "members_diverged",
    "modes_too_few",
]

_SAME = 1e-3
"""Distance of two members over the typical one, from which they are copies."""
_ALIKE = 3e-3
"""Spread of outputs over draws relative to that over examples."""
_GAIN = 0.03
"""Nats per example that many more modes would gain, from which they are too few."""
_MOVED = 0.5
_LEARNED = 0.1
"""Nats above an answer without a network, from which the best member counts as trained."""


def members_diverged(e: Evidence) -> Finding | None:
    """Members that are not finite, or far worse than an answer without a network."""
    outputs, classes = e.on_held_out, _class_count(e)
    assert e.held_out is not None
    broken = [k for k, o in enumerate(outputs) if not bool(o.isfinite().all())]
    healthy = [o for k, o in enumerate(outputs) if k not in broken]
    lost: list[int] = []
    if len(healthy) > 1:
        known = (e.training or e.held_out).targets
        constant = constant_log_density(known, e.held_out.targets, classes).mean()
        gains = e.log_densities(healthy, e.held_out.targets).mean(1) - constant
        learned = float(gains.max())
        most_learned = learned > _LEARNED and float(gains.median()) > learned / 2
        numbers = [k for k in range(len(outputs)) if k not in broken]
        lost = [k for k, gain in zip(numbers, gains.tolist(), strict=True) if gain < learned / 10]
        lost = lost if most_learned else []
    count = len(broken) + len(lost) + e.left_out
    if not count:
        return None
    names = ", ".join(str(k) for k in (broken + lost)[:5])
    return Finding(
        "members_diverged",
        "fault",
        f"{count} of {len(outputs) + e.left_out} members are not finite, were left out, or predict "
        f"worse than the frequencies of the targets{f' (number {names})' if names else ''}.",
        "One broken member spoils every average, and members that were left out make the posterior "
        "smaller than it looks.",
        "Lower their learning rate, clip gradients, or let them begin anew (`restarts`, "
        "`max_loss`).",
        {"diverged": count, "members": len(outputs) + e.left_out},
    )


def duplicate_members(e: Evidence) -> Finding | None:
    """Members that are one network, as where all have the same seed."""
    if len(e.modes) < 2:
        raise NotPossible("there is only one member")
    means = torch.stack([o.mean(0) for o in e.on_held_out]).flatten(1)
    distances = torch.cdist(means, means)
    above = distances[tuple(torch.triu_indices(len(means), len(means), 1))]
    scale = (means - means.mean(1, keepdim=True)).norm(dim=1).mean()
    pairs = int((above <= _SAME * scale).sum())
    if not pairs:
        return None
    return Finding(
        "duplicate_members",
        "fault",
        f"{pairs} of {len(above)} pairs of members predict the same to {_SAME:g} of the spread of "
        "their outputs.",
        "Copies add nothing: the posterior has fewer modes than it seems, and its uncertainty is "
        "too small.",
        "Give every member a start of its own (another seed; `start_from` of different networks) "
        "and check that they train.",
        {"pairs": pairs, "of": len(above)},
    )


def draws_alike(e: Evidence) -> Finding | None:
    """Draws of a mode that all predict the same."""
    several = [o for o in e.on_held_out if len(o) > 1]
    if not several:
        raise NotPossible("every mode is a single network")
    found = [float(_spread(o)) for o in several]
    typical = float(torch.tensor(found).median())
    if not typical < _ALIKE:
        return None
    return Finding(
        "draws_alike",
        "fault",
        f"Outputs of {len(several[0])} draws of a mode differ by {typical:.1g} of how much outputs "
        "differ between examples.",
        "A posterior whose draws are one function has no uncertainty about the network.",
        "Check deviations, dropout rates, noise and learning rate of the method: one of them is "
        "(nearly) zero.",
        {"spread": typical},
    )


def duplicate_draws(e: Evidence) -> Finding | None:
    """Networks of a chain that did not move between two times at which it was kept."""
    if not e.chains:
        raise NotPossible("there are no chains")
    same = [(t.diff(dim=1) == 0).flatten(2).all(2) for t in e.chains.values() if t.shape[1] > 1]
    if not same:
        raise NotPossible("every chain is a single network")
    share = float(torch.stack(same).all(0).double().mean())
    if share < _MOVED:
        return None
    return Finding(
        "duplicate_draws",
        "fault",
        f"In {share:.0%} of the intervals a chain has not moved at all.",
        "Proposals that are refused repeat a network, and repeated networks are one draw.",
        "Take a smaller `step_size` or shorter trajectories, until most proposals are accepted.",
        {"share": share},
    )


def modes_too_few(e: Evidence) -> Finding | None:
    """A prediction that would still gain from more modes."""
    if e.settings.sampled:
        raise NotPossible("chains are judged by whether they agree")
    outputs = [o for o in e.on_held_out if bool(o.isfinite().all())]
    if len(outputs) < 2 or e.alone:
        raise NotPossible("one mode cannot tell what others would add")
    assert e.held_out is not None
    each = e.log_densities(outputs, e.held_out.targets)
    every = (torch.logsumexp(each, 0) - torch.tensor(float(len(each))).log()).mean()
    without = torch.stack(
        [_mean_density(each[[j for j in range(len(each)) if j != k]]) for k in range(len(each))]
    ).mean()
    # error of a mean of K modes falls as 1/K: from K-1 to K it is 1/(K-1) of what is left at K
    left = float(every - without) * (len(each) - 1)
    if left < _GAIN:
        return None
    return Finding(
        "modes_too_few",
        "warning",
        f"With {len(each)} modes the log-likelihood of held-out data would gain about {left:.2g} "
        "nats per example from many more.",
        "The modes differ as functions, and the mean over so few of them is not that over all.",
        f"Train more members (`members={2 * len(each)}` or more).",
        {"gain": left, "modes": len(each)},
    )


def _mean_density(rows: Tensor) -> Tensor:
    return (torch.logsumexp(rows, 0) - torch.tensor(float(len(rows))).log()).mean()


def _spread(outputs: Tensor) -> Tensor:
    """Standard deviation over draws, relative to that over examples."""
    between = outputs.mean(0).var(0, correction=0).mean().sqrt()
    return outputs.var(0, correction=0).mean().sqrt() / between.clamp_min(1e-12)


def _class_count(e: Evidence) -> int | None:
    return max(2, e.on_held_out[0].shape[-1]) if e.classes else None

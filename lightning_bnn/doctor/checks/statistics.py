"""Whether statistics of BatchNorm belong to the networks that use them."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from lightning_bnn import params as P
from lightning_bnn.batch_norms import batch_norms
from lightning_bnn.doctor.evidence import Evidence, NotPossible
from lightning_bnn.doctor.findings import Finding
from lightning_bnn.evaluation.predictions import draw
from lightning_bnn.posteriors import Empirical

__all__ = ["statistics_of_other_networks"]

_LOSS = 0.05
"""Nats per example that statistics of their own must gain."""
_NETWORKS = 5


@torch.no_grad()
def statistics_of_other_networks(e: Evidence) -> Finding | None:
    """Draws that normalise with means and variances of activations that are not theirs."""
    if not batch_norms(e.network):
        raise NotPossible("the network has no layers with statistics")
    if e.training is None or e.held_out is None or len(e.training.targets) < 64:
        raise NotPossible("too few training or validation data were seen")
    if not all(isinstance(mode, Empirical) for mode in e.judged):
        raise NotPossible("the posterior predicts by draws that are not kept")
    networks = _some(e)
    likelihood, targets = e.likelihood, e.held_out.targets
    own = _with_own_statistics(e, networks)
    before, after = (
        float(_density(likelihood.log_prob(_outputs(e, stack), targets)))  # type: ignore[operator]  # it has one
        for stack in (networks, own)
    )
    if after - before < _LOSS:
        return None
    return Finding(
        "statistics_of_other_networks",
        "fault",
        f"With statistics of BatchNorm of their own the networks gain {after - before:.2g} nats "
        "per held-out example.",
        "Means and variances that were averaged over other weights make every prediction wrong.",
        "Estimate the statistics anew for every network that predicts (SWAG and averages of this "
        "package do; for others run training data through the network in training mode).",
        {"gain": after - before},
    )


def _some(e: Evidence) -> P.Params:
    stacks = [draw(mode, _NETWORKS, "doctor", k) for k, mode in enumerate(e.judged[:_NETWORKS])]
    joined = {name: torch.cat([stack[name] for stack in stacks]) for name in stacks[0]}
    return {name: t[:_NETWORKS] for name, t in joined.items()}


def _with_own_statistics(e: Evidence, networks: P.Params) -> P.Params:
    """The same weights, whose statistics are those of the training examples that were seen."""
    assert e.training is not None
    runner = copy.deepcopy(e.network).eval()
    for layer in batch_norms(runner):
        layer.train()
        layer.momentum = 1.0
    weights = set(P.weight_names(e.network))
    stack = {name: t if name in weights else t.clone() for name, t in networks.items()}
    P.apply(runner, stack, *e.training.inputs)
    return stack


def _outputs(e: Evidence, networks: P.Params) -> Tensor:
    assert e.held_out is not None
    return P.apply(e.network, networks, *e.held_out.inputs).double()


def _density(rows: Tensor) -> Tensor:
    return (torch.logsumexp(rows, 0) - torch.tensor(float(len(rows))).log()).mean()

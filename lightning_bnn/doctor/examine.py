"""All checks, one after the other, and the report of their findings."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from lightning_bnn.doctor.checks import mixing, predictions, training, weights
from lightning_bnn.doctor.evidence import Evidence, NotPossible
from lightning_bnn.doctor.findings import SEVERITIES, Finding, Report
from weightsym.params import elsewhere, random_numbers

Check = Callable[[Evidence], Finding | None]
CHECKS: dict[str, Check] = {
    name: getattr(module, name)
    for module in (training, weights, mixing, predictions)
    for name in module.__all__
}
"""Every check by the name of its verdict."""
_CONSEQUENCES = {
    "probabilities_as_logits": ("miscalibrated", "loss_not_converged"),
    "no_better_than_frequencies": ("prior_dominates",),
    "draws_alike": ("chains_not_converged",),
    "members_diverged": ("no_better_than_frequencies",),
    "statistics_of_other_networks": ("no_better_than_frequencies",),
}
"""Verdicts that are not reported beside their cause."""


def examine(evidence: Any, facts: Mapping[str, Any] | None = None, **options: Any) -> Report:
    """Make every check that is possible.

    Args:
        evidence: a posterior and what is known of it; or a list of modules, or whatever
            `Posterior.of` takes.
        facts: about the origin of the posterior, for the report.
        **options: arguments of `Evidence.of`, if there is no evidence yet.

    >>> import torch
    >>> from weightsym import params as P
    >>> from lightning_bnn.doctor import Examples
    >>> from lightning_bnn.likelihoods import Categorical
    >>> from lightning_bnn.models import mlp
    >>> from lightning_bnn.posteriors import Empirical
    >>> net, x = mlp(2, [8], 3), torch.randn(50, 2)
    >>> wrong = torch.nn.Sequential(net, torch.nn.Softmax(-1))  # its outputs are not logits
    >>> modes = [Empirical(P.populate(wrong, 1)) for _ in range(4)]
    >>> examples = Examples((x,), torch.randint(3, (50,)))
    >>> report = examine(Evidence(wrong, Categorical(), modes, modes, examples, examples))
    >>> report.faults[0].name
    'probabilities_as_logits'
    """
    begun = time.process_time()
    evidence = evidence if isinstance(evidence, Evidence) else Evidence.of(evidence, **options)
    findings: dict[str, Finding] = {}
    fine, skipped = [], {}
    network, training = evidence.network, evidence.network.training
    network.eval()
    evidence = evidence.at_one_position()
    with random_numbers(elsewhere(evidence.network.parameters())):
        for name, check in CHECKS.items():
            try:
                finding = check(evidence)
            except NotPossible as reason:
                skipped[name] = str(reason)
                continue
            if finding is None:
                fine.append(name)
            else:
                findings[name] = replace(finding, name=name)
    network.train(training)
    for name, consequences in _CONSEQUENCES.items():
        if name in findings:
            for consequence in consequences:
                findings.pop(consequence, None)
    order = sorted(findings.values(), key=lambda f: SEVERITIES.index(f.severity))
    every = {
        "modes": len(evidence.modes),
        "training examples seen": _size(evidence.training),
        "held-out examples": _size(evidence.held_out),
        **(facts or {}),
        "seconds": time.process_time() - begun,
    }
    return Report(order, fine, skipped, every, dict(evidence.curves))


def _size(examples: Any) -> int:
    return 0 if examples is None else len(examples.targets)

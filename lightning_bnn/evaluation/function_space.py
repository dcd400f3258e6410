"""The distance of two posteriors in what they predict."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bnn.evaluation.draws import predictor_of
from lightning_bnn.evaluation.errors import bootstrap
from lightning_bnn.likelihoods import Categorical
from lightning_bnn.metrics.mmd import law_mmd
from lightning_bnn.posteriors import Posterior
from lightning_bnn.predictions import Predictions
from lightning_bnn.tables import Measured


@torch.no_grad()
def function_distances(
    posterior: Any,
    reference: Any,
    network: nn.Module,
    inputs: Tensor,
    *,
    likelihood: nn.Module | None = None,
    samples: int = 100,
    seed: int = 0,
) -> dict[str, Measured]:
    """Measure how far two posteriors are apart in what they predict for given inputs.

    Args:
        posterior: whatever `Posterior.of` takes.
        reference: the same.
        network: gives the computation.
        inputs: a batch, without targets.
        likelihood: what outputs mean, by default `Categorical`.
        samples: number of networks of each, divided among its modes.
        seed: of the draws.

    Returns:
        ``"mmd"``, the unbiased MMD² between the laws of the outputs, whose error is over networks,
        or over modes where there are several; and distances of the two mixtures as in
        `lightning_bnn.compare`, whose errors are over inputs: of classes ``"agree"``, ``"tv"`` and
        ``"kl"``, of numbers ``"energy_f"`` and ``"energy"``.

    >>> from lightning_bnn.models import mlp
    >>> from lightning_bnn.posteriors import DiagonalGaussian
    >>> from weightsym import params as P
    >>> net, x = mlp(2, [8], 3), torch.randn(40, 2)
    >>> narrow, wide = (DiagonalGaussian(P.of(net), std) for std in (0.01, 2.0))
    >>> found = function_distances(wide, narrow, net, x)
    >>> [*found], found["mmd"].value > 5 * found["mmd"].error
    (['mmd', 'agree', 'tv', 'kl'], True)
    """
    likelihood = Categorical() if likelihood is None else likelihood
    sides = [_outputs(p, network, inputs, samples, seed, k)
             for k, p in enumerate((posterior, reference))]  # fmt: skip
    (first, modes), (second, chains) = sides
    chained: dict[str, Any] = {} if chains is None else {"chains": chains}
    mmd = law_mmd({"f": second.flatten(1)}, {"f": first.flatten(1)}, modes, **chained)
    mine, theirs = (Predictions.of(likelihood, outputs) for outputs in (first, second))

    def means(rows: Tensor) -> dict[str, float]:
        distances = mine.rows(rows).distances(theirs.rows(rows))
        return {name: float(values.mean()) for name, values in distances.items()}

    of_mixtures = bootstrap([len(inputs)], means, seed=seed)
    return {"mmd": Measured(float(mmd.value), float(mmd.error)), **of_mixtures}


def _outputs(
    source: Any, network: nn.Module, inputs: Tensor, samples: int, *key: int
) -> tuple[Tensor, Tensor | None]:
    """Return outputs ``(networks, examples, ...)``, and the mode of each if there are several."""
    modes = Posterior.of(source, network).modes()
    each = max(1, samples // len(modes))
    network = copy.deepcopy(network).eval()
    outputs = [predictor_of(mode, each, *key, k)(network, inputs) for k, mode in enumerate(modes)]
    if len(modes) == 1:
        return outputs[0], None
    counts = torch.tensor([len(o) for o in outputs])
    return torch.cat(outputs), torch.arange(len(modes)).repeat_interleave(counts)

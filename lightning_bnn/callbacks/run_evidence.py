"""What the doctor is shown of a run: of modules with a posterior, and of any other module."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence, Sized
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from lightning_bnn import params as P
from lightning_bnn.callbacks.network import whole_network
from lightning_bnn.doctor import Evidence, Examples, Settings
from lightning_bnn.likelihoods import Categorical, Gaussian
from lightning_bnn.member_batch import MemberBatch
from lightning_bnn.posteriors import Empirical

__all__ = ["ExampleStore", "evidence_of_module", "evidence_of_network", "settings_of"]

_FEW_CLASSES = 1000
_DRAWS = 20


class ExampleStore:
    """The first examples of some batches, until there are enough.

    Args:
        most: how many are kept.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._parts: list[Examples] = []
        self._count = 0

    def clear(self) -> None:
        """Forget the examples that were kept."""
        self._parts, self._count = [], 0

    def add(self, pl_module: Any, batch: Any) -> None:
        """Keep the examples of a batch; one whose layout is not known is left out."""
        if self._count >= self.most:
            return
        part = _examples(pl_module, batch)
        if part is None:
            return
        left = self.most - self._count
        part = Examples(
            tree_map(lambda t: t[:left].detach() if isinstance(t, Tensor) else t, part.inputs),
            part.targets[:left].detach(),
        )
        self._parts.append(part)
        self._count += len(part.targets)

    def examples(self) -> Examples | None:
        """All that was kept; None if nothing was."""
        if not self._parts:
            return None
        inputs = zip(*(part.inputs for part in self._parts), strict=True)
        joined = tuple(torch.cat(t) if isinstance(t[0], Tensor) else t[0] for t in inputs)
        return Examples(joined, torch.cat([part.targets for part in self._parts]))


def _examples(pl_module: Any, batch: Any) -> Examples | None:
    """Inputs and targets of a batch; of one with a batch for every member, those of the first."""
    if isinstance(batch, MemberBatch):
        batch = tree_map(lambda t: t[0] if isinstance(t, Tensor) else t, tuple(batch))
    read = getattr(pl_module, "inputs_and_targets", None)
    if callable(read):
        inputs, targets = read(batch)
        inputs = pl_module.cast(inputs)
    elif isinstance(batch, (tuple, list)) and len(batch) > 1:
        inputs, targets = tuple(batch[:-1]), batch[-1]
    else:
        return None
    sizes = {len(t) for t in (*inputs, targets) if isinstance(t, Tensor) and t.ndim}
    known = isinstance(targets, Tensor) and all(isinstance(t, Tensor) for t in inputs)
    return Examples(tuple(inputs), targets) if known and len(sizes) == 1 else None


def settings_of(trainer: Any, pl_module: Any) -> Settings:
    """What a run was asked for, as far as module and optimizers say it."""
    groups = [g for optimizer in trainer.optimizers for g in optimizer.param_groups]
    first: Mapping[str, Any] = groups[0] if groups else {}
    prior = getattr(pl_module, "prior", None)
    samples = "temperature" in first or "energy_variance" in first
    decay = 0.0 if samples else max((float(g.get("weight_decay", 0)) for g in groups), default=0.0)
    dataset = getattr(trainer.train_dataloader, "dataset", None)
    told = first.get("num_data") or getattr(pl_module, "num_data", None)
    method = getattr(pl_module, "method", None)
    return Settings(
        num_data=told if isinstance(told, int) else None,
        seen=len(dataset) if isinstance(dataset, Sized) else None,
        temperature=_number(first.get("temperature", getattr(pl_module, "temperature", 1.0))),
        kl_weight=_number(getattr(pl_module, "kl_weight", 1.0)),
        prior_std=_number(getattr(prior, "std", None), None),
        weight_decay=decay,
        sampled=bool(getattr(method, "is_sampler", samples)),
        wanted_energy_variance=_number(first.get("energy_variance"), None),
    )


def _number(value: Any, otherwise: Any = 1.0) -> Any:
    return float(value) if isinstance(value, (int, float)) else otherwise


def evidence_of_module(
    pl_module: Any,
    training: Examples | None,
    held_out: Examples | None,
    settings: Settings,
    curves: Mapping[str, Sequence[float]],
) -> Evidence:
    """Of a module of this package, or one with the same methods.

    Args:
        pl_module: what was trained.
        training: some of its examples.
        held_out: some that it was not trained on.
        settings: what was asked for.
        curves: what was seen epoch by epoch.
    """
    chains = getattr(pl_module, "chains", None)
    divergence = getattr(pl_module, "divergence", None)
    return Evidence(
        pl_module.template,
        pl_module.likelihood,
        pl_module.posterior().modes(),
        pl_module.judged_modes(_DRAWS),
        training,
        held_out,
        settings,
        curves,
        chains=chains() if callable(chains) else {},
        left_out=0 if divergence is None else int(divergence.left_out.sum()),
        draws=_DRAWS,
    )


def evidence_of_network(
    pl_module: nn.Module,
    name: str | None,
    training: Examples | None,
    held_out: Examples | None,
    settings: Settings,
    curves: Mapping[str, Sequence[float]],
) -> Evidence:
    """Of any module: one network, and the likelihood that its outputs and targets suggest.

    Args:
        pl_module: what was trained.
        name: of the network inside, by default the likeliest.
        training: some of its examples.
        held_out: some that it was not trained on.
        settings: what was asked for.
        curves: what was seen epoch by epoch.
    """
    network = copy.deepcopy(whole_network(pl_module, name)[1]).eval()
    weights = {n: t.detach() for n, t in P.of(network).items()}
    mode = Empirical({n: t[None] for n, t in weights.items()})
    examples = held_out or training
    if examples is None:
        raise ValueError("no batch was a tuple of inputs and targets")
    likelihood = _likelihood(network, examples)
    return Evidence(
        network, likelihood, [mode], [mode], training, held_out, settings, curves, alone=True
    )


@torch.no_grad()
def _likelihood(network: nn.Module, examples: Examples) -> nn.Module:
    """What targets look like: classes, or numbers with noise of the size of the errors."""
    targets = examples.targets
    try:
        outputs = network(*examples.inputs)
    except Exception as reason:  # whatever the user's forward raises
        first = (str(reason).strip().splitlines() or [type(reason).__name__])[0]
        raise ValueError(
            f"the network cannot be called with the inputs of a batch: {first}"
        ) from None
    if not isinstance(outputs, Tensor) or outputs.ndim != 2:
        raise ValueError("the network's outputs are not (batch, numbers)")
    whole = not targets.is_floating_point() and targets.ndim == 1
    if whole and 1 < outputs.shape[1] <= _FEW_CLASSES:
        return Categorical()
    if targets.is_floating_point() and targets.shape == outputs.shape:
        error = float((outputs - targets).square().mean().sqrt())
        return Gaussian(std=error if 0 < error < float("inf") else 1.0)
    raise ValueError("targets are neither class indices nor numbers in the shape of the outputs")

"""The examination of a run: of a module with a posterior, or of any other module."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bnn.callbacks.seen_examples import Seen, is_named_as_targets
from lightning_bnn.callbacks.watching import whole_network
from lightning_bnn.doctor import Evidence, Examples, Finding, Report, Settings, examine
from lightning_bnn.likelihoods import Categorical, Gaussian
from lightning_bnn.methods import Method, Samples
from lightning_bnn.methods.health import Diverged
from lightning_bnn.posteriors import Empirical
from weightsym import params as P
from weightsym.params import first_line, structural_copy

_FEW_CLASSES = 1000
_DRAWS = 20


@torch.no_grad()
def examine_run(
    trainer: Any,
    pl_module: Any,
    network: str | None,
    training: Seen | None,
    held_out: Seen | None,
    curves: Mapping[str, Sequence[float]],
) -> Report:
    """Examine the posterior of a run as it is now.

    Args:
        trainer: of the run.
        pl_module: what it trains.
        network: name of the network inside, by default the likeliest.
        training: some of the examples that it is trained on.
        held_out: some that it is not trained on.
        curves: numbers of every epoch.
    """
    settings = _settings(trainer, pl_module)
    try:
        if callable(getattr(pl_module, "judged_modes", None)):
            examples = _of_one(training), _of_one(held_out)
            evidence = _of_module(pl_module, *examples, settings, curves)
        else:
            evidence = _of_network(pl_module, network, training, held_out, settings, curves)
    except ValueError as error:
        return _unexaminable(pl_module, error, settings, curves)
    return examine(evidence, {"module": type(pl_module).__name__})


def _settings(trainer: Any, pl_module: Any) -> Settings:
    """Read the settings of a run from its method and optimizers."""
    groups = [g for optimizer in trainer.optimizers for g in optimizer.param_groups]
    first: Mapping[str, Any] = groups[0] if groups else {}
    method = getattr(pl_module, "method", None)
    method = method if isinstance(method, Method) else None
    samples = "temperature" in first or "energy_variance" in first
    decay = 0.0 if samples else max((float(g.get("weight_decay", 0)) for g in groups), default=0.0)
    dataset = getattr(trainer.train_dataloader, "dataset", None)
    num_data = first.get("num_data") or getattr(pl_module, "num_data", None)
    return Settings(
        num_data=num_data if isinstance(num_data, int) else None,
        seen=len(dataset) if isinstance(dataset, Sized) else None,
        temperature=_temperature(method, groups),
        kl_weight=1.0 if method is None else method.complexity_weight(pl_module.state),
        prior_std=_number(getattr(getattr(pl_module, "prior", None), "std", None), None),
        weight_decay=decay,
        sampled=samples if method is None else isinstance(method, Samples),
        wanted_energy_variance=_number(first.get("energy_variance"), None),
    )


def _temperature(method: Method | None, groups: Sequence[Mapping[str, Any]]) -> float:
    """The temperature of the method or of the optimizers, the first that is not 1.

    A cyclical schedule sets that of its sampler to zero while it explores, and keeps nothing then.
    """
    of_method = None if method is None else method.temperature
    of_groups = (g.get("sampling_temperature", g.get("temperature")) for g in groups)
    known = [_number(t) for t in (of_method, *of_groups) if t is not None]
    return next((t for t in known if t != 1), 1.0)


def _number(value: Any, otherwise: Any = 1.0) -> Any:
    return float(value) if isinstance(value, (int, float)) else otherwise


def _of_module(
    pl_module: Any,
    training: Examples | None,
    held_out: Examples | None,
    settings: Settings,
    curves: Mapping[str, Sequence[float]],
) -> Evidence:
    """Collect the evidence on a module of this package, or one with the same methods."""
    state = getattr(pl_module, "state", pl_module)
    chains, divergence = (getattr(state, name, None) for name in ("chains", "divergence"))
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


def _of_network(
    pl_module: nn.Module,
    name: str | None,
    training: Seen | None,
    held_out: Seen | None,
    settings: Settings,
    curves: Mapping[str, Sequence[float]],
) -> Evidence:
    """Collect the evidence on any module: one network, and the likelihood that targets suggest."""
    judged = held_out or training
    if judged is None:
        raise ValueError("no network was called with the tensors of a batch that holds targets")
    called = name if judged.network is None else judged.network
    network = structural_copy(whole_network(pl_module, called or None)[1]).eval()
    likelihood, targets = read_as_one_tensor(network, judged)
    mode = Empirical({n: t.detach()[None] for n, t in P.of(network).items()})
    examples = _of_one(training, targets), _of_one(held_out, targets)
    return Evidence(network, likelihood, [mode], [mode], *examples, settings, curves, alone=True)


def _of_one(examples: Seen | None, targets: int | str | None = None) -> Examples | None:
    """Inputs in order, and the targets of a name, by default the likeliest."""
    if examples is None:
        return None
    name = next(iter(examples.targets)) if targets is None else targets
    return (
        Examples(tuple(examples.inputs.values()), examples.targets[name])
        if name in examples.targets
        else None
    )


@torch.no_grad()
def read_as_one_tensor(network: nn.Module, examples: Seen) -> tuple[nn.Module, int | str]:
    """Let a network return the outputs for which there are targets.

    Returns:
        A likelihood for these, and the name of the targets.
    """
    call = _with_others(network, examples)
    try:
        outputs = call(*examples.inputs.values())
    except Exception as reason:  # whatever the user's forward raises
        raise ValueError(
            f"the network cannot be called with the inputs of a batch: {first_line(reason)}"
        ) from None
    usual = [k for k, out in enumerate(outputs) if out.ndim == 2 and out.is_floating_point()]
    if not usual:
        raise ValueError("the network's outputs are not (batch, numbers)")
    batch = [*examples.inputs.values(), *examples.targets.values()]
    for key in usual:
        chosen = ((n, _likelihood(outputs[key], t, batch)) for n, t in examples.targets.items())
        fitting = [(name, likelihood) for name, likelihood in chosen if likelihood is not None]
        unclear = [str(n) for n, _ in fitting if not (_is_place(n) or is_named_as_targets(n))]
        if len(fitting) == len(unclear) > 1:
            raise ValueError(
                f"tensors of a batch that may be the targets are {', '.join(unclear)}: call one of "
                "them labels or targets"
            )
        if fitting:
            name, likelihood = fitting[0]
            network.forward = partial(_part, call, key)
            return likelihood, name
    raise ValueError("targets are neither class indices nor numbers in the shape of the outputs")


def return_first_tensor(network: nn.Module, examples: Seen) -> None:
    """Let a network take the inputs of examples, and return its first tensor, or its logits."""
    network.forward = partial(_part, _with_others(network, examples), 0)


def _with_others(network: nn.Module, examples: Seen) -> Callable[..., list[Tensor]]:
    return partial(_call, network.forward, tuple(examples.inputs), examples.others)


def _is_place(name: int | str) -> bool:
    """Tell whether a tensor of a batch stands in a tuple, where the last ones are targets."""
    return str(name).rpartition(".")[2].isdigit()


def _call(
    forward: Any, names: Sequence[int | str], others: Mapping[int | str, Any], *inputs: Tensor
) -> list[Tensor]:
    """The tensors that a network returns, logits first."""
    arguments = {**others, **dict(zip(names, inputs, strict=True))}
    places = sorted(k for k in arguments if isinstance(k, int))
    named = {k: v for k, v in arguments.items() if isinstance(k, str)}
    return list(_tensors(forward(*(arguments[k] for k in places), **named)))


def _part(call: Any, key: int, *inputs: Tensor) -> Tensor:
    return call(*inputs)[key]


def _tensors(outputs: Any) -> Iterator[Tensor]:
    """Yield the tensors in dicts, tuples and objects, those called logits first.

    >>> [t.item() for t in _tensors({"loss": torch.tensor(1), "logits": torch.tensor(2)})]
    [2, 1]
    """
    if isinstance(outputs, Tensor):
        yield outputs
        return
    if isinstance(outputs, Mapping):
        items = outputs
    elif isinstance(outputs, (tuple, list)):
        items = dict(zip(getattr(outputs, "_fields", range(len(outputs))), outputs, strict=True))
    else:
        items = getattr(outputs, "__dict__", {})
    for key in sorted(items, key=lambda key: key != "logits"):
        yield from _tensors(items[key])


def _likelihood(outputs: Tensor, targets: Tensor, batch: Sequence[Tensor]) -> nn.Module | None:
    """Choose a likelihood for targets: classes, or numbers with noise as large as the errors.

    As many outputs as an example has numbers may be a reconstruction of it: then they count as
    logits only if they predict classes better than chance.
    """
    whole = not targets.is_floating_point() and targets.ndim == 1
    if whole and 1 < outputs.shape[1] <= _FEW_CLASSES:
        sizes = {t[0].numel() for t in batch if t.is_floating_point() and t.ndim > 1}
        is_other = outputs.shape[1] in sizes and not _names(outputs.argmax(1), targets)
        return None if is_other else Categorical()
    if targets.is_floating_point() and targets.shape == outputs.shape:
        error = float((outputs - targets).square().mean().sqrt())
        return Gaussian(std=error if 0 < error < float("inf") else 1.0)
    return None


def _names(found: Tensor, labels: Tensor) -> bool:
    """Tell whether two labels of every example agree beyond chance, by three standard errors."""
    size = int(found.max()) + 2
    counts = [t.clamp(0, size - 1).bincount(minlength=size).double() for t in (found, labels)]
    chance = float(counts[0] @ counts[1]) / len(labels) ** 2
    agreement = float((found == labels).double().mean())
    return agreement > chance + 3 * (chance / len(labels)) ** 0.5


def _unexaminable(
    pl_module: Any, reason: ValueError, settings: Settings, curves: Mapping[str, Sequence[float]]
) -> Report:
    """Report on the run alone, where there is no posterior, or nothing is known of the network."""
    facts = {"module": type(pl_module).__name__}
    if isinstance(reason, Diverged):
        finding = Finding(
            "fault",
            f"There is no posterior to look at: {reason}",
            "Nothing can be drawn from it.",
            "Take a smaller learning rate, or clip gradients.",
            name="no_posterior",
        )
        everything = {"everything else": "there is no posterior"}
        return Report([finding], (), everything, facts, curves)
    report = examine(
        Evidence(pl_module, nn.Identity(), [], [], None, None, settings, curves), facts
    )
    return replace(report, skipped=dict.fromkeys(report.skipped, str(reason)))

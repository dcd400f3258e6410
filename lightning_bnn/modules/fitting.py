"""The course of a fit: members before it, after steps and epochs, and at its end."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from lightning.pytorch.callbacks import Callback, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn

from lightning_bnn._compat import log, trainer_of
from lightning_bnn.harvest import ends, epochs_of
from lightning_bnn.likelihoods import Categorical, Dirichlet
from lightning_bnn.methods import Fit, Method, Progress, Samples, Transitions
from lightning_bnn.methods.health import finite_members
from lightning_bnn.modules.members import (
    check_fixed,
    constants_of,
    explaining_misfits,
    sample_of_fixed,
)
from lightning_bnn.modules.training_data import fault_of
from lightning_bnn.samplers import Sampler
from lightning_bnn.samplers.cyclical import interval_of
from weightsym.params import Params, at_least_single, key_of

if TYPE_CHECKING:
    from lightning_bnn.modules.bayesian import Bayesian


# ------------------------------------------------------------ the beginning
def check_parts(method: Any, likelihood: Any, optimizer: Any) -> None:
    """Check the types of the arguments."""
    if not isinstance(method, Method):
        raise ValueError(
            f"`method` must be one of lightning_bnn.methods, such as MFVI(), got {method!r}."
        )
    if likelihood is not None and not isinstance(likelihood, nn.Module):
        raise ValueError(
            "`likelihood` must be a module such as Categorical() or Gaussian(), got "
            f"{likelihood!r}."
        )
    if isinstance(likelihood, Dirichlet) and method.needs_targets:
        raise ValueError(
            "Labels do not determine the concentrations of `Dirichlet`: a Distillation learns them "
            "from a posterior."
        )
    if not callable(optimizer):
        raise ValueError(
            "`optimizer` must be a function that makes an optimizer from parameters, such "
            f"as `lambda p: torch.optim.Adam(p, 1e-3)`, got a {type(optimizer).__name__}."
        )


def begin(module: Bayesian) -> None:
    """Read N if it was not given, pass it to samplers, and start the method."""
    trainer = module.trainer
    _refuse_averages(module, cast(Any, trainer).callbacks)
    if trainer.global_step == 0 and not bool(finite_members(module.state.parameters()).any()):
        raise ValueError(
            f"{type(module).__name__} starts from weights that are not finite: check the "
            "given network."
        )
    _compare_fixed_weights(module)
    module.broken = set()
    module.data.source = trainer.train_dataloader
    groups = [group for o in trainer.optimizers for group in o.param_groups]
    _seed(module, groups)
    asking = [g for g in groups if g.get("num_data", 0) is None or "reads_num_data" in g]
    weighs_data = module.method.prior is not None or isinstance(module.method, Samples)
    if module.data.given is None and (weighs_data or asking):
        module.data.read(module)
    elif module.data.given is None and type(module.method).at_end is not Method.at_end:
        with contextlib.suppress(ValueError):  # then the curvature is that of what is given
            module.data.read(module)
    before = {group["num_data"] for group in asking} - {None, module.num_data}
    if before:
        rank_zero_warn(
            f"The checkpoint is of a run on {before.pop()} training examples, but now "
            f"there are {module.num_data}: the target is another posterior."
        )
    for group in asking:  # also when it is resumed on other data
        group.update(num_data=module.num_data, reads_num_data=True)
    module.method.before_fit(module.state, _fit(module), module.run)
    trainer.strategy.barrier()


def _seed(module: Bayesian, groups: Sequence[dict[str, Any]]) -> None:
    """Seed the noise of samplers by seed, members and fit."""
    module.seed = module.trainer.strategy.broadcast(module.seed)  # processes may have their own
    key = module.population.key
    for group in groups:
        if group.get("seed", 0) is None:
            group["seed"] = key_of(module.seed, "sampler", module.fits, *key)
        elif "seed" in group and key and "is_seeded" not in group:
            group["seed"] = key_of(group["seed"], "sampler", *key)
        group["is_seeded"] = True  # also for who goes on from its checkpoint
    module.fits += 1


def in_common(module: Bayesian, tensors: Params) -> Params:
    """Replace tensors by those of the first process if several processes train the same members."""
    trainer = module.trainer
    return tensors if trainer.world_size == 1 else trainer.strategy.broadcast(tensors)


def _compare_fixed_weights(module: Bayesian) -> None:
    """Check that all processes have the same fixed weights, and report their memory."""
    template = module.template
    sample = sample_of_fixed(template)
    if len(sample):
        check_fixed(template, in_common(module, {"fixed": sample})["fixed"], "The first process")
        rank_zero_info(f"{type(module).__name__}: {memory_of(module)}.")


def memory_of(module: Bayesian) -> str:
    """Describe the memory for weights in words."""
    fixed = {id(t): t.nbytes for t in constants_of(module.template).values()}
    trained = sum(p.nbytes for p in module.state.parameters() if p.requires_grad)
    parts = {
        "members take": sum(t.nbytes for t in module.state.state_dict().values()),
        "their gradients": trained,
        "an optimizer like Adam": 2 * trained,
        "weights held fixed": sum(fixed.values()),
    }
    return ", ".join(f"{name} {_size(size)}" for name, size in parts.items() if size)


def _size(count: int) -> str:
    """Write a number of bytes in the largest unit that is not larger."""
    unit = min(3, max(0, len(str(count)) - 1) // 3)
    return f"{count / 1000**unit:.3g} {('bytes', 'kB', 'MB', 'GB')[unit]}"


def _refuse_averages(module: Bayesian, callbacks: list[Callback]) -> None:
    """Refuse callbacks that swap the weights of which the posterior is made."""
    kinds = WeightAveraging | StochasticWeightAveraging
    averages = [type(c).__name__ for c in callbacks if isinstance(c, kinds)]
    if averages and module.method.keeps_networks:
        raise ValueError(
            f"{averages[0]} swaps the weights of which {type(module).__name__} makes its "
            "posterior: omit the callback, or train a DeepEnsemble with it and start from "
            "that checkpoint."
        )


def _fit(module: Bayesian) -> Fit:
    """Return the facts that are known at the start of the fit."""
    trainer = cast(Any, module.trainer)
    steps, batches = trainer.estimated_stepping_batches, trainer.num_training_batches
    if batches < math.inf:  # of streams, the number is not known
        batches = math.ceil(batches / trainer.accumulate_grad_batches)
    each = module.method.transitions if isinstance(module.method, Transitions) else 1
    return Fit(
        anew=trainer.ckpt_path is None and trainer.global_step == 0,
        steps=math.inf if steps in (None, -1) else each * steps,
        epochs=epochs_of(trainer),
        epoch_steps=each * batches,
        optimizer=trainer.optimizers[0],
        schedulers=_schedulers(module),
        clips_gradients=bool(trainer.gradient_clip_val),
        rank=trainer.global_rank,
        processes=trainer.world_size,
        trial=bool(trainer.fast_dev_run),
        batches=lambda: module.data.batches(module) or (),
        example=module.example,
        in_common=lambda tensors: in_common(module, tensors),
    )


def _schedulers(module: Bayesian) -> tuple[Any, ...]:
    return tuple(config.scheduler for config in module.trainer.lr_scheduler_configs)


def warn_of_copies(likelihood: Any, inputs: Sequence[Any], targets: Tensor) -> None:
    """Warn of targets that are the input tokens themselves, without a shift by one.

    Args:
        likelihood: of the module.
        inputs: of a batch.
        targets: of the same batch.
    """
    if not isinstance(likelihood, Categorical) or likelihood.next_token:
        return
    ignored = targets == likelihood.ignore_index
    alike = [x for x in inputs if isinstance(x, Tensor) and x.shape == targets.shape]
    if any(bool(((x == targets) | ignored).all()) for x in alike):
        rank_zero_warn(
            "The targets equal the inputs, which a causal language model would learn to copy: "
            "pass `likelihood=Categorical(next_token=True)`."
        )


# ------------------------------------------------------------ steps and epochs
def means_of(terms: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return means over the members that are finite, or over all."""
    rows = torch.stack([values.detach() for values in terms.values()])
    finite = rows.isfinite()
    sums = torch.stack([rows.where(finite, 0).sum(1), finite.sum(1).to(rows.dtype)])
    return dict(zip(terms, sums[0] / sums[1], strict=True))


def transition(module: Bayesian) -> None:
    """Take a step of a method that uses all the data."""
    sampler: Any = module.optimizers()
    method = module.method
    assert isinstance(method, Transitions)
    count, trainer = method.transitions, module.trainer
    before, collected = count * trainer.global_step, False
    for k in range(1, count + 1):
        is_last = k == count  # which the trainer counts
        move = sampler.step if is_last else sampler.optimizer.step
        with explaining_misfits(module.template, module.run.rows):
            terms = method.transition(module.state, module.run, move)
        collected |= after_step(module, before + k, trainer.is_last_batch and is_last)
    if collected:
        look_for_divergence(module)
    for name, value in {**terms, **sampler.optimizer.metrics()}.items():
        mean = value.mean().float() if isinstance(value, Tensor) else value
        log(module, f"train/{name}", mean, prog_bar=name == "acceptance")


def log_sampler(module: Bayesian) -> None:
    """Log the metrics of a sampler, for methods with gradients of batches."""
    trainer: Any = module.trainer
    every = trainer.log_every_n_steps  # none is 0
    due = every and trainer.global_step % every == 0
    if module.automatic_optimization and due and isinstance(module.method, Samples):
        for name, value in trainer.optimizers[0].metrics().items():
            module.log(f"train/{name}", value)


def after_step(module: Bayesian, step: int, epoch_ends: bool) -> bool:
    """Tell the method that the weights have moved, and return whether it has collected some.

    Args:
        module: in the fit.
        step: number of optimizer steps or transitions so far, this one included.
        epoch_ends: whether this was the last one of its epoch.
    """
    trainer = module.trainer
    progress = Progress(
        step, trainer.current_epoch, epoch_ends, trainer.optimizers[0],
        _schedulers(module), lambda tensors: in_common(module, tensors),
    )  # fmt: skip
    return module.method.after_step(module.state, progress, module.run)


def judge_losses(module: Bayesian) -> None:
    """Leave out members that have diverged in this epoch."""
    divergence = module.state.divergence
    means = None if divergence is None else divergence.take()
    if divergence is None or means is None:
        return
    if module.trainer.world_size > 1:  # they have seen other examples
        every = module.all_gather(means.to(module.device))
        assert isinstance(every, Tensor)
        means = every.mean(0).cpu()
    finite = finite_members(module.state.parameters())
    divergence.judge(means, finite, ends(module.trainer))
    left_out = int(divergence.left_out.sum())
    if left_out:
        name = type(module).__name__
        rank_zero_info(f"{name}: {left_out} of {module.members} are left out.")


def look_for_divergence(module: Bayesian) -> None:
    """Warn of diverged members, and end a run without healthy ones."""
    trainer = module.trainer
    finite = finite_members(module.state.parameters()).tolist()
    bad = [m for m, well in enumerate(finite) if not well]
    if set(bad) - module.broken:
        module.broken |= set(bad)
        data = module.data.batches(module) if trainer.world_size == 1 else None
        fault = "" if data is None else fault_of(data)
        reason = "the learning rate is too large, or the data are not finite or not scaled"
        rank_zero_warn(
            f"Members {bad} of {module.members} have weights that are not finite after step "
            f"{trainer.global_step}: {fault or reason}."
        )
    if len(bad) == module.members:
        trainer.should_stop = True
    trainer.strategy.barrier()  # others read what the first has written


# ------------------------------------------------------------ the end
def complete(module: Bayesian) -> None:
    """Compute what the method derives from trained weights, without losing them on a failure."""
    data, trainer = module.data.batches(module), trainer_of(module)
    if not module.state.lacks or data is None:
        return
    run = module.run
    run.shows_progress = bool(trainer and trainer.is_global_zero and trainer.progress_bar_callback)
    try:
        module.method.at_end(module.state, data, run)
    except ValueError as error:
        rank_zero_warn(
            f"{type(module).__name__}: the members are trained, but the "
            f"{module.state.lacks} is missing: {error}"
        )


class EndsFit(Callback):
    """A callback that reports exceptions to modules, since only callbacks receive them."""

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Release files, although the trainer may already run another module."""
        method = getattr(pl_module, "method", None)
        if isinstance(method, Method) and trainer.state.fn == TrainerFn.FITTING:
            method.after_fit(pl_module.state, pl_module.run)


# ------------------------------------------------------------ optimizers
_PROBES = ((3, 4, 5), (3, 4))
_SCALES = (1e-3, 1.0, 1e3)


def configured_optimizers(module: Bayesian) -> Any:
    """Return one optimizer for all members, and its schedule.

    Args:
        module: creates both.
    """
    if module.members > 1:
        check_elementwise(module.make_optimizer)
    optimizer: Any = None
    if module.method.trains:
        optimizer = module.make_optimizer([p for p in module.parameters() if p.requires_grad])
    scheduler = None if module.make_scheduler is None else module.make_scheduler(optimizer)
    trainer = trainer_of(module)
    epochs = 0 if trainer is None else epochs_of(trainer)
    resumed = trainer is not None and trainer.ckpt_path is not None
    schedule = scheduler
    scheduler = module.method.configure_optimizer(
        module.state, optimizer, module.run, schedule, epochs, resumed
    )
    if scheduler is None:
        return optimizer
    if scheduler is not schedule and module.lr_interval == "step":
        raise ValueError(
            f"The schedule of {module.method.name} counts epochs: omit `lr_interval` 'step'."
        )
    watched = getattr(scheduler, "monitor", "val/nll")
    interval = module.lr_interval or interval_of(scheduler)
    config = {"scheduler": scheduler, "interval": interval, "monitor": watched}
    return {"optimizer": optimizer, "lr_scheduler": config}


def check_elementwise(optimizer: Callable[[Iterable[Tensor]], Any]) -> None:
    """Refuse an optimizer that would let members of a stack influence each other.

    Three small networks take two steps, once as a stack and once each on its own, with gradients of
    very different sizes, and the results must agree. A `Sampler`, which adds noise, is not tested.

    Args:
        optimizer: function that makes one for given parameters.
    """
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator) for shape in _PROBES]
    grads = [torch.randn(shape, generator=generator) for shape in _PROBES]
    for grad in grads:
        grad *= torch.tensor(_SCALES).reshape(-1, *(1,) * (grad.ndim - 1))
    try:
        together = _moved(optimizer, values, grads)
        if together is None:
            return
        apart = [
            _moved(optimizer, [v[m] for v in values], [g[m] for g in grads])
            for m in range(len(_SCALES))
        ]
    except (TypeError, ValueError, RuntimeError) as error:
        raise _refused(optimizer, f"it cannot move a stack of tensors: {error}") from error
    for k, moved in enumerate(together):
        if not torch.allclose(moved, torch.stack([a[k] for a in apart if a]), rtol=1e-4, atol=1e-7):
            raise _refused(optimizer, "the step of one network would depend on the others")


def _moved(
    make: Callable[[Iterable[Tensor]], Any], values: list[Tensor], grads: list[Tensor]
) -> list[Tensor] | None:
    tensors = [torch.nn.Parameter(v.clone()) for v in values]
    optimizer = make(tensors)
    if isinstance(optimizer, Sampler):
        return None
    for _ in range(2):
        for tensor, grad in zip(tensors, grads, strict=True):
            tensor.grad = grad.clone()
        optimizer.step()
    return [t.detach() for t in tensors]


def _refused(optimizer: Any, reason: str) -> ValueError:
    name = getattr(optimizer, "__name__", None) or type(optimizer).__name__
    return ValueError(
        f"`optimizer` {name} cannot train members side by side: {reason}. Use an "
        "elementwise one (SGD, Adam, AdamW, RMSprop, ...) or `members=1`."
    )


def clip(module: Bayesian, optimizer: Any, limit: float | None, kind: str | None) -> None:
    """Clip the gradients of every member, and those of shared parameters, separately.

    Args:
        module: in the fit.
        optimizer: its gradients are clipped.
        limit: of the norm of the gradient of one member, or of its entries.
        kind: ``"value"`` clips every entry on its own.
    """
    clips = limit is not None and limit > 0
    if clips:
        module.method.before_clipping(module.state)
    if limit is None or not clips or kind == "value" or module.members == 1:
        module.clip_gradients(optimizer, limit, kind)
        return
    shared = [p for p in module.shared_parameters() if p.grad is not None]
    clip_members(module.state.parameters(), float(limit))
    nn.utils.clip_grad_norm_(shared, float(limit))


def clip_members(stacks: Iterable[Tensor], limit: float) -> None:
    """Clip the norm of the gradient of every member separately.

    Args:
        stacks: parameters whose first dimension counts members.
        limit: largest norm of the gradient of one member.
    """
    grads = [t.grad for t in stacks if t.grad is not None]
    if not grads:
        return
    norms = torch.stack([at_least_single(g).flatten(1).norm(dim=1) for g in grads]).norm(dim=0)
    factors = (limit / (norms + 1e-6)).clamp(max=1)
    for grad in grads:
        grad *= factors.to(grad).reshape(-1, *(1,) * (grad.ndim - 1))

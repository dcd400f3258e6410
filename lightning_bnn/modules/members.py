"""Members of a population: the network that gives their computation, and their initial weights.

Weights that the network holds fixed become buffers of the template, in no state dict. They are
constants of the computation, held once for all members.
"""

from __future__ import annotations

import copy
import traceback
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_bnn.bank import read_networks
from lightning_bnn.methods.run import evaluation
from weightsym import params as P
from weightsym.params import Params, check_count, first_line, is_whole, keyed_generator

Numbers = int | tuple[int, int]


class Members:
    """Consecutive members of a population, which share one computation.

    Args:
        network: gives the computation; it is copied.
        members: number of members; or the first one of this part and the one after its last.
        seed: of the drawn initial weights.

    Attributes:
        template: the copy. Its modules in evaluation mode are those that the training network has
            in that mode.
    """

    def __init__(self, network: nn.Module, members: Numbers, seed: int) -> None:
        if not isinstance(members, (tuple, list)):
            check_count("members", members)
            members = (0, members)
        first, end = members if len(members) == 2 and all(map(is_whole, members)) else (0, 0)
        if not 0 <= first < end:
            raise ValueError(
                "`members` must be a number, or a range from the first to after the last, such "
                f"as (5, 10), got {members!r}."
            )
        self.count, self.first, self.seed = end - first, first, seed
        self.template = template_of(network)
        self._frozen = [m for m in self.template.modules() if network.training and not m.training]

    @property
    def key(self) -> tuple[int, ...]:
        """Key of the noise, which differs between parts of a population."""
        return (self.first,) if self.first else ()

    # ------------------------------------------------------------ modes of the template
    def follow(self, training: bool) -> None:
        """Set the template to the mode of the module that runs it."""
        if self.template.training != training:
            self.template.train(training)
            for module in self._frozen if training else ():
                module.eval()

    def evaluation(self, training: bool) -> AbstractContextManager[None]:
        """Put the template into evaluation mode for predictions.

        Otherwise BatchNorm would use and learn the statistics of the examples at hand.
        """
        self.follow(training)
        return evaluation(self.template)

    # ------------------------------------------------------------ where they start
    def starts(self, source: str | None) -> Params:
        """Return the given networks, followed by drawn ones for the other members.

        Args:
            source: a checkpoint, a folder of checkpoints, or a bank to start from instead.
        """
        template = self.template
        starts = without_fixed(template, self._given(source))
        count = 0 if self.first > 0 else P.stack_size(starts)  # the given network is member 0
        missing = self.count - count
        if missing == 0:
            return starts
        skip, generator = max(0, self.first - 1), keyed_generator(self.seed, "members")
        drawn = P.populate(template, missing, generator, skip)
        if count and source is None:
            _warn_of_other_starts(template, starts, drawn)
        fixed = fixed_names(template)
        others = {
            name: t[:1].expand(missing, *t.shape[1:]) if name in fixed else drawn[name].to(t)
            for name, t in starts.items()
        }
        return {name: torch.cat([t[:count], others[name]]) for name, t in starts.items()}

    def _given(self, source: str | None) -> Params:
        """Return the given network, or those of a source."""
        weights = P.of(self.template)
        if not weights:
            raise ValueError("`network` has no weights.")
        if source is None:
            fixed = P.fixed_weights(self.template)
            return {n: (t if n in fixed else t.clone())[None] for n, t in weights.items()}
        several = Path(source).is_dir()
        if several and self.first:
            raise ValueError(
                "`start_from` with a folder sets the networks of all members: it cannot be "
                f"combined with members from {self.first} on."
            )
        stack, _ = read_networks(source, self.template, last=self.count)
        if several and P.stack_size(stack) < self.count:
            raise ValueError(
                f"`start_from` {source} holds {P.stack_size(stack)} networks, fewer than the "
                f"{self.count} members."
            )
        return {
            name: stack[name].to(t) if name in stack else t[None] for name, t in weights.items()
        }


# ------------------------------------------------------------ weights unlike those that are drawn
_FACTOR, _NUMBERS = 1.5, 64
"""Factor between clearly different standard deviations, for tensors of at least this many entries.
"""


def _warn_of_other_starts(template: nn.Module, given: Params, drawn: Params) -> None:
    """Warn if the given network was initialised differently from the drawn ones."""
    for name, parameter in template.named_parameters():
        if name not in given or parameter.is_meta or not parameter.is_floating_point():
            continue
        initial, new = _spread(given[name]), _spread(drawn[name])
        constant = (initial == 0) != (new == 0)
        factor = parameter.numel() >= _NUMBERS and max(initial, new) > _FACTOR * min(initial, new)
        if constant or factor:
            rank_zero_warn(
                f"Members after the first do not start like the given network: {name!r} "
                f"has standard deviation {initial:.2g} in it, and {new:.2g} as drawn by "
                "`reset_parameters` of its layer. Give the network a method "
                "`_init_weights(part)` that draws all of its weights, or pass networks of "
                "your own, a folder, as `start_from`."
            )
            return


def _spread(stack: Tensor) -> float:
    """Return the standard deviation within each network of a stack, averaged."""
    rows = stack.detach().flatten(1).float()
    return float(rows.std(1, correction=0).mean())


# ------------------------------------------------------------ the template
def template_of(network: nn.Module) -> nn.Module:
    """Copy a network for use with a posterior, sharing the fixed weights."""
    if not isinstance(network, nn.Module):
        raise ValueError(f"`network` must be a torch.nn.Module, got {type(network).__name__}.")
    if any(is_lazy(p) for p in network.parameters()):
        raise ValueError("`network` has lazy parameters: run one batch through it first.")
    if any(p.is_complex() for p in network.parameters()):
        raise ValueError("`network` has complex parameters, which are not supported.")
    shared = {id(p): p for p in network.parameters() if not p.requires_grad}
    try:
        template = copy.deepcopy(network, shared)
    except RuntimeError as error:
        if "graph leaves" not in str(error):
            raise
        raise ValueError(
            "`network` has weights that a hook computes from other tensors: use "
            "torch.nn.utils.parametrizations (weight_norm, spectral_norm) instead."
        ) from error
    if any(c.__module__.startswith(("transformers.", "peft.")) for c in type(network).__mro__):
        template.register_forward_hook(_logits_of)
    return template


def _logits_of(network: nn.Module, inputs: Any, outputs: Any) -> Any:
    """Return the logits of a network of transformers."""
    logits = getattr(outputs, "logits", None)
    return logits if isinstance(logits, Tensor) else outputs


# ------------------------------------------------------------ fixed weights
_OF_EACH = 64
"""Entries of a fixed weight that identify it, at least."""
_FIXED = "_fixed_weights"
"""Attribute of a template with the names of its fixed weights, which are buffers."""


def fixed_names(template: nn.Module) -> set[str]:
    """Return the names of untrained weights, and of buffers in modules without trained weights."""
    trained = {name for name, p in template.named_parameters() if p.requires_grad}
    fixed = P.fixed_weights(template) | set(getattr(template, _FIXED, ()))
    owners = {name.rpartition(".")[0] for name in fixed}
    owners -= {name.rpartition(".")[0] for name in trained}
    buffers = {name for name, _ in template.named_buffers() if name.rpartition(".")[0] in owners}
    return fixed | buffers


def without_fixed(template: nn.Module, stack: Params) -> Params:
    """Remove the fixed weights of a stack, which become constants of the template.

    Fixed weights that differ between networks stay in the stack. If nothing is trained, all stay.

    Args:
        template: of the networks, changed in place.
        stack: the networks.
    """
    fixed = P.fixed_weights(template)
    fixed = fixed if any(p.requires_grad for p in template.parameters()) else set()
    common = {n: stack[n][0] for n in fixed if _is_one(stack[n])}
    constants = {id(template.get_parameter(name)): t for name, t in common.items()}
    copies: dict[int, nn.Parameter] = {}
    names = []
    for path, module in template.named_modules():
        for leaf, p in list(module._parameters.items()):
            if id(p) in constants:
                del module._parameters[leaf]
                module.register_buffer(leaf, constants[id(p)], persistent=False)
                names.append(f"{path}.{leaf}".lstrip("."))
            elif p is not None and not p.requires_grad:  # it is that of the given network
                copied = copies.setdefault(id(p), nn.Parameter(p.detach().clone(), False))
                module._parameters[leaf] = copied
    setattr(template, _FIXED, tuple(names))
    return {name: t for name, t in stack.items() if name not in common}


def network_of(template: nn.Module) -> nn.Module:
    """Copy the network of a template, with memory of its own."""
    network = copy.deepcopy(template)
    fixed = constants_of(network)
    parameters = {id(t): nn.Parameter(t, requires_grad=False) for t in fixed.values()}
    for name in fixed:
        path, _, leaf = name.rpartition(".")
        module = network.get_submodule(path)
        module._non_persistent_buffers_set.remove(leaf)
        module._parameters[leaf] = parameters[id(module._buffers.pop(leaf))]
    for key, hook in list(network._forward_hooks.items()):
        if hook is _logits_of:
            del network._forward_hooks[key]
    return network


def constants_of(template: nn.Module) -> dict[str, Tensor]:
    """Return the fixed weights of a template, tied ones under each of their names."""
    return {name: template.get_buffer(name) for name in getattr(template, _FIXED, ())}


def sample_of_fixed(template: nn.Module) -> Tensor:
    """Return some entries of every fixed weight, which identify the backbone."""
    rows = [t.detach().flatten() for t in constants_of(template).values()]
    some = [row[:: max(1, len(row) // _OF_EACH)].float().cpu() for row in rows]
    return torch.cat(some) if some else torch.empty(0)


def check_fixed(template: nn.Module, sample: Tensor, where: str) -> None:
    """Refuse other fixed weights than those of a checkpoint or of another process.

    Args:
        template: of the networks.
        sample: result of `sample_of_fixed` there.
        where: the checkpoint or process, for the message.
    """
    present = sample_of_fixed(template)
    rounding = 0.02 * (sample.abs() + sample.abs().nanmean())
    if len(present) != len(sample) or bool(((present - sample).abs() > rounding).any()):
        raise ValueError(
            f"{where} has different fixed weights from `network`, and checkpoints do not store "
            "them: pass the network with the same pretrained weights."
        )


def _is_one(rows: Tensor) -> bool:
    return len(rows) == 1 or bool(torch.equal(rows, rows[:1].expand_as(rows)))


@contextmanager
def explaining_misfits(network: nn.Module, inputs: Sequence[Any]) -> Iterator[None]:
    """Explain which inputs a network does not take, instead of the error of torch.

    Args:
        network: runs meanwhile.
        inputs: of the network.
    """
    try:
        yield
    except (RuntimeError, IndexError) as error:
        tensors, first = [x for x in inputs if isinstance(x, Tensor)], first_line(error).rstrip(".")
        if any(word in first for word in ("dtype", "scalar type", "Input type")):
            wrong = f"type {', '.join(str(x.dtype) for x in tensors)}: {first}"
            wrong += "" if all(x.is_floating_point() for x in tensors) else "; pass `x.float()`"
        elif any(word in str(error) for word in ("shape", "size", "Dimension")):
            wrong = f"shape {', '.join(str(tuple(x.shape)) for x in tensors)}: {first}"
            labels = all(x.ndim == 1 and not x.is_floating_point() for x in tensors)
            wrong += "; batches are (inputs, labels), in this order" if labels else ""
        else:
            raise
        modules = {id(module) for module in network.modules()}
        frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
        if not any(id(frame.f_locals.get("self")) in modules for frame in frames):
            raise  # it does not come out of the network
        raise ValueError(f"{type(network).__name__} does not take inputs of {wrong}.") from error

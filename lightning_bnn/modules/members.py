"""Members of a population that are trained here, and where they start."""

from __future__ import annotations

from pathlib import Path

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_bnn.bank import read_networks
from lightning_bnn.modules.templates import fixed_names, without_fixed
from weightsym import params as P
from weightsym.params import Params, check_count, is_whole, keyed_generator

Numbers = int | tuple[int, int]


class Members:
    """Consecutive members of a population.

    Args:
        members: how many there are; or the first of those that are here, and the one after them.
        seed: of the weights of members that are drawn.
    """

    def __init__(self, members: Numbers, seed: int) -> None:
        if not isinstance(members, (tuple, list)):
            check_count("members", members)
            members = (0, members)
        first, end = members if len(members) == 2 and all(map(is_whole, members)) else (0, 0)
        if not 0 <= first < end:
            raise ValueError(
                "`members` must be a number, or the first of several and the one after the last, "
                f"such as (5, 10), got {members!r}."
            )
        self.count, self.first, self.seed = end - first, first, seed

    @property
    def key(self) -> tuple[int, ...]:
        """A key of the noise: parts of a population have noise of their own."""
        return (self.first,) if self.first else ()

    # ------------------------------------------------------------ where they start
    def starts(self, template: nn.Module, source: str | None) -> Params:
        """The given networks, then as many drawn anew as there are further members.

        Args:
            template: the network that was given; its fixed weights become constants.
            source: a checkpoint, a folder of checkpoints, or a bank to start from instead.
        """
        starts = without_fixed(template, self._given(template, source))
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

    def _given(self, template: nn.Module, source: str | None) -> Params:
        """The network as it was given, or those of a source."""
        weights = P.of(template)
        if not weights:
            raise ValueError("`network` has no weights.")
        if source is None:
            fixed = P.fixed_weights(template)
            return {n: (t if n in fixed else t.clone())[None] for n, t in weights.items()}
        several = Path(source).is_dir()
        if several and self.first:
            raise ValueError(
                "`start_from` a folder gives the networks of all members: it does not go together "
                f"with members from {self.first} on."
            )
        stack, _ = read_networks(source, template, last=self.count)
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
"""Standard deviations differ clearly by this factor, in tensors of at least so many numbers."""


def _warn_of_other_starts(template: nn.Module, given: Params, drawn: Params) -> None:
    """Warn if the given network was initialised or trained otherwise than the others are drawn."""
    for name, parameter in template.named_parameters():
        if name not in given or parameter.is_meta or not parameter.is_floating_point():
            continue
        one, new = _spread(given[name]), _spread(drawn[name])
        constant = (one == 0) != (new == 0)
        factor = parameter.numel() >= _NUMBERS and max(one, new) > _FACTOR * min(one, new)
        if constant or factor:
            rank_zero_warn(
                f"Members after the first do not start like the network that was given: {name!r} "
                f"has standard deviation {one:.2g} in it, and {new:.2g} as `reset_parameters` of "
                "its layer draws it. Give the network a method `_init_weights(part)` that draws "
                "all of its parts, or pass networks of your own, a folder, as `start_from`."
            )
            return


def _spread(stack: Tensor) -> float:
    """The standard deviation within each network of a stack, on average."""
    rows = stack.detach().flatten(1).float()
    return float(rows.std(1, correction=0).mean())

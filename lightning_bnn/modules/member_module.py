"""Networks side by side in one module: where they start, and which of them are here."""

from __future__ import annotations

import contextlib
import copy
from abc import abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_bnn import params as P
from lightning_bnn.arguments import count, is_number
from lightning_bnn.bank import read_networks
from lightning_bnn.judging import Judge
from lightning_bnn.modules.divergence import Diverged
from lightning_bnn.modules.judged_module import JudgedModule
from lightning_bnn.modules.sharing import Part, nothing_like, part_of_mixture
from lightning_bnn.modules.side_by_side import finite_members
from lightning_bnn.modules.templates import fixed_names
from lightning_bnn.params import Params
from lightning_bnn.posteriors import Predictor
from lightning_bnn.randomness import keyed_generator

__all__ = ["MemberModule"]


class MemberModule(JudgedModule):
    """Members of a population, all of them or the share of one process.

    Args:
        network: gives the computation, and the weights of member 0.
        likelihood: what the outputs say about targets, by default ``Categorical``.
        members: how many there are here.
        start_from: weights of member 0, or of all.
        eval_samples: how many networks predict in validation, test and prediction.
        chunk_size: networks that run at once, by default chosen by their size.
        seed: of the random numbers of this module.
        first_member: number of the first.
        member_rates: learning rates of the members, as multiples of the optimizer's.
    """

    def __init__(
        self,
        network: nn.Module,
        likelihood: nn.Module | None,
        members: int,
        start_from: str | None,
        eval_samples: int,
        chunk_size: int | None,
        seed: int,
        first_member: int,
        member_rates: Sequence[float] | None,
    ) -> None:
        super().__init__(network, likelihood, eval_samples, chunk_size, seed)
        count("members", members)
        count("first_member", first_member, 0)
        if isinstance(member_rates, int | float):
            raise ValueError(f"`member_rates` must be a list, got {member_rates}.")
        if member_rates is not None and len(member_rates) != members:
            raise ValueError(
                f"`member_rates` must be one for each of the {members} members, got "
                f"{len(member_rates)}."
            )
        rates = () if member_rates is None else member_rates
        if not all(is_number(rate) and rate > 0 for rate in rates):
            raise ValueError(f"`member_rates` must be positive numbers, got {member_rates}.")
        self.members, self.first_member, self.start_from = members, first_member, start_from
        self.member_rates = (
            None if member_rates is None else torch.tensor(list(member_rates), dtype=torch.float64)
        )
        self.whole: tuple[int, int] | None = None  # which of all members these are, if not all
        self._order: Tensor | None = None  # of the draws of all processes
        self._has_weights = start_from is not None  # of a fit, or of a file
        self.register_load_state_dict_post_hook(_weights_came)

    # -------------------------------------------------------- what a method is
    @abstractmethod
    def member_stack(self) -> Params:
        """One network for each member: the weights that are trained, or the centres of modes."""

    @abstractmethod
    def stacked_parameters(self) -> list[Tensor]:
        """Parameters whose first dimension counts members."""

    # -------------------------------------------------------- members
    def weights(self) -> tuple[nn.Module, Params, tuple[Any, ...]]:
        """Template, stack of members, and an example of its inputs: what callbacks look at."""
        return self.template, self.member_stack(), self.example()

    def member(self, index: int) -> nn.Module:
        """A plain module with the weights of one member."""
        if not 0 <= index < self.members:
            raise ValueError(f"`index` must be between 0 and {self.members - 1}, got {index}.")
        result = copy.deepcopy(self.template)
        result.load_state_dict({n: t[index] for n, t in self.member_stack().items()}, strict=False)
        return result.train(self.training)

    # -------------------------------------------------------- shares
    def take_share(self, first: int, last: int) -> None:
        """Let go of all members but some, which this process is to train.

        Args:
            first: the first of them.
            last: the one after the last.
        """
        raise ValueError(
            f"`strategy` members: the members of {type(self).__name__} cannot be shared out; train "
            "it in parts, by `lightning-bnn population`."
        )

    def _keep_share(self, first: int, last: int) -> None:
        """What all modules know of their members; the tensors are cut by each of them."""
        self.whole, self._everyone = (first, last), self.members
        self.members, self.first_member = last - first, self.first_member + first
        if self.member_rates is not None:
            self._all_rates = self.member_rates
            self.member_rates = self.member_rates[first:last]

    def take_whole(self, gather: Callable[[Tensor], Tensor]) -> None:
        """The opposite of `take_share`: have the members of all processes.

        Args:
            gather: from the members that are here to all.
        """
        assert self.whole is not None
        names = self.member_names()
        for name, tensor in self.state_dict(keep_vars=True).items():
            if name in names:
                tensor.data, tensor.grad = gather(tensor.data), None
        self.members, self.first_member = self._everyone, self.first_member - self.whole[0]
        if self.member_rates is not None:
            self.member_rates = self._all_rates
        self.whole, self._order = None, None

    def member_names(self) -> set[str]:
        """Names in the state dict whose tensors have a leading member dimension."""
        held = {id(p) for p in self.stacked_parameters()}
        return {n for n, p in self.named_parameters(remove_duplicate=False) if id(p) in held}

    def healthy(self) -> Tensor:
        """Indices of the members with finite weights; the others are left out of the posterior."""
        finite = finite_members(self.stacked_parameters()).nonzero()[:, 0]
        if len(finite) == 0:
            raise Diverged(
                "No member has finite weights, training has diverged: take a smaller learning rate."
            )
        return finite

    # -------------------------------------------------------- evaluation
    @property
    def may_recover(self) -> bool:
        """Whether members that have diverged begin anew."""
        return False

    def on_train_start(self) -> None:
        """From now on the weights are those of a fit."""
        self._has_weights = True

    def unfitted(self) -> str | None:
        """What is judged in place of a posterior that was not fitted; None if all is well."""
        return (
            "its members have the weights that they were drawn with" if self.members > 1 else None
        )

    def on_validation_epoch_start(self) -> None:
        """Draw networks; there may be none for now."""
        try:
            super().on_validation_epoch_start()
        except Diverged as error:
            if not (self.may_recover and self.trainer.state.fn == TrainerFn.FITTING):
                raise
            rank_zero_warn(f"{error} They begin anew, and are not validated.")

    def _start(self, judge: Judge | None) -> None:
        """Weights that nobody has trained are not judged without a word."""
        judged = None if self._has_weights or self.fits_now else self.unfitted()
        if judged is not None:
            rank_zero_warn(
                f"{type(self).__name__} has not been fitted: {judged}; fit it, or pass the "
                "`ckpt_path` of a fit."
            )
        super()._start(judge)

    def _predictor(self) -> Predictor:
        if self.whole is None:
            return super()._predictor()
        strategy: Any = self.trainer.strategy
        everyone = strategy.gather_members(self._well())
        before, total = int(everyone[: self.whole[0]].sum()), int(everyone.sum())
        if total == 0:
            self.healthy()  # says why
        with torch.no_grad():
            part = self.part_of_predictions(before, total)
        self._order = part.order
        return part.predictor or nothing_like(self.member_stack(), self.chunk_size)

    def _well(self) -> Tensor:
        """Whether the members that are here may predict; their processes leave it to others."""
        well = torch.zeros(self.members, dtype=torch.long, device=self.device)
        with contextlib.suppress(Diverged):
            well[self.healthy()] = 1
        return well

    def part_of_predictions(self, before: int, total: int) -> Part:
        """The draws of the members that are here.

        Args:
            before: how many members of other processes come first.
            total: how many there are.
        """
        modes = self.judged_posterior().modes() if bool(self._well().any()) else []
        generator = keyed_generator(self.seed, "judged", device=self.device)
        return part_of_mixture(modes, before, total, self.eval_samples, generator, self.chunk_size)

    def _of_everyone(self, outputs: Tensor) -> Tensor:
        """In the order of one process."""
        if self.whole is None:
            return outputs
        strategy: Any = self.trainer.strategy
        every = strategy.gather_members(outputs)
        return every if self._order is None else every[self._order.to(every.device)]

    # -------------------------------------------------------- starts
    def first_networks(self) -> Params:
        """The given networks, then as many drawn anew as there are further members."""
        own = self._given_networks()
        held = P.stack_size(own)
        if self.first_member > 0:
            held = 0  # the given network is member 0
        count = self.members - held
        if count == 0:
            return own
        skip = max(0, self.first_member - 1)
        generator = keyed_generator(self.seed, "members")
        drawn = P.populate(self.template, count, generator, skip)
        fixed = fixed_names(self.template)
        others = {
            name: t[:1].expand(count, *t.shape[1:]) if name in fixed else drawn[name].to(t)
            for name, t in own.items()
        }
        return {name: torch.cat([t[:held], others[name]]) for name, t in own.items()}

    def _given_networks(self) -> Params:
        """The network as it was given, or those of ``start_from``."""
        own = P.of(self.template)
        if not own:
            raise ValueError("`network` has no weights.")
        if self.start_from is None:
            return {name: t.clone()[None] for name, t in own.items()}
        several = Path(self.start_from).is_dir()
        if several and self.first_member:
            raise ValueError(
                "`start_from` a folder gives the networks of all members: it does not go together "
                f"with `first_member` {self.first_member}."
            )
        stack, _ = read_networks(self.start_from, self.template, last=self.members)
        if several and P.stack_size(stack) < self.members:
            raise ValueError(
                f"`start_from` {self.start_from} holds {P.stack_size(stack)} networks, fewer than "
                f"the {self.members} members."
            )
        return {name: stack[name].to(t) for name, t in own.items()}

    def _part(self) -> tuple[int, ...]:
        """A key of the noise: parts of a population have noise of their own."""
        return (self.first_member,) if self.first_member else ()


def _weights_came(module: MemberModule, incompatible: Any) -> None:
    """After `load_state_dict`."""
    module._has_weights = True

"""The average of a run, and of runs of other seeds in its frame, with statistics of its own."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_avg_fn
from torch.utils._pytree import tree_map

from lightning_bnn.callbacks.watching import whole_network
from lightning_bnn.harvest import Schedule
from weightsym import average, discover
from weightsym import params as P
from weightsym.files import NetworkNames, fit, open_network
from weightsym.params import Params, batch_norms, check_between

__all__ = ["SymmetricAverage"]

_CALLS = 16
"""Batches on which statistics of batch norms are estimated: the last ones of training."""


class SymmetricAverage(WeightAveraging):
    r"""Averages the weights of a run, and those of other runs in its frame.

    .. math:: m \leftarrow m + (1 - d)(\theta - m) \text{ or } m + \tfrac{1}{n + 1} (\theta - m),
        \qquad \bar\theta = \tfrac{1}{k + 1} \Big(m + \sum_{j=1}^k g_j \theta_j\Big)

    It is Lightning's `WeightAveraging`, which validates the average, writes it to checkpoints, and
    puts it into the module when training ends, with two differences. Statistics of batch norms are
    estimated on the last 16 batches of training with the average in place; averages of the
    statistics of networks are not those of their average. And networks of other runs may join when
    training ends: each is matched to this one first, by permutations and signs, without which
    averages of other seeds are at chance.

    Works with any LightningModule. A resumed run continues the average.

    Args:
        others: files with networks of other runs (.safetensors, .ckpt, .pt), all with equal weight.
        decay: of an exponential average; by default all networks of the run count equally.
        every_n_steps: period in optimizer steps; by default every step, unless epochs are given.
        every_n_epochs: period in epochs.
        start: first step (or epoch) that counts.
        module: name of the network inside the LightningModule, such as ``"net"``; by default the
            only submodule with weights, else the whole LightningModule.

    References:
        | Averaging Weights Leads to Wider Optima and Better Generalization (Izmailov et al., 2018)
        | Git Re-Basin: Merging Models modulo Permutation Symmetries (Ainsworth et al., 2023)

    >>> from lightning import Trainer
    >>> from lightning_bnn.datamodules import TwoGaussians
    >>> from lightning_bnn.models import mlp
    >>> from lightning_bnn.modules import DeepEnsemble
    >>> module = DeepEnsemble(mlp(2, [8], 2), members=1)
    >>> quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    >>> average = SymmetricAverage(every_n_steps=2, start=4)
    >>> trainer = Trainer(max_steps=8, enable_model_summary=False, callbacks=[average], **quiet)
    >>> trainer.fit(module, TwoGaussians())
    >>> int(average.networks)  # of steps 4, 6 and 8
    3
    """

    def __init__(
        self,
        others: Sequence[str | os.PathLike[str]] = (),
        decay: float | None = None,
        every_n_steps: int | None = None,
        every_n_epochs: int | None = None,
        start: int = 0,
        module: str | None = None,
    ) -> None:
        if decay is not None:
            check_between("decay", decay)
        if every_n_steps is None and every_n_epochs is None:
            every_n_steps = 1
        how = {} if decay is None else {"avg_fn": get_ema_avg_fn(decay)}
        super().__init__(use_buffers=False, **how)
        self.schedule = Schedule(every_n_steps, every_n_epochs, start)
        self.others, self.module = [Path(path) for path in others], module
        self._calls: deque[tuple[Any, Any]] = deque(maxlen=_CALLS)
        self._handle: Any = None

    @property
    def networks(self) -> Tensor:
        """The number of networks of the run in the average."""
        assert self._average_model is not None
        return self._average_model.n_averaged

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """Follow the schedule; override it for another one."""
        if step_idx is not None:
            return self.schedule.after_step(step_idx, step_idx + 1)
        return epoch_idx is not None and self.schedule.after_epoch(epoch_idx + 1)

    # -------------------------------------------------------- hooks
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        _, network = whole_network(pl_module, self.module)
        self._read_others(network)  # what does not fit is refused before the run
        self._calls.clear()
        if batch_norms(network) or self.others:
            self._handle = network.register_forward_pre_hook(self._keep, with_kwargs=True)

    def _keep(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if module.training:
            self._calls.append(tree_map(_detached, (args, kwargs)))

    def on_validation_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self._refresh(trainer, pl_module)
        super().on_validation_epoch_start(trainer, pl_module)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self._refresh(trainer, pl_module)
        super().on_save_checkpoint(trainer, pl_module, checkpoint)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if not self.networks:
            rank_zero_warn(f"SymmetricAverage has averaged nothing ({self.schedule}).")
        elif self.others:
            self._join(self._network())
        self._refresh(trainer, pl_module)
        super().on_train_end(trainer, pl_module)
        self._close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._close()

    def _close(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    # -------------------------------------------------------- the average
    def _network(self) -> nn.Module:
        """The network in the copy of the module that holds the average."""
        assert self._average_model is not None
        return whole_network(self._average_model.module, self.module)[1]

    def _refresh(self, trainer: Any, pl_module: Any) -> None:
        """Estimate statistics of batch norms with the average in place.

        Before the first average, the copy holds the weights of the module.
        """
        if self._average_model is None:
            return
        if not self.networks:
            self._average_model.module.load_state_dict(pl_module.state_dict())
        if not self.networks or not self._calls:
            return
        network = self._network()
        norms = batch_norms(network)
        with _estimating(network, norms), isolate_rng(), torch.no_grad():
            for args, kwargs in self._calls:
                network(*args, **kwargs)
        for norm in norms if trainer.world_size > 1 else ():
            squares = norm.running_var + norm.running_mean.square()
            mean, second = (trainer.strategy.reduce(t, reduce_op="mean")
                            for t in (norm.running_mean.clone(), squares))  # fmt: skip
            norm.running_mean.copy_(mean)
            norm.running_var.copy_(second - mean.square())

    def _read_others(self, network: nn.Module) -> list[Params]:
        names = NetworkNames.of(network)
        files = [fit(open_network(path), names, others="copy") for path in self.others]
        like = P.of(network)
        return [{n: file[n].to(t) for n, t in like.items()} for file in files]

    def _join(self, network: nn.Module) -> None:
        """Average the run and the others, in the frame of the run."""
        if not self._calls:
            rank_zero_warn(
                "SymmetricAverage: the network was never called, so that others cannot be matched "
                "to it: name it by `module`."
            )
            return
        args, kwargs = self._calls[-1]
        with isolate_rng():
            symmetries = discover(network, *args, **kwargs)
        stack = P.stack([P.of(network), *self._read_others(network)])
        network.load_state_dict(average(stack, symmetries), strict=False)


@contextmanager
def _estimating(network: nn.Module, norms: Sequence[Any]) -> Iterator[None]:
    """Let batch norms average the statistics of all batches; everything else evaluates."""
    modes, momenta = [(m, m.training) for m in network.modules()], [m.momentum for m in norms]
    network.eval()
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None
        norm.train()
    yield
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
    for module, mode in modes:
        module.training = mode


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value

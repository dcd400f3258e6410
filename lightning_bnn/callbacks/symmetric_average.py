"""Averages the networks of a run in one frame: EMA and SWA that symmetries cannot spoil."""

from __future__ import annotations

import copy
import inspect
from collections import deque
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torchmetrics import Metric

from lightning_bnn.callbacks.figure_logging import log_folder
from lightning_bnn.callbacks.watching import SymmetryCallback, stack_of
from lightning_bnn.harvest import Schedule
from weightsym import Symmetries, flip, identity, match, permute
from weightsym import params as P
from weightsym.arguments import check_fraction
from weightsym.batch_norms import batch_norms
from weightsym.forward import first_line, runners_of, structural_copy
from weightsym.matching.repair import reestimated_on_calls
from weightsym.params import Params

__all__ = ["SymmetricAverage"]

_CALLS = 16
"""Batches that statistics of batch norms are estimated on: the last ones of training."""


class SymmetricAverage(SymmetryCallback):
    r"""Averages the weights of a run, every network in the frame of the running mean.

    .. math:: m \leftarrow (1 - w)\, m + w\, g \theta, \qquad w = 1 - d \text{ (EMA)},\;
        w = \tfrac{1}{n + 1} \text{ (SWA)}

    The symmetry g exchanges and flips units so that the network is closest to the mean. It is
    looked for at the end of every epoch, and used until the next. While a run stays where it is, g
    is the identity, and this is the plain average. Training does not
    notice: weights, optimizers and random numbers are those of a run without the callback. The
    average

    - is validated beside the module, by a copy of it whose logs get a prefix,
    - is written to ``average.ckpt`` when training ends, an ordinary checkpoint of the module,
    - goes with every checkpoint of the trainer, so that a resumed run continues it,
    - is what `averaged_state` returns, for ``module.load_state_dict``.

    Statistics of batch norms are estimated on the last training inputs whenever the average is
    used. Parameters outside of the network are averaged as they are. The callback is switched off,
    with a warning, where the network cannot be traced or no process has all weights.

    Args:
        kind: ``"ema"``, weights that decay exponentially, or ``"swa"``, equal ones.
        decay: of the EMA, per average.
        every_n_steps: period in optimizer steps; by default every step for EMA.
        every_n_epochs: period in epochs; by default every epoch for SWA.
        start: first step (or epoch) that counts.
        module: name of the network inside the LightningModule; by default it is found.
        prefix: of everything that the validation of the average logs; None validates nothing.
        path: where the average is written, in the log folder; None writes nothing.

    Attributes:
        networks: how many were averaged.
        moved_units: how many units the last network had in other places, or flipped.

    References:
        | Averaging Weights Leads to Wider Optima and Better Generalization (Izmailov et al., 2018)
        | Git Re-Basin: Merging Models modulo Permutation Symmetries (Ainsworth et al., 2023)

    >>> from lightning import Trainer
    >>> from lightning_bnn.datamodules import TwoGaussians
    >>> from lightning_bnn.models import mlp
    >>> from lightning_bnn.modules import DeepEnsemble
    >>> module = DeepEnsemble(mlp(2, [8], 2), members=1)
    >>> quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    >>> average = SymmetricAverage(decay=0.5, path=None)
    >>> trainer = Trainer(max_steps=6, enable_model_summary=False, callbacks=[average], **quiet)
    >>> trainer.fit(module, TwoGaussians())
    >>> average.networks, average.averaged_state(module).keys() == module.state_dict().keys()
    (6, True)
    """

    def __init__(
        self,
        kind: Literal["ema", "swa"] = "ema",
        decay: float = 0.999,
        every_n_steps: int | None = None,
        every_n_epochs: int | None = None,
        start: int = 0,
        module: str | None = None,
        prefix: str | None = "average/",
        path: str | None = "average.ckpt",
    ) -> None:
        super().__init__(module, 1)
        if kind not in ("ema", "swa"):
            raise ValueError(f"`kind` must be 'ema' or 'swa', got {kind!r}.")
        check_fraction("decay", decay)
        if prefix == "":
            raise ValueError("`prefix` must not be empty: logs of the module have no prefix.")
        if every_n_steps is None and every_n_epochs is None:
            every_n_steps, every_n_epochs = (1, None) if kind == "ema" else (None, 1)
        self.schedule = Schedule(every_n_steps, every_n_epochs, None, start)
        self.kind, self.decay, self.prefix, self.path = kind, decay, prefix, path
        self.networks = 0
        self._frame: _Frame | None = None
        self._element: list[Tensor] = []
        self._mean: Params | None = None
        self._names: dict[str, str] = {}
        self._calls: deque[Any] = deque(maxlen=_CALLS)
        self._handle: Any = None
        self._validation: _Validation | None = None

    @property
    def moved_units(self) -> int:
        """The number of units of the last network with other places or signs in the average."""
        return 0 if self._frame is None else self._frame.moved_units

    # -------------------------------------------------------- state
    @property
    def state_key(self) -> str:
        return f"SymmetricAverage(kind={self.kind!r}, module={self.module!r})"

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self._mean, "networks": self.networks, "element": self._found()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        mean = state_dict["mean"]
        self._mean = None if mean is None else {n: t.clone() for n, t in mean.items()}
        self.networks, self._element = state_dict["networks"], list(state_dict["element"])
        self._frame, self._restored = None, True

    def _found(self) -> list[Tensor]:
        return self._element if self._frame is None else self._frame.element

    def __getstate__(self) -> dict[str, Any]:
        """The state for a spawned process, which finds the network itself."""
        calls: deque[Any] = deque(maxlen=_CALLS)
        return {**super().__getstate__(), "_handle": None, "_validation": None, "_calls": calls}

    def forget(self) -> None:
        self._mean, self.networks, self._frame, self._element = None, 0, None, []
        self._calls.clear()

    # -------------------------------------------------------- averaging
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        super().on_train_start(trainer, pl_module)
        if self._active and hasattr(trainer.strategy, "gather_members") and trainer.world_size > 1:
            self._switch_off("each process trains members of its own")
        if not self._active:
            self._mean = None  # another process has it, or nobody

    def begin(self, weights: Params) -> None:
        assert self.network is not None
        root, network = self._seen(), self.network.module
        live = _averaged_tensors(root)
        prefix = f"{self.network.name}." if self.network.name else ""
        self._names = _names_in(live, self.network.weights(), prefix)
        is_stack = stack_of(root) is not None
        if is_stack and len(self._names) < len(live):  # what else is trained would not move along
            self._frame = None
        else:
            self._frame = _Frame(self.network.symmetries, self._found())
        if self._mean is not None:
            self._mean = {n: t.to(live[n].device) for n, t in self._mean.items()}
        if batch_norms(network) and not is_stack:
            self._listen(root.get_submodule(self.network.name))

    def _listen(self, network: nn.Module) -> None:
        calls = self._calls

        def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if module is network and module.training:  # copies have this hook, too
                calls.append(tree_map(_detached, (args, kwargs)))

        self._handle = network.register_forward_pre_hook(keep, with_kwargs=True)

    def due(self, trainer: Any, before: int, step: int) -> bool:
        # the end of an epoch, but before validation, where checkpoints are made
        ended = trainer.is_last_batch and self.schedule.after_epoch(trainer.current_epoch + 1)
        return ended or self.schedule.after_step(before, step)

    def look(self, trainer: Any, pl_module: Any, weights: Params) -> None:
        live = {n: _wide(t) for n, t in _averaged_tensors(pl_module).items()}
        if not all(bool(t.isfinite().all()) for t in live.values()):
            rank_zero_warn("SymmetricAverage does not average weights that are not finite.")
            return
        if self._mean is None:
            self._mean = {n: t.clone() for n, t in live.items()}
        else:
            weight = 1 - self.decay if self.kind == "ema" else 1 / (self.networks + 1)
            for name, tensor in self._moved(trainer, live, self._mean, weights).items():
                self._mean[name].lerp_(tensor, weight)
        self.networks += 1

    def _moved(self, trainer: Any, live: Params, mean: Params, weights: Params) -> Params:
        """The tensors of the module with its network in the frame of the mean."""
        if self._frame is None:
            return live
        network, goal = (
            {**weights, **{n: tensors[name] for n, name in self._names.items()}}
            for tensors in (live, mean)
        )
        if trainer.is_last_batch:
            self._frame.follow(network, goal)
        moved = self._frame.place(network)
        return {**live, **{name: moved[n] for n, name in self._names.items()}}

    def _close(self) -> None:
        super()._close()
        if self._handle is not None:
            self._handle.remove()
        self._handle = self._validation = None

    # -------------------------------------------------------- what becomes of the average
    @torch.no_grad()
    def averaged_state(self, pl_module: Any) -> dict[str, Any]:
        """Copy the state dict of a module, with the average in place of its weights.

        Args:
            pl_module: the module that was trained; it keeps its weights.
        """
        if self._mean is None:
            raise ValueError("There is no average yet: no step has been averaged.")
        live = _averaged_tensors(pl_module)
        mean = {n: t.to(live[n].device, live[n].dtype) for n, t in self._mean.items()}
        mean |= self._statistics(mean)
        live_state = _state(pl_module)
        state = {n: t.clone() if isinstance(t, Tensor) else t for n, t in live_state.items()}
        names = _names_in(live, {n: t for n, t in live_state.items() if _is_full(t)})
        return state | {n: mean[name] for n, name in names.items()}

    def _statistics(self, mean: Params) -> Params:
        """Statistics of batch norms in the network, estimated with the average in it."""
        if not self._calls or self.network is None:
            return {}
        network = {**self.network.weights(), **{n: mean[name] for n, name in self._names.items()}}
        device = next(iter(mean.values())).device
        calls = [tree_map(lambda t: _detached(t, device), call) for call in self._calls]
        with isolate_rng():
            runner = structural_copy(self.network.module).eval()
            new = reestimated_on_calls(runner, network, calls)
        return {name: new[n] for n, name in self._names.items() if not P.is_weight(n, new[n])}

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self._active and self._mean is None:
            rank_zero_warn(f"SymmetricAverage has averaged nothing ({self.schedule}).")
        folder = log_folder(trainer)  # all processes agree on it
        exists = trainer.strategy.broadcast(self._mean is not None)
        if exists and self.path is not None and not trainer.fast_dev_run:
            self._save(trainer, pl_module, folder / self.path)
        super().on_train_end(trainer, pl_module)

    @torch.no_grad()
    def _save(self, trainer: Any, pl_module: Any, path: Path) -> None:
        """Let the trainer write a checkpoint while the module holds the average."""
        trained = {n: t.clone() for n, t in _state(pl_module).items() if isinstance(t, Tensor)}
        try:
            if self._mean is not None:
                _overwrite(pl_module, self.averaged_state(pl_module))
            trainer.save_checkpoint(path, weights_only=True)
        finally:
            _overwrite(pl_module, trained)

    # -------------------------------------------------------- validation
    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._validation = None
        is_ours = self._seen is not None and self._seen() is pl_module
        if trainer.sanity_checking or self.prefix is None or not is_ours:
            return
        state = None if self._mean is None else self.averaged_state(pl_module)
        state = trainer.strategy.broadcast(state)
        if state is None:
            return
        try:
            with isolate_rng():
                self._validation = _Validation(trainer, pl_module, state, self.prefix)
        except Exception as error:  # whatever copying the user's module raises
            reason = first_line(error)
            rank_zero_warn(f"SymmetricAverage does not validate, as it cannot copy: {reason}")

    def on_validation_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if self._validation is not None:
            self._validation.module.on_validation_epoch_start()

    def on_validation_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, *indices: int
    ) -> None:
        if self._validation is not None:
            with isolate_rng():
                self._validation.step(trainer, batch, *indices)

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if self._validation is not None:
            with isolate_rng():
                self._validation.module.on_validation_epoch_end()
            moved = float(self.moved_units)
            pl_module.log(f"{self.prefix}moved_units", moved, rank_zero_only=True)
            self._validation = None


class _Frame:
    """The exchanges and flips of units that bring a network, or each of a stack, to its mean.

    Args:
        sym: the symmetries of the network.
        element: permutations and signs that were found before, a row for each network.
    """

    def __init__(self, sym: Symmetries, element: list[Tensor]) -> None:
        self.sym, self.element = sym, element

    @property
    def moved_units(self) -> int:
        """The number of units in other places, or flipped."""
        places = sum(int((p != torch.arange(p.shape[1])).sum()) for p in self._permutations)
        return places + sum(int((s < 0).sum()) for s in self._signs)

    @property
    def _permutations(self) -> list[Tensor]:
        return self.element[: len(self.sym.permutations)]

    @property
    def _signs(self) -> list[Tensor]:
        return self.element[len(self.sym.permutations) :]

    def place(self, networks: Params) -> Params:
        """The networks in the places that were found last."""
        if self.moved_units == 0:
            return networks
        stacked = P.is_stacked(networks, self.sym.shapes)
        signs, orders = ([e if stacked else e[0] for e in some]
                         for some in (self._signs, self._permutations))  # fmt: skip
        return permute(flip(networks, self.sym, signs) if signs else networks, self.sym, orders)

    def follow(self, networks: Params, means: Params) -> None:
        """Match every network with its mean, and keep what brings it closer than what was found."""
        if not (self.sym.permutations or self.sym.signs):
            return
        if not P.is_stacked(networks, self.sym.shapes):
            networks, means = ({n: t[None] for n, t in p.items()} for p in (networks, means))
        if not self.element:
            units = [*identity(self.sym), *(torch.ones(g.units) for g in self.sym.signs)]
            self.element = [e.repeat(P.stack_size(networks), 1) for e in units]
        rows = []
        stacks = (P.unstack(params) for params in (networks, self.place(networks), means))
        for m, (network, placed, mean) in enumerate(zip(*stacks, strict=True)):
            matched = match(network, mean, self.sym, signs=bool(self.sym.signs))
            new = matched.apply(network, self.sym)
            before, after = (self._product(params, mean) for params in (placed, new))
            closer = after > before + 1e-7 * abs(before)
            rows.append(matched.element if closer else [e[m] for e in self.element])
        self.element = [torch.stack(column) for column in zip(*rows, strict=True)]

    def _product(self, network: Params, mean: Params) -> float:
        """The inner product of the weights of two networks."""
        return sum(float((network[n] * mean[n]).sum()) for n in self.sym.weights)


class _Validation:
    """A copy of a module with other weights and its own metrics, which logs under a prefix."""

    def __init__(self, trainer: Any, pl_module: Any, state: dict[str, Any], prefix: str) -> None:
        shared = {id(x): x for m in pl_module.modules() for x in runners_of(m)}
        self.module: Any = copy.deepcopy(pl_module, shared)
        self.module.load_state_dict(state)
        self.module.trainer = trainer
        self.module.eval()

        def log(name: str, value: Any, *args: Any, **options: Any) -> None:
            if isinstance(value, Metric):  # it belongs to the copy
                options.setdefault("metric_attribute", name)
            pl_module.log(prefix + name, value, *args, **options)

        self.module.__dict__["log"] = log
        self.module.on_validation_start()

    def step(self, trainer: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Validate one batch, which is on the device already."""
        indices = (batch_idx, dataloader_idx) if len(trainer.num_val_batches) > 1 else (batch_idx,)
        function = self.module.validation_step
        kinds = [p.kind for p in inspect.signature(function).parameters.values()]
        most = 3 if inspect.Parameter.VAR_POSITIONAL in kinds else len(kinds)
        with trainer.precision_plugin.val_step_context():
            function(*(batch, *indices)[:most])


# ------------------------------------------------------------ tensors
def _averaged_tensors(root: nn.Module) -> Params:
    """Live parameters, and means and variances of batch norms, by their names in the state dict."""
    norms = [t for m in batch_norms(root) for t in (m.running_mean, m.running_var)]
    statistics = {id(t) for t in norms if t is not None}
    buffers = [(n, b) for n, b in root.named_buffers() if id(b) in statistics]
    every = [*root.named_parameters(), *buffers]
    return {name: t.detach() for name, t in every if t.is_floating_point() and t.numel()}


def _memory(tensor: Tensor) -> tuple[int, torch.Size]:
    """Return an identity that two tensors share if they are one."""
    return tensor.data_ptr(), tensor.shape


def _names_in(root: Params, tensors: Params, prefix: str = "") -> dict[str, str]:
    """Names of tensors in a module: the same behind a prefix, or those that share their memory."""
    by_memory = {_memory(t): name for name, t in reversed(root.items())}
    names = {
        n: prefix + n
        if prefix + n in root and root[prefix + n].shape == t.shape
        else by_memory.get(_memory(t))
        for n, t in tensors.items()
    }
    return {n: name for n, name in names.items() if name is not None}


def _state(pl_module: Any) -> dict[str, Any]:
    return dict(pl_module.state_dict())


def _overwrite(pl_module: Any, state: dict[str, Any]) -> None:
    for name, tensor in _state(pl_module).items():
        if isinstance(tensor, Tensor):
            tensor.copy_(state[name])


def _is_full(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() > 0


def _wide(tensor: Tensor) -> Tensor:
    """A tensor in which small steps are not rounded away: half precision becomes float32."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _detached(value: Any, device: torch.device | None = None) -> Any:
    return value.detach().to(device) if isinstance(value, Tensor) else value

"""Search for the network that a run trains, and looks at its symmetries after steps."""

from __future__ import annotations

import copy
import inspect
import logging
import math
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves, tree_map

import weightsym
from lightning_bnn._compat import log, sharding
from lightning_bnn.callbacks.onlooker import Onlooker, RefusedArgument
from weightsym import Symmetries, UnsupportedModel
from weightsym import params as P
from weightsym.params import Inputs, Params, check_count, first_line, where_precise

_EXAMPLE_ROWS = 2
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Network:
    """A network inside a LightningModule: its weights, its symmetries, and the inputs of a call.

    The symmetries were found with these inputs.
    """

    name: str
    module: nn.Module
    weights: Callable[[], Params]
    symmetries: Symmetries
    inputs: Inputs
    left_out: tuple[str, ...] = ()
    """Other modules with weights besides it."""
    layout: tuple[Any, ...] = field(init=False)
    """Its modules and tensors when its symmetries were found."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "layout", _layout(self.module, self.weights()))

    def is_as_found(self, root: nn.Module) -> bool:
        """Check whether a module still has the network, with the same modules and tensors."""
        is_there = stack_of(root) is not None or _of_name(root, self.name) is self.module
        weights = self.weights()
        return is_there and _layout(self.module, weights) == self.layout and self._holds(weights)

    def _holds(self, weights: Params) -> bool:
        """Check whether buffers read as constants, such as masks of pruning, are unchanged."""
        pairs = ((weights[name], t) for name, t in self.symmetries.constants.items())
        return all(bool((now == then.to(now.device)).all()) for now, then in pairs)

    def title(self, root: nn.Module) -> str:
        """Name the watched network of a module, and the modules that are left out.

        Args:
            root: the LightningModule.
        """
        class_name = type(self.module).__name__
        name = f"{self.name} ({class_name})" if self.name else type(root).__name__
        others = [*self.left_out[:2], f"{len(self.left_out) - 2} more"]
        others = others if len(self.left_out) > 2 else list(self.left_out)
        return f"{name}, without {' and '.join(others)}" if others else name


def _of_name(root: nn.Module, name: str) -> nn.Module | None:
    module = dict(root.named_modules(remove_duplicate=False)).get(name)
    return None if module is None else plain(module)


def _layout(module: nn.Module, weights: Params) -> tuple[Any, ...]:
    """Return the classes of modules, and names and shapes of tensors."""
    return tuple(map(type, module.modules())), {n: t.shape for n, t in weights.items()}


class Stack(NamedTuple):
    """Networks that a module trains side by side."""

    template: nn.Module
    weights: Params
    example: tuple[Any, ...]


def stack_of(root: Any) -> Stack | None:
    """Return the result of ``weights()`` of a module that trains several networks, or None.

    Other modules may have an attribute of that name with another meaning.
    """
    method = getattr(root, "weights", None)
    if not inspect.ismethod(method) or len(inspect.signature(method).parameters) > 0:
        return None
    result = method()
    if not isinstance(result, tuple) or len(result) != 3 or not isinstance(result[0], nn.Module):
        return None
    return Stack(*result)


def plain(module: nn.Module) -> nn.Module:
    """Unwrap a module from `torch.compile`."""
    return getattr(module, "_orig_mod", module)


def candidates(root: nn.Module, name: str | None) -> list[tuple[str, nn.Module]]:
    """List modules that may be the network with their names, the likeliest first.

    Candidates are the named one; else the only child with weights; else the LightningModule itself,
    followed by its children by size.
    """
    if name is not None:
        return [(name, _named(root, name))]
    children = [(n, m) for n, m in root.named_children() if _size(m)]
    children.sort(key=lambda child: -_size(child[1]))
    if len(children) == 1 and not list(root.parameters(recurse=False)):
        return children
    return [("", root), *children]


def check_name(root: nn.Module, name: str | None) -> None:
    """Require a module with a submodule of this name, and with a choice of networks."""
    if name is not None and stack_of(root) is not None:
        raise RefusedArgument(
            f"`module`: {type(root).__name__} has a single network; omit {name!r}."
        )
    try:
        root.get_submodule(name or "")
    except AttributeError:
        raise RefusedArgument(_without(root, name)) from None


def _named(root: nn.Module, name: str) -> nn.Module:
    try:
        return root.get_submodule(name)
    except AttributeError:
        raise ValueError(_without(root, name)) from None


def _without(root: nn.Module, name: str | None) -> str:
    names = ", ".join(n for n, _ in root.named_children()) or "none"
    return f"`module`: {type(root).__name__} has no submodule {name!r}; it has {names}."


def _size(module: nn.Module) -> int:
    return sum(1 if is_lazy(p) else p.numel() for p in module.parameters() if p.is_floating_point())


def whole_network(root: nn.Module, name: str | None) -> tuple[str, nn.Module]:
    """Return the likeliest network and its name, whether or not it is ever called."""
    chosen, module = candidates(root, name)[0]
    return chosen, plain(module)


# ------------------------------------------------------------ input
@dataclass
class Capture:
    """Records the calls of all candidates during one batch, and finds the network among them.

    Args:
        root: the LightningModule.
        name: of the network, if the user has set one.
    """

    root: nn.Module
    name: str | None
    calls: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._modules = candidates(self.root, self.name)
        self._handles = [
            module.register_forward_pre_hook(self._listener(name, module), with_kwargs=True)
            for name, module in self._modules
        ]

    def _listener(self, name: str, watched: nn.Module) -> Callable[..., None]:
        def listen(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if module is watched:  # not a copy, which somebody else may trace
                self.calls[name] = (args, kwargs)

        return listen

    def close(self) -> None:
        """Stop recording."""
        for handle in self._handles:
            handle.remove()

    def called(self) -> list[tuple[str, tuple[Any, ...], dict[str, Any]]]:
        """Return names and arguments of the called networks, the likeliest first."""
        return [(name, *self.calls[name]) for name, _ in self._modules if name in self.calls]

    def network(self, batch_norm: Literal["carrier", "eval"]) -> Network:
        """Return the first called candidate with known symmetries."""
        reasons = []
        for name, module in self._modules:
            if name not in self.calls:
                reasons.append(f"{name or type(self.root).__name__} was not called")
                continue
            inner = plain(module)
            for args, kwargs in _examples(*self.calls[name]):
                try:
                    inputs = _inputs(inner, args, kwargs)
                    symmetries = weightsym.discover(
                        inner, *inputs.args, batch_norm=batch_norm, **inputs.named
                    )
                except Exception as error:  # whatever the user's forward raises on two rows
                    reasons.append(f"{name or type(self.root).__name__}: {first_line(error)}")
                    continue
                if symmetries.permutations or symmetries.scalings or len(self._modules) == 1:
                    weights = partial(P.of, inner)
                    left_out = _left_out(self.root, name)
                    network = Network(name, inner, weights, symmetries, inputs, left_out)
                    return _announced(network)
        raise UnsupportedModel("; ".join(dict.fromkeys(reasons)))


def _inputs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
    """Return the inputs of a call, by position where `discover` has an option of the same name."""
    if kwargs.keys() & inspect.signature(weightsym.discover).parameters.keys():
        return Inputs(inspect.signature(module.forward).bind(*args, **kwargs).args, {})
    return Inputs(args, kwargs)


def _examples(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Return the inputs to try: two rows of the batch, then all of it."""
    call = (args, kwargs)
    sizes = {t.shape[:1] for t in tree_leaves(call) if isinstance(t, Tensor) and t.ndim > 1}
    if len(sizes) == 1 and next(iter(sizes))[0] > _EXAMPLE_ROWS:
        rows = next(iter(sizes))
        yield tree_map(lambda t: _rows(t, rows), call)
    yield tree_map(lambda t: t.detach() if isinstance(t, Tensor) else t, call)


def _rows(value: Any, rows: torch.Size) -> Any:
    if isinstance(value, Tensor) and value.shape[:1] == rows:
        return value.detach()[:_EXAMPLE_ROWS]
    return value


def _left_out(root: nn.Module, name: str) -> tuple[str, ...]:
    """List modules with weights that are neither inside nor around the named one."""
    others, parent, prefix = [], root, ""
    for word in name.split(".") if name else ():
        siblings = ((n, m) for n, m in parent.named_children() if n != word and _size(m))
        others += [prefix + n for n, _ in siblings]
        parent, prefix = parent.get_submodule(word), f"{prefix}{word}."
    return tuple(others)


def _announced(network: Network) -> Network:
    sym = network.symmetries
    _log.info(
        "Watching %s: %d groups of permutations (10^%.1f), %d free scales%s.",
        network.name or "the LightningModule itself",
        len(sym.permutations),
        sym.log10_permutations,
        sym.scaling_dof,
        f"; {len(sym.frozen)} operations held fixed" if sym.frozen else "",
    )
    return network


class SymmetryCallback(Onlooker):
    """Finds the network and its symmetries in the first batch, and looks at it after steps.

    Callbacks of one run share the result, or the error. A network that cannot be traced is ignored,
    and training continues. A network with changed modules or tensors is found again in the next
    batch. With several processes only the first one looks.
    """

    persistent: Mapping[str, Callable[[], Any]] = {"history": list}
    """Attributes in checkpoints, each with a function that makes its initial value."""
    history: list[tuple[int, list[float]]]

    def __init__(
        self,
        module: str | None,
        every_n_steps: int,
        batch_norm: Literal["carrier", "eval"] = "carrier",
    ) -> None:
        check_count("every_n_steps", every_n_steps)
        if batch_norm not in ("carrier", "eval"):
            raise ValueError(f"`batch_norm` must be 'carrier' or 'eval', got {batch_norm!r}.")
        self.module, self.every_n_steps, self.batch_norm = module, every_n_steps, batch_norm
        self.network: Network | None = None
        self._failure: str | None = None
        self._capture: Capture | None = None
        self._before: Params = {}
        self._step, self._every = 0, every_n_steps
        self._restored = False
        self._seen: Any = None
        self.forget()

    def forget(self) -> None:
        """Remove the history before another run."""
        for name, empty in self.persistent.items():
            setattr(self, name, empty())

    @property
    def state_key(self) -> str:
        return f"{type(self).__name__}(module={self.module!r}, batch_norm={self.batch_norm!r})"

    def state_dict(self) -> dict[str, Any]:
        return {name: copy.copy(getattr(self, name)) for name in self.persistent}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for name in self.persistent:
            setattr(self, name, copy.copy(state_dict[name]))
        self._restored = True

    def begin(self, weights: Params) -> None:
        """Look at the weights before the first step."""

    @abstractmethod
    def look(self, trainer: Any, pl_module: Any, weights: Params) -> None:
        """Look at the weights after every n-th step."""

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a spawned process, without the network."""
        return {**self.__dict__, **dict.fromkeys(("network", "_failure", "_capture", "_seen"))}

    # -------------------------------------------------------- hooks
    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            self.network = self._failure = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if not self._restored and self._seen is not None and self._seen() is not pl_module:
            self.forget()
        self._restored, self._seen = False, weakref.ref(pl_module)
        self._step = trainer.global_step
        self._every = int(min(self.every_n_steps, max(1, _planned_steps(trainer))))
        shards = shards_weights(trainer, pl_module)
        self._active = trainer.is_global_zero and not shards
        stack = stack_of(pl_module)
        if not trainer.is_global_zero:
            return
        check_name(pl_module, self.module)
        if not self._active:
            self._switch_off("its weights are sharded across processes")
        elif stack is not None and stack.example:
            self._watch_stack(trainer, pl_module, stack)
        elif stack is not None:  # a stream of batches: an example comes with the first of them
            self._before = {name: t.clone() for name, t in stack.weights.items()}
        elif not any(is_lazy(p) for p in pl_module.parameters()):
            self._before = {_plain_name(n): t.clone() for n, t in P.of(pl_module).items()}

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if self.network is None and stack_of(pl_module) is None:
            self._capture = Capture(pl_module, self.module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if self.network is None:
            if self._capture is not None:
                self._watch_called(trainer, self._capture)
            elif (stack := stack_of(pl_module)) is not None:
                weights = self._before or stack.weights
                self._watch_stack(trainer, pl_module, stack._replace(weights=weights))
        before, self._step = self._step, trainer.global_step
        every = self._every
        if self._active and self._step // every > before // every:
            self._see(trainer, pl_module)

    def _see(self, trainer: Any, pl_module: Any) -> None:
        """Look at the network, unless the next batch must find it again."""
        if (network := self._current(pl_module)) is not None:
            with torch.no_grad():
                self.look(trainer, pl_module, _measured(network.weights()))

    def _current(self, pl_module: Any) -> Network | None:
        """Return the network if its modules and tensors have not changed."""
        if self.network is not None and not self.network.is_as_found(pl_module):
            self.network = None
        return self.network

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._close()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._close()

    # -------------------------------------------------------- network
    def _watch(
        self, trainer: Any, find: Callable[[], Network], before: Callable[[Network], Params]
    ) -> None:
        """Find the network, and look at its weights before the first step."""
        try:
            self.network = self._found_by_another(trainer) or self._found(find)
            self._check(self.network)
        except ValueError as error:
            self._switch_off(str(error))
        else:
            self.begin(_measured(before(self.network)))
        self._capture, self._before = None, {}

    def _found_by_another(self, trainer: Any) -> Network | None:
        """Return the result or the error of an earlier callback with the same arguments."""
        asked = self.module, self.batch_norm
        others = [c for c in trainer.callbacks if isinstance(c, SymmetryCallback)]
        others = [c for c in others if (c.module, c.batch_norm) == asked]
        if failures := [c._failure for c in others if c._failure]:
            raise UnsupportedModel(failures[0])
        root = trainer.lightning_module
        return next((c.network for c in others if c.network and c.network.is_as_found(root)), None)

    def _found(self, find: Callable[[], Network]) -> Network:
        try:
            return find()
        except ValueError as error:  # whose frames would keep tensors alive
            self._failure = str(error)
            raise

    def _watch_called(self, trainer: Any, capture: Capture) -> None:
        """Take the network that the first batch has called."""
        capture.close()
        self._watch(trainer, partial(self._likeliest, capture), self._weights_before)

    def _likeliest(self, capture: Capture) -> Network:
        """Find the network, and report what is left out if the user has not chosen."""
        network = capture.network(self.batch_norm)
        if network.left_out and self.module is None:
            rank_zero_info(
                f"Callbacks without `module` watch {network.title(capture.root)}: pass for example "
                f"module={network.left_out[0]!r} to watch another network."
            )
        return network

    def _watch_stack(self, trainer: Any, pl_module: Any, stack: Stack) -> None:
        """Take the networks of a module of this package."""

        def find() -> Network:
            symmetries = weightsym.discover(
                stack.template, *stack.example, batch_norm=self.batch_norm
            )
            inputs = Inputs(stack.example, {})
            return Network("", stack.template, lambda: pl_module.weights()[1], symmetries, inputs)

        self._watch(trainer, find, lambda _: stack.weights)

    def _weights_before(self, network: Network) -> Params:
        """Return the weights before the first step, or the current ones of lazy modules."""
        prefix = f"{network.name}." if network.name else ""
        return {
            name: self._before.get(_plain_name(prefix + name), tensor)
            for name, tensor in network.weights().items()
        }

    def _prefix(self, trainer: Any) -> str:
        return prefix_among_others(self, trainer, self.network.name if self.network else "")

    def _log_all(self, trainer: Any, pl_module: Any, values: dict[str, float]) -> None:
        """Log from the first process, with the network's name if two callbacks are of one class."""
        prefix = self._prefix(trainer)
        for key, value in values.items():
            log(pl_module, prefix + key, value, rank_zero_only=True)

    def _check(self, network: Network) -> None:
        """Raise a `ValueError` for a network without anything to watch."""

    def _close(self) -> None:
        if self._capture is not None:
            self._capture.close()
        self._capture, self._before = None, {}


def prefix_among_others(callback: Callback, trainer: Any, name: str | None) -> str:
    """Return the network's name as a prefix if the run has several callbacks of one class."""
    same = [c for c in trainer.callbacks if type(c) is type(callback)]
    return f"{name}/" if len(same) > 1 and name else ""


def _planned_steps(trainer: Any) -> int | float:
    """Return the number of steps of a run; a short one is looked at at its end."""
    try:
        steps: int | float = trainer.estimated_stepping_batches
    except MisconfigurationException:  # they cannot be known before
        return math.inf
    return steps


def _measured(weights: Params) -> Params:
    return {name: where_precise(t) for name, t in weights.items()}


def _plain_name(name: str) -> str:
    return name.replace("_orig_mod.", "")


def shards_weights(trainer: Any, module: torch.nn.Module) -> bool:
    """Check whether every process holds only a part of the weights."""
    return sharding(trainer) is not None or any(isinstance(p, DTensor) for p in module.parameters())

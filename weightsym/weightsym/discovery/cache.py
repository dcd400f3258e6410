"""A cache of `discover`, keyed by the operations of a forward, to avoid repeated tracing.

A module cannot tell whether it computes what it computed before: its forward is code. So it runs,
in evaluation and in training, and all operations that torch carries out are written down, with all
that they are given but the numbers of inputs and weights. They are carried out on the meta device,
where they cost little; what depends on neither, such as positions, is computed. A forward that
needs other numbers is not known again.
"""

from __future__ import annotations

import functools
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.node import map_aggregate
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from weightsym import params as P
from weightsym.discovery.dimensions.nodes import leaves_of
from weightsym.groups.symmetries import Symmetries
from weightsym.networks.forward import Inputs, called, structural_copy, tensors_of
from weightsym.networks.shared_tensors import named_tensors, overlapping, owners

_LIMIT = 32
_SETTINGS = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_PLAIN = (bool, int, float, complex, str, type(None), *_SETTINGS)
_PROBABILITY = {F.scaled_dot_product_attention: 4, F.multi_head_attention_forward: 10}
"""The position of the probability of a dropout, by function."""
_TRAINING = 13
"""The position of the argument of the second function that says whether it drops."""
_results: OrderedDict[str, Symmetries] = OrderedDict()


def recall(keys: Sequence[str]) -> Symmetries | None:
    """Return the cached result of one of some keys, if any."""
    found = next((_results[key] for key in keys if key in _results), None)
    if found is not None:
        remember(keys, found)
    return found


def remember(keys: Sequence[str], symmetries: Symmetries) -> None:
    """Cache a result."""
    for key in filter(None, keys):
        _results[key] = symmetries
        _results.move_to_end(key)
    while len(_results) > _LIMIT:
        _results.popitem(last=False)


def forget() -> None:
    """Clear the cache, so that every network is traced and solved again."""
    _results.clear()


Dropout = tuple[float, bool]
"""The probability of a dropout, and whether it drops anything in this mode."""


class Record(NamedTuple):
    """The operations that a network performs in one mode, where dropouts return what they take."""

    lines: list[str]
    dropouts: list[Dropout]


class Operations(NamedTuple):
    """The operations that a network performs on an example, in evaluation and in training."""

    evaluation: Record
    training: Record

    @property
    def dropouts(self) -> list[Dropout] | None:
        """All dropouts in training, if these are known to be all that differs between modes."""
        agree = self.evaluation.lines == self.training.lines != []
        return self.training.dropouts if agree else None


UNKNOWN = Operations(Record([], []), Record([], []))


@torch.no_grad()
def operations_of(model: nn.Module, inputs: Inputs) -> Operations:
    """List the operations of a network in evaluation mode, or none if they cannot be recorded."""
    try:
        evaluation = _operations(model, inputs)
        model.train()
        return Operations(evaluation, _operations(model, inputs))
    except Exception:  # an unknown operation, one that needs numbers, or a wrong example
        return UNKNOWN
    finally:
        model.eval()


def key_of(model: nn.Module, operations: Operations, batch_norm: str) -> str:
    """Hash all that determines a result. Return an empty string if it cannot be described.

    Args:
        model: the network.
        operations: of the network, with an example; that is no key for what longer ones show.
        batch_norm: as `discover` takes it.
    """
    try:
        lines = [batch_norm, *_described_modules(model), *_described_tensors(model)]
    except Exception:  # numbers that cannot be read
        return ""
    digest = hashlib.sha256()
    for mode in operations:
        lines += ["mode", *mode.lines, str(mode.dropouts)]
    for line in lines:
        digest.update(line.encode())
        digest.update(b"\0")
    return digest.hexdigest() if operations != UNKNOWN else ""


def with_numbers(keys: Sequence[str], model: nn.Module, inputs: Inputs) -> list[str]:
    """Return keys of a result that depends on the numbers of the example and on weights."""
    tensors = [x for x in tree_leaves(inputs) if isinstance(x, Tensor)]
    weights = (t for t in P.of(model).values() if t.is_floating_point())
    try:
        lines = [*map(_numbers, tensors), *(f"{t.sum().item()} {t.norm().item()}" for t in weights)]
    except Exception:  # numbers that cannot be read
        return []
    return [f"{key} {hash(tuple(lines))}" for key in filter(None, keys)]


class _Unknown(Exception):
    """Raised for an operation whose meaning cannot be recorded."""


def _described_modules(model: nn.Module) -> Iterator[str]:
    """Describe the modules of a network, and their code, to which reports refer."""
    for name, module in model.named_modules():
        code = getattr(module.forward, "__code__", None)
        yield f"{name} {type(module)} {hash(code)}"


def _described_tensors(model: nn.Module) -> Iterator[str]:
    """Describe the shapes of tensors, and the values of those that may be read as constants."""
    tensors, persistent = named_tensors(model), model.state_dict()
    for name, t in tensors:
        is_row = name in persistent and t.is_floating_point() and t.ndim == 1
        numbers = "" if isinstance(t, nn.Parameter) or is_row else _numbers(t)
        yield f"{name} {type(t).__name__} {_shape(t)} {t.requires_grad} {numbers}"
    yield str(owners(model))
    yield str(overlapping(tensors))
    yield str(list(persistent))


def _operations(model: nn.Module, inputs: Inputs) -> Record:
    """List the operations of a forward, one per line, and its dropouts."""
    (device,) = {t.device for t in tree_leaves((P.of(model), inputs)) if isinstance(t, Tensor)}
    state, inputs = tree_map(_without_numbers, (P.of(model), inputs))
    log, functions = _Log(), _Functions(device)
    for name, t in state.items():
        log.note(t, name)
    log.lines += [log.note(x, "input") for x in tree_leaves(inputs) if isinstance(x, Tensor)]
    log.kept = {t.untyped_storage()._cdata for t in state.values()}
    network, is_fused = structural_copy(model), torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)  # it stands for code that a trace reads
        with log, functions:
            returned = called(network, state, inputs)
    finally:
        torch.backends.mha.set_fastpath_enabled(is_fused)
    return Record([*log.lines, *map(log.word, tensors_of(returned))], functions.dropouts)


class _Functions(TorchFunctionMode):
    """A mode in which dropouts return what they take.

    Attributes:
        dropouts: all that were called.
        answers: what all tensors say of their device, by the getters of attributes.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.dropouts = list[Dropout]()
        places = {"meta": False, "cuda": device.type == "cuda", "cpu": device.type == "cpu"}
        self.answers: dict[Any, Any] = {
            getattr(Tensor, f"is_{name}").__get__: x for name, x in places.items()
        }
        self.answers[Tensor.device.__get__] = device

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if function is F.dropout:
            x, p, training = _bound(*args, **kwargs)
            self.dropouts.append((p, training))
            return x
        position = _PROBABILITY.get(function)
        if position is not None and len(args) <= _TRAINING:
            p, args = kwargs.pop("dropout_p", 0.0), [*args]
            if len(args) > position:
                p, args[position] = args[position], 0.0
            p = p if kwargs.get("training", True) else 0.0
            self.dropouts.append((p, p > 0))
        if function in self.answers:
            return self.answers[function]
        return function(*args, **kwargs)


def _bound(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> tuple[Tensor, float, bool]:
    """Return the arguments of a dropout in their order."""
    return input, p, training


class _Log(TorchDispatchMode):
    """A dispatch mode that records all operations.

    Attributes:
        lines: one for every operation.
        kept: the memory that nothing may write to.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.kept: set[int] = set()
        self._words, self._named = dict[int, str](), list[Tensor]()
        self._computed = dict[int, Tensor]()

    def note(self, t: Tensor, word: str) -> str:
        """Name a tensor by a word and a number, and return the name with its shape."""
        name = self._words[id(t)] = f"{word} {len(self._named)}"
        self._named.append(t)  # lives on, so that no identity is used twice
        return f"{name} {_shape(t)}"

    def word(self, x: Any, is_result: bool = False) -> str:
        """Describe a tensor by its name, or by its values if it is no result, else by `repr`."""
        if isinstance(x, Tensor):
            name = self._words.get(id(x))
            if name is None and is_result:
                return self.note(x, "result")
            if name is None:
                self.lines.append(f"{self.note(x, 'constant')} {_numbers(x)}")
                self._computed[id(x)] = x.detach().cpu().clone()
            return name or self._words[id(x)]
        if isinstance(x, tuple | list):
            return f"[{', '.join([self.word(item, is_result) for item in x])}]"
        if not isinstance(x, _PLAIN):
            raise _Unknown
        return repr(x)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Record a standard operation of torch and execute it."""
        kwargs, schema = kwargs or {}, function._schema
        is_known = function.namespace in ("aten", "prims")
        if not is_known or (schema.is_mutable and self._writes(schema.arguments, args, kwargs)):
            raise _Unknown
        call = f"{function} {self.word(args)} {self.word([*kwargs.items()])}"
        numbers = self._numbers_of(function, args, kwargs)
        is_number = isinstance(numbers, bool | int | float)
        result = numbers if is_number else _on_meta(function, args, kwargs)
        self.lines.append(f"{call} {self.word(result, is_result=True)}")
        if numbers is not None and not is_number:
            pairs = zip(tree_leaves(result), tree_leaves(numbers), strict=True)
            self._computed |= {id(t): x for t, x in pairs if isinstance(x, Tensor)}
        return result

    def _numbers_of(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Compute what depends on no input and no weight. None for all else."""
        tensors = [x for x in leaves_of((args, kwargs)) if isinstance(x, Tensor)]
        known = [id(x) in self._computed for x in tensors]
        if not all(known) or torch.Tag.nondeterministic_seeded in function.tags:
            if any(known) and function._schema.is_mutable:
                self._computed.clear()
            return None
        args, kwargs = map_aggregate(
            (args, kwargs), lambda x: self._computed[id(x)] if isinstance(x, Tensor) else x
        )
        cpu = {"device": torch.device("cpu")} if _kind_of(function)[0] else {}
        return function(*args, **kwargs | cpu)

    def _writes(self, arguments: Any, args: Any, kwargs: Any) -> bool:
        """Return whether an operation writes to a tensor of the network."""
        by_name = dict(zip((a.name for a in arguments), args, strict=False)) | kwargs
        written = [by_name.get(a.name) for a in arguments if a.alias_info and a.alias_info.is_write]
        tensors = [x for x in tree_leaves(written) if isinstance(x, Tensor)]
        return any(t.untyped_storage()._cdata in self.kept for t in tensors)


def _shape(t: Tensor) -> str:
    strides = t.stride() if t.layout is torch.strided else t.layout
    return f"{tuple(t.shape)} {strides} {t.dtype} {t.device}"


def _numbers(t: Tensor) -> str:
    if t.layout is not torch.strided or t.is_quantized:
        raise _Unknown
    numbers = t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(numbers.tobytes()).hexdigest()


# ------------------------------------------------------------ operations without numbers
class _Layout(NamedTuple):
    """The layout of a tensor on the meta device."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype


_layouts: dict[Any, Any] = {}
"""The layouts of results, by operation and arguments: the rules of torch for them are slow."""


def _on_meta(function: Any, args: Any, kwargs: Any) -> Any:
    """Carry out an operation on the meta device."""
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        raise _Unknown  # it does not cast there
    makes, is_new = _kind_of(function)
    args, kwargs = _each(_without_numbers, args), _each(_without_numbers, [*kwargs.items()])
    kwargs = dict(kwargs) | ({"device": torch.device("meta")} if makes else {})
    if not is_new:
        return function(*args, **kwargs)
    key = function, _each(_layout, args), _each(_layout, [*kwargs.items()])
    if key not in _layouts:
        _layouts[key] = _each(_layout, function(*args, **kwargs))
    return _each(_tensor, _layouts[key])


@functools.cache
def _kind_of(function: Any) -> tuple[bool, bool]:
    """Return whether a function takes a device, and whether all its results have new memory."""
    schema = function._schema
    makes = any(a.name == "device" for a in schema.arguments)
    is_new = all(str(r.type) == "Tensor" and r.alias_info is None for r in schema.returns)
    return makes, is_new and not schema.is_mutable


def _each(function: Callable[[Any], Any], x: Any) -> Any:
    """Apply a function to all that lists and tuples hold."""
    return tuple([_each(function, y) for y in x]) if type(x) in (list, tuple) else function(x)


def _without_numbers(x: Any) -> Any:
    return x if not isinstance(x, Tensor) or x.is_meta else _tensor(_layout(x))


def _layout(x: Any) -> _Layout | str:
    if not isinstance(x, Tensor):
        return repr(x)
    if type(x) not in (Tensor, nn.Parameter) or x.is_quantized:
        raise _Unknown
    return _Layout(x.shape, x.stride(), x.dtype)


def _tensor(layout: Any) -> Tensor | None:
    if not isinstance(layout, _Layout):
        return None
    return torch.empty_strided(layout.shape, layout.strides, dtype=layout.dtype, device="meta")

"""The LightningModule of each method, with the arguments of the method and of every module."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass, replace
from functools import partial
from inspect import Parameter
from typing import TYPE_CHECKING, Any, get_type_hints

from lightning_bnn import methods, samplers
from lightning_bnn.methods import Method
from lightning_bnn.modules.bayesian import Bayesian, OfMethod

__all__ = [
    "DeepEnsemble",
    "Distillation",
    "FromCheckpoints",
    "HMC",
    "IVON",
    "Laplace",
    "MCDropout",
    "MFVI",
    "MILE",
    "SGHMC",
    "SMILE",
    "SWAG",
    "ScalaBL",
    "SymmetrizedVI",
    "TFB",
    "lightning_class",
]


def lightning_class(
    method: type[Method], *, module: str | None = None, **defaults: Any
) -> type[OfMethod]:
    """Create the LightningModule of a method, with the arguments of both.

    Constructors, ``--help`` and YAML have one argument for each field of the method (also of nested
    dataclasses such as `Keeping`), and those of `Bayesian`.

    Args:
        method: a dataclass whose ``name`` becomes the name of the class.
        module: name of the module that holds the class, by default the calling one.
        **defaults: of arguments of `Bayesian`, where they differ.

    >>> import inspect
    >>> from dataclasses import dataclass
    >>> from lightning_bnn import methods
    >>> from lightning_bnn.models import mlp
    >>> @dataclass(eq=False)
    ... class Smoothed(methods.DeepEnsemble):
    ...     '''A deep ensemble with noise on its inputs.
    ...
    ...     Args:
    ...         noise: standard deviation of the noise.
    ...     '''
    ...
    ...     noise: float = 0.1
    >>> Noisy = lightning_class(Smoothed, members=2)
    >>> list(inspect.signature(Noisy).parameters)[:6]
    ['network', 'members', 'prior_std', 'max_loss', 'noise', 'likelihood']
    >>> module = Noisy(mlp(2, [8], 3), noise=0.2)
    >>> module, module.method.noise
    (Smoothed(2 members, Sequential of 51 weights, Categorical(), no prior), 0.2)
    """
    parameters = [*_parameters_of(method, defaults)]
    scope: dict[str, Any] = {
        "OfMethod": OfMethod,
        "default": {p.name: p.default for p in parameters},
        "arguments": lambda **given: _with_method(method, given),
    }
    exec(_source(method.name, parameters), scope)  # as dataclasses do: signatures are read by many
    module_class: type[OfMethod] = scope[method.name]
    module_class.__module__ = module or sys._getframe(1).f_globals.get("__name__", "__main__")
    module_class.__doc__ = _docstring(method, parameters)
    constructor: Any = module_class.__init__
    constructor.__annotations__ = {p.name: p.annotation for p in parameters} | {"return": None}
    return module_class


def _source(name: str, parameters: list[Parameter]) -> str:
    """Return the source of a class whose constructor has given parameters."""
    defaults = {p.name: f" = default[{p.name!r}]" for p in parameters if p.default is not p.empty}
    first = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY]
    options = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    head = ", ".join(n if n == "*" else n + defaults.get(n, "") for n in [*first, "*", *options])
    passed = ", ".join(f"{p.name}={p.name}" for p in parameters)
    return (
        f"class {name}(OfMethod):\n"
        f"    def __init__(self, {head}):\n"
        f"        super().__init__(**arguments({passed}))\n"
    )


def _with_method(method: type[Method], arguments: dict[str, Any]) -> dict[str, Any]:
    """Build the arguments of `Bayesian`, with the method in place of its own."""
    parts = {
        field.name: replace(group, **{f.name: arguments.pop(f.name) for f in fields(group)})
        for field, group in _with_parts(method)
    }
    of_method = {f.name: arguments.pop(f.name) for f in fields(method) if f.name in arguments}  # type: ignore[arg-type]  # a dataclass
    return {**arguments, "method": method(**of_method, **parts)}


# ------------------------------------------------------------ signatures
def _parameters_of(method: type[Method], defaults: dict[str, Any]) -> Iterator[Parameter]:
    """List the arguments of the class: the network, those of the method, members, and the rest."""
    hints = get_type_hints(Bayesian.__init__)
    shared = {
        name: p.replace(
            annotation=hints[name],
            kind=Parameter.KEYWORD_ONLY,
            default=defaults.get(name, p.default),
        )
        for name, p in inspect.signature(Bayesian).parameters.items()
        if name != "method" and (method.trains or name in _WITHOUT_TRAINING)
    }
    of_method = {p.name: p for p in _fields_of(method)}
    needed = [of_method.pop(p.name) for p in [*of_method.values()] if p.default is p.empty]
    first = [shared.pop("network"), *needed]
    first += [shared.pop("members")] if "members" in shared else []
    yield from (p.replace(kind=Parameter.POSITIONAL_OR_KEYWORD) for p in first)
    yield from of_method.values()
    yield from (p for name, p in shared.items() if name not in of_method)


_WITHOUT_TRAINING = "network", "likelihood", "eval_samples", "seed"
"""Arguments of `Bayesian` that have an effect where nothing is trained."""


def _fields_of(cls: Any, instance: Any = None) -> Iterator[Parameter]:
    """List the fields of a dataclass, with the defaults of an instance if there is one."""
    hints = get_type_hints(cls)
    for field in fields(cls):
        value = _default(field) if instance is None else getattr(instance, field.name)
        if is_dataclass(value):
            yield from _fields_of(type(value), value)
        else:
            yield Parameter(
                field.name, Parameter.KEYWORD_ONLY, default=value, annotation=hints[field.name]
            )


def _with_parts(cls: Any) -> Iterator[tuple[Field[Any], Any]]:
    """Expand fields that hold several arguments, with their defaults."""
    for field in fields(cls):
        group = _default(field)
        if is_dataclass(group):
            yield field, group


def _default(field: Field[Any]) -> Any:
    if field.default_factory is not MISSING:
        return field.default_factory()
    return Parameter.empty if field.default is MISSING else field.default


# ------------------------------------------------------------ docstrings
def _docstring(method: Any, parameters: list[Parameter]) -> str:
    """Join the docstring of a method with the descriptions of all arguments."""
    parts = (type(group) for _, group in _with_parts(method))
    texts: dict[str, str] = {}
    for cls in (Bayesian, *parts, *reversed(method.__mro__)):
        texts |= _argument_texts(cls)
    lines = [texts[p.name] for p in parameters if p.name in texts]
    blocks = inspect.cleandoc(method.__doc__ or "").split("\n\n")
    blocks = [block for block in blocks if not block.startswith("Args:")]
    ends = (k for k, b in enumerate(blocks) if b.startswith(("References:", ">>>")))
    blocks.insert(next(ends, len(blocks)), "\n".join(["Args:", *lines]))
    return "\n\n".join(blocks)


def _argument_texts(cls: type) -> dict[str, str]:
    """Return the descriptions of arguments in a docstring, by name."""
    _, _, section = inspect.cleandoc(cls.__dict__.get("__doc__") or "").partition("Args:\n")
    entries = re.split(r"\n(?=    \w)", section.partition("\n\n")[0])
    return {entry.strip().partition(":")[0]: entry for entry in entries if entry}


if TYPE_CHECKING:  # a checker knows no class that a function makes: each is the one it returns
    DeepEnsemble = OfMethod
    Distillation = OfMethod
    FromCheckpoints = OfMethod
    HMC = OfMethod
    IVON = OfMethod
    Laplace = OfMethod
    MCDropout = OfMethod
    MFVI = OfMethod
    MILE = OfMethod
    SGHMC = OfMethod
    SMILE = OfMethod
    SWAG = OfMethod
    ScalaBL = OfMethod
    SymmetrizedVI = OfMethod
    TFB = OfMethod
else:
    _made = partial(lightning_class, module=__name__)
    DeepEnsemble = _made(methods.DeepEnsemble, members=5)
    Distillation = _made(methods.Distillation)
    FromCheckpoints = _made(methods.FromCheckpoints)
    HMC = _made(methods.HamiltonianMonteCarlo, optimizer=samplers.HMC)
    IVON = _made(methods.VariationalOnlineNewton, optimizer=samplers.IVON)
    Laplace = _made(methods.Laplace)
    MCDropout = _made(methods.MCDropout)
    MFVI = _made(methods.MFVI)
    MILE = _made(methods.MILE, members=4, optimizer=samplers.MCLMC)
    SGHMC = _made(methods.SGMCMC, optimizer=samplers.SGHMC)
    SMILE = _made(methods.StochasticMILE, members=4, optimizer=samplers.SMILE)
    SWAG = _made(methods.SWAG)
    ScalaBL = _made(methods.ScalaBL)
    SymmetrizedVI = _made(methods.SymmetrizedVI)
    TFB = _made(methods.TFB)

"""The arguments of a module: those of its method and those of every module, each declared once."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import MISSING, Field, fields, is_dataclass, replace
from inspect import Parameter, Signature
from typing import Any, get_type_hints

from lightning_bnn.methods import Method


def joint_arguments(
    method: type[Method], module: type, **defaults: Any
) -> Callable[..., dict[str, Any]]:
    """Make a function that builds a method, and passes on the arguments of every module.

    Its signature and its docstring name all of them. LightningCLI follows ``**kwargs`` to where
    they are passed to, so that ``--help`` explains each, and YAML may give it.

    Args:
        method: a dataclass; what it holds in one field, such as `Keeping`, is given one by one.
        module: gives the other arguments.
        **defaults: of its arguments, where they differ.
    """
    of_method = list(_parameters(method))
    names = {parameter.name for parameter in of_method}
    hints = get_type_hints(module.__init__)  # type: ignore[misc]  # of a class, not of an instance
    of_module = [
        parameter.replace(
            annotation=hints[name],
            kind=Parameter.KEYWORD_ONLY,
            default=defaults.get(name, parameter.default),
        )
        for name, parameter in inspect.signature(module).parameters.items()
        if name not in {"network", "method", *names}
    ]

    def arguments(**kwargs: Any) -> dict[str, Any]:
        unknown = kwargs.keys() - names - {parameter.name for parameter in of_module}
        if unknown:
            raise TypeError(f"{method.__name__} has no argument `{min(unknown)}`.")
        of_method_given = {name: kwargs.pop(name) for name in names & kwargs.keys()}
        return {"method": _made(method, of_method_given), **defaults, **kwargs}

    vars(arguments)["__signature__"] = Signature([*of_method, *of_module])
    parts = (type(value) for _, value in _held(method))
    sections = map(_section, [module, *parts, *reversed(method.__mro__[:-1])])
    arguments.__doc__ = "Build a method.\n\nArgs:\n" + "\n".join(filter(None, sections))
    return arguments


def values_of(method: Any) -> dict[str, Any]:
    """The arguments that a method was made with, those of what it holds one by one."""
    values = {field.name: getattr(method, field.name) for field in fields(method)}
    parts = [name for name, _ in _held(type(method))]
    for name in parts:
        values |= values_of(values.pop(name))
    return values


def _held(cls: Any) -> Iterator[tuple[str, Any]]:
    """Fields that hold several arguments, with what they hold by default."""
    for field in fields(cls):
        value = _default(field)
        if is_dataclass(value):
            yield field.name, value


def _default(field: Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


def _parameters(cls: Any, default: Any = None) -> Iterator[Parameter]:
    """List the arguments of a dataclass, with the defaults of an instance if there is one."""
    hints = get_type_hints(cls)
    for field in fields(cls):
        value = _default(field) if default is None else getattr(default, field.name)
        if is_dataclass(value):
            yield from _parameters(type(value), value)
        else:
            annotation = hints[field.name]
            yield Parameter(
                field.name, Parameter.KEYWORD_ONLY, default=value, annotation=annotation
            )


def _made(method: type[Method], arguments: dict[str, Any]) -> Method:
    """A method of some arguments."""
    parts = {
        name: replace(
            value, **{f.name: arguments.pop(f.name) for f in fields(value) if f.name in arguments}
        )
        for name, value in _held(method)
    }
    return method(**parts, **arguments)


def _section(cls: type) -> str:
    """The lines of a docstring about arguments."""
    _, _, text = (cls.__doc__ or "").partition("Args:\n")
    return textwrap.indent(textwrap.dedent(text.partition("\n\n")[0]), "    ").rstrip()

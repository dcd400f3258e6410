"""Checks of annotations at run time that cost less and find the same.

`jaxtyping` binds the arguments of every call and calls two functions that check them. Here a
function is one of `beartype`, within which sizes have names if its signature names shapes.
Closures are defined again and again, and share what was compiled for them.
"""

import functools
import inspect
from types import FunctionType
from typing import Any, get_args

import jaxtyping
import jaxtyping._decorator as decorator

_PARTS = (
    "_destring_annotation", "_make_fn_with_signature", "push_shape_memo", "pop_shape_memo"
)  # fmt: skip


def use_cheap_checks():
    """For all that is imported from now on; a `jaxtyping` of other parts stays as it is."""
    if all(hasattr(decorator, name) for name in _PARTS):
        jaxtyping.jaxtyped = cheap(jaxtyping.jaxtyped)


def cheap(jaxtyped):
    """The decorator, for functions; classes are left to the one given."""

    @functools.wraps(jaxtyped)
    def cheaply(fn=None, *, typechecker):
        if fn is None:
            return functools.partial(cheaply, typechecker=typechecker)
        if not inspect.isfunction(fn):
            return jaxtyped(fn, typechecker=typechecker)
        if "<locals>" not in fn.__qualname__ and not inspect.isgeneratorfunction(fn):
            signature = _resolved(fn)
            checked = typechecker(_annotated(fn, signature))
        else:
            if fn.__code__ not in _COMPILED:
                _COMPILED[fn.__code__] = _before_and_after(fn, typechecker)
            signature, *checks = _COMPILED[fn.__code__]
            checked = _between(fn, *checks)
        return functools.update_wrapper(_naming(checked, signature), fn)

    return cheaply


_COMPILED: dict[Any, Any] = {}
"""Of a closure's code its signature, what checks its arguments, and what checks its result."""


def _resolved(fn):
    def value(annotation):
        return decorator._destring_annotation(annotation, fn.__globals__)

    signature = inspect.signature(fn)
    parameters = [p.replace(annotation=value(p.annotation)) for p in signature.parameters.values()]
    returned = value(signature.return_annotation)
    return signature.replace(parameters=parameters, return_annotation=returned)


def _annotated(fn, signature):
    """The same function, of which annotations are not strings."""
    same = FunctionType(fn.__code__, fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__)
    functools.update_wrapper(same, fn)
    del same.__wrapped__
    same.__kwdefaults__ = fn.__kwdefaults__
    given = {n: p.annotation for n, p in signature.parameters.items()}
    given["return"] = signature.return_annotation
    same.__annotations__ = {n: a for n, a in given.items() if a is not inspect.Signature.empty}
    return same


def _before_and_after(fn, typechecker):
    names, signature = (fn.__name__, fn.__qualname__, fn.__module__), _resolved(fn)
    given, returned = signature.replace(return_annotation=Any), signature.replace(parameters=[])
    before = decorator._make_fn_with_signature(*names, given, output=False)
    after, result = decorator._make_fn_with_signature(*names, returned, output=True)
    before, after = typechecker(before), typechecker(after)
    return signature, before, lambda out: after(**{result: out})


def _between(fn, before, after):
    def checked(*args, **kwargs):
        __tracebackhide__ = True
        before(*args, **kwargs)
        out = fn(*args, **kwargs)
        after(out)
        return out

    return checked


def _naming(checked, signature):
    """One name is one size in all arguments and the result of a call."""
    annotations = [p.annotation for p in signature.parameters.values()]
    if not any(map(_names_shapes, [*annotations, signature.return_annotation])):
        return checked

    def named(*args, **kwargs):
        __tracebackhide__ = True
        decorator.push_shape_memo({})
        try:
            return checked(*args, **kwargs)
        finally:
            decorator.pop_shape_memo()

    return named


def _names_shapes(annotation):
    if isinstance(annotation, list):
        return any(map(_names_shapes, annotation))
    if inspect.isclass(annotation) and issubclass(annotation, jaxtyping.AbstractArray):
        return True
    return any(map(_names_shapes, get_args(annotation)))

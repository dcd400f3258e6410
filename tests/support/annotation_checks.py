"""Checks of annotations at run time that cost less and find the same.

`jaxtyping` binds the arguments of every call, so that shapes of one signature can be compared, and
compiles two functions for whatever is defined, also for a closure whenever it is defined again.
Here arguments are bound where a signature names shapes, and equal checks are compiled once.
"""

import functools
import inspect
from typing import Any, get_args

import jaxtyping
import jaxtyping._decorator as decorator

_PARTS = ("_make_fn_with_signature", "_apply_typechecker", "_destring_annotation")


def use_cheap_checks():
    """For all that is imported from now on; a `jaxtyping` of other parts stays as it is."""
    if all(hasattr(decorator, name) for name in _PARTS):
        for name in _PARTS[:2]:
            setattr(decorator, name, _kept(getattr(decorator, name)))
        jaxtyping.jaxtyped = cheap(jaxtyping.jaxtyped)


def _kept(function):
    held = functools.cache(function)

    @functools.wraps(function)
    def kept(*args, **kwargs):
        try:
            return held(*args, **kwargs)
        except TypeError:  # a default that cannot be hashed
            return function(*args, **kwargs)

    return kept


def cheap(jaxtyped):
    """The decorator, with a short way for functions whose signature names no shapes."""

    @functools.wraps(jaxtyped)
    def cheaply(fn=None, *, typechecker):
        if fn is None:
            return functools.partial(cheaply, typechecker=typechecker)
        signature = _resolved(fn) if inspect.isfunction(fn) else None
        if signature is None or any(map(_names_shapes, _annotations(signature))):
            return jaxtyped(fn, typechecker=typechecker)
        return _checked(fn, signature, typechecker)

    return cheaply


def _resolved(fn):
    def value(annotation):
        return decorator._destring_annotation(annotation, fn.__globals__)

    signature = inspect.signature(fn)
    parameters = [p.replace(annotation=value(p.annotation)) for p in signature.parameters.values()]
    returned = value(signature.return_annotation)
    return signature.replace(parameters=parameters, return_annotation=returned)


def _annotations(signature):
    return [*(p.annotation for p in signature.parameters.values()), signature.return_annotation]


def _names_shapes(annotation):
    if isinstance(annotation, list):
        return any(map(_names_shapes, annotation))
    if inspect.isclass(annotation) and issubclass(annotation, jaxtyping.AbstractArray):
        return True
    return any(map(_names_shapes, get_args(annotation)))


def _checked(fn, signature, typechecker):
    names = fn.__name__, fn.__qualname__, fn.__module__
    before = signature.replace(return_annotation=Any)
    after, result = decorator._make_fn_with_signature(*names, signature, output=True)
    before = decorator._make_fn_with_signature(*names, before, output=False)
    after, before = (decorator._apply_typechecker(typechecker, f) for f in (after, before))

    @functools.wraps(fn)
    def checked(*args, **kwargs):
        __tracebackhide__ = True
        before(*args, **kwargs)
        out = fn(*args, **kwargs)
        after(*args, **kwargs, **{result: out})
        return out

    return checked

"""Commands that take any number of files, and options that take several numbers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence

from docstring_parser import parse

from lightning_bnn.commands.parsers import StrictParser

__all__ = ["call_with_several", "takes_several"]


def takes_several(command: Callable[..., None]) -> str | None:
    """The name under which a command takes any number of values; None if it does not."""
    every = inspect.signature(command).parameters.values()
    return next((p.name for p in every if p.kind is p.VAR_POSITIONAL), None)


def call_with_several(
    command: Callable[..., None], args: Sequence[str], prog: str, numbers: str
) -> None:
    """Call a command with several values, ``A B C --numbers 1 2 3``.

    Args:
        command: a function with a parameter such as ``*files``.
        args: the command line.
        prog: the name of the command, for its help.
        numbers: the option that takes several numbers, too.
    """
    several = takes_several(command)
    assert several is not None
    text = inspect.getdoc(command) or ""
    helps = {p.arg_name: p.description for p in parse(text).params}
    parser = StrictParser(prog=prog, description=text.partition("\n\nArgs:")[0])
    parser.add_argument(several, nargs="+", type=str, help=helps[f"*{several}"])
    parser.add_argument(f"--{numbers}", nargs="+", type=float, help=helps[numbers])
    parser.add_function_arguments(command, as_positional=False, skip={several, numbers})
    given = vars(parser.parse_args(list(args)))
    command(*given.pop(several), **given)

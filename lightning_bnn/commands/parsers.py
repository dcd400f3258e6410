"""A parser that takes options in full only, and names the nearest where one is not known."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from typing import Any, NoReturn

from jsonargparse import ArgumentParser

from lightning_bnn.commands.spelling import did_you_mean

__all__ = ["StrictParser"]

_TYPED = re.compile(r"unrecognized arguments: (--[^\s=]+).*", re.DOTALL)
_WRITTEN = re.compile(r"(?:Option|does not accept option) '([^']+)'")


class StrictParser(ArgumentParser):
    """No abbreviations: one that is unique today is ambiguous, or another option, tomorrow.

    It raises `argparse.ArgumentError`; parsers of classes in a configuration are of this kind too.

    Args:
        *args: of `jsonargparse.ArgumentParser`.
        **kwargs: of `jsonargparse.ArgumentParser`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "allow_abbrev": False, "exit_on_error": False})

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Say which option was probably meant."""
        if typed := _TYPED.fullmatch(message):
            message = f"there is no option `{typed[1]}`" + did_you_mean(
                typed[1], (name for name in _options(self) if name.startswith("--")), "`"
            )
        elif (written := _WRITTEN.search(message)) and "did you mean" not in message:
            known = (name.lstrip("-") for name in _options(self))
            message += did_you_mean(written[1], known)
        super().error(message, ex)


def _options(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Every option, also those of subcommands."""
    yield from parser._option_string_actions
    for action in parser._actions:
        if isinstance(action.choices, dict):
            for name in action.choices:
                yield from _options(action.choices[name])

"""A parser that takes options in full only, and says itself what it does not accept and why."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator
from typing import Any, ClassVar, NoReturn

from jsonargparse import ActionConfigFile, ArgumentParser

from lightning_bnn.commands.refused_values import Refusal, refusal_of
from lightning_bnn.commands.spelling import did_you_mean

__all__ = ["StrictParser"]

# Names that argparse and jsonargparse tell nowhere but in their messages.
_UNKNOWN = re.compile(r"(?:unrecognized arguments: (?=--)|option ')([^\s=']+)", re.IGNORECASE)
_MISSING = re.compile(r"arguments are required: (.*)")
_COMMAND = re.compile(r"^(fit|validate|test|predict)\.")


class StrictParser(ArgumentParser):
    """No abbreviations: one that is unique today is ambiguous, or another option, tomorrow.

    It raises `Refusal`. The arguments of a class in a configuration have a parser of this kind,
    too. What that refuses is the mistake; but jsonargparse turns it into text, or goes on to
    another type, so refusals are kept until the check of the whole value has failed.

    Args:
        *args: of `jsonargparse.ArgumentParser`.
        **kwargs: of `jsonargparse.ArgumentParser`.
    """

    _refusals: ClassVar[list[Refusal]] = []
    _typed: tuple[argparse.Action, Any, int] | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "allow_abbrev": False, "exit_on_error": False})

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        self._typed = action, " ".join(arg_strings), len(self._refusals)
        return super()._get_values(action, arg_strings)

    def _check_value_key(self, action: argparse.Action, value: Any, *args: Any, **kw: Any) -> Any:
        before = len(self._refusals)
        try:
            return super()._check_value_key(action, value, *args, **kw)
        except Refusal:
            raise
        except TypeError as error:
            raise self._refused(action, value, before) from error

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise what is wrong as a `Refusal`, from what was noted about it before."""
        if isinstance(ex, Refusal):
            refusal = ex
        elif message.startswith("Parser key") and self._typed is not None:
            refusal = self._refused(*self._typed)
        else:
            refusal = self._wrong_name(message) or Refusal(" ".join(message.split()))
        self._refusals.append(refusal)
        raise refusal from None if ex is refusal else ex

    def _refused(self, action: argparse.Action, value: Any, before: int) -> Refusal:
        """Why a value was refused: the likeliest type is tried first, so its refusal counts."""
        inner = self._refusals[before:]
        del self._refusals[before:]
        if inner:
            return inner[0].under(action.dest)
        if isinstance(action, ActionConfigFile):
            folder = f"{value} is a folder, and no YAML file"
            reason = folder if os.path.isdir(value) else f"there is no file {value}"
            return Refusal(reason, key=action.dest)
        hint = getattr(action, "_typehint", None)
        if hint is None:
            return Refusal(f"must be a group of settings, got {value}", key=action.dest)
        return refusal_of(hint, value).under(action.dest)

    def _wrong_name(self, message: str) -> Refusal | None:
        if missing := _MISSING.search(message):
            names = [f"`{_COMMAND.sub('', name)}`" for name in missing[1].split(", ")]
            return Refusal(f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} missing")
        if not (unknown := _UNKNOWN.search(message)):
            return None
        name, typed = unknown[1], unknown[1].startswith("--")
        known = [option if typed else option.lstrip("-") for option in _options(self)]
        quote = "`" if typed else "'"
        meant = did_you_mean(name, known, quote)
        return Refusal(f"there is no option {quote}{name}{quote}", name, meant)


def _options(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Every option of a parser and of its subcommands."""
    yield from parser._option_string_actions
    for action in parser._actions:
        if isinstance(action.choices, dict):
            for name in action.choices:
                yield from _options(action.choices[name])

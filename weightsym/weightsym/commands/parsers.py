"""A parser without abbreviations, with refusals in the user's terms."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, NoReturn, Union, get_args, get_origin

from jsonargparse import (
    ActionConfigFile,
    ArgumentError,
    ArgumentParser,
    DefaultHelpFormatter,
    Namespace,
)

# Names that argparse and jsonargparse tell nowhere but in their messages.
_UNKNOWN = re.compile(r"(?:unrecognized arguments: (?=--)|option ')([^\s=']+)", re.IGNORECASE)
_MISSING = re.compile(r"arguments are required: (.*)")
_TOO_MANY = re.compile(r"unrecognized arguments: ([^-\s].*)", re.IGNORECASE)
_COMMAND = re.compile(r"^(fit|validate|test|predict)\.")
_SUBCLASSES = re.compile(r", known subclasses: [^)]*")
_NAMES = {NoneType: "null", bool: "true or false"}
_LONGEST = 80


class Refusal(ArgumentError, TypeError):  # jsonargparse handles both on the way out
    """An argument that a parser refuses.

    Args:
        reason: explanation without a full stop.
        culprit: the word to look for in configurations; by default the setting.
        meant: half a sentence that suggests a better word.
        key: full name of the setting; empty if there is none.
    """

    def __init__(self, reason: str, culprit: str = "", meant: str = "", key: str = "") -> None:
        colon = "" if reason.startswith("must be") else ":"
        super().__init__(None, f"`{key}`{colon} {reason}" if key else reason)
        self.reason, self.meant, self.key = reason, meant, key
        self.culprit = culprit or key.rpartition(".")[-1]

    def under(self, key: str) -> Refusal:
        """Return the same refusal for a setting in a group."""
        return Refusal(self.reason, self.culprit, self.meant, f"{key}.{self.key}".rstrip("."))


class _ShortHelp(DefaultHelpFormatter):
    """Help of screen width, without the hundreds of classes that would fit."""

    def __init__(self, prog: str, **options: Any) -> None:
        super().__init__(prog, **{**options, "max_help_position": 32, "width": 100})

    def _get_help_string(self, action: argparse.Action) -> str:
        return _SUBCLASSES.sub("", super()._get_help_string(action))

    def _format_action(self, action: argparse.Action) -> str:
        return "" if action.dest.endswith(".help") else super()._format_action(action)


class StrictParser(ArgumentParser):
    """A parser without abbreviations, which would become ambiguous with new options.

    It raises `Refusal`. The arguments of a class in a configuration have a parser of this kind,
    too. Its refusal is the actual mistake, but jsonargparse converts it to text or tries another
    type. Refusals are therefore stored until the check of the whole value has failed.

    Args:
        *args: of `jsonargparse.ArgumentParser`.
        **kwargs: of `jsonargparse.ArgumentParser`.
    """

    _refusals: ClassVar[list[Refusal]] = []
    _typed: tuple[argparse.Action, Any, int] | None = None
    _words: Sequence[str] = ()

    @property
    def option_for_word(self) -> str:
        """Suggest an option for a word without one, if there is a likely one."""
        for action in self._actions:
            hint = getattr(action, "_typehint", None)
            kinds = [get_origin(alternative) for alternative in get_args(hint)]
            if get_origin(hint) in (Union, UnionType) and dict in kinds:
                return f"; name it, as in --{action.dest}.NAME PLACE"
        return ""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        ours = {"allow_abbrev": False, "exit_on_error": False, "formatter_class": _ShortHelp}
        super().__init__(*args, **{**kwargs, **ours})

    def parse_args(self, args: Any = None, *others: Any, **options: Any) -> Any:
        """Parse words, and remember the options in them."""
        self._words = [str(word).partition("=")[0] for word in args or ()]
        return super().parse_args(args, *others, **options)

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
        """Raise an error as a `Refusal`, with the stored cause if there is one."""
        if isinstance(ex, Refusal):
            refusal = ex
        elif message.startswith("Parser key") and self._typed is not None:
            refusal = self._refused(*self._typed)
        else:
            refusal = self._wrong_name(message) or Refusal(" ".join(message.split()))
        self._refusals.append(refusal)
        raise refusal from None if ex is refusal else ex

    def _refused(self, action: argparse.Action, value: Any, before: int) -> Refusal:
        """Explain a refused value. The likeliest type is tried first, so its refusal counts."""
        inner = self._refusals[before:]
        del self._refusals[before:]
        if inner:
            return inner[0].under(action.dest)
        if isinstance(action, ActionConfigFile):
            folder = f"{value} is a folder, not a YAML file"
            reason = folder if os.path.isdir(value) else f"there is no file {value}"
            return Refusal(reason, key=action.dest)
        hint = getattr(action, "_typehint", None)
        if hint is None:
            return Refusal(f"must be a group of settings, got {value}", key=action.dest)
        return self.refusal_of(hint, value).under(action.dest)

    def refusal_of(self, hint: Any, value: Any) -> Refusal:
        """Explain why a value was refused. Parsers of classes override this.

        Args:
            hint: requested type.
            value: as typed, or as read from a file.
        """
        return refusal_of(hint, value)

    def _wrong_name(self, message: str) -> Refusal | None:
        places = [action.dest for action in self._actions if not action.option_strings]
        for name in places:
            if f"--{name}" in self._words:
                text = f"`{name}` is not an option: write it without `--{name}`, after the command"
                return Refusal(text, f"--{name}")
        if missing := _MISSING.search(message):
            names = [f"`{_COMMAND.sub('', name)}`" for name in missing[1].split(", ")]
            return Refusal(f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} missing")
        if extra := _TOO_MANY.search(message):
            word = next((w for w in self._words if extra[1].startswith(w)), extra[1].split()[0])
            accepted = ", ".join(f"`{name}`" for name in places)
            hint = f"and only {accepted} can be without one" if places else "which it needs"
            return Refusal(f"{word!r} has no option before it, {hint}", word, self.option_for_word)
        if not (unknown := _UNKNOWN.search(message)):
            return None
        name, typed = unknown[1], unknown[1].startswith("--")
        options = [option if typed else option.lstrip("-") for option in _options(self)]
        quote = "`" if typed else "'"
        meant = did_you_mean(name, options, quote)
        return Refusal(f"there is no option {quote}{name}{quote}", name, meant)


def _options(parser: argparse.ArgumentParser) -> Iterator[str]:
    """List every option of a parser and of its subcommands."""
    yield from parser._option_string_actions
    for action in parser._actions:
        if isinstance(action.choices, dict):
            for name in action.choices:
                yield from _options(action.choices[name])


def did_you_mean(word: str, candidates: Iterable[str], quote: str = "'") -> str:
    """Suggest the candidate nearest to a word, or to its first part, in half a sentence.

    >>> did_you_mean("fti", ["fit", "test"])
    "; did you mean 'fit'?"
    >>> did_you_mean("modle.init_args.members", ["model", "data"])
    "; did you mean 'model'?"

    Args:
        word: as written.
        candidates: allowed words.
        quote: around the name.
    """
    names = list(candidates)
    near = get_close_matches(word, names, 1) or get_close_matches(word.partition(".")[0], names, 1)
    return f"; did you mean {quote}{near[0]}{quote}?" if near else ""


# ------------------------------------------------------------ values
def refusal_of(hint: Any, value: Any, note: str = "") -> Refusal:
    """Explain why a value was refused.

    >>> print(refusal_of(int | None, "many"))
    must be int or null, got many

    Args:
        hint: requested type.
        value: as typed, or as read from a file.
        note: in brackets after the type.
    """
    text = str(value.as_dict() if isinstance(value, Namespace) else value)
    text = text if len(text) <= _LONGEST else text[:_LONGEST] + "..."
    choice = _choice(hint)
    listed = "a list of" in choice and isinstance(value, (str, int, float))
    meant = f"; a list is written [{text}]." if listed else ""
    return Refusal(f"must be {choice}{note}, got {text}", meant=meant)


def _choice(hint: Any) -> str:
    """Describe the values of a type, with null for None.

    >>> _choice(Literal["a", "b"] | None), _choice(list[int])
    ("'a' or 'b' or null", 'a list of int')
    """
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType, Literal):
        return " or ".join(dict.fromkeys(map(repr if origin is Literal else _choice, args)))
    if args and origin in (Callable, Annotated):
        return _choice(args[-1] if origin is Callable else args[0])
    if args and issubclass(origin, Iterable) and not issubclass(origin, Mapping):
        return f"a list of {_choice(args[0])}"
    return _NAMES.get(hint) or str(getattr(origin or hint, "__name__", hint))

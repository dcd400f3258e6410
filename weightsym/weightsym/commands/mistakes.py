"""Mistakes of the user, reported in one sentence, as opposed to bugs with a traceback."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from weightsym.commands.parsers import Refusal
from weightsym.extras import MissingPackage
from weightsym.networks.files.settings import config_files

_PACKAGES = ("weightsym", "lightning_bnn")
_BUGS = (AttributeError, AssertionError, LookupError, NameError)


def mistake(error: Exception, typed: Sequence[str], program: str) -> str | None:
    """Return a message for a mistake of the user, or None for a bug.

    Mistakes are refusals of a parser, errors of the system about a path, missing packages of an
    extra, misconfigurations reported by Lightning, and a ValueError from a file of this project.

    Args:
        error: raised by a command.
        typed: the command line.
        program: name of the console script.
    """
    if isinstance(error, Refusal):
        return _refused(error, typed, program)
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}."
    refused = isinstance(error, (OSError, MissingPackage)) or _is_misconfigured(error)
    if refused or (isinstance(error, ValueError) and _is_ours(error, program.replace("-", "_"))):
        return " ".join(str(error).split())
    return None


@contextmanager
def building(title: str) -> Iterator[None]:
    """Treat errors about values as mistakes of the user, while building objects from settings.

    Args:
        title: name of the objects, for the message.
    """
    try:
        yield
    except Exception as error:
        first: BaseException = error
        while first.__cause__ is not None and not _is_ours(first):  # jsonargparse wraps errors
            first = first.__cause__
        if isinstance(first, (*_BUGS, MissingPackage)):
            raise
        prefix = "" if _is_ours(first) else f"{title} cannot be made: "
        raise ValueError(f"{prefix}{first}") from error


def _is_ours(error: BaseException, *packages: str) -> bool:
    """Check whether a file of one of our packages has raised an error."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    package = str(frame.f_globals.get("__name__")).partition(".")[0]
    return package in (*_PACKAGES, *packages)


def _is_misconfigured(error: BaseException) -> bool:
    return type(error).__name__ == "MisconfigurationException"  # importing its class takes seconds


def _refused(refusal: Refusal, typed: Sequence[str], program: str) -> str:
    """Return the refusal of a parser with its file, and the command for help."""
    file = _file_with(refusal.culprit, config_files(typed), typed)
    location = f" (in {file})" if file else ""
    return f"{refusal}{location}{refusal.meant or '.'} (`{program} {typed[0]} --help` explains.)"


def _file_with(culprit: str, files: Sequence[str], typed: Sequence[str]) -> str | None:
    """Find the configuration that contains a word, unless it was typed."""
    word = re.compile(rf"(?<!\w){re.escape(culprit.rpartition('.')[-1])}(?!\w)")
    if not culprit or any(word.search(argument) for argument in typed if argument not in files):
        return None
    return next((f for f in files if word.search(Path(f).read_text(encoding="utf-8"))), None)

"""Whose fault an error is: mistakes of the user become one sentence, bugs keep their traceback."""

from __future__ import annotations

import errno
import re
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError

from lightning_bnn.commands.refused_values import Refusal
from lightning_bnn.extras import MissingPackage
from lightning_bnn.settings_files import config_files

__all__ = ["building", "mistake", "restoring"]

_OURS = ("lightning_bnn", "pathlib")
_DISK = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, FileExistsError)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
_OF_VALUES = (ValueError, TypeError, RuntimeError, ImportError, OSError)
"""What libraries raise about arguments; others, such as KeyError, are bugs."""
_REFUSALS = (ValueError, OSError, MissingPackage)
_RESTORING = "lightning.pytorch.trainer.connectors.checkpoint_connector"
_CONFIGURED = ("fit", "validate", "test", "predict")


def mistake(error: Exception, typed: Sequence[str]) -> str | None:
    """What the user can mend, in one sentence, or None for what is no mistake of theirs.

    Mistakes are what a parser refuses, what this package refuses, what Lightning calls a
    misconfiguration, and what the system says about a path.

    Args:
        error: what a command has raised.
        typed: the command line.
    """
    if isinstance(error, Refusal):
        return _refused(error, typed)
    if isinstance(error, _DISK) or getattr(error, "errno", None) in _FULL:
        path, reason = getattr(error, "filename", None), getattr(error, "strerror", None)
        return f"{path}: {reason}." if path is not None and reason else _one_line(error)
    refused = _refused_by_us(error)
    return None if refused is None else _one_line(refused)


@contextmanager
def building(what: str) -> Iterator[None]:
    """While objects are made from values of the user, complaints about values are mistakes.

    Args:
        what: is made, for the message.
    """
    try:
        yield
    except Exception as error:
        first = next((e for e in _chain(error) if not _raised_in(e, ("jsonargparse",))), error)
        known = _refused_by_us(error) is not None or not isinstance(first, _OF_VALUES)
        if known and not _is_misconfigured(first):
            raise
        raise ValueError(f"{what} cannot be made: {first}") from error


@contextmanager
def restoring(path: object) -> Iterator[None]:
    """While a run goes on from a checkpoint, it may be no checkpoint, or one of another network.

    Args:
        path: of the checkpoint.
    """
    try:
        yield
    except UnpicklingError:
        raise
    except Exception as error:
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        steps = {f.f_code.co_name for f in frames if f.f_globals.get("__name__") == _RESTORING}
        if "resume_start" in steps and not isinstance(error, FileNotFoundError):
            raise ValueError(
                f"`ckpt_path`: {path} is no checkpoint that Lightning has written, or it is "
                f"damaged ({type(error).__name__})."
            ) from error
        about_values = isinstance(error, (RuntimeError, ValueError))
        if steps and about_values and _refused_by_us(error) is None:
            message = f"`ckpt_path`: {path} does not fit: {_one_line(error)[:300]}"
            raise ValueError(message) from error
        raise


# ------------------------------------------------------------ whose it is
def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and those that it came from."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _raised_in(error: BaseException, packages: tuple[str, ...]) -> bool:
    """Whether the code that raised it belongs to one of these packages."""
    frames = list(traceback.walk_tb(error.__traceback__))
    return bool(frames) and frames[-1][0].f_globals.get("__name__", "").startswith(packages)


def _is_misconfigured(error: BaseException) -> bool:
    return type(error).__name__ == "MisconfigurationException"  # importing its class takes seconds


def _refused_by_us(error: BaseException) -> BaseException | None:
    """What this package, or Lightning on its behalf, said is wrong."""
    if _is_misconfigured(error):
        return error
    refusals = (e for e in _chain(error) if isinstance(e, _REFUSALS))
    first = next((e for e in refusals if _raised_in(e, _OURS)), None)
    return first if isinstance(error, _REFUSALS) else None


# ------------------------------------------------------------ what is said
def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def _refused(refusal: Refusal, typed: Sequence[str]) -> str:
    """What a parser does not accept, the file in which it stands, and where help is."""
    files = config_files(typed)
    file = _file_with(refusal.culprit, files, typed)
    place = f" (in {file})" if file else ""
    preset = "`lightning-bnn presets NAME > FILE` writes a preset. "
    help_ = f"(`lightning-bnn {typed[0]} --help` explains.)"
    asks_for_file = typed[0] in _CONFIGURED and not files
    return f"{refusal}{place}{refusal.meant or '.'} {preset if asks_for_file else ''}{help_}"


def _file_with(culprit: str, files: Sequence[str], typed: Sequence[str]) -> str | None:
    """The configuration in which a word stands, unless it was typed."""
    word = re.compile(rf"(?<!\w){re.escape(culprit.rpartition('.')[-1])}(?!\w)")
    if not culprit or any(word.search(part) for part in typed if part not in files):
        return None
    return next((f for f in files if word.search(Path(f).read_text(encoding="utf-8"))), None)

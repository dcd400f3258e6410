"""Whose fault an error is: mistakes of the user become one sentence, bugs keep their traceback."""

from __future__ import annotations

import errno
import traceback
from argparse import ArgumentError
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pickle import UnpicklingError

from lightning_bnn.commands.complaints import complaint, written_in
from lightning_bnn.settings_files import config_files

__all__ = ["building", "mistake", "restoring"]

_OURS = ("lightning_bnn", "pathlib")
_DISK = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, FileExistsError)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
_OF_VALUES = (ValueError, TypeError, RuntimeError, ImportError, OSError)
"""What libraries raise about arguments; others, such as KeyError, are bugs."""
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
    if isinstance(error, ArgumentError):
        return _parsed(error, typed)
    if isinstance(error, _DISK) or getattr(error, "errno", None) in _FULL:
        return _about_path(error)
    own = _own(error)
    return None if own is None else " ".join(str(own).split())


@contextmanager
def building(what: str) -> Iterator[None]:
    """While objects are made from values of the user, complaints about values are mistakes.

    Args:
        what: is made, for the message.
    """
    try:
        yield
    except Exception as error:
        first = next((e for e in _chain(error) if not _raised_by(e, ("jsonargparse",))), error)
        if _own(error) is not None and not _is_misconfigured(first):
            raise
        if not isinstance(first, _OF_VALUES) and not _is_misconfigured(first):
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
        steps = {
            frame.f_code.co_name
            for frame, _ in traceback.walk_tb(error.__traceback__)
            if frame.f_globals.get("__name__") == _RESTORING
        }
        if "resume_start" in steps and not isinstance(error, FileNotFoundError):
            raise ValueError(
                f"`ckpt_path`: {path} is no checkpoint that Lightning has written, or it is "
                f"damaged ({type(error).__name__})."
            ) from error
        if steps and isinstance(error, (RuntimeError, ValueError)) and _own(error) is None:
            told = " ".join(str(error).split())[:300]
            raise ValueError(f"`ckpt_path`: {path} does not fit: {told}") from error
        raise


# ------------------------------------------------------------ whose it is
def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and those that it came from."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _raised_by(error: BaseException, names: tuple[str, ...]) -> bool:
    """Whether the code that raised it belongs to one of these packages."""
    frames = list(traceback.walk_tb(error.__traceback__))
    return bool(frames) and frames[-1][0].f_globals.get("__name__", "").startswith(names)


def _is_misconfigured(error: BaseException) -> bool:
    return type(error).__name__ == "MisconfigurationException"  # importing its class takes seconds


def _own(error: BaseException) -> BaseException | None:
    """What this package, or Lightning on its behalf, said is wrong."""
    if _is_misconfigured(error):
        return error
    if not isinstance(error, (ValueError, OSError)):
        return None
    return next((e for e in _chain(error) if _refusal(e)), None)


def _refusal(error: BaseException) -> bool:
    return isinstance(error, (ValueError, OSError)) and _raised_by(error, _OURS)


# ------------------------------------------------------------ what is said
def _about_path(error: Exception) -> str:
    """Path and reason, without the number of the error."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}."
    return " ".join(str(error).split())


def _parsed(error: ArgumentError, typed: Sequence[str]) -> str:
    """What a parser says, and the file in which it stands."""
    told = complaint(str(error))
    where = written_in(told.culprit, config_files(typed), typed)
    wrong, asks, meant = told.sentence.rstrip(".").partition("; did you mean ")
    sentence = wrong + (f" (in {where})" if where else "") + (asks + meant or ".")
    more = f"(`lightning-bnn {typed[0]} --help` explains.)"
    if typed[0] in _CONFIGURED and ("does not exist" in sentence or " missing" in sentence):
        more = f"`lightning-bnn presets NAME > FILE` writes a preset. {more}"
    return f"{sentence} {more}"

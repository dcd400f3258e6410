"""The nearest right spelling of what is not known."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

__all__ = ["did_you_mean", "nearest"]


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The name that was probably meant: of a whole, or of its first part.

    >>> nearest("trainer.max_epoch", ["trainer.max_epochs", "trainer.devices"])
    'trainer.max_epochs'
    >>> nearest("modle.init_args.members", ["model", "data"])
    'model'
    >>> nearest("x", ["model", "data"])

    Args:
        word: what was written.
        known: what can be written.
    """
    known = list(known)
    found = get_close_matches(word, known, 1) or get_close_matches(word.partition(".")[0], known, 1)
    return found[0] if found else None


def did_you_mean(word: str, known: Iterable[str], quote: str = "'") -> str:
    """Half a sentence that names the nearest, or nothing.

    >>> did_you_mean("fti", ["fit", "test"])
    "; did you mean 'fit'?"

    Args:
        word: what was written.
        known: what can be written.
        quote: around the name.
    """
    found = nearest(word, known)
    return "" if found is None else f"; did you mean {quote}{found}{quote}?"

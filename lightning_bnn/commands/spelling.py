"""The nearest right spelling of what is not known."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

__all__ = ["did_you_mean"]


def did_you_mean(word: str, known: Iterable[str], quote: str = "'") -> str:
    """Half a sentence that names what is nearest to a word, or to its first part; or nothing.

    >>> did_you_mean("fti", ["fit", "test"])
    "; did you mean 'fit'?"
    >>> did_you_mean("modle.init_args.members", ["model", "data"])
    "; did you mean 'model'?"

    Args:
        word: what was written.
        known: what can be written.
        quote: around the name.
    """
    names = list(known)
    near = get_close_matches(word, names, 1) or get_close_matches(word.partition(".")[0], names, 1)
    return f"; did you mean {quote}{near[0]}{quote}?" if near else ""

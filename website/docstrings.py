"""Docstrings as the site shows them: formulas as they are written, references as lines."""

from __future__ import annotations

import re

import griffe


class Formulas(griffe.Extension):
    """Turns the few directives of reStructuredText that docstrings have into Markdown."""

    def on_instance(self, *, obj, **_):  # type: ignore[no-untyped-def]  # as griffe calls it
        """Rewrite the docstring of one function, class or module."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(text: str) -> str:
    r"""A docstring without directives.

    >>> as_markdown("Mean, :math:`x`.\n\n.. math:: a = b\n    + c\n\nEnd.")
    'Mean, `x`.\n\n```text\na = b\n    + c\n```\n\nEnd.'
    >>> as_markdown("Sum.\n\n>>> 1 + 1\n2")
    'Sum.\n\n```pycon\n>>> 1 + 1\n2\n```'
    """
    text = re.sub(r":math:`([^`]*)`", r"`\1`", text)
    text = re.sub(r"``([^`]+)``", r"`\1`", text)
    block = re.compile(r"^\.\. math:: *(.*(?:\n(?!\n).+)*)", re.MULTILINE)
    text = block.sub(lambda m: f"```text\n{m[1].strip()}\n```", text)
    text = re.sub(r"^>>> .*(?:\n(?!\n).+)*", r"```pycon\n\g<0>\n```", text, flags=re.MULTILINE)
    return re.sub(r"^( *)\| (.*)$", r"\1\2  ", text, flags=re.MULTILINE)

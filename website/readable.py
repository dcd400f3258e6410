"""Readability of pages: room for wide tables, unbroken numbers, pictures to enlarge."""

from __future__ import annotations

import re

_CELL = re.compile(r"<t[dh][^>]*>.*?</t[dh]>", re.DOTALL)
_PICTURE = re.compile(r'(<a [^>]*>\s*)?<img [^>]*src="([^"]+\.png)"[^>]*>')
_SPACE = "\N{NO-BREAK SPACE}"
_RULE = re.compile(r"^\|(?:[ :]*-+[ :]*\|)+ *$", re.MULTILINE)
_WIDE = 10
"""Columns of a table that does not fit beside a column of contents."""


def is_wide(markdown: str) -> bool:
    r"""Check whether a page has a table that needs the room of the column of contents.

    >>> is_wide("| a | b |\n|---|---|\n| 1 | 2 |"), is_wide("|---" * 10 + "|")
    (False, True)
    """
    return any(rule.count("|") > _WIDE for rule in _RULE.findall(markdown))


def with_contents(markdown: str) -> str:
    r"""Return a page with its contents below its title.

    >>> with_contents("# A\n\nText.")
    '# A\n\n!!! contents "On this page"\n    [TOC]\n\nText.'
    """
    title, _, text = markdown.partition("\n\n")
    return f'{title}\n\n!!! contents "On this page"\n    [TOC]\n\n{text}'


def whole_numbers(html: str) -> str:
    """Keep numbers and their errors in tables on one line.

    >>> whole_numbers("<p>1 ± 2</p><td>1 ± 2</td>").count("1\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}2")
    1
    """
    return _CELL.sub(lambda cell: cell[0].replace(" ± ", f"{_SPACE}±{_SPACE}"), html)


def enlarging(html: str) -> str:
    """Link pictures to their files, which a browser shows at full size.

    >>> enlarging('<img alt="a" src="b.png">')
    '<a class="picture" href="b.png"><img alt="a" src="b.png"></a>'
    >>> enlarging('<a href="c.html"><img alt="a" src="b.png"></a>')
    '<a href="c.html"><img alt="a" src="b.png"></a>'
    """

    def linked(picture: re.Match[str]) -> str:
        return (
            picture[0] if picture[1] else f'<a class="picture" href="{picture[2]}">{picture[0]}</a>'
        )

    return _PICTURE.sub(linked, html)


# ------------------------------------------------------------ what mkdocs calls
def on_page_markdown(markdown, page, config, files):  # type: ignore[no-untyped-def]  # mkdocs is not known here
    """Move the contents of a page with wide tables to its top."""
    if not is_wide(markdown):
        return markdown
    page.meta.setdefault("hide", []).append("toc")
    return with_contents(markdown) if markdown.count("\n## ") > 1 else markdown


def on_page_content(html, page, config, files):  # type: ignore[no-untyped-def]  # as above
    """Rewrite the HTML of a page."""
    return enlarging(whole_numbers(html))

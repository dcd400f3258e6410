"""One self-contained HTML page of text, tables and figures."""

from __future__ import annotations

import base64
import html
import io
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #222; max-width: 78rem; margin: 2rem auto;
       padding: 0 1rem; }
h1 { font-size: 1.7rem; margin-bottom: .2rem } h2 { font-size: 1.25rem; margin-top: 2.5rem }
p.about, figcaption { color: #555; font-size: .9rem } figure { margin: 1.2rem 0 }
img { max-width: 100%; height: auto } .wide { overflow-x: auto }
table { border-collapse: collapse; font-size: .74rem; font-variant-numeric: tabular-nums }
th, td { padding: .2rem .34rem; text-align: right; white-space: nowrap }
th { border-bottom: 2px solid #888 } tr + tr td { border-top: 1px solid #eee }
.open table { font-size: .9rem } .open td { white-space: normal }
th:nth-child(-n+2), td:nth-child(-n+2) { text-align: left }
caption { text-align: left; font-weight: 600; padding: .4rem 0 }
details { margin: .6rem 0 } summary { cursor: pointer; font-weight: 600 }
pre { background: #f5f5f5; padding: .7rem .9rem; overflow-x: auto; font-size: .85rem }
"""


@runtime_checkable
class Tabular(Protocol):
    """The interface of a table on a page."""

    def html(self, folded: bool = False) -> str:
        """Return the table as HTML, or as a title that opens it."""


def section(
    title: str,
    text: Sequence[str] = (),
    code: str = "",
    tables: Sequence[Tabular] = (),
    figures: Mapping[str, Figure] | None = None,
    folds: bool = True,
) -> str:
    """Return a part of a report as HTML.

    Args:
        title: its heading, if it has one.
        text: paragraphs.
        code: text shown as typed.
        tables: one below the other, under the figures.
        figures: by caption.
        folds: whether tables open with a click.
    """
    heading = [_element("h2", title)] if title else []
    parts = [*heading, *(_element("p", paragraph) for paragraph in text)]
    if code:
        parts.append(_element("pre", code))
    parts += [_figure(caption, figure) for caption, figure in (figures or {}).items()]
    return "\n".join([*parts, *(table.html(folds) for table in tables)])


def html_report(title: str, about: str, sections: Sequence[str]) -> str:
    """Return a page that needs no other files.

    Args:
        title: its heading.
        about: one sentence at its end.
        sections: the parts, as HTML.
    """
    body, name = "\n".join(sections), html.escape(title)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{name}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f'<h1>{name}</h1>\n{body}\n<p class="about">{html.escape(about)}</p>\n</body>\n</html>\n'
    )


def _element(tag: str, text: str, options: str = "") -> str:
    content = html.escape(text)
    if tag == "p":  # names of code
        content = re.sub(r"`([^`]+)`", r"<code>\1</code>", content)
    return f"<{tag}{options}>{content}</{tag}>"


def _figure(caption: str, figure: Figure) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=200)
    data = base64.b64encode(buffer.getvalue()).decode()
    image = f'<img alt="{html.escape(caption)}" src="data:image/png;base64,{data}">'
    return f"<figure>{image}{_element('figcaption', caption)}</figure>"

"""A figure whose names are never formulas, apart since it imports matplotlib."""

from __future__ import annotations

import io
from typing import Any

from matplotlib.figure import Figure
from matplotlib.text import Text

_OF_AXES = (r"$\mathdefault", r"$\times\mathdefault")
"""Prefixes of formulas in ticks and offsets."""


class PlainFigure(Figure):
    """A figure that shows names of the user literally, even with dollar signs."""

    def draw(self, renderer: Any) -> None:
        """Draw, with formulas along axes only."""
        for ax in self.axes:
            for axis in (ax.xaxis, ax.yaxis):
                axis.get_ticklabels()  # which writes them
        for text in self.findobj(Text):
            words = text.get_text()  # the layout may fill what is empty, with numbers
            text.set_parse_math(not words or words.startswith(_OF_AXES))
        super().draw(renderer)

    def _repr_png_(self) -> bytes:
        """Return the figure for a notebook, which knows only those of pyplot."""
        picture = io.BytesIO()
        self.savefig(picture, format="png", dpi=100)
        return picture.getvalue()

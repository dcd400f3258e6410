"""Figures in which names are no formulas; apart, since matplotlib is imported when one is made."""

from __future__ import annotations

import io
from typing import Any

from matplotlib.figure import Figure
from matplotlib.text import Text

_OF_AXES = (r"$\mathdefault", r"$\times\mathdefault")
"""How formulas of ticks and offsets begin."""


class PlainFigure(Figure):
    """A figure in which names of the user are no formulas, whatever dollars they hold."""

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
        """Show the figure in a notebook, which knows those of pyplot only."""
        picture = io.BytesIO()
        self.savefig(picture, format="png", dpi=100)
        return picture.getvalue()

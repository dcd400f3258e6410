"""Pictures: pure functions from tensors to matplotlib figures."""

from typing import TYPE_CHECKING

from lightning_bnn._lazy import lazy_package

if TYPE_CHECKING:
    from lightning_bnn.plots.dots import dots_figure
    from lightning_bnn.plots.lines import Line, lines_figure
    from lightning_bnn.plots.panels import hexbin_figure, histograms_figure, scatter_figure

__all__ = [
    "Line",
    "dots_figure",
    "hexbin_figure",
    "histograms_figure",
    "lines_figure",
    "scatter_figure",
]

lazy_package(__name__)

"""Pictures: pure functions from tensors to matplotlib figures."""

from typing import TYPE_CHECKING

from lightning_bnn._lazy import lazy_package

if TYPE_CHECKING:
    from lightning_bnn.plots.dots import dots_figure
    from lightning_bnn.plots.health import health_figure
    from lightning_bnn.plots.lines import Line, lines_figure
    from lightning_bnn.plots.panels import hexbin_figure, histograms_figure, scatter_figure
    from lightning_bnn.plots.predictions import (
        matrix_figure,
        reliability_figure,
        reliability_figures,
        sizes_figure,
    )
    from lightning_bnn.plots.weights import (
        chains_figure,
        curves_figure,
        distances_figure,
        gaussians_figure,
        trajectories_figure,
    )

__all__ = [
    "Line",
    "chains_figure",
    "curves_figure",
    "distances_figure",
    "dots_figure",
    "gaussians_figure",
    "health_figure",
    "hexbin_figure",
    "histograms_figure",
    "lines_figure",
    "matrix_figure",
    "reliability_figure",
    "reliability_figures",
    "scatter_figure",
    "sizes_figure",
    "trajectories_figure",
]

lazy_package(__name__)

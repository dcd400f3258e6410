"""Legends lie on no curve, hidden curves look out, and colours that are numbers have a bar."""

import pytest
import torch

from lightning_bnn.plots import Line, hexbin_figure, histograms_figure, lines_figure, scatter_figure
from lightning_bnn.plots.axes import axes_of

X = torch.linspace(0, 1, 50)
CURVES = {name: Line(X, torch.full_like(X, k / 3)) for k, name in enumerate("abcd")}
"""They fill the axes, so that no place inside is free."""
FIGURES = {
    "lines": lambda: lines_figure({"": CURVES}, ("x", "y")),
    "two kinds": lambda: lines_figure(
        {"one": CURVES, "two": {"e": CURVES["a"], "f": CURVES["d"]}}, ("x", "y")
    ),
    "many": lambda: lines_figure({"": {str(k): CURVES["a"] for k in range(7)}}, ("x", "y")),
    "some with more": lambda: lines_figure(
        {title: {str(k): CURVES["a"] for k in range(n)} for title, n in (("one", 5), ("two", 8))},
        ("x", "y"),
    ),
    "long names": lambda: lines_figure(
        {
            title: {f"the {k}th of several curves with long names": CURVES["a"] for k in range(6)}
            for title in ("one", "two")
        },
        ("x", "y"),
    ),
    "two long names": lambda: lines_figure(
        {
            title: {f"the {k}th of the curves of panel {title}": CURVES[k] for k in "ad"}
            for title in ("one", "two", "three")
        },
        ("x", "y"),
    ),
    "points": lambda: scatter_figure({"": {"a": (X, X), "b": (X, 1 - X)}}, ("x", "y")),
    "histograms": lambda: histograms_figure({"w": {"raw": X, "scaled": X / 2}}),
}


def boxes(figure):
    """Of all legends, and of all axes, in pixels."""
    figure.draw_without_rendering()
    legends = [*figure.legends, *(ax.get_legend() for ax in figure.axes if ax.get_legend())]
    return [x.get_window_extent() for x in legends], [ax.get_window_extent() for ax in figure.axes]


def covers(figure):
    legends, axes = boxes(figure)
    assert legends
    return any(a.overlaps(b) for a in legends for b in axes)


@pytest.mark.parametrize("name", FIGURES)
def test_no_legend_covers_axes(name):
    figure = FIGURES[name]()
    assert not covers(figure)
    legends, _ = boxes(figure)
    picture = figure.bbox.padded(1)
    assert all(picture.fully_contains(box.x0, box.y0) for box in legends)
    assert all(picture.fully_contains(box.x1, box.y1) for box in legends)
    for k, one in enumerate(legends):
        assert not any(one.overlaps(other) for other in legends[k + 1 :])


def test_the_check_sees_a_legend_inside():
    figure, ax = axes_of(None)
    ax.plot([0, 1], [0, 1], label="a")
    ax.legend()
    assert covers(figure)


def test_a_curve_below_another_one_is_wider():
    figure = lines_figure({"": {"a": CURVES["a"], "b": CURVES["a"]}}, ("x", "y"))
    below, above = figure.axes[0].lines
    assert below.get_linewidth() > above.get_linewidth() + 0.5


def test_colours_that_count_have_a_bar():
    figure = hexbin_figure({"raw": torch.randn(100, 2)}, ("a", "b"))
    assert [ax.get_ylabel() for ax in figure.axes] == ["b", "networks"]

"""Laws of all figures: no legend on data, all names and units there, nothing hidden."""

import functools
import itertools
import re

import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.text import Text
from sample_figures import FEW, FIGURES, NAMES, X, barred

from lightning_bnn import plots
from lightning_bnn.plots import Line, lines_figure, weights
from lightning_bnn.plots.axes import axes_of, short_names, titled

CARD = (340, 213)
"""Pixels that TensorBoard has for a figure."""
PHONE = 360


@functools.cache
def drawn(name):
    """A figure whose places are known."""
    figure = FIGURES[name]()
    figure.draw_without_rendering()
    return figure


def shown(figure):
    """The axes that are not the empty cells of a grid."""
    return [ax for ax in figure.axes if ax.axison]


def panels(figure):
    """The axes that are not the bars of colours either."""
    return [ax for ax in shown(figure) if ax.get_label() != "<colorbar>"]


def legends(figure):
    return [*figure.legends, *(ax.get_legend() for ax in figure.axes if ax.get_legend())]


def at_ends(figure):
    """Names at the ends of lines."""
    return [text for ax in figure.axes for text in ax.texts]


def panel(figure):
    """Red, green and blue inside of the first panel, without its margins."""
    figure.set_dpi(200)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    picture = np.asarray(canvas.buffer_rgba())[..., :3] / 255
    box = panels(figure)[0].get_window_extent()
    rows = slice(round(picture.shape[0] - box.y1), round(picture.shape[0] - box.y0))
    return picture[rows, round(box.x0) + 24 : round(box.x1) - 24]


# ------------------------------------------------------------ where things lie
def covers(figure):
    """Legends on axes."""
    inside = [ax.get_window_extent() for ax in shown(figure)]
    return [one for one in legends(figure) if one.get_window_extent().count_overlaps(inside)]


def crowded(figure):
    """Legends and names at the ends of lines that lie on each other, or names on lines."""
    names = [Text.get_window_extent(text) for text in at_ends(figure)]  # without leaders
    inside = [ax.get_window_extent() for ax in shown(figure)]
    boxes = [one.get_window_extent() for one in legends(figure)]
    boxes += [box.padded(-1) for box in names]
    pairs = [pair for pair in itertools.combinations(boxes, 2) if pair[0].overlaps(pair[1])]
    return pairs + [box for box in names if box.count_overlaps(inside)]


def unlabelled(figure):
    """Axes at the left or at the lower end of a grid that say nothing about their numbers."""
    grid = {ax: ax.get_subplotspec() for ax in panels(figure)}
    found = []
    for ax, place in grid.items():
        below = any(
            other.rowspan.start > place.rowspan.start and other.colspan == place.colspan
            for other in grid.values()
        )
        found += [ax] if not below and not said(ax.xaxis) else []
        found += [ax] if place.is_first_col() and not said(ax.yaxis) else []
    return found


def said(axis):
    """A label, or ticks that are words."""
    words = [re.search("[A-Za-z]", tick.get_text()) for tick in axis.get_ticklabels()]
    return axis.get_label_text() or (words and all(words))


def labels(figure):
    every = [t for ax in shown(figure) for t in (ax.title, ax.xaxis.label, ax.yaxis.label)]
    return [text.get_window_extent() for text in every if text.get_text()]


def overlapping(figure):
    """Pairs of titles and labels that lie on each other."""
    return [(a, b) for a, b in itertools.combinations(labels(figure), 2) if a.overlaps(b)]


def cut_off(figure):
    """Whatever has letters and is not all within the picture."""
    boxes = labels(figure) + [one.get_window_extent() for one in legends(figure)]
    boxes += [Text.get_window_extent(text) for text in at_ends(figure)]
    picture = figure.bbox.padded(2)
    return [b for b in boxes if not (picture.contains(*b.p0) and picture.contains(*b.p1))]


FAULTS = {f.__name__: f for f in (covers, crowded, unlabelled, overlapping, cut_off)}


@pytest.mark.parametrize("name", FIGURES)
def test_nothing_is_covered_cut_off_or_without_a_label(name):
    assert {fault: find(drawn(name)) for fault, find in FAULTS.items() if find(drawn(name))} == {}


def with_a_legend_inside():
    figure, ax = axes_of()
    ax.plot([0, 1], [0, 1], label="a")
    ax.legend()
    return figure


def with_a_name(place):
    def build():
        figure = FIGURES["tau of MLP"]()
        figure.draw_without_rendering()
        first, second, *_ = at_ends(figure)
        first.set_position(place or second.get_position())
        figure.set_layout_engine("none")
        return figure

    return build


def with_a_label(label):
    def build():
        figure, ax = axes_of((2.0, 2.0))
        ax.set_ylabel(label)
        return figure

    return build


@pytest.mark.parametrize(
    ("fault", "build"),
    [
        ("covers", with_a_legend_inside),
        ("crowded", with_a_name((0.5, 0.5))),
        ("crowded", with_a_name(None)),
        ("cut_off", with_a_name((1.5, 0))),
        ("cut_off", with_a_label("a label that is much longer than its axis")),
        ("unlabelled", with_a_label("y")),
    ],
)
def test_the_check_sees_a_fault(fault, build):
    figure = build()
    figure.draw_without_rendering()
    assert FAULTS[fault](figure)


@pytest.mark.parametrize("name", FIGURES)
def test_whatever_has_a_name_is_in_the_one_legend_or_at_the_end_of_its_line(name):
    figure = drawn(name)
    names = {n for ax in shown(figure) for n in ax.get_legend_handles_labels()[1]}
    told = [text.get_text() for one in legends(figure) for text in one.get_texts()]
    told += [text.get_text() for text in at_ends(figure)]
    assert len(told) == len(set(told))
    assert set(told) == (names if len(names) > 1 or told else set())


@pytest.mark.parametrize("network", NAMES)
def test_curves_of_real_networks_have_most_of_the_card(network):
    figure = drawn(f"tau of {network}")
    (ax,) = figure.axes
    box, card = ax.get_window_extent(), figure.bbox
    assert box.width > 0.4 * card.width
    assert box.height > 0.4 * card.height


@pytest.mark.parametrize("network", NAMES)
def test_short_names_are_distinct_parts_of_paths_and_begin_with_words(network):
    names = NAMES[network]
    short = short_names([f"model.{name}" for name in names])
    assert len(set(short.values())) == len(names)
    for name, brief in short.items():
        path, kind = name.partition("/")[::2]
        assert all(part in path for part in brief.partition("/")[0].split("…"))
        assert brief.partition("/")[2] == kind
        assert not brief[0].isdigit()
        assert not brief.partition("/")[0].rpartition("…")[2].isdigit() or "…" not in brief
    assert max(map(len, short.values())) <= 26


def test_a_legend_stands_in_a_cell_that_is_free():
    figure = drawn("lines in three panels")
    (free,) = (ax for ax in figure.axes if not ax.axison)
    assert [text.get_text() for text in free.get_legend().get_texts()] == list("0123")
    assert not figure.legends


@pytest.mark.parametrize("name", ["densities", "densities and a diagonal"])
def test_colours_that_count_have_one_bar_with_a_label(name):
    figure = drawn(name)
    (bar,) = (ax for ax in shown(figure) if ax.get_label() == "<colorbar>")
    assert bar.get_xlabel() or bar.get_ylabel()
    every = [c for ax in panels(figure) for c in [*ax.collections, *ax.images]]
    counted = [c for c in every if c.get_array() is not None]
    assert counted
    assert len({(c.norm.vmin, c.norm.vmax, c.cmap.name) for c in counted}) == 1


# ------------------------------------------------------------ nothing is hidden
def gaps(figure, colour, window):
    """Parts of the first panel, as wide as the window in pixels, in which nothing has a colour."""
    seen = (np.abs(panel(figure) - to_rgb(colour)).max(-1) < 0.12).any(0)
    count = len(seen) // window
    return int((~seen[: count * window].reshape(count, window).any(1)).sum())


@pytest.mark.parametrize(("count", "few"), [(2, True), (3, False), (5, True), (5, False)])
def test_all_of_the_curves_on_each_other_are_seen(count, few):
    curve = Line(torch.linspace(0, 1, 5), torch.linspace(0, 1, 5).square()) if few else Line(X, X)
    figure = lines_figure({"": {str(k): curve for k in range(count)}}, ("x", "y"))
    assert [gaps(figure, f"C{k}", 70) for k in range(count)] == [0] * count


def test_the_check_sees_a_hidden_curve():
    figure, ax = axes_of()
    for _ in range(2):
        ax.plot(X, X)
    assert gaps(figure, "C1", 70) == 0
    assert gaps(figure, "C0", 70) > 3


@pytest.mark.parametrize(
    "figure",
    [
        lambda: plots.scatter_figure({"": {n: (FEW, FEW) for n in "abcde"}}, ("x", "y")),
        lambda: lines_figure({"": {n: barred([1.0, 1.0, 1.0]) for n in "abcde"}}, ("x", "y")),
        lambda: plots.histograms_figure({"": {n: X for n in "abcd"}}),
    ],
)
def test_points_and_bars_on_each_other_are_seen(figure):
    figure = figure()
    inside = panel(figure)
    names = legends(figure)[0].get_texts()
    count = [(np.abs(inside - to_rgb(f"C{k}")).max(-1) < 0.12).sum() for k in range(len(names))]
    assert min(count) > 40


def test_error_bars_stand_beside_each_other():
    figure = lines_figure({"": {n: barred([1.0, 1.0, 1.0]) for n in "abc"}}, ("x", "y"))
    figure.draw_without_rendering()
    ax = panels(figure)[0]
    bars = [c.get_transform().transform(c.get_segments()[1])[0, 0] for c in ax.collections]
    assert np.all(np.diff(bars) > 2)


# ------------------------------------------------------------ letters
def letters(figure):
    """Points of the smallest letters."""
    texts = [t for ax in shown(figure) for t in [*ax.get_xticklabels(), *ax.get_yticklabels()]]
    texts += [t for ax in shown(figure) for t in (ax.title, ax.xaxis.label, ax.yaxis.label)]
    texts += [text for one in legends(figure) for text in one.get_texts()] + at_ends(figure)
    return min(text.get_fontsize() for text in texts if text.get_text())


CARDS = {
    "trajectories": lambda: weights.trajectories_figure(
        [1, 2], {"raw": torch.rand(2, 6)}, "abcdef"
    ),
    "pair": lambda: plots.hexbin_figure(
        {"raw": torch.randn(50, 2)}, ("0.weight[3]", "0.weight[9]")
    ),
    "marginals": FIGURES["histograms"],
    "tau": FIGURES["tau of BERT"],
    "chains": lambda: titled(
        FIGURES["one chain space"](), "R-hat 1.031 (function): no agreement yet.", "SGHMC"
    ),
    "rhat": lambda: weights.chains_figure({}, {"function": torch.rand(5)}),
}
"""What callbacks give to loggers."""


@pytest.mark.parametrize("name", CARDS)
def test_figures_of_callbacks_can_be_read_in_a_card(name):
    figure = CARDS[name]()
    figure.draw_without_rendering()
    inches = figure.bbox_inches
    scale = min(CARD[0] / inches.width, CARD[1] / inches.height)
    assert letters(figure) / 72 * scale >= 12
    assert not covers(figure)


WIDE = {"densities", "trajectories", "distances"}
"""Rows of panels that are compared from left to right, and layers of a network."""


@pytest.mark.parametrize("name", sorted(FIGURES.keys() - WIDE))
def test_figures_can_be_read_on_a_phone(name):
    figure = drawn(name)
    assert letters(figure) / 72 * PHONE / figure.bbox_inches.width >= 8

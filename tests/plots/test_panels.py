"""What is drawn, read off the figures; and that it can be drawn."""

import math
import pickle

import numpy as np
import pytest
import torch
from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

from lightning_bnn import plots
from lightning_bnn.plots import Line, lines_figure, weights


@pytest.mark.parametrize("name", ["$a$", "x_$^{"])
@pytest.mark.parametrize("log", ["xy", ""])
def test_ticks_are_formulas_and_names_are_not(name, log, monkeypatch):
    """Once a figure is drawn, as TensorBoard does, and of one that another process has sent."""
    drawn = []
    monkeypatch.setattr(Text, "draw", lambda t, _: drawn.append((t.get_text(), t.get_parse_math())))
    curve = Line(torch.tensor([1.0, 1000.0]), torch.tensor([1e-5, 2e-5]))
    with rc_context({"axes.formatter.use_mathtext": True}):  # for offsets, too
        figure = lines_figure({name: {name: curve, "b": curve}}, (name, name), log=log)
        FigureCanvasAgg(pickle.loads(pickle.dumps(figure))).draw()
    formulas = {words for words, parsed in drawn if parsed and words}
    assert {words for words, _ in drawn if "\\mathdefault" in words} == formulas
    assert log or any(words.startswith("$\\times") for words in formulas)
    assert len([1 for words, parsed in drawn if words == name and not parsed]) >= 3


def test_curves():
    figure = weights.curves_figure([1, 5], {"a": torch.tensor([0.5, 2.0])}, "tau")
    assert figure.axes[0].get_lines()[0].get_xydata().tolist() == [[1, 0.5], [5, 2.0]]
    values = torch.arange(6.0).reshape(3, 2)
    figure = weights.trajectories_figure([1, 2, 3], {"raw": values, "sorted": -values}, ["u", "v"])
    assert [ax.get_title() for ax in figure.axes] == ["raw", "sorted"]
    assert figure.axes[1].get_lines()[1].get_ydata().tolist() == [-1, -3, -5]


def test_distances_by_layer():
    stages = {"as stored": {"1": 1.4, "3": 1.2}, "units in order": {"1": 0.1, "3": 0.0}}
    figure = weights.distances_figure(stages, {"1.weight": 0.9, "3.weight": 0.25})
    ax, below = figure.axes
    one, two = (line.get_ydata().tolist() for line in ax.get_lines())
    assert (one, two[0]) == ([1.4, 1.2], 0.1)
    assert math.isnan(two[1])  # equal layers do not stretch a logarithmic axis
    assert [line.get_label() for line in ax.get_lines()] == list(stages)
    assert [bar.get_height() for bar in below.patches] == [0.9, 0.25]
    figure.canvas.draw()
    for each in figure.axes:
        assert [label.get_text() for label in each.get_xticklabels()] == ["1", "3"]


def test_densities():
    points = torch.tensor([[0.0, 1.0]] * 5 + [[1.0, 0.0]] * 3)
    figure = plots.hexbin_figure({"raw": points, "still": points[:5]}, ("u", "v"))
    counts = [ax.collections[0].get_array().tolist() for ax in figure.axes[:2]]
    assert sorted(counts[0]) == [3, 5]
    assert counts[1] == [5]


NAN = math.nan
SCORES = {"MMD": {"one": [(100.0, 1.0), (50.0, 1.0)], "all": [(60.0, 1.0), (0.5, 0.2)]}}


def ink(figure):
    """The darkest grey of every column of pixels in the panel, without dots, frame and grid."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    pixels = np.asarray(canvas.buffer_rgba())[..., :3].astype(int)
    box = figure.axes[0].get_window_extent()
    top, bottom = (round(pixels.shape[0] - y) for y in (box.y1, box.y0))
    inside = pixels[top + 3 : bottom - 3, round(box.x0) + 3 : round(box.x1) - 3]
    grey = np.ptp(inside, axis=2) < 10
    common = np.where(grey, inside.mean(2), 255)
    return np.median(np.sort(common, 0)[: common.shape[0] // 2], 0)


@pytest.mark.parametrize("half", [2.0, 1e-3, 1e-6, 0.0, float("nan")])
def test_the_noise_floor_can_be_seen_however_narrow_it_is(half):
    figure = plots.dots_figure(SCORES, ["A", "B"], {"MMD": (1e-4, half)})
    bare = plots.dots_figure(SCORES, ["A", "B"])
    assert ink(figure).min() < 160
    assert ink(bare).min() > 200  # the negative control
    assert "noise floor" in [text.get_text() for text in figure.legends[0].get_texts()]
    assert "noise floor" not in [text.get_text() for text in bare.legends[0].get_texts()]


def test_every_name_may_have_a_floor_of_its_own():
    floors = {"MMD": [(20.0, 1.0), (NAN, 1.0), (40.0, NAN)]}
    scores = {"MMD": {"one": [(50.0, 1.0)] * 3}}
    (ax, *_) = plots.dots_figure(scores, ["A", "B", "C"], floors).axes
    lines = [line for line in ax.lines if line.get_linewidth() == 1.6]
    places = [([*line.get_xdata()], [*line.get_ydata()]) for line in lines]
    assert places == [([20.0, 20.0], [-0.5, 0.5]), ([40.0, 40.0], [1.5, 2.5])]

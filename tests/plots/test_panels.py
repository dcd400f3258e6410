"""What is drawn, read off the figures; and that it can be drawn."""

import torch

from lightning_bnn import plots


def test_curves():
    figure = plots.curves_figure([1, 5], {"a": torch.tensor([0.5, 2.0])}, "tau")
    line = figure.axes[0].get_lines()[0]
    assert line.get_xydata().tolist() == [[1, 0.5], [5, 2.0]]


def test_trajectories():
    values = torch.arange(6.0).reshape(3, 2)
    figure = plots.trajectories_figure([1, 2, 3], {"raw": values, "sorted": -values}, ["u", "v"])
    assert [ax.get_title() for ax in figure.axes] == ["raw", "sorted"]
    assert figure.axes[1].get_lines()[1].get_ydata().tolist() == [-1, -3, -5]
    figure.canvas.draw()


def test_densities():
    points = torch.tensor([[0.0, 1.0]] * 5 + [[1.0, 0.0]] * 3)
    figure = plots.hexbin_figure({"raw": points, "still": points[:5]}, ("u", "v"))
    counts = [ax.collections[0].get_array().tolist() for ax in figure.axes]
    assert sorted(counts[0]) == [3, 5]
    assert counts[1] == [5]


def test_marginals():
    layers = {f"l{k}": {"raw": torch.randn(1000), "scaled": torch.randn(50)} for k in range(4)}
    figure = plots.histograms_figure(layers)
    assert [ax.get_title() for ax in figure.axes[:4]] == list(layers)
    heights = figure.axes[0].patches[0].get_path().vertices
    assert heights.shape[0] > 60
    few = plots.histograms_figure({"l": {"raw": torch.randn(10)}})
    assert few.axes[0].patches[0].get_path().vertices.shape[0] < 30
    figure.canvas.draw()


def test_matrix():
    figure, ax = plots.matrix_figure(torch.eye(3), "network", "nats")
    assert ax.images[0].get_array().tolist() == torch.eye(3).tolist()
    figure.canvas.draw()

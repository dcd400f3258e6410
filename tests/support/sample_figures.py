"""Every figure of the package on a few numbers, some of which lie on each other."""

from functools import partial

import torch

from lightning_bnn import plots
from lightning_bnn.plots import Line, predictions, weights
from lightning_bnn.plots.axes import short_names, titled

X = torch.linspace(0, 1, 50)
FEW = torch.tensor([1.0, 2.0, 5.0])
CURVES = {name: Line(X, torch.full_like(X, k / 3)) for k, name in enumerate("abcd")}
"""They fill the axes, so that no place inside is free."""
DOTS = {"one": [(1.0, 0.1), (2.0, 0.1)], "all": [(1.5, 0.1), (0.5, 0.2)]}
WEIGHTS = torch.randn(200, 2, generator=torch.Generator().manual_seed(0))
BINS = (torch.tensor([2, 0, 6]), torch.tensor([0.3, 0.0, 0.9]), torch.tensor([0.2, 0.0, 0.8]))
CHAINS = torch.randn(4, 30, 5, generator=torch.Generator().manual_seed(1))

NAMES = {
    "MLP": [f"model.{k}.weight" for k in range(0, 24, 2)],
    "ResNet": ["conv1.weight", *(
        f"layer{k}.{block}.{name}.weight" for k in range(1, 5) for block in "01"
        for name in ("conv1", "conv2", "downsample.0")
    )],
    "BERT": ["bert.embeddings.word_embeddings.weight", *(
        f"bert.encoder.layer.{k}.{name}.weight{kind}" for k in range(12)
        for name, kind in (
            ("attention.self.query", ""), ("attention.self.query", "/block"),
            ("attention.self.value", ""), ("attention.output.dense", ""),
            ("intermediate.dense", ""), ("output.dense", ""),
        )
    ), "bert.pooler.dense.weight"],
}  # fmt: skip
"""Tensors of networks that people train."""


def tau(network):
    """A curve for each layer of a network, with a question above."""
    names = short_names(NAMES[network]).values()
    curves = {name: 1 - torch.rand(2) / (k + 1) for k, name in enumerate(names)}
    return titled(
        weights.curves_figure([1, 2], curves, "tau"),
        "1.2 % of pairs of units still change places.",
        network,
    )


def barred(y):
    """A curve of a few points with error bars."""
    y = torch.as_tensor(y)
    return Line(FEW, y, y - 0.1, y + 0.1)


def lines(count, panels=("one",), name="{}", labels=("x", "y")):
    """Curves of which some lie on each other."""
    every = {title: {name.format(k): CURVES["ad"[k % 2]] for k in range(count)} for title in panels}
    return plots.lines_figure(every, labels)


FIGURES = {
    "lines": lambda: plots.lines_figure({"": CURVES}, ("x", "y")),
    "two kinds of lines": lambda: plots.lines_figure(
        {"one": CURVES, "two": {"e": CURVES["a"], "f": CURVES["d"]}}, ("x", "y")
    ),
    "lines with long names": lambda: lines(
        6, ("one", "two"), "the {}th of several curves with long names"
    ),
    "lines in three panels": lambda: lines(4, ("one", "two", "three")),
    "lines in panels with a unit each": lambda: plots.lines_figure(
        {"loss (nats)": CURVES, "accuracy (%)": CURVES}, ("step", "")
    ),
    "lines with long labels": lambda: lines(
        2, ("one", "two", "three"),
        labels=("share of the examples that are answered", "mean loss above that of the networks"),
    ),
    "long labels of one panel": lambda: lines(
        4, name="name {}", labels=("share of digits that are answered", "accuracy of the answers")
    ),
    "lines with error bars": lambda: plots.lines_figure(
        {"": {"a": barred([1.0, 2.0, 3.0]), "b": barred([1.0, 2.0, 3.0])}}, ("x", "y"), log="xy"
    ),
    "points and a diagonal": lambda: plots.scatter_figure(
        {"": {"a network": (X, X / 2)}}, ("mass", "minimum mass"), diagonal=True
    ),
    "points of five panels": lambda: plots.scatter_figure(
        {t: {n: (FEW[:1], FEW[:1], FEW[:1], FEW[:1]) for n in "abc"} for t in "vwxyz"}, ("x", "y")
    ),
    "histograms": lambda: plots.histograms_figure({"w": {"raw": X, "scaled": X / 2}}),
    "histograms of three kinds": lambda: plots.histograms_figure(
        {"mass": {"as trained": X, "minimum": X / 2}, "excess, %": {"": X}, "Acc, %": {"": X}}, ""
    ),
    "densities": lambda: plots.hexbin_figure({"raw": WEIGHTS, "scaled": WEIGHTS / 2}, ("a", "b")),
    "densities and a diagonal": lambda: plots.hexbin_figure({"raw": WEIGHTS}, ("a", "b"), True),
    "dots": lambda: plots.dots_figure({"Acc": DOTS, "MMD": DOTS}, ["A", "B"], label="%"),
    "dots above a floor": lambda: plots.dots_figure(
        {"Acc": DOTS, "MMD": DOTS, "NS": DOTS}, ["A", "B"],
        {"MMD": (0.0, 0.1), "NS": [(0.5, 0.1), (float("nan"), 0.1)]},
        label={"Acc": "%", "MMD": "x 100", "NS": "x 100"},
    ),
    **{f"tau of {network}": partial(tau, network) for network in NAMES},
    "trajectories": lambda: weights.trajectories_figure(
        [1, 2], {"raw": torch.rand(2, 3), "sorted": torch.rand(2, 3)}, ["u", "v", "w"]
    ),
    "chains": lambda: weights.chains_figure(
        {"function": CHAINS, "weights": CHAINS}, {n: torch.rand(5) for n in ("function", "weights")}
    ),
    "one chain space": lambda: weights.chains_figure(
        {"function": CHAINS}, {"function": torch.rand(5)}, every=False
    ),
    "layers": lambda: weights.layers_figure(
        dict.fromkeys(short_names(NAMES["ResNet"]).values(), (1.0, 0.7)), ("raw", "least"), "size"
    ),
    "distances": lambda: weights.distances_figure({"stored": {"1": 1.0, "2": 2.0}}, {"1": 0.5}),
    "reliability": lambda: predictions.reliability_figures({"": BINS}),
    "reliability, twice": lambda: predictions.reliability_figures({"before": BINS, "after": BINS}),
}  # fmt: skip

r"""P2, section 5.1: two ReLU units on :math:`\alpha |x|`, a posterior with two equal modes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from bnn_research.populations import fit_quietly
from lightning_bnn.datamodules import TractableReLU
from lightning_bnn.findings import Findings, publish, results_folder
from lightning_bnn.likelihoods import Gaussian
from lightning_bnn.models import two_relus
from lightning_bnn.modules import MFVI, Bayesian, SymmetrizedVI
from lightning_bnn.plots.axes import TEXT, label_edges, legend, panels_of
from lightning_bnn.posteriors.mutual_information import (
    Sampled,
    draw_information,
    permanent_information,
)
from lightning_bnn.posteriors.permanents import log_permanent
from lightning_bnn.posteriors.unit_layers import unit_layers
from lightning_bnn.tables import Cell, Table, spread
from weightsym import Outcome, discover
from weightsym.params import keyed_generator

METHODS: dict[str, tuple[Callable[..., Bayesian], dict[str, Any]]] = {
    "MFVI": (MFVI, {}),
    "symmetrized, K=2": (SymmetrizedVI, {"estimator": "uniform", "draws": 2}),
    "symmetrized, exact": (SymmetrizedVI, {"estimator": "bethe"}),
}
_SAMPLES, _DRAWS = 1000, 500
_PRIOR_STD, _START_STD, _START_SPREAD, _RATE = 1.0, 0.05, 0.1, 5e-3


@dataclass(frozen=True)
class Result:
    """Numbers of every seed for one method and slope. ELBOs are per example."""

    alpha: float
    method: str
    mse: Tensor
    elbo: Tensor
    drawn: Tensor
    exact: Tensor
    apart: Tensor
    mean: Tensor
    std: Tensor


def tractable(
    alphas: list[float] = [0.05, 0.1, 0.15, 0.2],  # noqa: B006
    seeds: int = 10,
    epochs: int = 10,
    noise: float = 1.5,
    out: str = "studies/tractable",
) -> Outcome:
    """Print tables 2 and 3 of P2, and plot the trained Gaussians.

    The default is the paper's scale. The paper does not state noise, prior, start and the
    normalisation of the ELBO. Here the prior is N(0, 1), means start from N(0, 0.1^2), deviations
    at 0.05, and ELBOs are divided by the 100 examples. The noise determines the slope at which a
    Gaussian prefers to lie between the modes.

    Args:
        alphas: slopes; the modes are at (alpha, -alpha) and (-alpha, alpha).
        seeds: number of runs for every number.
        epochs: number of training epochs.
        noise: standard deviation of the likelihood.
        out: folder for the results.
    """
    for name, values, least in (
        ("alphas", alphas, 0),
        ("noise", [noise], 0),
        ("seeds", [seeds], 1),
    ):
        if not all(value > least for value in values):
            raise ValueError(f"`{name}` must be above {least}, got {values}.")
    folder = results_folder(out, "tractable")
    results = study(alphas, seeds, epochs, noise)
    settings = {"alphas": alphas, "seeds": seeds, "epochs": epochs, "noise": noise}
    return publish(findings_of(results, settings), folder)


def study(alphas: list[float], seeds: int, epochs: int, noise: float) -> list[Result]:
    """Train every method at every slope, all seeds side by side."""
    jobs = tqdm(list(itertools.product(alphas, METHODS)), desc="training")
    return [_run(alpha, method, seeds, epochs, noise) for alpha, method in jobs]


# ------------------------------------------------------------ one run
def _run(alpha: float, method: str, seeds: int, epochs: int, noise: float) -> Result:
    module_class, options = METHODS[method]
    data = TractableReLU(alpha=alpha)
    module = module_class(
        two_relus(),
        members=seeds,
        likelihood=Gaussian(std=noise),
        prior_std=_PRIOR_STD,
        init_std=_START_STD,
        optimizer=lambda p: torch.optim.Adam(p, _RATE),
        **options,
    )
    with torch.no_grad():
        start = torch.randn(
            module.state.mean.shape, generator=keyed_generator("tractable", "start")
        )
        module.state.mean.copy_(_START_SPREAD * start)
    fit_quietly(module, data, epochs)
    return _result(module, data, alpha, method)


@torch.no_grad()
def _result(module: Bayesian, data: TractableReLU, alpha: float, method: str) -> Result:
    (x, y), (u, v) = data.load().train, data.load().test
    sym = discover(module.template, x[:2])
    (layer,) = unit_layers(sym, ["hidden.weight"])
    numbers = []
    for k, mode in enumerate(module.state.modes()):
        noise = torch.randn(_SAMPLES, 2, generator=keyed_generator("tractable", k))
        sampled = _sampled(mode, noise)
        error = (_outputs(sampled, u).mean(0) - v).square().mean()
        fit = module.likelihood.log_prob(_outputs(sampled, x), y).sum(-1).mean()
        elbo = fit - _divergence(mode)
        generator = keyed_generator("tractable", "draws", k)
        drawn = draw_information(sym, sampled, _DRAWS, generator).mean()
        exact = permanent_information(layer, sampled, log_permanent).mean()
        elbos = torch.stack([elbo, elbo + drawn, elbo + exact]) / len(x)
        numbers.append(torch.cat([error[None], elbos]))
    mean, std = module.state.mean.detach().clone(), module.state.log_std.detach().exp()
    apart = (mean[:, 0] - mean[:, 1]).abs() / (2 * alpha)
    mse, elbo, drawn, exact = torch.stack(numbers, 1)
    return Result(alpha, method, mse, elbo, drawn, exact, apart, mean, std)


def _sampled(mode: Any, noise: Tensor) -> Sampled:
    weights = mode.mean + mode.log_std.exp() * noise
    mean, log_std = (t.expand_as(weights) for t in (mode.mean, mode.log_std))
    return Sampled(*({"hidden.weight": t[:, :, None]} for t in (weights, mean, log_std, noise)))


def _outputs(sampled: Sampled, x: Tensor) -> Tensor:
    """Return outputs of all networks, ``(samples, batch, 1)``."""
    return torch.relu(x @ sampled.weights["hidden.weight"].mT).sum(-1, keepdim=True)


def _divergence(mode: Any) -> Tensor:
    q = torch.distributions.Normal(mode.mean, mode.log_std.exp())
    prior = torch.distributions.Normal(torch.zeros(()), torch.tensor(_PRIOR_STD))
    return torch.distributions.kl_divergence(q, prior).sum()


# ------------------------------------------------------------ output
def findings_of(results: list[Result], settings: Mapping[str, Any]) -> Findings:
    """Return both tables, the distance of the units, and the picture.

    Args:
        results: of all slopes and methods.
        settings: of the study.
    """
    alphas = settings["alphas"]

    def row(name: str, field: str, method: str) -> list[Cell]:
        values = {r.alpha: getattr(r, field) for r in results if r.method == method}
        return [name, *(spread(values[alpha]) for alpha in alphas)]

    def table(title: str, rows: list[list[Cell]], digits: int) -> Table:
        return Table(title, ["", *(f"alpha={alpha:g}" for alpha in alphas)], rows, digits)

    elbos = {"elbo": "L_VI", "drawn": f"L^G, K={_DRAWS}", "exact": "L^G, exact"}
    bounds = [row(f"{m}: {title}", field, m) for m in METHODS for field, title in elbos.items()]
    errors, apart = ([row(m, field, m) for m in METHODS] for field in ("mse", "apart"))
    where = "Distance of the units, of that of the modes (1: on a mode, 0: between both)"
    return Findings(
        "tractable",
        "Two ReLU units on alpha |x| (P2, section 5.1)",
        {
            "table2": table("Table 2: test MSE of the mean of 1000 networks", errors, 4),
            "table3": table("Table 3: ELBO per example", bounds, 4),
            "apart": table(where, apart, 2),
        },
        {"modes": draw(results, settings["noise"])},
        [f"Mean and standard deviation of {settings['seeds']} seeds."],
        settings,
    )


def draw(results: list[Result], noise: float) -> Any:
    """Plot the exact posterior of every slope, and the Gaussians of all seeds as ellipses."""
    from matplotlib.patches import Ellipse

    columns = len({r.method for r in results})
    figure, axes = panels_of(len(results), columns, 2.2, 2.0)
    results = sorted(results, key=lambda r: (r.alpha, list(METHODS).index(r.method)))
    for k, (ax, r) in enumerate(zip(axes, results, strict=True)):
        axis, density = posterior_density(r.alpha, noise)
        share, shares = (density / density.max()).mT, [k / 10 for k in range(1, 11)]
        drawn = ax.contourf(axis, axis, share, levels=shares, cmap="Blues")
        name = "a Gaussian, two standard deviations"
        for mean, std in zip(r.mean.tolist(), r.std.tolist(), strict=True):
            ax.add_patch(Ellipse(mean, *(4 * s for s in std), fill=False, color="C3", label=name))
        ax.set_title(f"{r.method}\nalpha = {r.alpha:g}", fontsize=TEXT - 1)
        ax.set(xlim=(axis[0], axis[-1]), ylim=(axis[0], axis[-1]), aspect="equal")
        ax.locator_params(nbins=3)
        below = k + columns >= len(axes)
        ax.tick_params(labelsize=TEXT - 1, labelleft=k % columns == 0, labelbottom=below)
    label_edges(axes, ("weight 1", "weight 2"))
    bar = figure.colorbar(drawn, ax=figure.axes, location="bottom", shrink=0.7, aspect=40, pad=0.02)
    bar.set_label("density, as a share of its maximum", fontsize=TEXT)
    legend(axes, 1)
    return figure


def posterior_density(alpha: float, noise: float, side: int = 121) -> tuple[Tensor, Tensor]:
    """Return the posterior of both weights on a grid, up to a factor: the axis, and values."""
    x, y = TractableReLU(alpha=alpha).load().train
    axis = torch.linspace(-0.4, 0.4, side)
    grid = torch.cartesian_prod(axis, axis)
    hidden = torch.relu(x[:, 0] * grid[:, :, None]).sum(1)
    logs = -(hidden - y[:, 0]).square().sum(1) / (2 * noise**2)
    logs = logs - grid.square().sum(1) / (2 * _PRIOR_STD**2)
    return axis, (logs - logs.max()).exp().reshape(side, side)

"""P2, section 3 and appendix A: one Gaussian for two modes lies between them, or on one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from tqdm.auto import tqdm

from bnn_research.scales import settings_of
from lightning_bnn.findings import Findings, publish, results_folder
from lightning_bnn.plots import Line, lines_figure
from lightning_bnn.tables import Cell, Table
from weightsym import Outcome
from weightsym.params import keyed_generator


@dataclass(frozen=True)
class Scale:
    """The grid, the number of samples and the number of steps."""

    dims: Sequence[int]
    sigmas: Sequence[float]
    points: int
    samples: int
    steps: int


SCALES = {
    "small": Scale((5, 30, 100), (0.25, 0.5, 1.0, 2.0), 21, 200, 1500),
    "paper": Scale((5, 30, 100), (0.25, 0.5, 1.0, 2.0), 41, 5000, 3000),
}


@dataclass(frozen=True)
class Fits:
    """Trained Gaussians, ``(sigmas, alphas)``, with distances in units of sigma."""

    alphas: Tensor
    measure: Tensor
    kl: Tensor


def interpolation(
    scale: Literal["small", "paper"] = "small",
    dims: list[int] | None = None,
    sigmas: list[float] | None = None,
    steps: int | None = None,
    seed: int = 0,
    out: str = "studies/interpolation",
) -> Outcome:
    """Fit one diagonal Gaussian to two modes at growing distance, from a start on one mode.

    The interpolation measure is the distance from that mode in units of the distance of both: 0.5
    between them, 0 on it. Where it drops is proportional to sigma and does not depend on the
    dimension. The loss is minimised by Adam, as in the authors' later notebook (the paper says
    SGD), with antithetic samples.

    Args:
        scale: small, which runs in minutes, or paper, the paper's recipe.
        dims: dimensions to try.
        sigmas: standard deviations of the two modes.
        steps: steps of Adam.
        seed: random seed of the samples.
        out: folder for the results.
    """
    folder = results_folder(out, "interpolation")
    settings = settings_of(SCALES, scale, dims=dims, sigmas=sigmas, steps=steps)
    fits = {dim: fitted_gaussians(dim, settings, seed) for dim in settings.dims}
    return publish(_findings(fits, settings, seed), folder)


def fitted_gaussians(dim: int, settings: Scale, seed: int) -> Fits:
    r"""Fit Gaussians that minimise KL(q || p) for all distances and deviations at once.

    p is the mean of N(0, sigma^2 I) and N(alpha u, sigma^2 I), and q starts at the first. In units
    of sigma all deviations are one, so that one grid of alpha / sigma serves each. They are
    nevertheless computed separately, with their own samples.

    Args:
        dim: dimension.
        settings: grid, samples, steps.
        seed: random seed of the samples.
    """
    sigmas = torch.tensor(list(settings.sigmas))
    alphas = torch.linspace(0, 10, settings.points)
    far = alphas / sigmas[:, None]
    mean = torch.zeros(*far.shape, dim, requires_grad=True)
    log_std = torch.zeros(*far.shape, dim, requires_grad=True)
    optimizer = torch.optim.Adam([mean, log_std], 1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, settings.steps)
    generator = keyed_generator(seed, "interpolation", dim)
    half = max(1, settings.samples // 2)
    for _ in tqdm(range(settings.steps), desc=f"{dim} dimensions", leave=False):
        noise = torch.randn(half, *far.shape, dim, generator=generator)
        loss = _divergence(mean, log_std, far, torch.cat([noise, -noise]))
        optimizer.zero_grad()
        loss.sum().backward()
        optimizer.step()
        schedule.step()
    kl = exact_divergence(mean.detach().double(), log_std.detach().double(), far.double())
    measure = torch.where(far > 0, mean.detach()[..., 0] / far, torch.nan)
    return Fits(alphas, measure, kl)


def _divergence(mean: Tensor, log_std: Tensor, far: Tensor, noise: Tensor) -> Tensor:
    """Estimate KL(q || p) by samples, with the entropy of q in closed form."""
    z = mean + log_std.exp() * noise
    others = z[..., 1:].square().sum(-1) / 2
    modes = torch.stack([z[..., 0].square() / 2, (z[..., 0] - far).square() / 2])
    log_p = (-modes).logsumexp(0) - math.log(2) - others
    entropy = (log_std + 0.5).sum(-1)
    return -entropy - log_p.mean(0)


def exact_divergence(mean: Tensor, log_std: Tensor, far: Tensor) -> Tensor:
    """Compute KL(q || p) in closed form, and by quadrature along the line between the modes.

    Args:
        mean: of the Gaussians, ``(..., dim)``.
        log_std: logarithms of their standard deviations.
        far: distance between the modes, ``(...)``.
    """
    others = (0.5 * (mean.square() + (2 * log_std).exp() - 1) - log_std)[..., 1:].sum(-1)
    nodes, weights = _quadrature()
    x = mean[..., :1] + log_std[..., :1].exp() * nodes
    modes = torch.stack([-x.square() / 2, -(x - far[..., None]).square() / 2])
    return math.log(2) - log_std[..., 0] - 0.5 - (weights * modes.logsumexp(0)).sum(-1) + others


def _quadrature() -> tuple[Tensor, Tensor]:
    from numpy.polynomial.hermite_e import hermegauss

    nodes, weights = (torch.from_numpy(t) for t in hermegauss(200))
    return nodes, weights / weights.sum()


def midpoint_kl(alpha: float) -> tuple[float, float]:
    """Return variance and KL of the best Gaussian halfway between two unit modes.

    >>> tuple(round(x, 4) for x in midpoint_kl(3.0))
    (2.9378, 0.0742)
    """
    from scipy.optimize import minimize_scalar

    middle, far = (torch.tensor(t, dtype=torch.float64) for t in ([alpha / 2], alpha))

    def kl(log_std: float) -> float:
        return float(exact_divergence(middle, torch.full_like(middle, log_std), far))

    best = minimize_scalar(kl, bounds=(-1.0, 4.0), method="bounded", options={"xatol": 1e-10})
    return math.exp(2 * best.x), float(best.fun)


# ------------------------------------------------------------ output
def _findings(every: Mapping[int, Fits], settings: Scale, seed: int) -> Findings:
    rows: list[list[Cell]] = []
    for dim, fits in every.items():
        for sigma, measure in zip(settings.sigmas, fits.measure, strict=True):
            last, first = _threshold(fits.alphas, measure)
            beside = [_value_at(fits.alphas, measure, alpha) for alpha in (last, first)]
            rows.append([str(dim), sigma, last, first, last / sigma, first / sigma, *beside])
    header = [
        "dimension", "sigma", "last alpha between", "first alpha on a mode",
        "between, / sigma", "on a mode, / sigma", "measure between", "measure on a mode",
    ]  # fmt: skip
    note = (
        "Started on a mode, the Gaussian stays there from alpha / sigma = 4.825 on (quadrature; "
        "the grid limits how well this table shows it)."
    )
    exact: list[list[Cell]] = [[f"{a:g}", *midpoint_kl(a)] for a in (1.0, 2.0, 3.0, 4.0, 4.8)]
    halfway = "Best Gaussian halfway, by quadrature (sigma = 1)"
    levels: list[list[Cell]] = [
        [str(dim), float(fits.kl[0, -1]), float(fits.kl[0, -1]) / dim]
        for dim, fits in every.items()
    ]
    far = f"Far apart (alpha = {10 / settings.sigmas[0]:g} sigma)"

    return Findings(
        "interpolation",
        "One Gaussian for two modes (P2, section 3)",
        {
            "thresholds": Table("Where the Gaussian leaves the middle", header, rows, 2, note),
            "exact": Table(halfway, ["alpha", "variance", "KL"], exact, 4),
            "levels": Table(far, ["dimension", "KL", "KL / dimension"], levels, 4),
        },
        {"measure": _figure(every, settings.sigmas)},
        settings={"scale": settings.__dict__, "seed": seed},
    )


def _figure(every: Mapping[int, Fits], sigmas: Sequence[float]) -> Any:
    """Plot one panel for each dimension, with one curve for each sigma."""
    panels = {
        f"{dim} dimensions": {
            f"sigma {sigma:g}": Line(fits.alphas, values)
            for sigma, values in zip(sigmas, fits.measure, strict=True)
        }
        for dim, fits in every.items()
    }
    return lines_figure(panels, ("alpha", "interpolation measure"))


def _threshold(alphas: Tensor, measure: Tensor) -> tuple[float, float]:
    """Return the last distance with a Gaussian between both modes, and the first on a mode."""
    between = (measure > 0.25).nonzero()[:, 0]
    on_mode = (measure <= 0.25).nonzero()[:, 0]
    last = float(alphas[between[-1]]) if len(between) else math.nan
    return last, float(alphas[on_mode[0]]) if len(on_mode) else math.nan


def _value_at(alphas: Tensor, measure: Tensor, alpha: float) -> float:
    """Return the measure at a distance of the grid, or NaN if there is none."""
    return math.nan if math.isnan(alpha) else float(measure[(alphas - alpha).abs().argmin()])

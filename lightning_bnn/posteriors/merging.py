r"""Merging of Gaussian posteriors over one network, weighted by their precisions.

.. math:: q(w) \propto p(w)^{1 - K} \prod_k q_k(w)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lightning_bnn.posteriors.base import Posterior
from lightning_bnn.posteriors.gaussian import DiagonalGaussian
from lightning_bnn.posteriors.laplace import LaplaceGaussian
from weightsym import Element, Symmetries, isometric, match, match_all, without_groups
from weightsym.params import (
    Params,
    check_positive,
    is_weight,
    precise,
    ravel,
    unravel,
)

__all__ = ["merge_gaussians", "transform_gaussian"]


def merge_gaussians(
    posteriors: Sequence[Posterior],
    prior_std: float | None = None,
    symmetries: Symmetries | None = None,
) -> DiagonalGaussian:
    r"""Merge Gaussians, such as those of clients, into one proportional to their product.

    .. math:: \Lambda = \textstyle\sum_k \Lambda_k - (K - 1) / \sigma^2, \quad
        \mu = \Lambda^{-1} \sum_k \Lambda_k \mu_k

    If each posterior has its own data and the same prior, the product contains the prior K times.
    Dividing by all but one gives the posterior of all the data, which is exact for a linear model
    with a Gaussian likelihood and independent inputs. Without ``prior_std``, means are averaged by
    precisions.

    Networks that were trained apart differ by symmetries, and adapters B A by an invertible matrix
    between their factors. If symmetries are given, the means are first matched to the first one. A
    prior admits only permutations, signs and rotations; without one, all matrices are used.
    Deviations stay those of single weights. (A product over the entries of B A would have no low
    rank.) Symmetries that would move fixed weights are left out. BatchNorm statistics are averaged:
    estimate them again.

    Args:
        posteriors: `DiagonalGaussian`, or `LaplaceGaussian` of the structure ``"diag"``, all over
            the same weights.
        prior_std: standard deviation of the Gaussian prior around zero that all of them have. A
            posterior with less precision than the prior contributes nothing to that weight.
        symmetries: result of `weightsym.discover` for the network.

    References:
        | A Bayesian Committee Machine (Tresp, 2000)
        | https://doi.org/10.1162/089976600300014908
        | Merging Models with Fisher-Weighted Averaging (Matena and Raffel, 2022)
        | https://arxiv.org/abs/2111.09832

    >>> sure = DiagonalGaussian({"w": torch.tensor([4.0])}, std=0.5)
    >>> unsure = DiagonalGaussian({"w": torch.tensor([0.0])}, std=1.0)
    >>> merge_gaussians([sure, unsure]).centre["w"]  # precisions 4 and 1
    tensor([3.2000])
    >>> merge_gaussians([sure, unsure], prior_std=1.0).centre["w"]  # the second is the prior
    tensor([4.])
    """
    check_positive("prior_std", prior_std, optional=True)
    if not posteriors:
        raise ValueError("`posteriors` must hold at least one.")
    gaussians = [_independent(p) for p in posteriors]
    _check_alike([p.centre for p in gaussians], [{*p.spec.names} for p in gaussians])
    if symmetries is not None:
        names, isometries = gaussians[0].spec.names, prior_std is not None
        elements = _to_first([p.centre for p in gaussians], names, symmetries, isometries)
        gaussians = [transform_gaussian(p, g) for p, g in zip(gaussians, elements, strict=True)]
    return _product(gaussians, 0.0 if prior_std is None else prior_std**-2)


def _independent(posterior: Posterior) -> DiagonalGaussian:
    """Return a Gaussian over independent weights as one of their deviations."""
    if isinstance(posterior, DiagonalGaussian):
        return posterior
    if not isinstance(posterior, LaplaceGaussian) or any(
        block.left is not None or block.right is not None for block in posterior.blocks
    ):
        raise ValueError(
            "`posteriors` must be DiagonalGaussian, or LaplaceGaussian of the structure 'diag', "
            f"got {type(posterior).__name__}."
        )
    mean, std = posterior.constants.tensors(), dict[str, Tensor]()
    for block in posterior.blocks:
        deviations = posterior.precision(block).rsqrt().flatten()
        std |= unravel(deviations, ravel(mean, block.names)[1])
    return DiagonalGaussian(mean, std, list(std))


def _product(posteriors: Sequence[DiagonalGaussian], prior: float) -> DiagonalGaussian:
    """Return the product of Gaussians in one frame, in which the prior counts once."""
    spec, like = posteriors[0].spec, posteriors[0].mean
    every, names = [p.centre for p in posteriors], spec.names
    means = torch.stack([precise(ravel(w, names)[0]) for w in every])
    stds = torch.stack([precise(ravel(p.deviations, names)[0]) for p in posteriors])
    precisions = stds.square().reciprocal()
    if prior and not bool((precisions > 0.99 * prior).any(1).all()):
        raise ValueError(
            f"A posterior has a lower precision than `prior_std` {prior**-0.5:g} at every weight."
        )
    data = (precisions - prior).clamp_min(0)
    precision = _checked(data.sum(0) + prior)
    mean = (precisions * means).where(data > 0, 0).sum(0) / precision
    weights, std = (unravel(t.to(like), spec) for t in (mean, precision.rsqrt()))
    return DiagonalGaussian({**every[0], **_constants(every, names), **weights}, std, names)


def transform_gaussian(posterior: DiagonalGaussian, element: Element) -> DiagonalGaussian:
    r"""Move a Gaussian by an element of the group of its network.

    Variances of single weights are exact, and so is the whole distribution except under matrices,

    .. math:: w' = s\, w \Rightarrow \sigma'^2 = s^2 \sigma^2, \qquad
        w' = G w \Rightarrow \sigma'^2_i = \textstyle\sum_j G_{ij}^2 \sigma_j^2

    Args:
        posterior: a Gaussian over the weights of one network.
        element: of the group of the network.

    >>> from lightning_bnn.models import mlp
    >>> from weightsym import Element, discover
    >>> from weightsym import params as P
    >>> net = mlp(2, [3], 1)
    >>> posterior, sym = DiagonalGaussian(P.of(net), 0.1), discover(net, torch.randn(8, 2))
    >>> element = Element.of_groups(sym, scales=[torch.tensor([2.0, 1.0, 0.5])])
    >>> moved = transform_gaussian(posterior, element)
    >>> moved.deviations["1.bias"], moved.deviations["3.weight"]
    (tensor([0.2000, 0.1000, 0.0500]), tensor([[0.0500, 0.1000, 0.2000]]))
    """
    names, mean = posterior.spec.names, posterior.centre
    variance = {n: t.square() for n, t in posterior.deviations.items()}
    spread = element.squares.on_some({**mean, **variance})
    return DiagonalGaussian(element(mean), {n: spread[n].sqrt() for n in names}, names)


def _to_first(
    networks: Sequence[Params], names: Sequence[str], symmetries: Symmetries, isometries: bool
) -> list[Element]:
    """Match networks to the first one, by symmetries that move no fixed weight."""
    if not isinstance(symmetries, Symmetries):
        title = type(symmetries).__name__
        raise ValueError(f"`symmetries` must be a `Symmetries`, got {title}.")
    first, *others = networks
    movable = {n for n, t in first.items() if n in names or not is_weight(n, t)}
    sym = _of_movable(isometric(symmetries) if isometries else symmetries, movable)
    if sym.linear:
        found = [match_all(w, first, sym).element for w in others]
    else:
        found = [match(w, first, sym, signs=bool(sym.signs)).element for w in others]
    return [Element(sym), *found]


def _of_movable(sym: Symmetries, names: set[str]) -> Symmetries:
    """Remove groups that move fixed tensors."""
    keep = [k for k, group in enumerate(sym.permutations) if sym.moved_by(group) <= names]
    signs = tuple(g for g in sym.signs if sym.moved_by(g) <= names)
    linear = tuple(g for g in sym.linear if sym.moved_by(g) <= names)
    return replace(without_groups(sym, keep), signs=signs, linear=linear)


# ------------------------------------------------------------ networks that belong together
def _check_alike(networks: Sequence[Params], weights: Sequence[set[str]]) -> None:
    """Refuse networks with different names or shapes, and non-finite weights."""
    first = {n: t.shape for n, t in networks[0].items()}
    for k, (network, names) in enumerate(zip(networks, weights, strict=True)):
        if {n: t.shape for n, t in network.items()} != first or names != weights[0]:
            raise ValueError(f"`posteriors[{k}]` is over different weights from the first.")
        if not all(bool(network[n].isfinite().all()) for n in names):
            raise ValueError(f"`posteriors[{k}]` holds NaN or infinite values.")


def _checked(precision: Tensor) -> Tensor:
    """Return the precisions of a product, which must be positive."""
    if not bool((precision.isfinite() & (precision > 0)).all()):
        low, high = (float(t) for t in precision.aminmax())
        raise ValueError(f"The product of `posteriors` has precisions {low:.3g} to {high:.3g}.")
    return precision


def _constants(networks: Sequence[Params], weights: Sequence[str]) -> Params:
    """Average the statistics, and require equal fixed weights."""
    constants: Params = {}
    for name in networks[0].keys() - {*weights}:
        rows = [network[name] for network in networks]
        if not is_weight(name, rows[0]) and rows[0].is_floating_point():
            constants[name] = torch.stack(rows).mean(0)
        elif is_weight(name, rows[0]) and not all(torch.equal(rows[0], t) for t in rows):
            raise ValueError(f"`posteriors` differ in the fixed weight {name!r}.")
    return constants

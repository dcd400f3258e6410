"""One network out of many: brought into one frame, averaged with weights, statistics renewed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from weightsym.batch_norms import batch_norms
from weightsym.forward import structural_copy
from weightsym.groups import Symmetries
from weightsym.matching.activations import inputs_of
from weightsym.matching.align import align
from weightsym.matching.repair import reestimated
from weightsym.params import Params, shares, stack_size, weighted_mean
from weightsym.validation import check_one_network, check_params

__all__ = ["average"]


@torch.no_grad()
def average(
    stack: Params,
    sym: Symmetries,
    weights: Sequence[int | float] | Tensor | None = None,
    *,
    reference: Params | None = None,
    signs: bool = True,
    mixing: bool = False,
    sweeps: int = 50,
    seed: int = 0,
    model: nn.Module | None = None,
    batches: Iterable[Any] | None = None,
) -> Params:
    r"""The weighted average of networks, once all of them are in one frame.

    .. math:: \bar\theta = \sum_k w_k\, g_k \theta_k, \qquad \textstyle\sum_k w_k = 1

    The elements :math:`g_k` of the group of symmetries change no network; without them the average
    of networks of different runs computes nothing of use. With the numbers of examples as weights
    this is one round of federated averaging; the server's network of the last round is then the
    ``reference``.

    References:
        Communication-Efficient Learning of Deep Networks from Decentralized Data (McMahan et al.,
        2017)
        Federated Learning with Matched Averaging (Wang et al., 2020)

    Args:
        stack: networks of one kind, from one run or several.
        sym: what `discover` returned.
        weights: one number for each network, not negative, such as how many examples it has seen;
            by default all count the same. Networks of weight zero are left out.
        reference: a network in whose frame the others are averaged, each matched to it alone; by
            default all are matched to each other, in the frame of the first, see `align`.
        signs: flip units as well, where a network lets whole units be flipped, outside of heads and
            other blocks; not with ``mixing``.
        mixing: match heads, streams and adapters by matrices as well; without signs.
        sweeps: rounds over all networks at most.
        seed: of the order of the networks.
        model: gives the computation, to estimate the statistics of batch norms on the average.
        batches: inputs, or tuples whose first element is the input, of training data.

    Returns:
        One network. Without ``model`` and ``batches`` statistics of batch norms are averaged, too,
        which is not what the average has.

    >>> from weightsym.params import of, stack
    >>> from weightsym import discover, permute
    >>> net = nn.Sequential(nn.Linear(1, 2), nn.ReLU(), nn.Linear(2, 1))
    >>> one, sym = of(net), discover(net, torch.randn(1, 1))
    >>> pair = stack([one, permute(one, sym, [torch.tensor([1, 0])])])
    >>> torch.equal(average(pair, sym)["0.weight"], one["0.weight"])
    True
    """
    if not check_params(stack, sym, "stack"):
        raise ValueError("`stack` must be a stack of networks, not one network.")
    if (model is None) != (batches is None):
        raise ValueError("`model` and `batches` go together: both, or neither.")
    parts = torch.tensor(shares(weights, stack_size(stack)), dtype=torch.float64)
    counted = (parts > 0).nonzero().flatten()
    if len(counted) < len(parts):
        parts = parts[counted]
        stack = {n: t.index_select(0, counted.to(t.device)) for n, t in stack.items()}
    how = partial(
        align,
        sym=sym,
        signs=signs and not mixing,
        mixing=mixing,
        sweeps=sweeps,
        seed=seed,
    )
    if reference is not None:
        both = _beside(reference, stack, sym)
        aligned = how(both, method="reference").apply(both, sym)
        stack = {n: t[1:] for n, t in aligned.items()}
    elif len(parts) > 1:
        stack = how(stack, weights=parts).apply(stack, sym)
    mean = weighted_mean(stack, parts)
    if model is None or batches is None or not batch_norms(model):
        return mean
    return reestimated(structural_copy(model).eval(), mean, inputs_of(batches))


def _beside(reference: Params, stack: Params, sym: Symmetries) -> Params:
    """A stack that begins with the reference."""
    check_one_network(reference, sym, "reference")
    missing = stack.keys() - reference.keys()
    if missing:
        raise ValueError(f"`reference` lacks {min(missing)!r}.")
    return {n: torch.cat([reference[n].to(t)[None], t]) for n, t in stack.items()}

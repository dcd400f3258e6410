"""What fine-tuning has changed, moved to another base."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from weightsym.arguments import is_number
from weightsym.groups.symmetries import Symmetries
from weightsym.groups.validation import check_pair
from weightsym.matching.match_all import Frame, in_frame
from weightsym.matching.moved import Moved
from weightsym.networks.devices import at_least_single
from weightsym.networks.dicts import Computed
from weightsym.params import is_weight


def rebase(
    finetuned: Mapping[str, Tensor],
    old: Mapping[str, Tensor],
    new: Mapping[str, Tensor],
    sym: Symmetries,
    *,
    scale: float = 1.0,
    method: Frame = "reference",
    seed: int = 0,
) -> Mapping[str, Tensor]:
    r"""Add to a base what fine-tuning has changed in another one, in the frame of the new base.

    .. math:: \theta = \theta_{new} + \lambda\, (g\, \theta_{tuned} - g\, \theta_{old})

    The element g brings the old base close to the new one. Statistics of batch norms are those of
    the new base. Each tensor is computed when it is read.

    References:
        Editing Models with Task Arithmetic (Ilharco et al., 2023)
        Update Your Transformer to the Latest Release: Re-Basin of Task Vectors (Rinaldi et al.,
        2025)

    Args:
        finetuned: the network that was trained from the old base.
        old: the base that it was trained from.
        new: the base to which the change is added.
        sym: what `discover` returned.
        scale: factor of the change.
        method: ``"reference"`` matches the old base by permutations and signs; ``"mixing"`` matches
            heads, streams and adapters by matrices as well, where norms with gains hold a stream
            fixed: fold those of all three networks first, see `fold_norms`. ``"plain"`` moves
            nothing, as is right where the new base continues the training of the old one.
        seed: of the order from which units are matched.

    >>> from weightsym import params as P
    >>> from weightsym import discover, permute, random_permutations, rebase
    >>> net = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    >>> sym, old = discover(net, torch.randn(8, 2)), P.of(net)
    >>> tuned = {name: w + 0.1 * torch.randn_like(w) for name, w in old.items()}
    >>> order = random_permutations(sym)
    >>> moved = rebase(tuned, old, permute(old, sym, order), sym)
    >>> all(torch.allclose(moved[n], w) for n, w in permute(tuned, sym, order).items())
    True
    """
    if not is_number(scale):
        raise ValueError(f"`scale` must be a finite number, got {scale!r}.")
    check_pair(finetuned, old, sym, sorted(sym.compared))
    element = in_frame(old, new, sym, method, seed)
    moved = [Moved(network, element) for network in (finetuned, old)]

    @torch.no_grad()
    def of(name: str) -> Tensor:
        base = new[name]
        if not is_weight(name, base):
            return base
        after, before = (at_least_single(network[name]) for network in moved)
        return (base + scale * (after - before)).to(base.dtype)

    return Computed(list(new), of)

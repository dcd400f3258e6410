"""Weight-space symmetries of any network: discover, act, remove, minimise, match, count.

>>> import torch
>>> from lightning_bnn import params as P
>>> from lightning_bnn.symmetry import canonicalise, discover
>>> net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))
>>> sym = discover(net, torch.randn(1, 2))
>>> [(group.units, group.name) for group in sym.permutations]
[(3, '0.weight')]
>>> canonicalise(P.of(net), sym)["0.weight"].norm(dim=1).round(decimals=4)
tensor([1., 1., 1.])
"""

from typing import TYPE_CHECKING

import lightning_bnn.symmetry.groups  # noqa: F401  # so that `torch.load` knows its classes
from lightning_bnn._lazy import lazy_package

if TYPE_CHECKING:
    from lightning_bnn.symmetry.actions import flip, permute, rescale, shift_logits
    from lightning_bnn.symmetry.balanced_form import balancing_matrices
    from lightning_bnn.symmetry.canonical import (
        canonical_scales_and_signs,
        canonicalise,
        remove_softmax_shift,
    )
    from lightning_bnn.symmetry.composition import compose, invert
    from lightning_bnn.symmetry.counting import (
        kendall_tau,
        ranks,
        transpositions,
    )
    from lightning_bnn.symmetry.discovery import discover
    from lightning_bnn.symmetry.elements import (
        identity,
        random_permutations,
        random_scales,
        random_signs,
    )
    from lightning_bnn.symmetry.fingerprint import Fingerprint, fingerprint
    from lightning_bnn.symmetry.folding import fold_norms
    from lightning_bnn.symmetry.forward import UnsupportedModel
    from lightning_bnn.symmetry.groups import (
        Frozen,
        LinearGroup,
        PermutationGroup,
        ScalingGroup,
        ShiftGroup,
        SignGroup,
        Symmetries,
    )
    from lightning_bnn.symmetry.matching.activations import match_activations
    from lightning_bnn.symmetry.matching.align import Alignment, align
    from lightning_bnn.symmetry.matching.averaging import average
    from lightning_bnn.symmetry.matching.difference import Difference, Stage, difference
    from lightning_bnn.symmetry.matching.interpolation import Barrier, barrier, interpolate
    from lightning_bnn.symmetry.matching.learned import Learning, learn_match
    from lightning_bnn.symmetry.matching.match import MatchResult, match
    from lightning_bnn.symmetry.matching.match_all import match_all
    from lightning_bnn.symmetry.matching.matrices import FullMatch
    from lightning_bnn.symmetry.matching.repair import Repaired, repair
    from lightning_bnn.symmetry.matching.running_frame import RunningFrame
    from lightning_bnn.symmetry.min_mass import MinMass, mass, min_mass
    from lightning_bnn.symmetry.mixing import identity_mixings, mix, random_mixings
    from lightning_bnn.symmetry.optimizer_state import (
        transform_optimizer_state,
    )
    from lightning_bnn.symmetry.orders import (
        OrderChange,
        UnitOrders,
        order_change,
        transpositions_between,
    )
    from lightning_bnn.symmetry.removal import Removal, plan_removal
    from lightning_bnn.symmetry.shifting import random_shifts, shift
    from lightning_bnn.symmetry.sorting import sort_permutations
    from lightning_bnn.symmetry.verify import verify

__all__ = [
    "Alignment",
    "Barrier",
    "Difference",
    "Fingerprint",
    "Frozen",
    "FullMatch",
    "Learning",
    "LinearGroup",
    "MatchResult",
    "MinMass",
    "OrderChange",
    "PermutationGroup",
    "Removal",
    "Repaired",
    "RunningFrame",
    "ScalingGroup",
    "ShiftGroup",
    "SignGroup",
    "Stage",
    "Symmetries",
    "UnitOrders",
    "UnsupportedModel",
    "align",
    "average",
    "balancing_matrices",
    "barrier",
    "canonical_scales_and_signs",
    "canonicalise",
    "compose",
    "difference",
    "discover",
    "fingerprint",
    "flip",
    "fold_norms",
    "identity",
    "identity_mixings",
    "interpolate",
    "invert",
    "kendall_tau",
    "learn_match",
    "mass",
    "match",
    "match_activations",
    "match_all",
    "min_mass",
    "mix",
    "order_change",
    "permute",
    "plan_removal",
    "random_mixings",
    "random_permutations",
    "random_scales",
    "random_shifts",
    "random_signs",
    "ranks",
    "remove_softmax_shift",
    "repair",
    "rescale",
    "shift",
    "shift_logits",
    "sort_permutations",
    "transform_optimizer_state",
    "transpositions",
    "transpositions_between",
    "verify",
]

lazy_package(__name__)

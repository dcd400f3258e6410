"""Weight-space symmetries of any network: discover, act, remove, minimise, match, count.

>>> import torch
>>> from weightsym import params as P
>>> from weightsym import canonicalise, discover
>>> net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))
>>> sym = discover(net, torch.randn(1, 2))
>>> [(group.units, group.name) for group in sym.permutations]
[(3, '0.weight')]
>>> canonicalise(P.of(net), sym)["0.weight"].norm(dim=1).round(decimals=4)
tensor([1., 1., 1.])
"""

import importlib
import sys
from typing import TYPE_CHECKING

from weightsym._lazy import lazy_package

if TYPE_CHECKING:
    from weightsym import files, params, randomness
    from weightsym.actions import flip, permute, rescale, shift_logits
    from weightsym.balanced_form import balancing_matrices
    from weightsym.canonical import Removal, canonicalise, plan_removal, remove_softmax_shift
    from weightsym.counting import kendall_tau, ranks, transpositions
    from weightsym.discovery.discover import discover
    from weightsym.elements import (
        compose,
        identity,
        invert,
        random_permutations,
        random_scales,
        random_signs,
    )
    from weightsym.fingerprint import Fingerprint, fingerprint
    from weightsym.folding import fold_norms
    from weightsym.forward import UnsupportedModel
    from weightsym.groups import (
        Frozen,
        LinearGroup,
        PermutationGroup,
        ScalingGroup,
        ShiftGroup,
        SignGroup,
        Symmetries,
    )
    from weightsym.matching.activations import match_activations
    from weightsym.matching.align import Alignment, align, average
    from weightsym.matching.difference import Difference, Stage, difference
    from weightsym.matching.interpolation import Barrier, barrier, interpolate
    from weightsym.matching.learned import Learning, learn_match
    from weightsym.matching.match import MatchResult, match
    from weightsym.matching.match_all import match_all
    from weightsym.matching.matrices import FullMatch
    from weightsym.matching.repair import Repaired, repair
    from weightsym.min_mass import MinMass, mass, min_mass
    from weightsym.mixing import identity_mixings, mix, random_mixings, random_shifts, shift
    from weightsym.optimizer_state import transform_optimizer_state
    from weightsym.orbits import orbit_directions
    from weightsym.orders import OrderChange, UnitOrders, order_change, transpositions_between
    from weightsym.sorting import sort_permutations
    from weightsym.verify import verify

__version__ = "0.1.0"

lazy_package(__name__)
if "torch" in sys.modules:  # its `load` is to know our classes
    importlib.import_module("weightsym.groups")

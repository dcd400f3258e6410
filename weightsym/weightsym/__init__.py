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
    from weightsym import files, params
    from weightsym.discovery.discover import discover
    from weightsym.discovery.folding import fold_networks, fold_norms
    from weightsym.discovery.verify import verify
    from weightsym.forms.balanced_form import balancing_matrices
    from weightsym.forms.canonical import canonicalise, plan_removal, remove_softmax_shift
    from weightsym.forms.counting import kendall_tau, ranks, transpositions
    from weightsym.forms.fingerprint import Fingerprint, fingerprint
    from weightsym.forms.likeness import kinship, likeness
    from weightsym.forms.mass_problem import mass
    from weightsym.forms.min_mass import MinMass, min_mass
    from weightsym.forms.orders import OrderChange, UnitOrders, order_change, transpositions_between
    from weightsym.forms.sorting import sort_permutations
    from weightsym.groups.actions import (
        compose,
        flip,
        invert,
        mix,
        permute,
        rescale,
        shift,
        shift_logits,
    )
    from weightsym.groups.element import Element
    from weightsym.groups.elements import (
        identity,
        identity_mixings,
        random_mixings,
        random_permutations,
        random_scales,
        random_shifts,
        random_signs,
    )
    from weightsym.groups.optimizer_state import transform_optimizer_state
    from weightsym.groups.orbits import orbit_directions
    from weightsym.groups.symmetries import (
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
    from weightsym.matching.learned import Learning
    from weightsym.matching.match import MatchResult, match
    from weightsym.matching.match_all import FullMatch, learn_match, match_all
    from weightsym.matching.mergeable import Mergeable, mergeable
    from weightsym.matching.parents import Parents, parents_of
    from weightsym.matching.rebase import rebase
    from weightsym.matching.relation import Relation, SharedUnits, relation
    from weightsym.matching.repair import Repaired, repair
    from weightsym.networks.forward import UnsupportedModel
if TYPE_CHECKING:  # for packages that build on this one
    from weightsym.cli import Script, described, imported, signature_of
    from weightsym.commands.mistakes import building
    from weightsym.commands.parsers import Refusal, StrictParser, did_you_mean, refusal_of
    from weightsym.commands.reports import Outcome
    from weightsym.extras import MissingPackage, needed
    from weightsym.forms.mass_problem import mass_problem
    from weightsym.forms.min_mass import excess
    from weightsym.forms.sorting import SortKey
    from weightsym.groups.axis_maps import along_axis
    from weightsym.groups.placements import Axis, Placement
    from weightsym.groups.symmetries import Group, without_groups
    from weightsym.groups.units import unit_rows, writer
    from weightsym.groups.validation import check_symmetries
    from weightsym.matching.matrices import isometric
    from weightsym.matching.mergeable import Meeting
    from weightsym.matching.shapes import in_one_shape

__version__ = "0.1.0"

lazy_package(__name__)
if "torch" in sys.modules:  # its `load` is to know our classes
    importlib.import_module("weightsym.groups.symmetries")

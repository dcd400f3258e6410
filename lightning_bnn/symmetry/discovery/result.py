"""From the channels of a network to its `Symmetries`: solve, and say what was held fixed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from lightning_bnn.symmetry.discovery.channels import Channels
from lightning_bnn.symmetry.discovery.classes import connected
from lightning_bnn.symmetry.discovery.constants import shift_groups
from lightning_bnn.symmetry.discovery.put_back import put_back
from lightning_bnn.symmetry.discovery.routers import shifts_of_routers
from lightning_bnn.symmetry.discovery.solve import solve
from lightning_bnn.symmetry.groups import Frozen, Symmetries
from lightning_bnn.symmetry.rules.labels import FROZEN

__all__ = ["symmetries_of"]

_NO_CHANNELS = "what it writes are inputs, outputs or constants of the network, or added to them"
_NO_TWINS = "no two of the channels that it writes are used alike"


def symmetries_of(channels: Channels) -> Symmetries:
    """Solve for the groups, and describe the network that they belong to."""
    _freeze_what_is_not_exchangeable(channels)
    first_name = channels.owners
    state = channels.model.state_dict()
    shapes = {first_name.get(n, n): t.shape for n, t in state.items() if isinstance(t, Tensor)}
    own = {n: part.shape for n, part in channels.parts.items()}
    limits = channels.interpreter.limits
    symmetries = solve(channels.system, shapes | own, channels.twins or [], limits)
    symmetries = put_back(symmetries, channels.parts, shapes)
    axes, shifts = shift_groups(channels.constants_added, symmetries.axes)
    shifted = {axes[p.axis].tensor for group in shifts for p in group.placements}
    forgotten = [
        group for group in shifts_of_routers(channels.routers or set(), symmetries.axes)
        if group.name not in shifted
    ]  # fmt: skip
    symmetries = replace(symmetries, axes=axes, shifts=(*shifts, *forgotten))
    return replace(
        symmetries,
        frozen=tuple(dict.fromkeys((*channels.frozen, *symmetries.frozen)))
        or _why_nothing_moves(channels, symmetries),
        softmax_shift=channels.shift,
        weights=_weights(channels, symmetries, shapes),
        shapes=shapes,
        aliases={n: first for n, first in first_name.items() if n != first},
        constants={n: t for n, t in channels.constants.items() if n in shapes},
    )


def _why_nothing_moves(channels: Channels, symmetries: Symmetries) -> tuple[Frozen, ...]:
    """A reason for every weight, where a network that was understood has no symmetry at all."""
    found = symmetries.permutations, symmetries.scalings, symmetries.signs
    if any((*found, symmetries.linear, symmetries.shifts)):
        return ()
    system = channels.system
    roots = connected(system.ties["permutation"], system.nodes)
    reasons: dict[str, Frozen] = {}
    for entry in system.entries.values():
        if entry.role in ("out", "raw", "gain"):
            fixed = roots[np.maximum(entry.labels, FROZEN)] == roots[FROZEN]
            which = _NO_CHANNELS if bool(fixed.all()) else _NO_TWINS
            reasons.setdefault(entry.name, Frozen("parameter", entry.name, "", which))
    nothing = Frozen("network", "", "", "its outputs depend on no weight")
    return tuple(reasons.values()) or (nothing,)


def _freeze_what_is_not_exchangeable(channels: Channels) -> None:
    """Draws that are used by themselves, and tensors that are used in ways that disagree."""
    system = channels.system
    for source in system.seen_noise & system.noise.keys():
        system.freeze(system.noise[source])
    for name, reason in system.conflicts.items():
        for entry in system.entries.values():
            if entry.name == name:
                system.freeze(entry.labels)
        if not any(name in f.module or "operation" in reason for f in channels.frozen):
            channels.frozen.append(Frozen("parameter", name, "", reason))


def _weights(
    channels: Channels, symmetries: Symmetries, shapes: Mapping[str, torch.Size]
) -> tuple[str, ...]:
    """Parameters that count for the mass: all but biases, read or not."""
    biases = {e.name for e in channels.system.entries.values() if e.role == "bias"}
    biases |= {
        part.whole for n, part in channels.parts.items() if n in biases and not part.of_vector
    }
    biases |= {
        a.tensor  # a vector that is used as it stands was added to an output
        for a in symmetries.axes
        if a.role == "raw" and a.size == shapes[a.tensor].numel() and a.dim is not None
    }
    biases |= {n for n in channels.unread_parameters() if n.endswith("bias")}
    return tuple(
        n
        for n, p in channels.model.named_parameters()
        if p.is_floating_point() and channels.owners[n] == n and n not in biases
    )

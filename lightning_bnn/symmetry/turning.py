"""The least mass over rotations of a normalised stream, whose norms choose their gains anew.

With gains a norm leaves only signs and permutations of its stream. But the same function has others
of its kind: fold the gains into the linear maps behind, turn the stream, and choose gains again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_bnn.arguments import check_count
from lightning_bnn.params import Params
from lightning_bnn.symmetry.balanced_form import free_basis, lifted
from lightning_bnn.symmetry.discovery import discover
from lightning_bnn.symmetry.folding import ReadNorm, folded_with_readers
from lightning_bnn.symmetry.forward import Inputs
from lightning_bnn.symmetry.groups import LinearGroup, Symmetries
from lightning_bnn.symmetry.validation import check_params

__all__ = ["Stream", "TurnedMass", "find_streams", "turned_mass"]


class Stream(NamedTuple):
    """A residual stream that may be turned once the gains of its norms are folded.

    Attributes:
        size: the number of its channels.
        keeps_ones: whether only rotations will do that leave the vector of ones alone, as behind a
            layer norm.
        norms: those that read it: the name of the gain, and of the weights behind it.

    >>> from lightning_bnn.symmetry import find_streams
    >>> net = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 5))
    >>> (stream,) = find_streams(net, torch.randn(8, 3))
    >>> stream.size, stream.keeps_ones, [norm.gain for norm in stream.norms]
    (4, True, ['1.weight'])
    """

    size: int
    keeps_ones: bool
    norms: tuple[ReadNorm, ...]


class TurnedMass(NamedTuple):
    """What rotations save; for a stack, tensors have a member dimension.

    Attributes:
        saved: by how much the mass falls, gains chosen anew.
        rotations: of every stream, ``(*members, size, size)``: its channels are multiplied by them.

    >>> from lightning_bnn import params as P
    >>> from lightning_bnn.symmetry import discover, find_streams, turned_mass
    >>> net, x = nn.Sequential(nn.Linear(3, 4), nn.RMSNorm(4), nn.Linear(4, 5)), torch.randn(8, 3)
    >>> found = turned_mass(P.populate(net, 2), discover(net, x), find_streams(net, x))
    >>> bool((found.saved > 0).all()), [q.shape for q in found.rotations]
    (True, [torch.Size([2, 4, 4])])
    """

    saved: Tensor
    rotations: tuple[Tensor, ...]


def find_streams(model: nn.Module, *example: Any, **named: Any) -> tuple[Stream, ...]:
    """Find the streams of a network that may be turned.

    Args:
        model: any module; it is left untouched.
        *example: example inputs, as the module takes them.
        **named: example inputs by name.

    >>> import torch
    >>> from torch import nn
    >>> net = nn.Sequential(nn.Linear(2, 4), nn.RMSNorm(4), nn.Linear(4, 3))
    >>> find_streams(net, torch.randn(5, 2))[0].norms
    (ReadNorm(gain='1.weight', offset=0, readers=('2.weight',)),)
    """
    inputs = Inputs(example, named)
    folded, norms = folded_with_readers(model, inputs, partial=True)
    norms = [norm for norm in norms if norm.offset == 0]  # the mass counts what is stored
    if not norms:
        return ()
    sym = discover(folded, *example, **named)
    groups = [g for g in sym.linear if g.kind in ("orthogonal", "centred") and g.spaces == 1]
    streams = [(group, [n for n in norms if _read_by(sym, group, n)]) for group in groups]
    return tuple(
        Stream(group.size, group.kind == "centred", tuple(read)) for group, read in streams if read
    )


def _read_by(sym: Symmetries, group: LinearGroup, norm: ReadNorm) -> bool:
    """Whether a group turns the inputs of all weights behind a norm, in their order."""
    axes = [sym.axes[p.axis] for p in group.placements if p.positions.shape[-1] == 1]
    turned = {axis.tensor for axis in axes if axis.dim == 1 and axis.size == group.size}
    return set(norm.readers) <= turned


def turned_mass(
    params: Params,
    sym: Symmetries,
    streams: Sequence[Stream],
    start: Sequence[Tensor] | None = None,
    steps: int = 100,
) -> TurnedMass:
    r"""How much mass rotations of streams save, beyond scales, by descent.

    .. math:: \min_{g, Q} \sum_k \sum_i g_{ki}^2 + \lVert F_k q_i \rVert^2 / g_{ki}^2
        = \min_Q 2 \sum_k \sum_i \lVert F_k q_i \rVert

    for folded weights F_k behind norm k and the columns q_i of a rotation Q; other weights keep
    their norm. The problem is not convex: what is saved is saved, more may be possible. Call it at
    the least mass over scales and matrices (`min_mass`), whose gains are the best for no rotation.

    Args:
        params: one network or a stack, with its gains.
        sym: its symmetries.
        streams: what `find_streams` has found.
        start: rotations to start from, such as those of an earlier call.
        steps: of descent.

    >>> from lightning_bnn import params as P
    >>> from lightning_bnn.symmetry import discover, find_streams, turned_mass
    >>> net, x = nn.Sequential(nn.Linear(2, 2), nn.RMSNorm(2), nn.Linear(2, 1)), torch.randn(8, 2)
    >>> w = P.of(net) | {"1.weight": torch.ones(2), "2.weight": torch.tensor([[1.0, 0.5]])}
    >>> found = turned_mass(w, discover(net, x), find_streams(net, x))
    >>> round(found.saved.item(), 2)  # 2 (1 + 0.5) - 2 sqrt(1 + 0.25), all on one channel
    0.76
    """
    check_count("steps", steps)
    stacked = check_params(params, sym)
    members = len(next(iter(params.values()))) if stacked else 1
    device = next(iter(params.values())).device
    saved = torch.zeros(members, dtype=torch.float64, device=device)
    rotations = []
    for k, stream in enumerate(streams):
        grams = _grams(params, stream, stacked)
        eye = torch.eye(stream.size).to(grams).expand(members, -1, -1)
        begun = eye if start is None else start[k].to(grams).reshape(eye.shape)
        rotation = _descended(grams, begun, stream.keeps_ones, steps)
        saved += _columns(grams, eye) - _columns(grams, rotation)
        rotations.append(rotation if stacked else rotation[0])
    return TurnedMass(saved if stacked else saved[0], tuple(rotations))


def _grams(params: Params, stream: Stream, stacked: bool) -> Tensor:
    """Gram matrices of the folded weights behind every norm, ``(members, norms, size, size)``."""
    found = []
    for norm in stream.norms:
        read = torch.cat([params[name].double() for name in norm.readers], -2)
        folded = read * params[norm.gain].double().unsqueeze(-2)
        found.append(folded.mT @ folded)
    grams = torch.stack(found, -3)
    return grams if stacked else grams[None]


def _columns(grams: Tensor, rotation: Tensor, more: Tensor | float = 0.0) -> Tensor:
    """Twice the sum of the norms of all columns, once they are turned; ``more`` in each square."""
    squares = torch.einsum("mij,mkji->mki", rotation, grams @ rotation.mT[:, None])
    return 2 * (squares.clamp_min(0) + more).sqrt().flatten(1).sum(-1)


def _descended(grams: Tensor, begun: Tensor, keeps_ones: bool, steps: int) -> Tensor:
    """Rotations under which columns are shorter than under those that the descent begins with.

    Steps are Cayley transforms of skew matrices, for all members at once. Without a rotation all
    first derivatives may vanish (columns that are orthogonal to each other): it starts beside it.
    """
    free = begun.shape[-1] - keeps_ones
    if free < 2:
        return begun
    basis = free_basis(begun.shape[-1], keeps_ones).to(begun)
    generator = torch.Generator().manual_seed(0)
    aside = 0.01 * torch.randn(free, free, generator=generator, dtype=torch.float64)
    skew = aside.to(begun).expand(len(begun), -1, -1).clone().requires_grad_()
    scale = _columns(grams, begun).clamp_min(1e-300)
    tiny = 1e-24 * grams.diagonal(dim1=-2, dim2=-1).mean((-1, -2)).clamp_min(1e-300)
    optimizer = torch.optim.LBFGS([skew], max_iter=steps, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = _columns(grams, _turned(begun, skew, basis), tiny[:, None, None])
        total = (value / scale).sum()
        total.backward()
        return total.detach()

    with torch.enable_grad():
        optimizer.step(closure)
    with torch.no_grad():
        found = _turned(begun, skew, basis)
        better = _columns(grams, found) < _columns(grams, begun)
        return torch.where(better[:, None, None], found, begun)


def _turned(begun: Tensor, skew: Tensor, basis: Tensor) -> Tensor:
    """The Cayley transform of ``skew - skew^T``, in the span of a basis, after a rotation."""
    eye, half = torch.eye(skew.shape[-1]).to(skew), skew - skew.mT
    return lifted(torch.linalg.solve(eye + half, eye - half), basis) @ begun

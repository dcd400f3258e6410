"""Tangents of orbits: the directions in which the weights, but not the function, change."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from functools import cached_property

import torch
from torch import Tensor

from weightsym.groups.actions import act, members_of
from weightsym.groups.element import Kind
from weightsym.groups.symmetries import SoftmaxShift, Symmetries
from weightsym.groups.tangents import SparseTangents, algebra, sparse_tangents
from weightsym.networks.devices import precise
from weightsym.params import Params


def orbit_directions(
    params: Params, sym: Symmetries, softmax_shift: bool = False
) -> OrbitDirections:
    r"""Return the tangent space of the orbit at a network, or at each member of a stack.

    .. math:: T \xi = \frac{d}{dt}\Big|_{t = 0} \exp(t \xi) \cdot w

    Generators :math:`\xi` are those of scales, of matrices and of shifts. The outputs do not change
    along these directions, so that the gradient of every loss is orthogonal to them.

    Args:
        params: one network or a stack.
        sym: what `discover` returned.
        softmax_shift: also shift all logits together, which changes no probabilities.

    >>> from torch import nn
    >>> from weightsym import discover, orbit_directions, params as P
    >>> net, x = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)), torch.randn(5, 2)
    >>> orbit = orbit_directions(P.of(net), discover(net, x))
    >>> net(x).square().sum().backward()
    >>> gradient = {name: p.grad for name, p in net.named_parameters()}
    >>> part = orbit.onto(gradient)  # nothing
    >>> max(t.abs().max().item() for t in part.values()) < 1e-6
    True
    """
    return OrbitDirections(params, sym, softmax_shift)


class OrbitDirections:
    """Products with the tangents of an orbit and with their adjoint, and projections.

    Of a small network the tangents are a sparse matrix. Those of large ones, and of stacks, are not
    written out: products are derivatives of the action of the group.

    Args:
        params: one network or a stack.
        sym: what `discover` returned.
        softmax_shift: also shift all logits together.

    Attributes:
        size: the number of generators, some of which may move the weights alike.
        names: the tensors that move.
    """

    def __init__(self, params: Params, sym: Symmetries, softmax_shift: bool = False) -> None:
        self._single = members_of(params, sym) is None
        names = [n for n in params if n in sym.shapes and params[n].is_floating_point()]
        last = sym.softmax_shift if softmax_shift else None
        sizes = list(_sizes(sym, last))
        self.size = sum(sizes)
        with torch.inference_mode(False), torch.enable_grad():
            weights = {n: self._stacked(precise(_usable(params[n]))) for n in names}
            first = next(iter(weights.values()))
            self._nothing = first.new_zeros(len(first), 0)
            self._generators = first.new_zeros(len(first), self.size)
            self._sparse = self._as_matrix(weights, sym) if last is None else None
            if self._sparse is None:
                self._differentiate(weights, sym, last, sizes)
            self._shapes = {n: weights[n].shape for n in self.names}
            self._numbers = [shape[1:].numel() for shape in self._shapes.values()]

    def _as_matrix(self, weights: Params, sym: Symmetries) -> SparseTangents | None:
        """Return the sparse tangents of one small float64 network on the CPU, or None."""
        usual = self._single and self.size and self._generators.dtype == torch.float64
        if not usual or self._generators.device.type != "cpu":
            return None
        pattern = sparse_tangents(sym, tuple(weights))
        if pattern is None:
            return None
        self.names = pattern.moving
        flat = torch.cat([t.flatten() for t in weights.values()])
        return SparseTangents(pattern, flat.numpy())

    def _differentiate(
        self, weights: Params, sym: Symmetries, last: SoftmaxShift | None, sizes: list[int]
    ) -> None:
        """Prepare products by automatic differentiation."""
        self._generators.requires_grad_()
        moved = _moved(weights, sym, last, self._generators.split(sizes, -1))
        self.names = tuple(n for n in weights if moved[n].requires_grad)
        self._moved = {n: moved[n].flatten(1) for n in self.names}
        self._cotangents = [torch.zeros_like(t).requires_grad_() for t in self._moved.values()]
        self._pulled = self._pull_parts(self._cotangents, create_graph=True)

    @torch.inference_mode(False)
    def times(self, generators: Tensor) -> Params:
        """Return the direction of generators ``(size,)`` or ``(members, size)`` in weight space."""
        rows = self._stacked(_usable(generators).to(self._generators))
        _check_shape("`generators`", rows, self._generators.shape, self._single)
        return self._tensors(self._push(rows))

    @torch.inference_mode(False)
    def adjoint(self, vectors: Params) -> Tensor:
        """Return the inner products of vectors, shaped as the weights, with all directions."""
        products = self._pull(self._rows(vectors))
        return products[0] if self._single else products

    @torch.inference_mode(False)
    def onto(self, vectors: Params, tolerance: float = 1e-12) -> Params:
        """Project vectors onto the orbit, by least squares.

        Args:
            vectors: one tensor, such as a gradient or a step, for each that moves.
            tolerance: the cosine, between what is left and the orbit, that is small enough.
        """
        rows = self._rows(vectors)
        return self._tensors(rows - self._rest(rows, tolerance), vectors)

    @torch.inference_mode(False)
    def off(self, vectors: Params, tolerance: float = 1e-12) -> Params:
        """Project vectors off the orbit, onto directions that change the function.

        Args:
            vectors: as for `onto`.
            tolerance: as for `onto`.
        """
        residual = self._tensors(self._rest(self._rows(vectors), tolerance), vectors)
        return {**vectors, **residual}

    # ------------------------------------------------------------ rows of numbers
    def _rows(self, vectors: Params) -> Tensor:
        """Flatten vectors to ``(members, numbers)``."""
        missing = [n for n in self.names if vectors.get(n) is None]
        if missing:
            raise ValueError(f"`vectors` lacks {missing[0]!r}, which moves along the orbit.")
        parts = [self._stacked(_usable(vectors[n]).to(self._generators)) for n in self.names]
        for (name, shape), block in zip(self._shapes.items(), parts, strict=True):
            _check_shape(f"`vectors`: {name!r}", block, shape, self._single)
        return torch.cat([block.reshape(len(block), -1) for block in parts] or [self._nothing], 1)

    def _tensors(self, rows: Tensor, like: Params | None = None) -> Params:
        tensors = {}
        for (name, shape), block in zip(self._shapes.items(), self._parts(rows), strict=True):
            t = block.reshape(shape[1:] if self._single else shape)
            tensors[name] = t if like is None else t.to(like[name])
        return tensors

    def _stacked(self, t: Tensor) -> Tensor:
        return t[None] if self._single else t

    def _parts(self, rows: Tensor) -> Sequence[Tensor]:
        return rows.split(self._numbers, 1)

    def _pull(self, rows: Tensor) -> Tensor:
        if self._sparse is not None:
            return torch.from_numpy(self._sparse.pull(rows[0].numpy()))[None]
        return self._pull_parts(self._parts(rows))

    def _pull_parts(self, parts: Sequence[Tensor], create_graph: bool = False) -> Tensor:
        moved = list(self._moved.values())
        if not moved:
            return torch.zeros_like(self._generators)
        return torch.autograd.grad(
            moved, self._generators, parts, retain_graph=True, create_graph=create_graph
        )[0]

    def _push(self, generators: Tensor) -> Tensor:
        if self._sparse is not None:
            return torch.from_numpy(self._sparse.push(generators[0].numpy()))[None]
        if not self._moved:
            return self._nothing
        parts = torch.autograd.grad(self._pulled, self._cotangents, generators, retain_graph=True)
        return torch.cat(parts, 1)

    def _rest(self, rows: Tensor, tolerance: float) -> Tensor:
        """Return the residual of least squares by conjugate gradients (CGLS), for all members.

        Tangents are divided by their lengths, nearly. Few of one network are made orthonormal.
        """

        def norm(t: Tensor) -> Tensor:
            return torch.linalg.vector_norm(t, dim=-1, keepdim=True)

        if self._sparse is not None and self._sparse.factor is not None:
            return torch.from_numpy(self._sparse.off(rows[0].numpy()))[None]
        scale, residual = self._inverse_lengths, rows
        slope = scale * self._pull(residual)
        direction, longest = slope, torch.zeros_like(norm(slope))
        rounding = 10 * torch.finfo(rows.dtype).eps * norm(rows)
        for _ in range(2 * self.size + 20):
            step = self._push(scale * direction)
            longest = torch.maximum(longest, norm(step) / norm(direction).clamp_min(1e-300))
            # true, too, where the slope is no number
            small = ~(norm(slope) > longest * (tolerance * norm(residual) + rounding))
            if bool(small.all()):
                return residual
            before = norm(slope).square()
            length = torch.where(small, 0, before / norm(step).square().clamp_min(1e-300))
            residual = residual - length * step
            slope = scale * self._pull(residual)
            direction = slope + norm(slope).square() / before.clamp_min(1e-300) * direction
        warnings.warn("Least squares along the orbit have not converged.", stacklevel=4)
        return residual

    @cached_property
    def _inverse_lengths(self) -> Tensor:
        """The inverse length of every tangent, estimated by random products if large."""
        if self._sparse is not None:
            return torch.from_numpy(self._sparse.inverse_lengths)[None]
        generator, squares = torch.Generator().manual_seed(0), 0 * self._generators.detach()
        for _ in range(_PROBES):
            noise = [torch.randn(t.shape, generator=generator) for t in self._moved.values()]
            squares += self._pull_parts([t.to(self._generators) for t in noise]).square()
        lengths = (squares / _PROBES).sqrt()
        return torch.where(lengths > 0, 1 / lengths, 0)


_PROBES = 4


def _usable(t: Tensor) -> Tensor:
    """Return a detached tensor that autograd can use in further computations."""
    return t.detach().clone() if t.is_inference() else t.detach()


def _check_shape(title: str, rows: Tensor, shape: torch.Size, single: bool) -> None:
    if rows.shape != shape:
        wanted, got = (tuple(s[1:] if single else s) for s in (shape, rows.shape))
        raise ValueError(f"{title} must have shape {wanted}, got {got}.")


# ------------------------------------------------------------ the group near the identity
def _sizes(sym: Symmetries, last: SoftmaxShift | None) -> Iterator[int]:
    """Yield the number of generators of every group, in the order of `_moved`."""
    yield from (group.units for group in sym.scalings)
    yield from (group.dimension for group in sym.linear)
    yield from (group.size for group in sym.shifts)
    if last is not None:
        yield sym.shapes[last.weight][1:].numel()
        yield int(last.bias is not None)


def _moved(
    weights: Params, sym: Symmetries, last: SoftmaxShift | None, generators: tuple[Tensor, ...]
) -> Params:
    """Return the weights after an element that is correct to first order in its generators."""
    parts = iter(generators)
    values: dict[Kind, list[Tensor | None]] = {
        "scalings": [1 + next(parts) for _ in sym.scalings],
        "linear": [],
        "duals": [],
    }
    for group in sym.linear:
        a = algebra(group, next(parts).unflatten(-1, (group.spaces, -1)))
        identity = torch.eye(group.size).to(a)
        values["linear"].append(identity + a)
        values["duals"].append(identity - a.mT)
    values["shifts"] = [next(parts) for _ in sym.shifts]
    if last is not None:
        row, bias = next(parts).unflatten(-1, sym.shapes[last.weight][1:]), next(parts)
        values["logits"] = [row, bias[..., 0] if last.bias else None]
    return act(weights, sym, values)

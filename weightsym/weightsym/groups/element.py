"""One element of the group of a network: what it does to every axis, and which tensors move.

On one axis it is a monomial matrix (units change places and are multiplied), followed by matrices
that mix some positions. Both can be multiplied, inverted and transposed without the groups that
they are from. Shifts depend on the weights and act before the rest of their step, so that a product
with a later shift has two steps.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weightsym.files import read_file, save_tensors
from weightsym.groups.actions import (
    Kind,
    axis_factors,
    axis_permutation,
    source_of,
)
from weightsym.groups.axis_maps import AxisMap, Mixing, Monomial, inverse_of, merged
from weightsym.groups.elements import random_permutations, random_scales, random_signs
from weightsym.groups.mixing import added, carried, random_mixings, random_shifts
from weightsym.groups.symmetries import Symmetries
from weightsym.groups.validation import check_element, check_params, check_symmetries
from weightsym.params import Params

Read = Callable[[str], Tensor]
Sources = str | tuple[str, ...]  # of one network, or of every member
_FORMAT = "weightsym element 1"


# ------------------------------------------------------------ one step
@dataclass(frozen=True, eq=False)
class Step:
    """Shifts, then one map for every axis; tensors come from where their sources are.

    Attributes:
        axes: the maps, by the number of the axis; those that are not there stay.
        sources: by name the tensor that comes to its place, where that is another one.
        shifts: one vector for every group of shifts, or none.
    """

    axes: Mapping[int, AxisMap] = field(default_factory=dict)
    sources: Mapping[str, Sources] = field(default_factory=dict)
    shifts: Sequence[Tensor] = ()

    def of(self, sym: Symmetries, name: str, read: Read) -> Tensor:
        """One tensor of the moved network."""
        source = self.sources.get(name, name)
        if isinstance(source, str):
            w = self._shifted(sym, source, read)
        else:
            w = torch.stack([self._shifted(sym, s, read)[m] for m, s in enumerate(source)])
        acting = [a for a in sym.axes_of.get(name, ()) if a in self.axes]
        offset = w.ndim - len(sym.shapes[name]) if acting else 0
        members = max((_members(self.axes[a]) for a in acting), default=0)
        if members and not offset:
            w, offset = w.expand(members, *w.shape), 1
        for a in acting:
            w = self.axes[a].act(w, sym.axes[a], offset)
        return w

    def _shifted(self, sym: Symmetries, name: str, read: Read) -> Tensor:
        w = read(name)
        if not self.shifts:
            return w
        for a in sym.axes_of.get(name, ()):
            for k, placement in sym.placements_by_axis("shifts").get(a, ()):
                w = added(w, sym, placement, self.shifts[k])
        for group, value in zip(sym.shifts, self.shifts, strict=True):
            for reader in (reader for reader in group.readers if reader.bias == name):
                weight = sym.axes[reader.channels.axis].tensor
                w = w - carried({weight: read(weight)}, sym, reader, value).to(w)
        return w

    def map(self, factors: Any, matrices: Any) -> Step:
        """Other factors and matrices in the same places."""
        return replace(self, axes={a: m.map(factors, matrices) for a, m in self.axes.items()})


def _members(axis_map: AxisMap) -> int:
    """The number of members that a map tells apart, 0 if it is the same for all."""
    tensors = [] if axis_map.monomial is None else [axis_map.monomial.factor]
    sizes = [len(t) for t in tensors if t.ndim == 2]
    return max(sizes + [len(m.matrices) for m in axis_map.mixings if m.matrices.ndim == 4] + [0])


def _after(sym: Symmetries, step: Step, first: Step) -> Step:
    """One step that does what two do, of which the later one shifts nothing."""
    names = {*step.sources, *first.sources}
    sources = {n: _source_through(n, step.sources, first.sources) for n in names}
    axes = {}
    for a in {*step.axes, *(b for k in first.axes for b in _twins(sym, k))}:
        old = _at_source(sym, a, step.sources, first.axes)
        old = _block_moved(sym, a, step, old)
        axes[a] = step.axes.get(a, AxisMap()) @ old
    kept = {n: s for n, s in sources.items() if s != n}
    return Step(axes, kept, first.shifts)


def _source_through(name: str, later: Mapping[str, Sources], first: Mapping[str, Sources]) -> Any:
    source = later.get(name, name)
    if isinstance(source, str):
        return first.get(source, source)
    found = [first.get(s, s) for s in source]
    return tuple(f if isinstance(f, str) else f[m] for m, f in enumerate(found))


def _twins(sym: Symmetries, a: int) -> list[int]:
    """The axes that may come to the place of one, itself included."""
    axis = sym.axes[a]
    names = sym.exchangeable_tensors.get(axis.tensor, {axis.tensor})
    return [_twin(sym, a, name) for name in names]


def _twin(sym: Symmetries, a: int, name: str) -> int:
    """The axis of another tensor that is what one axis is of its own."""
    axis = sym.axes[a]
    if axis.tensor == name:
        return a
    like = (axis.dim, axis.blocks)
    return next(k for k in sym.axes_of[name] if (sym.axes[k].dim, sym.axes[k].blocks) == like)


def _at_source(
    sym: Symmetries, a: int, sources: Mapping[str, Sources], axes: Mapping[int, AxisMap]
) -> AxisMap:
    """The map of the axis that comes to the place of one."""
    source = sources.get(sym.axes[a].tensor, sym.axes[a].tensor)
    if isinstance(source, str):
        return axes.get(_twin(sym, a, source), AxisMap())
    return _stacked([axes.get(_twin(sym, a, s), AxisMap()) for s in source], sym.axes[a].length)


def _stacked(maps: Sequence[AxisMap], length: int) -> AxisMap:
    """One map, whose member m is that of the m-th."""
    every = [_member(axis_map, m) for m, axis_map in enumerate(maps)]
    rest = Monomial(torch.arange(length), torch.ones(length, dtype=torch.float64))
    monomials = [axis_map.monomial or rest for axis_map in every]
    monomial = Monomial(
        torch.stack([one.index for one in monomials]),
        torch.stack([one.factor for one in monomials]),
    )
    mixings = [
        Mixing(
            torch.stack([m.positions for m in of_all]), torch.stack([m.matrices for m in of_all])
        ).ordered()
        for of_all in zip(*(axis_map.mixings for axis_map in every), strict=True)
    ]
    return AxisMap(monomial, tuple(mixings))


def _member(axis_map: AxisMap, m: int) -> AxisMap:
    """The map of one member."""

    def pick(t: Tensor, ndim: int) -> Tensor:
        return t[m] if t.ndim > ndim else t

    one = axis_map.monomial
    return AxisMap(
        None if one is None else Monomial(pick(one.index, 1), pick(one.factor, 1)),
        tuple(Mixing(pick(x.positions, 2), pick(x.matrices, 3)) for x in axis_map.mixings),
    )


def _block_moved(sym: Symmetries, a: int, step: Step, old: AxisMap) -> AxisMap:
    """What a map of columns becomes when the rows that see them move in blocks."""
    axis = sym.axes[a]
    rows = next((k for k in sym.axes_of[axis.tensor] if sym.axes[k].dim == 0), None)
    if axis.blocks == 1 or rows is None or sym.axes[rows].blocks > 1:
        return old
    moving = step.axes.get(rows, AxisMap()).monomial
    if moving is None:
        return old
    each = moving.index.shape[-1] // axis.blocks
    block = moving.index.unflatten(-1, (axis.blocks, each))[..., 0] // each
    index = (block[..., None] * axis.size + torch.arange(axis.size)).flatten(-2)
    there = Monomial(index, torch.ones_like(index, dtype=torch.float64))
    return AxisMap(there) @ old @ AxisMap(there.inverse)


def _inverted(sym: Symmetries, step: Step) -> Step:
    """The step that undoes another one, which shifts nothing."""
    sources = _undone(step.sources)
    back = Step({}, sources)
    axes = {}
    for a in {b for k in step.axes for b in _twins(sym, k)}:
        axes[a] = _at_source(sym, a, sources, {k: m.inverse for k, m in step.axes.items()})
    back = replace(back, axes=axes)
    return replace(back, axes={a: _block_moved(sym, a, back, m) for a, m in axes.items()})


def _undone(sources: Mapping[str, Sources]) -> dict[str, Sources]:
    """By name, the place to which the tensor that is there has to go back."""
    several = [s for s in sources.values() if not isinstance(s, str)]
    if not several:
        return {str(source): name for name, source in sources.items()}
    members = range(len(several[0]))
    back: dict[str, list[str]] = {}
    for name, source in sources.items():
        for m in members:
            there = source if isinstance(source, str) else source[m]
            back.setdefault(there, [there] * len(members))[m] = name
    return {name: tuple(homes) for name, homes in back.items()}


# ------------------------------------------------------------ the element
@dataclass(frozen=True, eq=False)
class Element:
    r"""One element of the group of a network, or one for each member of a stack.

    It acts on networks, ``element(params)``, and on one tensor at a time, ``element.of(name,
    read)``; ``second @ first`` does first what ``first`` does.

    .. math:: (g h) \cdot w = g \cdot (h \cdot w), \qquad f(g \cdot w) = f(w)

    Attributes:
        sym: what `discover` returned.
        steps: done one after the other, nearly always one.

    >>> from torch import nn
    >>> from weightsym import Element, discover
    >>> from weightsym import params as P
    >>> net, x = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)), torch.randn(8, 2)
    >>> g = Element.random(discover(net, x), torch.Generator().manual_seed(0))
    >>> moved = g(P.of(net))
    >>> torch.allclose(P.apply(net, moved, x), net(x), atol=1e-5)
    True
    >>> there_and_back = (g.inverse @ g)(P.of(net))
    >>> torch.allclose(there_and_back["0.weight"], net[0].weight)
    True
    """

    sym: Symmetries
    steps: tuple[Step, ...] = ()

    # -------------------------------------------------------- making one
    @classmethod
    def identity(cls, sym: Symmetries) -> Element:
        """The element that leaves everything as it is.

        Args:
            sym: what `discover` returned.
        """
        check_symmetries(sym)
        return cls(sym)

    @classmethod
    def random(
        cls,
        sym: Symmetries,
        generator: torch.Generator | None = None,
        members: int | None = None,
    ) -> Element:
        """A random element of the whole group, or one for every member.

        Args:
            sym: what `discover` returned.
            generator: of the random numbers.
            members: of the stack that it acts on.
        """
        return cls.of_groups(
            sym,
            permutations=random_permutations(sym, generator, members),
            scales=random_scales(sym, generator, members),
            signs=random_signs(sym, generator, members),
            matrices=random_mixings(sym, generator, members),
            shifts=random_shifts(sym, generator, members),
        )

    @classmethod
    def of_groups(
        cls,
        sym: Symmetries,
        *,
        permutations: Sequence[Tensor] | None = None,
        scales: Sequence[Tensor] | None = None,
        signs: Sequence[Tensor] | None = None,
        matrices: Sequence[Tensor] | None = None,
        shifts: Sequence[Tensor] | None = None,
    ) -> Element:
        """The element that shifts, then permutes, then rescales and flips, then mixes.

        Values with a leading dimension make one element for every member of a stack.

        Args:
            sym: what `discover` returned.
            permutations: as in `permute`.
            scales: as in `rescale`.
            signs: as in `flip`.
            matrices: as in `mix`.
            shifts: as in `shift`.
        """
        given = {
            "permutations": permutations, "scalings": scales, "signs": signs,
            "linear": matrices, "shifts": shifts,
        }  # fmt: skip
        check_symmetries(sym)
        members = _count_members(given)
        values = {
            kind: check_element(kind, value, sym, members)
            for kind, value in given.items()
            if value is not None
        }
        sources = _sources(sym, values.get("permutations", ()))
        axes = {a: _axis_map(sym, a, sources, values) for a in range(len(sym.axes))}
        moving = {a: m for a, m in axes.items() if m.monomial is not None or m.mixings}
        kept = {n: s for n, s in sources.items() if s != n}
        return cls(sym, (Step(moving, kept, tuple(values.get("shifts", ()))),))

    # -------------------------------------------------------- acting
    def __call__(self, params: Params) -> Params:
        """The moved network, or stack; tensors that nothing moves are the same objects.

        Args:
            params: one network or a stack.
        """
        check_params(params, self.sym)
        return self.on_some(params)

    def on_some(self, tensors: Params) -> Params:
        """What it makes of a part of the tensors, such as the gradients of weights alone.

        Args:
            tensors: by their names in the network.
        """
        first = {name: self.sym.aliases.get(name, name) for name in tensors}
        moved = {name: self.of(name, tensors.__getitem__) for name in dict.fromkeys(first.values())}
        return {name: moved[first[name]] for name in tensors}

    def of(self, name: str, read: Read) -> Tensor:
        """One tensor of the moved network.

        Args:
            name: of the tensor.
            read: gives the tensors of the network at rest by name; few are asked for.
        """
        name = self.sym.aliases.get(name, name)
        for step in self.steps:
            read = _reading(self.sym, step, read)
        return read(name)

    # -------------------------------------------------------- algebra
    def __matmul__(self, first: Element) -> Element:
        steps = list(first.steps)
        for step in self.steps:
            if steps and not step.shifts:
                steps[-1] = _after(self.sym, step, steps[-1])
            else:
                steps.append(step)
        return Element(self.sym, tuple(steps))

    @cached_property
    def inverse(self) -> Element:
        """The element that undoes this one."""
        steps: list[Step] = []
        for step in reversed(self.steps):
            steps.append(_inverted(self.sym, step))
            if step.shifts:
                steps.append(Step(shifts=tuple(-value for value in step.shifts)))
        return Element(self.sym, tuple(steps))

    @cached_property
    def dual(self) -> Element:
        r"""What gradients and momenta do when the weights move, the inverse transpose.

        .. math:: \langle g^{-T} m, g\, w \rangle = \langle m, w \rangle
        """
        if any(step.shifts for step in self.steps):
            raise ValueError("`dual`: shifts are no linear maps of the weights, and have none.")
        steps = (step.map(torch.reciprocal, lambda m: inverse_of(m).mT) for step in self.steps)
        return Element(self.sym, tuple(steps))

    @cached_property
    def squares(self) -> Element:
        """What variances and second moments do; those that matrices mix, if uncorrelated."""
        return self._without_shifts(torch.square)

    @cached_property
    def sizes(self) -> Element:
        """What absolute values do; those that matrices mix are bounds."""
        return self._without_shifts(torch.abs)

    def _without_shifts(self, function: Callable[[Tensor], Tensor]) -> Element:
        steps = (replace(step.map(function, function), shifts=()) for step in self.steps)
        return Element(self.sym, tuple(steps))

    # -------------------------------------------------------- files
    def save(self, path: str | Path) -> None:
        """Write it to a new file of safetensors.

        Args:
            path: of the file.
        """
        tensors: dict[str, Tensor] = {}
        for k, step in enumerate(self.steps):
            for a, axis_map in step.axes.items():
                tensors |= _tensors_of(f"{k}.{a}", axis_map)
            tensors |= {f"{k}.shift.{g}": c.clone() for g, c in enumerate(step.shifts)}
        sources = [{n: s for n, s in step.sources.items()} for step in self.steps]
        notes = {"format": _FORMAT, "axes": _layout(self.sym), "sources": json.dumps(sources)}
        save_tensors(Path(path), tensors, notes)

    @classmethod
    def load(cls, path: str | Path, sym: Symmetries) -> Element:
        """Read what `save` has written.

        Args:
            path: of the file.
            sym: the symmetries of the same network.
        """
        check_symmetries(sym)
        file = read_file(Path(path))
        if file.metadata.get("format") != _FORMAT:
            raise ValueError(f"{path} holds no element of a group.")
        if file.metadata.get("axes") != _layout(sym):
            raise ValueError(f"{path} holds an element of another network than `sym`.")
        tensors = {name: stored.read() for name, stored in file.tensors.items()}
        sources = json.loads(file.metadata["sources"])
        return cls(sym, tuple(_step_of(k, s, tensors) for k, s in enumerate(sources)))


def _reading(sym: Symmetries, step: Step, read: Read) -> Read:
    return lambda name: step.of(sym, name, read)


# ------------------------------------------------------------ from groups to axes
Values = Mapping[str, Sequence[Tensor]]


def _count_members(given: Mapping[str, Any]) -> int | None:
    """The length of the first leading dimension, None where values are those of one network."""
    for kind, values in given.items():
        for value in values or () if isinstance(values, Sequence) else ():
            if isinstance(value, Tensor) and value.ndim == (4 if kind == "linear" else 2):
                return len(value)
    return None


def _sources(sym: Symmetries, permutations: Sequence[Tensor]) -> dict[str, Sources]:
    """By name the tensor that comes to its place, of every member if they differ."""
    if not permutations:
        return {}
    names = sym.exchangeable_tensors
    orders = [p for g, p in zip(sym.permutations, permutations, strict=True) if g.tensors]
    members = max((len(p) for p in orders if p.ndim == 2), default=0)
    if not members:
        return {n: source_of(n, sym, permutations) for n in names}
    each = [[p[m] if p.ndim == 2 else p for p in permutations] for m in range(members)]
    return {n: tuple(source_of(n, sym, one) for one in each) for n in names}


def _axis_map(sym: Symmetries, a: int, sources: Mapping[str, Sources], values: Values) -> AxisMap:
    axis = sym.axes[a]
    index = _index(sym, a, sources, values.get("permutations"))
    kinds: tuple[Kind, ...] = ("scalings", "signs")
    factor = None
    for kind in kinds:
        if kind in values and a in sym.placements_by_axis(kind):
            each = axis_factors(sym, a, kind, values[kind], torch.float64, "cpu")
            factor = each if factor is None else factor * each
    monomial = None
    if index is not None or factor is not None:
        index = torch.arange(axis.length) if index is None else index
        factor = torch.ones(axis.length, dtype=torch.float64) if factor is None else factor
        monomial = Monomial(index, factor)
    mixings = []
    for k, placement in sym.placements_by_axis("linear").get(a, ()) if "linear" in values else ():
        g = values["linear"][k].double()
        g = g if placement.exponent == 1 else inverse_of(g).mT
        spaces, size, repeats = placement.positions.shape
        cells = placement.positions.cpu().movedim(-1, 1).reshape(spaces * repeats, size)
        mixings.append(Mixing(cells, g.repeat_interleave(repeats, -3)).ordered())
    return AxisMap(monomial, merged(mixings))


def _index(
    sym: Symmetries, a: int, sources: Mapping[str, Sources], orders: Sequence[Tensor] | None
) -> Tensor | None:
    """Old position of every new one along an axis, in the tensor that comes to its place."""
    if orders is None:
        return None
    axis = sym.axes[a]
    source = sources.get(axis.tensor, axis.tensor)
    if isinstance(source, str):
        at = _twin(sym, a, source)
        found = [axis_permutation(sym, at, orders)] if _permuted(sym, at) else []
        index = found[0] if found else None
    else:
        each = [[p[m] if p.ndim == 2 else p for p in orders] for m in range(len(source))]
        ats = [_twin(sym, a, s) for s in source]
        index = torch.stack(
            [axis_permutation(sym, at, one) for at, one in zip(ats, each, strict=True)]
        )
    if index is not None and axis.blocks > 1:  # whole blocks move with their rows
        place = torch.arange(axis.length)
        index = place - place % axis.size + index % axis.size
    return index


def _permuted(sym: Symmetries, a: int) -> bool:
    return a in sym.placements_by_axis("permutations")


# ------------------------------------------------------------ files
def _layout(sym: Symmetries) -> str:
    """The axes of a network, as a text that two of them can be compared by."""
    return json.dumps([[a.tensor, a.dim, a.size, a.blocks] for a in sym.axes])


def _tensors_of(prefix: str, axis_map: AxisMap) -> dict[str, Tensor]:
    tensors = {}
    if axis_map.monomial is not None:
        tensors[f"{prefix}.index"] = axis_map.monomial.index
        tensors[f"{prefix}.factor"] = axis_map.monomial.factor
    for k, mixing in enumerate(axis_map.mixings):
        tensors[f"{prefix}.{k}.positions"] = mixing.positions
        tensors[f"{prefix}.{k}.matrices"] = mixing.matrices
    return {name: t.contiguous() for name, t in tensors.items()}


def _step_of(k: int, sources: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Step:
    mine = {n.partition(".")[2]: t for n, t in tensors.items() if n.partition(".")[0] == str(k)}
    axes = {int(n.partition(".")[0]) for n in mine if not n.startswith("shift.")}
    shifts = [mine[f"shift.{g}"] for g in range(sum(n.startswith("shift.") for n in mine))]
    maps = {}
    for a in axes:
        count = sum(n.startswith(f"{a}.") and n.endswith(".matrices") for n in mine)
        mixings = (
            Mixing(mine[f"{a}.{i}.positions"], mine[f"{a}.{i}.matrices"]) for i in range(count)
        )
        index = mine.get(f"{a}.index")
        monomial = None if index is None else Monomial(index, mine[f"{a}.factor"])
        maps[a] = AxisMap(monomial, tuple(mixings))
    homes = {n: s if isinstance(s, str) else tuple(s) for n, s in sources.items()}
    return Step(maps, homes, tuple(shifts))

"""One element of the group of a network: its action on every axis and exchange of tensors.

On one axis it is a monomial matrix (units change places and are multiplied), followed by matrices
that mix some positions. Both can be multiplied, inverted and transposed without the groups that
they are from. Shifts depend on the weights and act before the rest of their step, so that a product
with a later shift has two steps.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from weightsym.files import read_file, save_tensors
from weightsym.groups.axis_maps import (
    AxisMap,
    Change,
    Mixing,
    Monomial,
    dual_of,
    joined_maps,
    take_along_last,
)
from weightsym.groups.elements import (
    orders_of,
    random_mixings,
    random_permutations,
    random_scales,
    random_shifts,
    random_signs,
)
from weightsym.groups.placements import Axis, LinearGroup, Placement, Reader
from weightsym.groups.symmetries import Symmetries
from weightsym.groups.validation import check_element, check_params, check_symmetries
from weightsym.networks.devices import kept_on, widest
from weightsym.networks.dicts import Computed
from weightsym.params import Params

Read = Callable[[str], Tensor]
Sources = str | tuple[str, ...]  # of one network, or of every member
Kind = Literal["permutations", "scalings", "signs", "linear", "duals", "shifts", "logits"]
Values = Mapping[Kind, Sequence[Tensor | None]]
"""By kind one tensor per group, or None where it does nothing. Duals are the inverse transposes of
matrices; logits what is added to all rows of the last weight, and to all of its biases."""
FACTORS: tuple[Kind, ...] = ("scalings", "signs")
_ON_AXES: tuple[Kind, ...] = ("permutations", *FACTORS, "linear")
_FORMAT = "weightsym element 1"


# ------------------------------------------------------------ one step
@dataclass(frozen=True, eq=False)
class Step:
    """Shifts, then one map for every axis. Each tensor is read from its source.

    Attributes:
        axes: the maps, by the number of the axis; those that are not there stay.
        sources: by name the tensor that comes to its place, where that is another one.
        shifts: by the number of a group of shifts its vector.
        constants: by name what is added to a tensor, besides.
    """

    axes: Mapping[int, AxisMap] = field(default_factory=dict)
    sources: Mapping[str, Sources] = field(default_factory=dict)
    shifts: Mapping[int, Tensor] = field(default_factory=dict)
    constants: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def adds(self) -> bool:
        """True if shifts or constants are added, which products of maps do not include."""
        return bool(self.shifts or self.constants)

    def of(self, sym: Symmetries, name: str, read: Read, owned: bool) -> Tensor:
        """Return one tensor of the moved network, see `Element.of`."""
        source = self.sources.get(name, name)
        if not isinstance(source, str):
            w = torch.stack([self._shifted(sym, s, read)[m] for m, s in enumerate(source)])
        else:
            w = self._shifted(sym, source, read) if self.adds else read(source)
        acting = [a for a in sym.axes_of.get(name, ()) if a in self.axes]
        offset = w.ndim - len(sym.shapes[name]) if acting else 0
        for a in acting:
            moved = self.axes[a].act(w, sym.axes[a], offset, owned)
            w, owned = moved, owned or moved is not w
        return w

    def moved(self, sym: Symmetries) -> set[str]:
        """Return the tensors that change, except by shifts."""
        return {sym.axes[a].tensor for a in self.axes} | self.sources.keys()

    def on(self, sym: Symmetries, tensors: Params) -> Params:
        """Return some tensors of the moved network, with aliases of equal value."""

        def read(name: str) -> Tensor:
            if name not in tensors:
                raise ValueError(
                    f"`params` must hold {name!r}, which another tensor is exchanged with."
                )
            return tensors[name]

        first = {n: sym.aliases.get(n, n) for n in tensors}
        moving = first.values() if self.adds else self.moved(sym)
        moved = {n: self.of(sym, n, read, False) for n in first.values() if n in moving}
        return {n: moved[f] if f in moved else tensors[n] for n, f in first.items()}

    def _shifted(self, sym: Symmetries, name: str, lookup: Read) -> Tensor:
        w = lookup(name)
        for a in sym.axes_of.get(name, ()) if self.shifts else ():
            for k, placement in sym.placements_by_axis("shifts").get(a, ()):
                if k in self.shifts:
                    value = _spread_shift(sym, placement, self.shifts[k].to(w))
                    w = w + sym.axes[a].spread(value, sym.shapes[name])
        for k, value in self.shifts.items():
            for reader in (reader for reader in sym.shifts[k].readers if reader.bias == name):
                w = w - _carried_shift(sym, reader, lookup, value).to(w)
        return w + self.constants[name].to(w) if name in self.constants else w

    def map(self, factors: Change, matrices: Change) -> Step:
        """Return the step with other factors and matrices at the same positions."""
        return replace(self, axes={a: m.map(factors, matrices) for a, m in self.axes.items()})

    def of_members(self, sym: Symmetries, rows: int | slice | Tensor) -> Step:
        """Return the step for one or several members of a stack."""
        constants = self.constants.items()
        return Step(
            {a: m.of_members(rows) for a, m in self.axes.items()},
            {n: s if isinstance(s, str) else _rows_of(s, rows) for n, s in self.sources.items()},
            {k: value[rows] if value.ndim > 1 else value for k, value in self.shifts.items()},
            {n: t[rows] if t.ndim > len(sym.shapes[n]) else t for n, t in constants},
        )


def _rows_of(sources: tuple[str, ...], rows: int | slice | Tensor) -> Sources:
    if isinstance(rows, Tensor):
        return tuple(sources[m] for m in rows.tolist())
    return sources[rows]


def _spread_shift(sym: Symmetries, placement: Placement, value: Tensor) -> Tensor:
    """Return the shift of every position of an axis."""
    full = value.new_zeros(*value.shape[:-1], sym.axes[placement.axis].length)
    positions = kept_on(placement.positions, value.device)
    repeated = (placement.exponent * value)[..., None].expand(*value.shape, positions.shape[1])
    return full.index_add(-1, positions.reshape(-1), repeated.flatten(-2))


def _carried_shift(sym: Symmetries, reader: Reader, lookup: Read, value: Tensor) -> Tensor:
    """Return the change of a layer's outputs under a shift of its inputs."""
    axis = sym.axes[reader.channels.axis]
    w = lookup(axis.tensor)
    spread = _spread_shift(sym, reader.channels, value.to(w))
    assert axis.dim is not None
    offset = w.ndim - len(sym.shapes[axis.tensor])
    blocks = w.movedim(axis.dim + offset, -1)  # (..., outgoing, ..., incoming)
    blocks = blocks.flatten(offset + 1, -2).sum(-2) if blocks.ndim > offset + 2 else blocks
    blocks = blocks.unflatten(offset, (axis.blocks, -1))
    rows = torch.einsum("...bri,...bi->...br", blocks, spread.unflatten(-1, (axis.blocks, -1)))
    rows = rows.flatten(-2)
    return rows if reader.rows is None else rows[..., reader.rows.to(rows.device)]


def _after(sym: Symmetries, step: Step, first: Step) -> Step:
    """Return the composition of two steps, of which the later one has no shifts."""
    names = {*step.sources, *first.sources}
    sources = {n: _source_through(n, step.sources, first.sources) for n in names}
    axes = dict[int, AxisMap]()
    if step.sources:
        concerned = {*step.axes, *(b for k in first.axes for b in _twins(sym, k))}
    else:  # what it does not touch stays
        axes |= first.axes
        moving = {sym.axes[a].tensor for a in step.axes}
        concerned = {*step.axes, *(a for a in axes if sym.axes[a].tensor in moving)}
    for a in concerned:
        old = _at_source(sym, a, step.sources, first.axes)
        old = _block_moved(sym, a, step, old)
        axes[a] = step.axes.get(a, AxisMap()) @ old
    changed = {n: s for n, s in sources.items() if s != n}
    return Step(axes, changed, first.shifts, first.constants)


def _of_every_member(source: Sources, count: int) -> tuple[str, ...]:
    return (source,) * count if isinstance(source, str) else source


def _source_through(name: str, later: Mapping[str, Sources], first: Mapping[str, Sources]) -> Any:
    source = later.get(name, name)
    if isinstance(source, str):
        return first.get(source, source)
    origins = [first.get(s, s) for s in source]
    return tuple(f if isinstance(f, str) else f[m] for m, f in enumerate(origins))


def _twins(sym: Symmetries, a: int) -> list[int]:
    """List the axes that may be exchanged with a given one, itself included."""
    axis = sym.axes[a]
    names = sym.exchangeable_tensors.get(axis.tensor, {axis.tensor})
    return [sym.twin(a, name) for name in names]


def _at_source(
    sym: Symmetries, a: int, sources: Mapping[str, Sources], axes: Mapping[int, AxisMap]
) -> AxisMap:
    """Return the map of the axis that replaces a given one."""
    source = sources.get(sym.axes[a].tensor)
    if source is None:
        return axes.get(a, AxisMap())
    if isinstance(source, str):
        return axes.get(sym.twin(a, source), AxisMap())
    maps = [axes.get(sym.twin(a, s), AxisMap()) for s in source]
    each = [m.of_members(slice(k, k + 1)) for k, m in enumerate(maps)]
    return joined_maps(each, [1] * len(each), sym.axes[a].length)


def _block_moved(sym: Symmetries, a: int, step: Step, old: AxisMap) -> AxisMap:
    """Permute the blocks of a map of columns along with the row blocks that they belong to."""
    axis, rows = sym.axes[a], sym.rows_of_blocks(a)
    moving = None if rows is None else step.axes.get(rows, AxisMap()).monomial.index
    if moving is None:
        return old
    each = moving.shape[-1] // axis.blocks
    block = moving.unflatten(-1, (axis.blocks, each))[..., 0] // each
    blocks = Monomial(
        (block[..., None] * axis.size + torch.arange(axis.size).to(block)).flatten(-2)
    )
    return AxisMap(blocks) @ old @ AxisMap(blocks.inverse)


def _inverted(sym: Symmetries, step: Step) -> Step:
    """Return the inverse of a step without shifts."""
    sources = _undone(step.sources)
    back = Step({}, sources)
    axes = {}
    for a in {b for k in step.axes for b in _twins(sym, k)}:
        axes[a] = _at_source(sym, a, sources, {k: m.inverse for k, m in step.axes.items()})
    back = replace(back, axes=axes)
    return replace(back, axes={a: _block_moved(sym, a, back, m) for a, m in axes.items()})


def _undone(sources: Mapping[str, Sources]) -> dict[str, Sources]:
    """Return the inverse of an exchange of tensors."""
    several = [s for s in sources.values() if not isinstance(s, str)]
    if not several:
        return {str(source): name for name, source in sources.items()}
    members = range(len(several[0]))
    back: dict[str, list[str]] = {}
    for name, source in sources.items():
        for m in members:
            origin = source if isinstance(source, str) else source[m]
            back.setdefault(origin, [origin] * len(members))[m] = name
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
        """Return the identity.

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
        """Draw a random element of the whole group, or one for every member.

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
        """Return the element that shifts, then permutes, then rescales and flips, then mixes.

        Values with a leading dimension make one element for every member of a stack.

        Args:
            sym: what `discover` returned.
            permutations: as in `permute`.
            scales: as in `rescale`.
            signs: as in `flip`.
            matrices: as in `mix`.
            shifts: as in `shift`.
        """
        given: dict[Kind, Sequence[Tensor] | None] = {
            "permutations": permutations, "scalings": scales, "signs": signs,
            "linear": matrices, "shifts": shifts,
        }  # fmt: skip
        check_symmetries(sym)
        members = _count_members(given)
        values: Values = {
            kind: check_element(kind, value, sym, members)
            for kind, value in given.items()
            if value is not None
        }
        return cls.of_values(sym, values)

    @classmethod
    def of_values(
        cls,
        sym: Symmetries,
        values: Values,
        like: Tensor | None = None,
        names: Collection[str] | None = None,
    ) -> Element:
        """Return the element of validated values.

        Args:
            sym: what `discover` returned.
            values: by kind.
            like: a tensor on the device where it will act, by default the CPU.
            names: the tensors that it will be asked for, by default all.
        """
        device = torch.device("cpu") if like is None else like.device
        return _Given(sym, values, device).element(names)

    # -------------------------------------------------------- acting
    def __call__(self, params: Params) -> Params:
        """Apply the element to a network or stack. Unmoved tensors are the same objects.

        Args:
            params: one network or a stack.
        """
        stacked = check_params(params, self.sym)
        if self.members and self.members != (len(next(iter(params.values()))) if stacked else 1):
            raise ValueError(f"`params` must be a stack of {self.members} networks here.")
        return self.on_some(params)

    @cached_property
    def members(self) -> int:
        """The number of networks that are moved differently, or 0 if all are moved alike."""
        return max((m.members for step in self.steps for m in step.axes.values()), default=0)

    @cached_property
    def mixes(self) -> bool:
        """True if matrices mix channels."""
        return any(m.mixings for step in self.steps for m in step.axes.values())

    @cached_property
    def moving(self) -> frozenset[str]:
        """The tensors that change, except by shifts."""
        return frozenset(n for step in self.steps for n in step.moved(self.sym))

    def on_some(self, tensors: Params) -> Params:
        """Apply the element to some of the tensors, such as the gradients of weights alone.

        Args:
            tensors: by their names in the network.
        """
        for step in self.steps:
            tensors = step.on(self.sym, tensors)
        return tensors

    def of(self, name: str, read: Read, owned: bool = False) -> Tensor:
        """Return one tensor of the moved network.

        Args:
            name: of the tensor.
            read: gives the tensors of the network at rest by name; few are asked for.
            owned: true if it gives them in memory of their own, which may be written to.
        """
        name = self.sym.aliases.get(name, name)
        for step in self.steps:
            read = _reading(self.sym, step, read, owned)
        return read(name)

    def view(self, params: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the moved network, of which each tensor is computed when it is read.

        Args:
            params: one network or a stack.
        """
        if not self.steps:
            return params
        return Computed(tuple(params), functools.partial(self.of, read=params.__getitem__), params)

    def rows(self, name: str, values: Tensor, rows: slice = slice(None)) -> Tensor:
        """Return one tensor of some members of a stack, if it depends on no other tensor.

        Args:
            name: of the tensor.
            values: ``(rows, *shape)``.
            rows: which members these are.
        """
        if name not in self.sym.shapes:
            examples = ", ".join(list(self.sym.shapes)[:3])
            raise ValueError(f"The network has no tensor {name!r}; it has {examples}, ...")
        some = self.of_members(rows)
        if some.members not in (0, len(values)):
            raise ValueError(f"`values` has {len(values)} networks, but `rows` has {some.members}.")
        return some.on_some({name: values})[name]

    # -------------------------------------------------------- members
    def of_members(self, rows: int | slice | Tensor) -> Element:
        """Return the element of one or several members of a stack.

        Args:
            rows: which members these are.
        """
        return Element(self.sym, tuple(step.of_members(self.sym, rows) for step in self.steps))

    @classmethod
    def joined(cls, elements: Sequence[Element], members: Sequence[int]) -> Element:
        """Concatenate elements of several stacks or networks along the members.

        Args:
            elements: of each, without shifts.
            members: the number of networks of each.
        """
        sym, steps = elements[0].sym, [element.without_shifts for element in elements]
        axes = {
            a: joined_maps([s.axes.get(a, AxisMap()) for s in steps], members, sym.axes[a].length)
            for a in dict.fromkeys(a for step in steps for a in step.axes)
        }
        sources = {
            n: tuple(
                each
                for step, count in zip(steps, members, strict=True)
                for each in _of_every_member(step.sources.get(n, n), count)
            )
            for n in dict.fromkeys(n for step in steps for n in step.sources)
        }
        return cls(sym, (Step(axes, sources),))

    # -------------------------------------------------------- parts
    @cached_property
    def without_shifts(self) -> Step:
        """The element without shifts, as one step."""
        steps = [replace(step, shifts={}, constants={}) for step in self.steps] or [Step()]
        return functools.reduce(lambda first, step: _after(self.sym, step, first), steps)

    @cached_property
    def permutations(self) -> tuple[Tensor, ...]:
        """For each group of permutations, the order of its units, as in `permute`."""
        step = self.without_shifts
        orders = orders_of(self.sym, step.axes, step.sources, max(1, self.members))
        return tuple(order if self.members else order[0] for order in orders)

    @cached_property
    def matrices(self) -> tuple[Tensor, ...]:
        """For each group of matrices, those that mix channels after all moves, as in `mix`."""
        return tuple(self.matrices_of(k) for k in range(len(self.sym.linear)))

    def matrices_of(self, k: int) -> Tensor:
        """Return the matrices of one group.

        Args:
            k: index of the group in ``sym.linear``.
        """
        group = self.sym.linear[k]
        axis = group.placements[0].axis
        return _matrices_at(group, self.without_shifts.axes.get(axis, AxisMap()))

    # -------------------------------------------------------- algebra
    def __matmul__(self, first: Element) -> Element:
        steps = list(first.steps)
        for step in self.steps:
            if steps and not step.adds:
                steps[-1] = _after(self.sym, step, steps[-1])
            else:
                steps.append(step)
        return Element(self.sym, tuple(steps))

    @cached_property
    def inverse(self) -> Element:
        """The inverse element."""
        steps: list[Step] = []
        for step in reversed(self.steps):
            steps.append(_inverted(self.sym, step))
            if step.adds:
                constants = {name: -value for name, value in step.constants.items()}
                shifts = {k: -value for k, value in step.shifts.items()}
                steps.append(Step(shifts=shifts, constants=constants))
        return Element(self.sym, tuple(steps))

    @cached_property
    def dual(self) -> Element:
        r"""The action on gradients and momenta, the inverse transpose.

        .. math:: \langle g^{-T} m, g\, w \rangle = \langle m, w \rangle
        """
        if any(step.adds for step in self.steps):
            raise ValueError("`dual`: shifts are not linear maps of the weights and have no dual.")
        steps = (step.map(torch.reciprocal, dual_of) for step in self.steps)
        return Element(self.sym, tuple(steps))

    @cached_property
    def squares(self) -> Element:
        """The action on variances and second moments, taken as uncorrelated where mixed."""
        return self._without_shifts(torch.square)

    @cached_property
    def sizes(self) -> Element:
        """The action on absolute values, an upper bound where they are mixed."""
        return self._without_shifts(torch.abs)

    def _without_shifts(self, function: Callable[[Tensor], Tensor]) -> Element:
        steps = (
            replace(step.map(function, function), shifts={}, constants={}) for step in self.steps
        )
        return Element(self.sym, tuple(steps))

    # -------------------------------------------------------- files
    def save(self, path: str | Path) -> None:
        """Write the element to a new safetensors file.

        Args:
            path: of the file.
        """
        tensors: dict[str, Tensor] = {}
        for k, step in enumerate(self.steps):
            for a, m in step.axes.items():
                tensors |= {f"{k}.{a}.{n}": t.contiguous() for n, (t, _) in m.tensors.items()}
            tensors |= {f"{k}.shift.{g}": c.clone() for g, c in step.shifts.items()}
            tensors |= {f"{k}.constant.{n}": c.clone() for n, c in step.constants.items()}
        sources = [dict(step.sources) for step in self.steps]
        notes = {"format": _FORMAT, "axes": _layout(self.sym), "sources": json.dumps(sources)}
        save_tensors(Path(path), tensors, notes)

    @classmethod
    def load(cls, path: str | Path, sym: Symmetries) -> Element:
        """Read an element that `save` has written.

        Args:
            path: of the file.
            sym: the symmetries of the same network.
        """
        check_symmetries(sym)
        file = read_file(Path(path))
        if file.metadata.get("format") != _FORMAT:
            raise ValueError(f"{path} does not contain a group element.")
        if file.metadata.get("axes") != _layout(sym):
            raise ValueError(f"{path} contains an element for another network than that of `sym`.")
        tensors = {name: stored.read().clone() for name, stored in file.tensors.items()}
        sources = json.loads(file.metadata["sources"])
        return cls(sym, tuple(_step_of(k, s, tensors) for k, s in enumerate(sources)))


def _reading(sym: Symmetries, step: Step, lookup: Read, owned: bool) -> Read:
    return lambda name: step.of(sym, name, lookup, owned)


# ------------------------------------------------------------ from groups to axes
def _count_members(values_by_kind: Mapping[Kind, Any]) -> int | None:
    """Return the length of the member dimension, or None for values of one network."""
    for kind, values in values_by_kind.items():
        for value in values or () if isinstance(values, Sequence) else ():
            if isinstance(value, Tensor) and value.ndim == (4 if kind == "linear" else 2):
                return len(value)
    return None


@dataclass(frozen=True, eq=False)
class _Given:
    """Values on a device, without trivial permutations, scales and signs."""

    sym: Symmetries
    values: Values
    device: torch.device
    cache: dict[tuple[Kind, int], Tensor | None] = field(default_factory=dict)

    def of(self, kind: Kind, k: int) -> Tensor | None:
        """Return the value of a group, cached."""
        if (kind, k) not in self.cache:
            self.cache[kind, k] = self._acting(kind, k)
        return self.cache[kind, k]

    def _acting(self, kind: Kind, k: int) -> Tensor | None:
        if kind == "duals" and kind not in self.values:
            matrices = self.values["linear"][k]
            value = None if matrices is None else dual_of(matrices)
        else:
            value = self.values[kind][k]
        if value is None:
            return None
        if kind == "permutations":
            unmoved = torch.arange(value.shape[-1], device=value.device)
            stays = torch.equal(value, unmoved if value.ndim == 1 else unmoved.expand_as(value))
            return None if stays else value.to(self.device)
        if kind in FACTORS and not value.requires_grad and bool((value == 1).all()):
            return None
        return value.to(self.device, widest(self.device))

    def at(self, kind: Kind, a: int) -> list[tuple[Placement, Tensor]]:
        """Return the placements on an axis of groups of one kind, with their values."""
        acting: list[tuple[Placement, Tensor]] = []
        for k, placement in self.sym.placements_by_axis(kind).get(a, ()):
            turned = kind == "linear" and placement.exponent == -1
            value = self.of("duals" if turned else kind, k)
            if value is not None:
                acting.append((placement, value))
        return acting

    def element(self, names: Collection[str] | None) -> Element:
        """Return the element of all values, for some or all tensors."""
        sym, sources = self.sym, self._sources()
        if names is not None:
            concerned = [a for name in names for a in sym.axes_of.get(name, ())]
        else:
            kinds = [kind for kind in _ON_AXES if kind in self.values]
            concerned = [a for kind in kinds for a in sym.placements_by_axis(kind)]
        axes = {a: self._map(a, sources) for a in dict.fromkeys(concerned)}
        constants, last = dict[str, Tensor](), sym.softmax_shift
        shifted = (last.weight, last.bias) if last else ()
        for name, row in zip(shifted, self.values.get("logits", ()), strict=False):
            if name is not None and row is not None:
                constants[name] = row.unsqueeze(row.ndim - len(sym.shapes[name]) + 1)
        shifts = {k: v for k, v in enumerate(self.values.get("shifts", ())) if v is not None}
        acting = {a: m for a, m in axes.items() if not m.stays}
        changed = {n: s for n, s in sources.items() if s != n}
        return Element(sym, (Step(acting, changed, shifts, constants),))

    def _map(self, a: int, sources: Mapping[str, Sources]) -> AxisMap:
        axis, values = self.sym.axes[a], self.values
        source, index = sources.get(axis.tensor, axis.tensor), None
        permuted = self.sym.placements_by_axis("permutations")
        if "permutations" in values and (a in permuted or source != axis.tensor):
            index = self._index(a, source)
        pairs = [pair for kind in FACTORS if kind in values for pair in self.at(kind, a)]
        mixings = (mixing_at(*pair) for pair in self.at("linear", a)) if "linear" in values else ()
        factor = axis_factor(axis, pairs) if pairs else None
        return AxisMap(Monomial(index, factor), tuple(mixings))

    def _index(self, a: int, source: Sources) -> Tensor | None:
        """Return the old position of every new one, in the tensor that replaces the axis's own."""
        axis = self.sym.axes[a]
        if isinstance(source, str):
            index = axis_index(axis, self.at("permutations", self.sym.twin(a, source)))
        else:
            each = enumerate(self.at("permutations", self.sym.twin(a, s)) for s in source)
            of_members = [
                axis_index(axis, [(p, v if v.ndim == 1 else v[m]) for p, v in pairs])
                for m, pairs in each
            ]
            stay = torch.arange(axis.length, device=self.device)
            index = torch.stack([stay if i is None else i for i in of_members])
        if index is not None and axis.blocks > 1:  # whole blocks move with their rows
            position = torch.arange(axis.length, device=index.device)
            index = position - position % axis.size + index % axis.size
        return index

    def _sources(self) -> dict[str, Sources]:
        """Return the tensor that replaces each exchanged tensor, per member if they differ."""
        if "permutations" not in self.values:
            return {}
        rows = [k for k, group in enumerate(self.sym.permutations) if group.tensors]
        orders = {k: v for k in rows if (v := self.of("permutations", k)) is not None}
        members = max((len(v) for v in orders.values() if v.ndim == 2), default=0)
        names = self.sym.exchangeable_tensors if orders else ()
        if not members:
            return {n: source_of(n, self.sym, orders) for n in names}
        each = [{k: v if v.ndim == 1 else v[m] for k, v in orders.items()} for m in range(members)]
        return {n: tuple(source_of(n, self.sym, order) for order in each) for n in names}


def source_of(name: str, sym: Symmetries, orders: Mapping[int, Tensor]) -> str:
    """Return the tensor that replaces a given one in a single network."""
    for k in sorted(orders, reverse=True):
        row = next((row for row in sym.permutations[k].tensors if name in row), None)
        name = name if row is None else row[int(orders[k][row.index(name)])]
    return name


def axis_index(axis: Axis, pairs: Sequence[tuple[Placement, Tensor]]) -> Tensor | None:
    """Return the old position of every new position on an axis, or None for the identity.

    Args:
        axis: of a tensor.
        pairs: places of groups of permutations, and orders of their units.
    """
    if not pairs or (len(pairs) == 1 and pairs[0][0].covers(axis)):
        return pairs[0][1] if pairs else None
    device, lead = pairs[0][1].device, max(order.shape[:-1] for _, order in pairs)
    index = torch.arange(axis.length, device=device).repeat(*lead, 1)
    for placement, order in pairs:
        positions = kept_on(placement.positions, device)
        moved = positions[order.to(device)].flatten(-2)
        index[..., positions.reshape(-1)] = take_along_last(index, moved)
    return index


def axis_factor(axis: Axis, pairs: Sequence[tuple[Placement, Tensor]]) -> Tensor | None:
    """Return the factor of every position on an axis, or None if all are one.

    Args:
        axis: of a tensor.
        pairs: places of groups, and scales or signs of their units.
    """
    powers = [(p, v if p.exponent == 1 else v**p.exponent) for p, v in pairs]
    if len(powers) < 2 and all(placement.covers(axis) for placement, _ in powers):
        return powers[0][1] if powers else None
    lead = max(value.shape[:-1] for _, value in powers)
    factors = torch.ones(*lead, axis.length).to(powers[0][1])
    for placement, value in powers:
        positions = kept_on(placement.positions, value.device).reshape(-1)
        each = value.repeat_interleave(placement.positions.shape[1], -1).expand(*lead, -1)
        if placement.meets_itself:
            index = positions.expand(*lead, -1)
            factors = factors.scatter_reduce(-1, index, each, "prod").clone()
        else:
            factors[..., positions] = factors[..., positions] * each
    return factors


def mixing_at(placement: Placement, matrices: Tensor) -> Mixing:
    """Return the matrices of a group at one of its placements.

    Args:
        placement: of the group.
        matrices: ``(..., spaces, size, size)``, or vectors ``(spaces, size)`` of reflections.
    """
    spaces, size, repeats = placement.positions.shape
    cells = kept_on(placement.positions, matrices.device).movedim(-1, 1)
    each = matrices.repeat_interleave(repeats, 0 if matrices.ndim == 2 else -3)
    return Mixing(cells.reshape(spaces * repeats, size), each if repeats > 1 else matrices)


def _matrices_at(group: LinearGroup, axis_map: AxisMap) -> Tensor:
    """Return the matrices of a group from the map of its first placement's axis."""
    dense = [mixing.dense for mixing in axis_map.mixings]
    if any(mixing.positions.ndim == 3 for mixing in dense):
        members = range(axis_map.members)
        return torch.stack([_matrices_at(group, axis_map.of_members(m)) for m in members])
    positions, order = group.placements[0].positions[..., 0].sort(-1)
    back = order.argsort(-1)
    for cells, matrices in ((m.positions.cpu(), m.matrices) for m in dense):
        cell = torch.searchsorted(cells[:, 0].contiguous(), positions[:, 0].contiguous())
        if torch.equal(cells[cell.clamp_max(len(cells) - 1)], positions):
            sorted_matrices = matrices[..., cell[:, None, None], back[:, :, None], back[:, None, :]]
            return (
                sorted_matrices if group.placements[0].exponent == 1 else dual_of(sorted_matrices)
            )
    return torch.eye(group.size, dtype=torch.float64).repeat(group.spaces, 1, 1)


# ------------------------------------------------------------ files
def _layout(sym: Symmetries) -> str:
    """Return a description of a network's axes for comparison."""
    return json.dumps([[a.tensor, a.dim, a.size, a.blocks] for a in sym.axes])


def _step_of(k: int, sources: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Step:
    mine: dict[str, dict[str, Tensor]] = {}
    for name, t in tensors.items():
        step, field, key = name.split(".", 2)
        if step == str(k):
            mine.setdefault(field, {})[key] = t
    shifts, constants = (mine.pop(field, {}) for field in ("shift", "constant"))
    maps = {int(a): AxisMap.of_tensors(named) for a, named in mine.items()}
    homes = {n: s if isinstance(s, str) else tuple(s) for n, s in sources.items()}
    return Step(maps, homes, {int(g): value for g, value in shifts.items()}, constants)

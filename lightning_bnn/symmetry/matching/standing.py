"""Where the networks of a stack stand, and how alike their units are to those of a reference."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from lightning_bnn.params import Params, is_stacked, stack_size
from lightning_bnn.symmetry.actions import multiplied_tensor, permuted_tensor
from lightning_bnn.symmetry.axis_actions import Element, Kind, permute_axis
from lightning_bnn.symmetry.composition import standing_at
from lightning_bnn.symmetry.exchanges import source_of
from lightning_bnn.symmetry.matching.plan import Plan, View
from lightning_bnn.symmetry.matching.rows import Rows, put, some

__all__ = ["Standing"]


class Standing:
    """The tensors of a stack in the order of their units now; rows are indices of its networks.

    Similarities of units are kept until another order or sign changes their tensor.
    """

    def __init__(
        self, plan: Plan, params: Params, reference: Params, signs: Element | None = None
    ) -> None:
        self.plan, self.sym, self.params = plan, plan.sym, params
        self.members = stack_size(params)
        self.everyone: Rows = np.arange(self.members)
        self.signs = None if signs is None else [s.clone() for s in signs]
        self.precise = False
        self.look_at(reference)

    def look_at(self, reference: Params) -> None:
        """Compare with another network, or with one for each member of the stack."""
        self.reference, self.goals = reference, dict[int, Tensor]()
        self.several = is_stacked({n: reference[n] for n in self.plan.compared}, self.sym.shapes)
        self.tables: dict[int, Tensor] = {}
        self.fresh: dict[int, np.ndarray] = {}

    def look_closely(self) -> None:
        """Compare in double precision from now on."""
        self.precise = True
        self.look_at(self.reference)

    def _real(self, w: Tensor) -> Tensor:
        return w.double() if self.precise or w.dtype == torch.float64 else w.float()

    def begin(self, permutations: Sequence[Tensor]) -> None:
        """Stand in some order: one permutation per group and member."""
        self.permutations = list(permutations)
        self.current = {n: self.params[n] for n in self.plan.compared}
        self.regather(self.plan.compared, self.everyone)

    # -------------------------------------------------------- what there is
    def score(self, names: Iterable[str] | None, rows: Rows) -> Tensor:
        """Similarity of the tensors as they stand now, for some members."""
        chosen = self.plan.compared if names is None else set(names) & set(self.plan.compared)
        total = torch.zeros(len(rows), dtype=torch.float64)
        for n in sorted(chosen):
            goal = some(self.reference[n], rows) if self.several else self.reference[n]
            product = self._real(some(self.current[n], rows)) * self._real(goal)
            total += product.reshape(len(rows), -1).sum(1, dtype=torch.float64).cpu()
        return total

    def similarity(
        self, views: Sequence[View], rows: Rows, known: set[int] | None
    ) -> Tensor | None:
        """Inner products of all pairs of units, over the places whose other side is known."""
        parts = [self._part(v, rows) for v in views if known is None or v.across <= known]
        if len(parts) < 2:
            return parts[0] if parts else None
        return torch.stack(parts).sum(0)

    def _part(self, view: View, rows: Rows) -> Tensor:
        fresh = self.fresh.setdefault(view.key, np.zeros(self.members, bool))
        stale = rows[~fresh[rows]]
        if len(stale):
            own = self._real(view.rows(some(self.current[view.tensor], stale)))
            goal = self._goal(view, stale).to(own)
            new = (goal @ own.mT).cpu()
            self.tables[view.key] = put(self.tables.get(view.key), stale, new, self.members)
            fresh[stale] = True
        return some(self.tables[view.key], rows)

    def _goal(self, view: View, rows: Rows) -> Tensor:
        if view.key not in self.goals:
            goal = self.reference[view.tensor]
            goal = view.rows(goal) if self.several else view.rows(goal[None])[0]
            self.goals[view.key] = self._real(goal)
        return some(self.goals[view.key], rows) if self.several else self.goals[view.key]

    # -------------------------------------------------------- changes
    def reorder(self, group: int, order: Tensor, rows: Rows) -> None:
        """Reorder units as they stand: an inner order belongs to the block that sits there."""
        for target, chosen in self.standing_at(group, rows).items():
            old = some(self.permutations[target], rows[chosen])
            self.reset_order(target, rows[chosen], old.gather(1, some(order, chosen)))
        for place in self.sym.permutations[group].placements:
            axis = self.sym.axes[place.axis]
            if axis.tensor not in self.current:
                continue
            view, w = self.plan.view(place), some(self.current[axis.tensor], rows)
            index = order
            if view.dim is None:
                index = torch.arange(axis.blocks * axis.size).repeat(len(rows), 1)
                index[:, place.positions.reshape(-1)] = place.positions[order].flatten(1)
            self._become(axis.tensor, rows, permute_axis(w, axis, index.to(w.device), 1))
            self._outdate(axis.tensor, rows, view.key, order)

    def standing_at(self, group: int, rows: Rows) -> dict[int, Rows]:
        """The groups whose units stand in the places of another one, and for which of the rows."""
        if group not in self.plan.homes:
            return {group: np.arange(len(rows))}
        found: dict[int, list[int]] = {}
        for k, m in enumerate(rows.tolist()):
            own = _OneMember(self.permutations, m)
            at = standing_at(group, own, self.sym, self.plan.homes)
            found.setdefault(at, []).append(k)
        return {target: np.array(chosen) for target, chosen in found.items()}

    def flip(self, group: int, mirror: int, factors: Tensor, rows: Rows) -> None:
        """Flip units as they stand."""
        assert self.signs is not None
        at = some(self.permutations[group], rows)
        signs = some(self.signs[mirror], rows)
        signs = signs.scatter(1, at, signs.gather(1, at) * factors.to(signs))
        self.signs[mirror] = self._renewed(self.signs[mirror], rows, signs)
        places = self.sym.permutations[group].placements
        self.regather({self.sym.axes[p.axis].tensor for p in places}, rows)

    def go_back(self, saved: tuple[list[Tensor], list[Tensor] | None], rows: Rows) -> None:
        """Let some members have the orders and signs that `saved` had; tensors stay."""
        orders, signs = ([some(t, rows) for t in part or ()] for part in saved)
        self._have(rows, orders, signs)

    def stand(self, rows: Rows, orders: Sequence[Tensor], signs: Sequence[Tensor] | None) -> None:
        """Let some members stand elsewhere, given the orders and signs of these alone."""
        self._have(rows, orders, signs or ())
        self.regather(self.plan.compared, rows)

    def _have(self, rows: Rows, orders: Sequence[Tensor], signs: Sequence[Tensor]) -> None:
        for g, new in enumerate(orders):
            self.reset_order(g, rows, new)
        for k, new in enumerate(signs):
            assert self.signs is not None
            self.signs[k] = self._renewed(self.signs[k], rows, new)

    def saved(self) -> tuple[list[Tensor], list[Tensor] | None]:
        """Orders and signs, for `go_back`."""
        return list(self.permutations), None if self.signs is None else list(self.signs)

    def regather(self, names: Iterable[str], rows: Rows) -> None:
        """Take tensors of some members from the networks anew."""
        for name in set(names) & self.current.keys():
            for source, chosen in self._sources(name, rows).items():
                self._take(name, source, rows[chosen])
            self._outdate(name, rows)

    def _take(self, name: str, source: str, rows: Rows) -> None:
        """Have one tensor of the networks, in its order, in the place of another or its own."""
        orders = [some(p, rows) for p in self.permutations]
        w = some(self.params[source], rows)
        if self.signs is not None and source in self.plan.flipped:
            factors: dict[Kind, Element] = {"signs": [some(s, rows) for s in self.signs]}
            w = multiplied_tensor(w, self.sym, self.plan.flipped[source], factors, 1)
        axes = self.plan.tensors.get(source, [])
        self._become(name, rows, permuted_tensor({source: w}, self.sym, source, axes, orders))

    def _sources(self, name: str, rows: Rows) -> dict[str, Rows]:
        """The tensors that come to stand in the place of one, and for which of the rows."""
        if name not in self.plan.exchanged:
            return {name: np.arange(len(rows))}
        found: dict[str, list[int]] = {}
        for k, m in enumerate(rows.tolist()):
            source = source_of(name, self.sym, _OneMember(self.permutations, m))
            found.setdefault(source, []).append(k)
        return {source: np.array(chosen) for source, chosen in found.items()}

    def reset_order(self, group: int, rows: Rows, orders: Tensor) -> None:
        """Give one group of some members another permutation; tensors stay as they are."""
        self.permutations[group] = self._renewed(self.permutations[group], rows, orders)

    def _become(self, name: str, rows: Rows, new: Tensor) -> None:
        self.current[name] = self._renewed(self.current[name], rows, new)

    def _renewed(self, old: Tensor, rows: Rows, new: Tensor) -> Tensor:
        """A copy with new rows: what is kept elsewhere stays as it is."""
        whole = len(rows) == self.members
        return put(None if whole else old.clone(), rows, new, self.members)

    def _outdate(
        self, name: str, rows: Rows, kept: int | None = None, order: Tensor | None = None
    ) -> None:
        """Similarities of a tensor no longer hold; those along the axis that moved move, too."""
        for key in self.plan.keys_of(name) & self.fresh.keys():
            if key != kept or order is None:
                self.fresh[key][rows] = False
            elif self.fresh[key][rows].any():
                table = some(self.tables[key], rows)
                index = order[:, None, :].expand(-1, table.shape[1], -1)
                moved = table.gather(2, index)
                self.tables[key] = put(self.tables[key], rows, moved, self.members)


class _OneMember(Sequence[Tensor]):
    """The permutations of one member, taken where they are asked for."""

    def __init__(self, permutations: Sequence[Tensor], member: int) -> None:
        self.permutations, self.member = permutations, member

    def __getitem__(self, index: int) -> Tensor:  # type: ignore[override]
        return self.permutations[index][self.member]

    def __len__(self) -> int:
        return len(self.permutations)

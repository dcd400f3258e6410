"""Matching by data: what goes through linear maps, and how alike units are by it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode

from weightsym.groups.element import Element
from weightsym.groups.symmetries import Placement, Symmetries
from weightsym.groups.units import WRITES
from weightsym.groups.validation import check_one_network, check_params
from weightsym.matching.ascent import Ascent
from weightsym.matching.plan import Plan, plan_of
from weightsym.networks.forward import in_precision_of, structural_copy
from weightsym.params import Params, of, stack, stack_size, unstack

_log = logging.getLogger(__name__)
_ATEN = torch.ops.aten
_SWEEPS = 100


# ------------------------------------------------------------ units
@torch.no_grad()
def match_activations(
    model: nn.Module,
    params: Params,
    reference: Params,
    sym: Symmetries,
    batches: Iterable[Any],
) -> list[Tensor]:
    r"""Permutations after which hidden activations agree best with those of a reference.

    .. math:: \max_p \sum_x \sum_k a_{p(k)}(x)\, a^*_k(x)

    Inner products of activations are summed over the batches and maximised by one linear assignment
    per group, as by ``match(..., method="activations")``, which also says what was reached. Heads
    that share keys (grouped queries) are matched by weights, with a warning.

    References:
        A Compact Representation for BNNs by Removing Permutation Symmetry (Xiao, Liu, Bamler, 2023)

    Args:
        model: gives the computation; it runs in evaluation mode.
        params: one network or a stack.
        reference: the network to agree with.
        sym: what `discover` returned.
        batches: inputs, or tuples whose first element is the input.

    Returns:
        One permutation per group, for `permute`; with a leading dimension for a stack.

    >>> from weightsym import params as P
    >>> from torch import nn
    >>> from weightsym import discover, match_activations, permute
    >>> net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
    >>> batches = [torch.randn(64, 2)]
    >>> sym, w = discover(net, batches[0]), P.of(net)
    >>> copy = permute(w, sym, [torch.tensor([3, 0, 1, 2])])
    >>> match_activations(net, copy, w, sym, batches)  # what undoes it
    [tensor([1, 2, 3, 0])]
    """
    check_one_network(reference, sym, "reference")
    stacked = check_params(params, sym)
    check_complete(model, params=params, reference=reference)
    members = params if stacked else stack([params])
    matched, *_ = by_activations(plan_of(sym), model, members, reference, batches)
    return matched if stacked else [p[0] for p in matched]


def check_complete(model: nn.Module, **networks: Mapping[str, Tensor]) -> None:
    """Refuse tensors of a network some of which are missing.

    Args:
        model: the network.
        **networks: its tensors, by the name of the argument.
    """
    for name, network in networks.items():
        missing = of(model).keys() - network.keys()
        if missing:
            raise ValueError(
                f"`{name}` must hold all tensors of the network {type(model).__name__}: it lacks "
                f"{sorted(missing)[0]!r}."
            )


def by_activations(
    plan: Plan,
    model: nn.Module,
    params: Params,
    reference: Params,
    batches: Iterable[Any],
) -> tuple[list[Tensor], Tensor]:
    """Assign the units of every group by their activations.

    Args:
        plan: of the groups.
        model: gives the computation; it runs in evaluation mode.
        params: a stack.
        reference: one network.
        batches: inputs, or tuples whose first element is the input.

    Returns:
        The permutations of every member, and what they reach.
    """
    tables = activation_tables(plan, model, params, reference, batches)
    orders = plan.best(tables)
    value = torch.zeros(stack_size(params), dtype=torch.float64)
    for table, order in zip(tables, orders, strict=True):
        value = value + table.gather(2, order[:, :, None]).sum((1, 2))
    return _with_shared_heads(plan, params, reference, plan.elements(orders)), value


def activation_tables(
    plan: Plan,
    model: nn.Module,
    params: Params,
    reference: Params,
    batches: Iterable[Any],
) -> list[Tensor]:
    """Inner products of units, ``(members, units, units)`` for every table, zero where unseen.

    The arguments are those of `by_activations`.
    """
    network = structural_copy(model).eval()
    for k in plan.branches:
        _log.warning(
            "match: the order of the experts that hold %s is not seen in activations; they stay in "
            "their places, and weights alone exchange them.",
            plan.groups[k].tensors[0][0],
        )
    members = unstack(params)
    spots: dict[int, Placement] | None = None
    like = torch.zeros(len(members), 1, 1, dtype=torch.float64)
    tables = [like.expand(-1, t.units, t.units) for t in plan.tables]
    for x in inputs_of(batches):
        spots = _spots(plan, network, reference, x) if spots is None else spots
        for k, rows in _units(plan, network, [reference, *members], spots, x).items():
            tables[k] = tables[k] + (rows[0] @ rows[1:].mT).cpu()
    if not all(bool(table.isfinite().all()) for table in tables):
        raise ValueError("`batches` lead to activations that are NaN or infinite.")
    return tables


def _spots(plan: Plan, network: nn.Module, params: Params, x: Any) -> dict[int, Placement]:
    """By table, where its units are seen: at what reads them, or at the first that writes them."""
    places: dict[int, list[Placement]] = {}
    for k, table in enumerate(plan.tables):
        writers = [p for p in table.places if plan.axes[p.axis].role in WRITES][:1]
        places[k] = [p for p in table.places if plan.axes[p.axis].role == "in"] + writers
    names = {plan.axes[p.axis].tensor for every in places.values() for p in every}
    products, spots = watch(network, params, x, names), dict[int, Placement]()
    for k, every in places.items():
        visible = (p for p in every if values_at(plan.sym, p, products) is not None)
        spot = next(visible, None)
        if spot is not None:
            spots[k] = spot
        elif plan.tables[k].places:
            _log.warning(
                "match: no layer shows the units of %s; they stay as they are.",
                plan.axes[plan.tables[k].places[0].axis].tensor,
            )
    return spots


def _units(
    plan: Plan, network: nn.Module, networks: Sequence[Params], spots: dict[int, Placement], x: Any
) -> dict[int, Tensor]:
    """By table, the activations of its units ``(networks, units, samples)``."""
    names = {plan.axes[p.axis].tensor for p in spots.values()}
    rows: dict[int, list[Tensor]] = {k: [] for k in spots}
    for params in networks:
        products = watch(network, params, x, names)
        for k, placement in spots.items():
            values = values_at(plan.sym, placement, products)
            assert values is not None
            rows[k].append(values.flatten(1).double())
    return {k: torch.stack(every) for k, every in rows.items()}


def _with_shared_heads(
    plan: Plan, params: Params, reference: Params, orders: list[Tensor]
) -> list[Tensor]:
    """Orders in which heads that share keys, and all around and inside of them, fit by weights.

    A query head has part of every channel of its keys: neither is assigned before the other, so
    that no table of activations tells the order of both.

    Args:
        plan: of the groups.
        params: a stack.
        reference: one network.
        orders: by activations, of every member.
    """
    homes = set[int]()
    covered = {g for family in plan.outer for g in family.members}
    for g in (f.group for f in plan.families if f.group not in covered):
        while g in plan.homes:
            g = plan.homes[g][0]
        homes.add(g)
    around = [k for k, f in enumerate(plan.families) if f.group in homes]
    chosen = sorted({*around, *(k for g in homes for k in plan.inside(g))})
    if not chosen:
        return orders
    moving = {g for k in chosen for g in plan.families[k].members}
    _log.warning(
        "match: activations do not tell the order of heads that share keys (grouped queries): "
        "weights order these heads and what is inside of them."
    )
    ascent = Ascent(plan, params, reference)
    ascent.stand(Element.of_values(plan.sym, {"permutations": orders}))
    still = set(range(len(orders))) - moving
    ascent.climb(torch.Generator().manual_seed(0), _SWEEPS, chosen, still)
    return [p.expand(ascent.members, -1) for p in ascent.element.permutations]


# ------------------------------------------------------------ what goes through linear maps
class Product(NamedTuple):
    """The inputs and outputs of one linear map or convolution.

    Attributes:
        rows: of the weight that were used.
        columns: vectors whose numbers lie along dimension 1 of the weight, one per row.
        outputs: those along dimension 0, without the bias.
        source: what was multiplied, which later operations may have changed in place.
    """

    rows: slice
    columns: Tensor
    outputs: Tensor
    source: Tensor

    @property
    def origin(self) -> tuple[int, int]:
        """The memory of what was multiplied, as long as that is there."""
        return _storage(self.source), int(self.source.storage_offset())


def inputs_of(batches: Iterable[Any]) -> Iterator[Any]:
    """The inputs of at least one batch, each of which may be a tuple that begins with them."""
    if isinstance(batches, Tensor):
        raise ValueError("`batches` must be an iterable of inputs; put one tensor into a list.")
    empty = True
    for batch in batches:
        empty = False
        yield batch[0] if isinstance(batch, tuple | list) else batch
    if empty:
        raise ValueError("`batches` is empty.")


def values_at(
    sym: Symmetries, placement: Placement, products: Mapping[str, Sequence[Product]]
) -> Tensor | None:
    """Values at the positions of a placement, ``(*positions, samples)``, or None."""
    axis = sym.axes[placement.axis]
    every = (_values(sym, placement, product) for product in products.get(axis.tensor, ()))
    parts = [piece for piece in every if piece is not None]
    return torch.cat(parts, -1) if parts else None


def _values(sym: Symmetries, placement: Placement, product: Product) -> Tensor | None:
    axis, positions = sym.axes[placement.axis], placement.positions.to(product.columns.device)
    if axis.dim != 1:
        values, rows = product.outputs, positions - product.rows.start
        if axis.dim != 0 or bool((rows < 0).any()) or int(rows.max()) >= values.shape[1]:
            return None
        return values.T[rows]
    if product.columns.shape[1] == axis.blocks * axis.size:
        return product.columns.T[positions]
    height = sym.shapes[axis.tensor][0] // axis.blocks
    starts = (positions // axis.size).unique() * height
    inside = (product.rows.start <= starts) & (starts < product.rows.stop)
    return product.columns.T[positions % axis.size] if bool(inside.any()) else None


@contextmanager
def _every_module_called() -> Iterator[None]:
    """Fused layers call no module, and make no products of their own."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def call_modules(network: nn.Module, params: Params, x: Any) -> Any:
    """Run a network so that the hooks of its layers fire."""
    if isinstance(x, Tensor) and not x.numel():
        raise ValueError(f"`batches` holds an empty batch, of shape {tuple(x.shape)}.")
    with _every_module_called():
        return functional_call(network, params, (in_precision_of(params, x),))


def watch(
    network: nn.Module, params: Params, x: Any, names: Iterable[str]
) -> dict[str, list[Product]]:
    """All products with the weights of some names during one evaluation.

    Hooks see modules that are called; products are seen wherever they are computed, also inside of
    attention that takes its weights as arguments.

    Args:
        network: gives the computation, in evaluation mode.
        params: one network.
        x: the input.
        names: of weights; those of fewer than two dimensions are left out.
    """
    watched = {n: params[n].detach().clone() for n in names if params[n].ndim > 1}
    with torch.no_grad(), _ActivationWatch(watched) as products:
        call_modules(network, {**params, **watched}, x)
    return products.products


class _ActivationWatch(TorchDispatchMode):
    """Keeps the factors of products whose second one is a watched weight."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.names = {_storage(w): n for n, w in weights.items()}
        self.weights = weights
        self.products: dict[str, list[Product]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is _ATEN.mm.default:
            self._see(args[0], args[1].mT, result, None)
        elif func is _ATEN.linear.default:
            self._see(args[0], args[1], result, args[2] if len(args) > 2 else None)
        elif func is _ATEN.addmm.default:
            self._see(args[1], args[2].mT, result, args[0])
        elif func is _ATEN.bmm.default and args[1].stride(0) == 0:
            self._see(args[0], args[1][0].mT, result, None)
        elif func is _ATEN.convolution.default:
            inputs, outputs = args[0].movedim(1, -1), result.movedim(1, -1)
            if args[6]:  # transposed: the other way round
                inputs, outputs = outputs, inputs
            self._see(inputs, args[1], outputs, None if args[6] else args[2])
        return result

    def _see(self, columns: Tensor, weight: Tensor, outputs: Tensor, bias: Tensor | None) -> None:
        name = self.names.get(_storage(weight))
        if name is None:
            return
        whole = self.weights[name]
        if weight.stride() != whole.stride() or weight.shape[1] != whole.shape[1]:
            return
        start = weight.storage_offset() // whole.stride(0)
        rows = slice(start, start + weight.shape[0])
        outputs = outputs.clone() if bias is None else outputs - bias
        both = columns.flatten(0, -2).clone(), outputs.flatten(0, -2)
        self.products.setdefault(name, []).append(Product(rows, *both, columns))


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)

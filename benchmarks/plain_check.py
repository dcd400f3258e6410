"""Does every group of a `Symmetries` keep the function of a network? Asked without the package."""

import copy
import warnings
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch
from plain_actions import Weights, mixed, multiplied, permuted, shifted
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

KINDS = ("permutations", "scalings", "signs", "linear", "shifts")
WRONG = 1e-9  # relative error of outputs, in float64
Run = Callable[[Weights], list[np.ndarray]]


class InFloat64(TorchDispatchMode):
    """Forwards that ask for float32 inside (norms, softmax, rotary tables) get float64."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        args, kwargs = tree_map(
            lambda x: torch.float64 if x is torch.float32 else x, (args, kwargs or {})
        )
        if function is torch.ops.aten._grouped_mm.default and args[0].dtype == torch.float64:
            return _grouped_product(*args, **kwargs)
        return function(*args, **kwargs)


def _grouped_product(x, weights, offs=None, bias=None, out_dtype=None):
    """Rows times the matrix of their group, for which torch has no float64."""
    ends = offs.tolist()
    parts = [x[a:b] @ w for a, b, w in zip([0, *ends], ends, weights, strict=False)]
    rest = x.new_zeros(len(x) - (ends[-1] if ends else 0), weights.shape[-1])
    return torch.cat([*parts, rest])


def _forget(model: nn.Module) -> None:
    """Empty the caches that some modules keep of what they have computed from their weights."""
    for module in model.modules():
        for name, value in vars(module).items():
            if name.endswith("cache") and isinstance(value, dict):
                value.clear()


def runner(model: nn.Module, inputs: dict[str, Any]) -> Run:
    """A function from weights to all output tensors, in evaluation and float64."""
    model = copy.deepcopy(model).double().eval()
    inputs = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
    names = [n for n, _ in (*model.named_parameters(), *model.named_buffers())]  # shared ones once

    def run(weights: Weights) -> list[np.ndarray]:
        state = {n: torch.from_numpy(np.ascontiguousarray(weights[n])) for n in names}
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            with torch.no_grad(), InFloat64(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                torch.manual_seed(0)
                _forget(model)
                out = torch.func.functional_call(model, state, (), inputs, strict=False)
        finally:
            torch.set_default_dtype(default)
        return [t.numpy() for t in _tensors(out)]

    return run


def _tensors(out: Any) -> list[torch.Tensor]:
    if isinstance(out, torch.Tensor):
        return [out.detach().clone()] if out.is_floating_point() else []
    if isinstance(out, dict):
        return [t for v in out.values() for t in _tensors(v)]
    if isinstance(out, (list, tuple)):
        return [t for v in out for t in _tensors(v)]
    if is_dataclass(out):
        return [t for f in fields(out) for t in _tensors(getattr(out, f.name))]
    return []


def generic_weights(model: nn.Module, symmetries: Any, seed: int) -> Weights:
    """Random parameters without zeros or ones, and random statistics of batch norms."""
    random = np.random.default_rng(seed)
    weights: Weights = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        first = symmetries.aliases.get(name, name)
        if first in weights:
            weights[name] = weights[first]
        elif p.is_floating_point():
            old = np.nan_to_num(p.detach().double().numpy())
            noise = random.standard_normal(old.shape)
            fan_in = max(1, int(np.prod(old.shape[1:])))
            weights[name] = noise / np.sqrt(fan_in) if old.ndim > 1 else old + 0.3 * noise
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_var is not None:
            shape = module.running_var.shape
            weights[f"{name}.running_mean"] = 0.3 * random.standard_normal(shape)
            weights[f"{name}.running_var"] = random.uniform(0.5, 2, shape)
    return weights


def with_buffers(model: nn.Module, weights: Weights) -> Weights:
    """The same with the buffers as they are, which groups may move."""
    buffers = {
        n: b.double().numpy() if b.is_floating_point() else b.numpy()
        for n, b in model.named_buffers(remove_duplicate=False)
    }
    return {**buffers, **weights}


def check(model: nn.Module, symmetries: Any, inputs: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Errors of each kind by itself and of all together, and the single groups that are wrong.

    ``control`` is the error of a group that is wrong on purpose, which must be seen.
    """
    report: dict[str, Any] = {"errors": {}, "wrong": []}
    for number, one in enumerate(inputs):
        weights = with_buffers(model, generic_weights(model, symmetries, 7 + number))
        run = runner(model, one)
        old = run(weights)
        other = run({**weights, **generic_weights(model, symmetries, 77 + number)})
        sizes = [_size(a, b) for a, b in zip(old, other, strict=True)]
        if not any(sizes):
            report["unchecked"] = "outputs do not move with the weights, or are not finite"
            continue
        random = np.random.default_rng(number)
        for kind in (*KINDS, "together"):
            kinds = KINDS if kind == "together" else (kind,)
            element = _element(symmetries, kinds, random)
            error = _error(old, run(_act(weights, symmetries, element)), sizes)
            report["errors"][kind] = max(error, report["errors"].get(kind, 0.0))
            if error > WRONG and kind != "together":
                report["wrong"] += _offenders(symmetries, kind, run, weights, old, sizes, random)
        broken = _without_a_place(symmetries)
        if broken is not None:
            element = _element(broken, ("permutations",), random)
            control = _error(old, run(_act(weights, broken, element)), sizes)
            report["control"] = min(control, report.get("control", np.inf))
        repeat = _error(old, run(weights), sizes)
        report["errors"]["identity"] = max(repeat, report["errors"].get("identity", 0.0))
    report["wrong"] = list({(w["kind"], w["group"]): w for w in report["wrong"]}.values())
    return report


def _without_a_place(symmetries: Any) -> Any:
    """A negative control: the first group that moves several tensors forgets all but one."""
    for group in symmetries.permutations:
        if len({symmetries.axes[p.axis].tensor for p in group.placements}) > 1:
            wrong = replace(group, placements=group.placements[:1])
            return replace(symmetries, permutations=(wrong,), linear=(), shifts=())
    return None


def _element(symmetries: Any, kinds: Iterable[str], random: Any) -> dict[str, list[np.ndarray]]:
    """A random order, factor, sign or matrix for all units; other kinds stay the identity."""
    draws = {
        "permutations": lambda g: _order(g.units, random),
        "scalings": lambda g: np.exp(0.5 * random.standard_normal(g.units)),
        "signs": lambda g: random.choice([-1.0, 1.0], g.units),
        "linear": lambda g: np.stack([_matrix(g.kind, g.size, random) for _ in range(g.spaces)]),
        "shifts": lambda g: 0.5 * random.standard_normal(g.size),
    }
    rest = {
        "permutations": lambda g: np.arange(g.units),
        "scalings": lambda g: np.ones(g.units),
        "signs": lambda g: np.ones(g.units),
        "linear": lambda g: np.stack([np.eye(g.size)] * g.spaces),
        "shifts": lambda g: np.zeros(g.size),
    }
    return {
        kind: [(draws if kind in kinds else rest)[kind](g) for g in getattr(symmetries, kind, ())]
        for kind in KINDS
    }


def _order(units: int, random: Any) -> np.ndarray:
    """One cycle through all units, so that every one of them moves."""
    cycle, order = random.permutation(units), np.arange(units)
    order[cycle] = np.roll(cycle, 1)
    return order


def _matrix(kind: str, size: int, random: Any) -> np.ndarray:
    """A generic matrix of a kind, with condition number of a few at most."""
    rotation = np.linalg.qr(random.standard_normal((size, size)))[0]
    if kind == "general":
        return rotation + 0.3 * random.standard_normal((size, size)) / np.sqrt(size)
    if kind == "orthogonal":
        return rotation
    if kind == "centred":
        basis = np.linalg.svd(np.ones((1, size)))[2][1:]
        small = np.linalg.qr(random.standard_normal((size - 1, size - 1)))[0]
        return basis.T @ small @ basis + 1 / size
    x, y = random.standard_normal(2)
    if kind == "unit complex":
        x, y = x / np.hypot(x, y), y / np.hypot(x, y)
    return np.array([[x, -y], [y, x]])


def _act(weights: Weights, symmetries: Any, element: dict[str, list[np.ndarray]]) -> Weights:
    if element["shifts"]:
        weights = shifted(weights, symmetries, element["shifts"])
    for kind in ("scalings", "signs"):
        weights = multiplied(weights, symmetries, kind, element[kind])
    if element["linear"]:
        weights = mixed(weights, symmetries, element["linear"])
    return permuted(weights, symmetries, element["permutations"])


def _offenders(symmetries, kind, run, weights, old, sizes, random) -> list[dict[str, Any]]:
    """Halve the groups of a kind until single wrong ones remain (at most twenty)."""
    element = _element(symmetries, (kind,), random)
    unit = _element(symmetries, (), random)[kind]
    pending, wrong = [list(range(len(unit)))], []
    while pending and len(wrong) < 20:
        part = pending.pop()
        some = [element[kind][k] if k in part else unit[k] for k in range(len(unit))]
        error = _error(old, run(_act(weights, symmetries, {**element, kind: some})), sizes)
        if error <= WRONG or not part:
            continue
        if len(part) == 1:
            group = getattr(symmetries, kind)[part[0]]
            wrong.append(
                {
                    "kind": kind,
                    "group": part[0],
                    "name": group.name,
                    "units": getattr(group, "units", getattr(group, "size", 0)),
                    "error": error,
                    "places": _places(symmetries, group),
                }
            )
        else:
            half = len(part) // 2
            pending += [part[:half], part[half:]]
    return wrong


def _places(symmetries: Any, group: Any) -> list[str]:
    axes = [symmetries.axes[p.axis] for p in group.placements]
    return [f"{a.tensor}[{a.dim}]" for a in axes]


def _size(old: np.ndarray, other: np.ndarray) -> float:
    """Root mean square of what other weights change; 0 for outputs that they leave alone."""
    visible = np.isfinite(old) & np.isfinite(other) & (np.abs(old) < 1e8)
    moved = (old - other)[visible]
    moved = moved[np.abs(moved) > 1e-12]
    return float(np.sqrt((moved**2).mean())) if moved.size else 0.0


def _error(old: list[np.ndarray], new: list[np.ndarray], sizes: list[float]) -> float:
    worst = 0.0
    for a, b, size in zip(old, new, sizes, strict=True):
        if size == 0:
            continue
        if (np.isfinite(a) != np.isfinite(b)).any():
            return float("inf")
        visible = np.isfinite(a) & (np.abs(a) < 1e8)
        worst = max(worst, float(np.abs(a - b)[visible].max(initial=0.0)) / size)
    return worst

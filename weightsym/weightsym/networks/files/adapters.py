"""Low-rank adapters of peft in folders: their sums as one adapter, or in the weights of a base."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weightsym.networks.files.drafts import draft_of
from weightsym.networks.files.fitting import are_finite
from weightsym.networks.files.loading import read_json
from weightsym.networks.files.safetensors_format import read_file, save_tensors
from weightsym.networks.files.stored import StoredNetwork
from weightsym.networks.files.writing import write_like

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_PARTS = re.compile(
    r"(?P<module>.+)\.(?P<part>lora_A\.weight|lora_B\.weight|lora_B\.bias|lora_embedding_A|"
    r"lora_embedding_B|lora_magnitude_vector)(\.weight)?"
)
_FOREIGN = (
    "use_qalora", "use_bdlora", "kasa_config", "arrow_config", "monteclora_config",
    "alora_invocation_tokens", "layer_replication", "trainable_token_indices", "target_parameters",
)  # fmt: skip
"""Options of peft under which a layer is more than its weight and a product."""
_CHANGE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Initialisations that also change the weights of the base."""


class LowRank(NamedTuple):
    r"""What an adapter adds to one weight, :math:`s B A`, and to the bias behind it.

    Attributes:
        down: A, of shape ``(rank, ...)``.
        up: B, of shape ``(channels, rank, ...)``.
        scale: s.
        bias: of B, or None.
        magnitude: norms of the rows of the changed weight (DoRA), or None.
        in_table: whether the weight is that of an embedding, ``(rows, channels)``.
    """

    down: Tensor
    up: Tensor
    scale: float
    bias: Tensor | None = None
    magnitude: Tensor | None = None
    in_table: bool = False

    @property
    def rank(self) -> int:
        """The number of inner channels."""
        return len(self.down)

    def change(self, weight: Tensor, transposed: bool) -> Tensor:
        """Return what is added to a weight.

        Args:
            weight: of the base.
            transposed: whether a linear weight has its inputs first.
        """
        product = self.scale * (_wide(self.up).flatten(1) @ _wide(self.down).flatten(1))
        turned = self.in_table or transposed
        delta = (product.mT if turned else product).reshape(weight.shape)
        if self.magnitude is None:
            return delta
        whole = weight + delta
        rows = whole.mT if turned else whole
        norms = rows.flatten(1).norm(dim=1)
        factors = (_wide(self.magnitude).flatten() / norms).reshape(-1, *(1,) * (rows.ndim - 1))
        return ((rows * factors).mT if turned else rows * factors) - weight


@dataclass(frozen=True, eq=False)
class Adapter:
    """An adapter of peft: LoRA, rsLoRA or DoRA.

    Attributes:
        path: its folder.
        config: its settings.
        layers: what is added to each module, by its name.
        plain: other trained tensors, which replace those of the base: biases, and modules that are
            saved whole.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> layer = LowRank(torch.randn(2, 5), torch.randn(3, 2), 4.0)
    >>> Adapter(folder, {"peft_type": "LORA"}, {"fc": layer}, {}).write(folder / "a")
    >>> one = Adapter.read(folder / "a")
    >>> twice = sum_of([one, one], [1.0, -1.0])
    >>> twice.layers["fc"].rank, compressed(twice, 1)[0].layers["fc"].rank
    (4, 1)
    """

    path: Path
    config: dict[str, Any]
    layers: dict[str, LowRank]
    plain: dict[str, Tensor]

    @classmethod
    def read(cls, path: Path) -> Adapter:
        """Read the folder of an adapter."""
        config = read_json(path / CONFIG)
        _check_kind(path, config)
        parts: dict[str, dict[str, Tensor]] = {}
        plain: dict[str, Tensor] = {}
        for key, stored in read_file(path / WEIGHTS).tensors.items():
            name, tensor = key.removeprefix(_PREFIX), stored.read().clone()
            if not are_finite(tensor):
                raise ValueError(f"{path}: {key!r} holds NaN or infinite values.")
            if found := _PARTS.fullmatch(name):
                parts.setdefault(found["module"], {})[found["part"]] = tensor
            elif "lora_" in name:
                raise ValueError(f"{path}: {key!r} belongs to an unsupported kind of adapter.")
            else:
                plain[name] = tensor
        layers = {name: _layer(path, name, part, config) for name, part in parts.items()}
        return cls(path, config, layers, plain)

    def change(self, name: str, weight: Tensor) -> Tensor:
        """Return what is added to a tensor of the base.

        Args:
            name: of the tensor.
            weight: the tensor.
        """
        module, _, leaf = name.rpartition(".")
        total, layer = torch.zeros_like(weight), self.layers.get(module)
        plain = self.plain.get(name, self.plain.get(f"{module}.base_layer.{leaf}"))
        if plain is not None:
            total = _wide(plain).reshape(weight.shape) - weight
        if layer is not None and leaf == "weight":
            total = total + layer.change(weight, bool(self.config.get("fan_in_fan_out")))
        if layer is not None and leaf == "bias" and layer.bias is not None:
            total = total + layer.scale * _wide(layer.bias)
        return total

    def write(self, target: Path) -> None:
        """Write a folder that peft reads."""
        with draft_of(target) as draft:
            draft.mkdir()
            text = json.dumps(self._settings(), indent=2, sort_keys=True)
            (draft / CONFIG).write_text(text, encoding="utf-8")
            save_tensors(draft / WEIGHTS, dict(self._tensors()), {"format": "pt"})

    def _settings(self) -> dict[str, Any]:
        """The configuration of layers of any rank, all of which have scale one when written."""
        ranks = {name: layer.rank for name, layer in self.layers.items()}
        largest = max(ranks.values(), default=1)
        others = {re.escape(n): rank for n, rank in ranks.items() if rank != largest}
        return self.config | {
            "peft_type": "LORA", "r": largest, "lora_alpha": largest, "use_rslora": False,
            "rank_pattern": others, "alpha_pattern": others, "target_modules": sorted(ranks),
            "exclude_modules": None, "layers_to_transform": None, "layers_pattern": None,
            "init_lora_weights": True, "inference_mode": True,
            "lora_bias": any(layer.bias is not None for layer in self.layers.values()),
        }  # fmt: skip

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, layer in self.layers.items():
            kind = "lora_embedding_{}" if layer.in_table else "lora_{}.weight"
            yield f"{_PREFIX}{name}.{kind.format('A')}", layer.down.contiguous()
            yield f"{_PREFIX}{name}.{kind.format('B')}", (layer.scale * layer.up).contiguous()
            if layer.bias is not None:
                yield f"{_PREFIX}{name}.lora_B.bias", layer.scale * layer.bias
            if layer.magnitude is not None:
                yield f"{_PREFIX}{name}.lora_magnitude_vector", layer.magnitude
        yield from ((_PREFIX + name, tensor) for name, tensor in self.plain.items())


def is_adapter(path: Path) -> bool:
    """Return whether a folder looks like an adapter of peft."""
    return (path / CONFIG).is_file()


def _check_kind(path: Path, config: dict[str, Any]) -> None:
    """Refuse adapters that are more than sums of products, and missing weights."""
    if config.get("peft_type") != "LORA":
        raise ValueError(f"{path} is an adapter of type {config.get('peft_type')!r}, not LORA.")
    foreign = [key for key in _FOREIGN if config.get(key)]
    if foreign:
        raise ValueError(f"{path} uses `{foreign[0]}`, and is more than a sum of products.")
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.startswith(_CHANGE_BASE):
        raise ValueError(
            f"{path} was initialised by {start!r}, which changes the base: convert it to plain "
            "LoRA with peft (`path_initial_model_for_weight_conversion`)."
        )
    if not (path / WEIGHTS).is_file():
        raise ValueError(f"{path} has no {WEIGHTS}; other formats are not read.")


def _layer(path: Path, name: str, part: dict[str, Tensor], config: dict[str, Any]) -> LowRank:
    in_table = "lora_embedding_A" in part
    kind = "lora_embedding_{}" if in_table else "lora_{}.weight"
    down, up = (part.get(kind.format(side)) for side in "AB")
    if down is None or up is None:
        raise ValueError(f"{path} is damaged: {name!r} has only one of two factors.")
    if down.ndim < 2 or up.ndim < 2 or up.shape[1] != len(down) or not len(down):
        raise ValueError(
            f"{path}: the factors of {name!r} have shapes {tuple(down.shape)} and "
            f"{tuple(up.shape)}, which are no product (layers in groups are not read)."
        )
    sides = [part.get("lora_B.bias"), part.get("lora_magnitude_vector")]
    whole = [t for t in (down, up, *sides) if t is not None and not t.is_floating_point()]
    if whole or any(t is not None and t.numel() != len(up) for t in sides):
        raise ValueError(f"{path} is damaged: {name!r} has tensors of another type or size.")
    rank, alpha = len(down), _alpha(name, config)
    scale = alpha / (rank**0.5 if config.get("use_rslora") else rank)
    return LowRank(
        down, up, scale, part.get("lora_B.bias"), part.get("lora_magnitude_vector"), in_table
    )


def _alpha(name: str, config: dict[str, Any]) -> float:
    """Return the alpha of a module: of the first pattern at its end, or of all."""
    patterns = config.get("alpha_pattern") or {}
    try:
        fitting = (p for p in patterns if re.fullmatch(rf"(.*\.)?({p})", name))
        alpha = float(patterns.get(next(fitting, None), config.get("lora_alpha", 8)))
    except (AttributeError, TypeError, ValueError, re.error) as error:
        raise ValueError(f"The alpha of {name!r} cannot be read: {error}.") from error
    if not math.isfinite(alpha):
        raise ValueError(f"The alpha of {name!r} is {alpha}.")
    return alpha


def _wide(t: Tensor) -> Tensor:
    return t if t.dtype == torch.float64 else t.float()


# ------------------------------------------------------------ sums
def sum_of(adapters: Sequence[Adapter], weights: Sequence[float]) -> Adapter:
    """Return one adapter that adds what several add together: its ranks are their sums.

    Args:
        adapters: at least one.
        weights: how often each is added, which may be negative.
    """
    first = adapters[0]
    for adapter in adapters:
        for name, layer in adapter.layers.items():
            if layer.magnitude is not None:
                raise ValueError(
                    f"{adapter.path} scales {name!r} by magnitudes (DoRA), so that its sum with "
                    "others is no adapter: pass `--base`."
                )
        if bool(adapter.config.get("fan_in_fan_out")) != bool(first.config.get("fan_in_fan_out")):
            raise ValueError(f"{adapter.path} and {first.path} differ in `fan_in_fan_out`.")
    names = dict.fromkeys(name for adapter in adapters for name in adapter.layers)
    layers = {}
    for name in names:
        having = [(a, w) for a, w in zip(adapters, weights, strict=True) if name in a.layers]
        layers[name] = _sum_of_layers(name, having)
    return Adapter(first.path, first.config, layers, _mean_of_plain(adapters, weights))


def _sum_of_layers(name: str, having: Sequence[tuple[Adapter, float]]) -> LowRank:
    parts = [(a.layers[name], w) for a, w in having]
    first = parts[0][0]
    for (adapter, _), (layer, _) in zip(having, parts, strict=True):
        fits = layer.down.shape[1:] == first.down.shape[1:] and layer.in_table == first.in_table
        if not fits or len(layer.up) != len(first.up):
            raise ValueError(f"{adapter.path} and {having[0][0].path} differ in shape at {name!r}.")
    up = torch.cat([w * layer.scale * _wide(layer.up) for layer, w in parts], 1)
    biases = [w * layer.scale * layer.bias for layer, w in parts if layer.bias is not None]
    bias = torch.stack(biases).sum(0) if biases else None
    down = torch.cat([_wide(layer.down) for layer, _ in parts])
    return LowRank(
        down.to(first.down.dtype), up.to(first.up.dtype), 1.0, bias, None, first.in_table
    )


def _mean_of_plain(adapters: Sequence[Adapter], weights: Sequence[float]) -> dict[str, Tensor]:
    """Return weighted means of trained tensors, which are sums of changes if weights add to one."""
    names = dict.fromkeys(name for adapter in adapters for name in adapter.plain)
    for name in names:
        lacking = [a for a in adapters if name not in a.plain]
        if lacking or abs(sum(weights) - 1) > 1e-6:
            why = f"{lacking[0].path} lacks it" if lacking else "the weights do not add up to one"
            raise ValueError(
                f"{name!r} is trained as a whole, and {why}, so that its change is unknown: pass "
                "`--base`."
            )
    return {
        name: torch.stack(
            [w * _wide(a.plain[name]) for a, w in zip(adapters, weights, strict=True)]
        ).sum(0).to(adapters[0].plain[name].dtype)
        for name in names
    }  # fmt: skip


def compressed(adapter: Adapter, rank: int) -> tuple[Adapter, float]:
    r"""Return the closest adapter of a rank, and the relative error of its products.

    Singular values of :math:`B A` are those of a matrix as small as the rank, since
    :math:`B = Q R` and :math:`A^T = P S` with orthogonal columns: :math:`B A = Q (R S^T) P^T`.

    Args:
        adapter: with layers of any rank.
        rank: largest rank of a layer.
    """
    layers, dropped, total = {}, 0.0, 0.0
    for name, layer in adapter.layers.items():
        q, r = torch.linalg.qr(layer.up.flatten(1).double())
        p, s = torch.linalg.qr(layer.down.flatten(1).double().mT)
        left, values, right = torch.linalg.svd(r @ s.mT, full_matrices=False)
        squares = (layer.scale * values).square()
        total, dropped = total + float(squares.sum()), dropped + float(squares[rank:].sum())
        roots = values[:rank].sqrt()
        up, down = q @ (left[:, :rank] * roots), (roots[:, None] * right[:rank]) @ p.mT
        layers[name] = layer._replace(
            down=down.reshape(-1, *layer.down.shape[1:]).to(layer.down.dtype),
            up=up.reshape(len(layer.up), -1, *layer.up.shape[2:]).to(layer.up.dtype),
        )
    return replace(adapter, layers=layers), (dropped / total) ** 0.5 if total else 0.0


# ------------------------------------------------------------ into a base
def write_into(
    base: StoredNetwork,
    adapters: Sequence[Adapter],
    weights: Sequence[float],
    target: Path,
    overwrite: bool = False,
) -> None:
    """Write the base with adapters in its weights, tensor by tensor.

    Args:
        base: a file or a folder of Hugging Face.
        adapters: what is added.
        weights: how often each is added.
        target: of the form of the base.
        overwrite: whether what is there may be replaced.
    """
    changes: dict[str, list[tuple[Adapter, str, float]]] = {}
    for adapter, weight in zip(adapters, weights, strict=True):
        wanted = [f"{name}.weight" for name in adapter.layers]
        wanted += [f"{n}.bias" for n, layer in adapter.layers.items() if layer.bias is not None]
        wanted += [name.replace(".base_layer.", ".") for name in adapter.plain]
        for name in dict.fromkeys(wanted):
            place = _place(name, base, adapter)
            changes.setdefault(place, []).append((adapter, name, weight))
    write_like(base, target, partial(_changed, base, changes), overwrite)


def _place(name: str, base: StoredNetwork, adapter: Adapter) -> str:
    """Return the name in the base of a tensor of an adapter, which may have other first parts."""
    if name in base.tensors:
        return name
    found = [n for n in base.tensors if n.endswith(f".{name}") or name.endswith(f".{n}")]
    if len(found) != 1:
        there = f"{len(found)} tensors of that name" if found else f"no {name!r}"
        raise ValueError(f"{base.path} has {there}, which {adapter.path} changes.")
    return found[0]


def _changed(
    base: StoredNetwork, changes: Mapping[str, list[tuple[Adapter, str, float]]], place: str
) -> Tensor:
    """Return one tensor of the base, changed by all adapters."""
    stored = base.read(place)
    if place not in changes:
        return stored
    weight = _wide(stored)
    total = weight.clone()
    for adapter, name, weigh in changes[place]:
        try:
            total += weigh * adapter.change(name, weight)
        except RuntimeError as error:  # of shapes
            raise ValueError(
                f"{adapter.path} and {base.path} differ in shape at {name!r}."
            ) from error
    result = total.to(stored.dtype)
    if not are_finite(result):
        raise ValueError(f"{place!r} with the adapters is too large for {stored.dtype}.")
    return result

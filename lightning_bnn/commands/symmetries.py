"""`lightning-bnn symmetries`: print what can be permuted, rescaled and flipped in a network."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_bnn import params as P
from lightning_bnn.params import Params
from lightning_bnn.symmetry import Symmetries, discover, min_mass, verify

__all__ = ["symmetries"]


def symmetries(
    network: str,
    input: str = "",
    init: dict[str, Any] | None = None,
    checkpoint: str | None = None,
    batch_norm: Literal["carrier", "eval"] = "carrier",
    seed: int = 0,
) -> None:
    """Print the groups, their counts, what is frozen and why, the masses, the verified error.

    Args:
        network: import path of a class or function that returns a network, e.g.
            torchvision.models.resnet18; modules in the current folder are found too.
        input: shape of the input, e.g. 1,3,224,224; with a type after a colon, e.g. 2,16:int64;
            several separated by ;
        init: arguments of the class, e.g. --init.num_classes 10
        checkpoint: weights to read: a Lightning .ckpt, a state dict (.pt, .pth) or .safetensors.
        batch_norm: carrier holds the weights before a batch norm; eval treats it as a fixed affine
            map.
        seed: of the initialisation and of the example input.
    """
    torch.manual_seed(seed)
    example = _example(input)
    model = _build(network, init or {})
    if checkpoint is not None:
        _load(model, Path(checkpoint))
    started = time.perf_counter()
    sym = discover(model, *example, batch_norm=batch_norm)
    seconds = time.perf_counter() - started
    print(_report(network, model, sym, example, seconds))


def _report(
    network: str, model: nn.Module, sym: Symmetries, example: tuple[Tensor, ...], seconds: float
) -> str:
    params = P.of(model)
    weights = sum(params[n].numel() for n in P.weight_names(model))
    error = verify(model.eval(), sym, *example)
    lines = [f"{network}: {weights} weights, read in {seconds:.1f} s", "", str(sym), ""]
    if not sym.frozen:
        lines.append("frozen:               nothing")
    lines.append(f"error of a random element of the whole group: {error:.1e} (relative, float64)")
    if sym.scaling_dof:
        found = min_mass(params, sym)
        lines += [
            f"mass:                 {float(found.mass):.6g}",
            f"minimum mass:         {float(found.minimum):.6g}"
            f"  (excess {float(found.excess):.3g} %, certified to {float(found.gap):.0e})",
        ]
        if int(found.dead):
            lines.append(f"dead units:           {int(found.dead)}")
    return "\n".join(lines)


# ------------------------------------------------------------ input
def _example(text: str) -> tuple[Tensor, ...]:
    if not text:
        raise ValueError(
            "`--input` is missing: give the shape of the input, e.g. --input 1,3,224,224"
        )
    return tuple(_tensor(part) for part in text.split(";"))


def _tensor(text: str) -> Tensor:
    shape, _, kind = text.partition(":")
    dtype = getattr(torch, kind or "float32", None)
    try:
        sizes = [int(n) for n in shape.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1 or not isinstance(dtype, torch.dtype):
        raise ValueError(
            f"`--input` must be positive sizes with an optional type, like 1,3,224,224 or "
            f"2,16:int64, got {text!r}."
        )
    return (
        torch.randn(sizes, dtype=dtype)
        if dtype.is_floating_point
        else torch.randint(0, 2, sizes).to(dtype)
    )


# ------------------------------------------------------------ network
def _build(path: str, init: Mapping[str, Any]) -> nn.Module:
    factory = _import(path)
    if not callable(factory):
        raise ValueError(
            f"`{path}` is a {type(factory).__name__}, not a class or function that returns a "
            "network."
        )
    try:
        model = factory(**init)
    except TypeError as error:
        raise ValueError(
            f"`{path}` cannot be called with {dict(init)}: {error}. Pass its arguments by --init."
        ) from error
    if not isinstance(model, nn.Module):
        raise ValueError(f"`{path}` returned a {type(model).__name__}, not a torch.nn.Module.")
    return model


def _import(path: str) -> Any:
    if "" not in sys.path:
        sys.path.insert(0, "")
    module, _, name = path.replace(":", ".").rpartition(".")
    if not module:
        raise ValueError(f"`{path}` is no import path: write package.module.Class.")
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        raise ValueError(f"`{path}` cannot be imported: {error}.") from error
    except AttributeError as error:
        raise ValueError(f"There is no {name!r} in `{module}`.") from error


# ------------------------------------------------------------ checkpoint
def _load(model: nn.Module, path: Path) -> None:
    """Load a state dict, under its own names or behind one common prefix."""
    if not path.is_file():
        raise ValueError(f"`--checkpoint`: there is no file {path}.")
    state = _read(path)
    wanted = P.of(model)
    prefix = _prefix(state, wanted)
    found = {n.removeprefix(prefix): t for n, t in state.items() if n.startswith(prefix)}
    missing = [n for n in wanted if n not in found]
    if missing:
        raise ValueError(
            f"`--checkpoint`: {path} lacks {missing[0]!r} and {len(missing) - 1} more names of "
            "the network."
        )
    for name, tensor in wanted.items():
        if found[name].shape != tensor.shape:
            raise ValueError(
                f"`--checkpoint`: {name!r} has shape {tuple(found[name].shape)} in {path}, "
                f"the network has {tuple(tensor.shape)}."
            )
    model.load_state_dict(found, strict=False)


def _prefix(state: Params, wanted: Params) -> str:
    first = next(iter(wanted))
    ends = [n for n in state if n == first or n.endswith(f".{first}")]
    return min(ends, key=len).removesuffix(first) if ends else ""


def _read(path: Path) -> Params:
    if path.suffix == ".safetensors":
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            return load_file(path)
        except SafetensorError as error:
            raise ValueError(f"`--checkpoint`: {path} is no safetensors file: {error}.") from error
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(
            f"`--checkpoint`: {path} holds no plain tensors that torch can read."
        ) from error
    state = content.get("state_dict", content) if isinstance(content, dict) else None
    if not state or not all(isinstance(t, Tensor) for t in state.values()):
        raise ValueError(
            f"`--checkpoint`: {path} is not a state dict: it must map names to tensors."
        )
    return {n.replace("_orig_mod.", ""): t for n, t in state.items()}

"""Networks in files: Lightning checkpoints, state dicts, safetensors; names behind a prefix."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_bnn.loading import load
from lightning_bnn.params import Params

__all__ = ["FORMATS", "find_prefix", "natural_order", "read_state", "strip_prefix"]

FORMATS = (".ckpt", ".pt", ".pth", ".safetensors")
_NESTED = ("state_dict", "model_state_dict", "model")


def read_state(path: Path, mmap: bool = False) -> tuple[Params, dict[str, Any]]:
    """The tensors of a file by name, and the step and epoch if the file has them.

    Args:
        path: a file of one of `FORMATS`.
        mmap: leave tensors that torch has written on the disk until they are used.

    >>> import tempfile
    >>> import torch
    >>> path = Path(tempfile.mkdtemp()) / "run.ckpt"
    >>> torch.save({"state_dict": {"net.w": torch.ones(2)}, "global_step": 30, "epoch": 2}, path)
    >>> read_state(path)
    ({'net.w': tensor([1., 1.])}, {'step': 30, 'epoch': 2})
    """
    if path.suffix == ".safetensors":
        return _read_safetensors(path), {}
    content = load(path, mmap=mmap)
    content = content if isinstance(content, dict) else {}
    nested = (content[key] for key in _NESTED if isinstance(content.get(key), dict))
    state = next(nested, content)
    if not state or not all(isinstance(n, str) and isinstance(t, Tensor) for n, t in state.items()):
        raise ValueError(f"{path} is not a state dict: it must map names to tensors.")
    numbers = {"global_step": "step", "epoch": "epoch"}
    record = {to: content[key] for key, to in numbers.items() if isinstance(content.get(key), int)}
    return {name.replace("_orig_mod.", ""): t for name, t in state.items()}, record


def _read_safetensors(path: Path) -> Params:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is no safetensors file: {error}.") from error


def strip_prefix(state: Params, prefix: str, wanted: Sequence[str] | None = None) -> Params:
    """The tensors whose names start with a prefix, without it; only those wanted.

    >>> import torch
    >>> state = {"net.w": torch.ones(1), "net.b": torch.zeros(1), "loss.w": torch.ones(3)}
    >>> strip_prefix(state, "net."), list(strip_prefix(state, "net.", wanted=["w"]))
    ({'w': tensor([1.]), 'b': tensor([0.])}, ['w'])
    """
    inner = {n.removeprefix(prefix): t for n, t in state.items() if n.startswith(prefix)}
    return inner if wanted is None else {name: inner[name] for name in wanted}


def find_prefix(path: Path, state: Params, wanted: Mapping[str, Tensor], given: str | None) -> str:
    """The one prefix with which all names and shapes of a network are in a file.

    >>> import torch
    >>> net = torch.nn.Linear(2, 1)
    >>> state = {f"model.net.{name}": t for name, t in net.state_dict().items()}
    >>> find_prefix(Path("run.ckpt"), state, net.state_dict(), given=None)
    'model.net.'
    """
    first = next(iter(wanted))
    candidates = sorted({n[: -len(first)] for n in state if n == first or n.endswith(f".{first}")})
    candidates = candidates if given is None else [given]
    fitting = [p for p in candidates if _misfit(state, wanted, p) is None]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise ValueError(
            f"Several networks in {path} fit: {', '.join(map(repr, fitting))}. "
            "Choose one by its `prefix`."
        )
    misfits = [_misfit(state, wanted, p) for p in candidates] or [_misfit(state, wanted, "")]
    raise ValueError(f"{path} does not fit: {misfits[0]}.")


def _misfit(state: Params, wanted: Mapping[str, Tensor], prefix: str) -> str | None:
    missing = [n for n in wanted if prefix + n not in state]
    if missing:
        more = f" and {len(missing) - 1} more names" if len(missing) > 1 else ""
        return f"it lacks {prefix + missing[0]!r}{more}"
    for name, tensor in wanted.items():
        shape = tuple(state[prefix + name].shape)
        if shape != tensor.shape:
            return f"{prefix + name!r} has shape {shape}, the network has {tuple(tensor.shape)}"
    return None


def natural_order(path: Path) -> list[tuple[int, str]]:
    """A sort key that puts epoch=9 before epoch=10."""
    pieces = re.split(r"(\d+)", path.as_posix())
    return [(int(p), "") if p.isdigit() else (-1, p) for p in pieces if p]

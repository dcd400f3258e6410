"""`weightsym symmetries`: print what can be permuted, rescaled and flipped in a network."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from weightsym import Symmetries, discover, min_mass, verify
from weightsym import params as P
from weightsym.commands.architecture import Architecture
from weightsym.commands.networks import build, fit_all
from weightsym.files import NetworkNames, open_network
from weightsym.networks.files.stored import is_hugging_face


def symmetries(
    network: str,
    input: str = "",
    init: dict[str, Any] | None = None,
    checkpoint: str | None = None,
    prefix: str | None = None,
    batch_norm: Literal["carrier", "eval"] = "carrier",
    seed: int = 0,
    explain: str | None = None,
) -> None:
    """Print the symmetries of a network, what is held fixed and why, its mass and the error.

    Args:
        network: import path of a class or function that returns a network, e.g.
            torchvision.models.resnet18, also of a module in the current folder; a configuration
            for fit (.yaml); or a folder of Hugging Face, if transformers is installed.
        input: shape of the input, e.g. 1,3,224,224; a type may follow a colon, e.g. 2,16:int64;
            separate several inputs by ; (found automatically for configurations and folders).
        init: arguments of the class, e.g. --init.num_classes 10
        checkpoint: file with the weights: a Lightning .ckpt, a state dict (.pt, .pth) or
            .safetensors; by default those of the folder.
        prefix: prefix of the network's tensor names in the checkpoint, dot included, e.g. net.
            (found automatically if only one fits).
        batch_norm: carrier leaves the weights before a batch norm alone; eval treats the norm as a
            fixed affine map.
        seed: random seed of the initialisation and the example input.
        explain: name of a tensor; print the operations that tie its units or hold them instead.
    """
    folder = Path(network) if is_hugging_face(Path(network)) else None
    named = Architecture(None if folder else network, input, init, seed=seed)
    model, example, names = build(named, folder)
    weights = folder if checkpoint is None else Path(checkpoint)
    source = _load(model, names, weights, prefix) if weights is not None else ""
    started = time.perf_counter()
    sym = discover(model, *example, batch_norm=batch_norm, explain=explain)
    seconds = time.perf_counter() - started
    if explain is not None:
        return
    if source:
        print(source)
    print(_report(network, model, sym, example, seconds))


def _report(
    network: str, model: nn.Module, sym: Symmetries, example: tuple[Tensor, ...], seconds: float
) -> str:
    params = P.of(model)
    weights = sum(params[n].numel() for n in P.weight_names(model))
    error = verify(model.eval(), sym, *example)
    checked = "not checked, see above" if math.isnan(error) else f"{error:.1e} (relative, float64)"
    lines = [
        f"{network}: {weights} weights, read in {seconds:.1f} s",
        "",
        str(sym),
        "",
        *([] if sym.frozen else ["frozen:               nothing"]),
        f"error of a random element of the whole group: {checked}",
        *(_masses(params, sym) if sym.scaling_dof else []),
    ]
    return "\n".join(lines)


def _masses(params: P.Params, sym: Symmetries) -> list[str]:
    smallest = min_mass(params, sym)
    lines = [
        f"mass:                 {float(smallest.mass):.6g}",
        f"minimum mass:         {float(smallest.minimum):.6g}"
        f"  (excess {float(smallest.excess):.3g} %, certified to {float(smallest.gap):.0e})",
    ]
    if not bool(smallest.attained):
        lines.append("                      (a limit: no finite scales reach it)")
    if int(smallest.dead):
        lines.append(f"dead units:           {int(smallest.dead)}")
    return lines


def _load(model: nn.Module, names: NetworkNames, path: Path, prefix: str | None) -> str:
    """Load the weights of a file, whose names may have a common prefix, and say so."""
    (file,) = fit_all([open_network(path)], names, prefix, "copy")
    model.load_state_dict({name: file.number(name) for name in file.places}, strict=False)
    first = next(iter(file.places))
    start = file.places[first].removesuffix(first)
    return f"weights from {path}" + (f", names behind {start!r}" if start else "")

"""`weightsym symmetries`: print the permutations, scales and signs of a network."""

from __future__ import annotations

import math
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from torch import nn

from weightsym import MinMass, Outcome, Symmetries, min_mass, verify
from weightsym import params as P
from weightsym.commands.architecture import Architecture
from weightsym.commands.networks import build, fit_all, symmetries_in
from weightsym.files import open_network
from weightsym.networks.files.fitting import FittedNetwork
from weightsym.networks.files.stored import has_weights, is_hugging_face

_LARGE = 2**27
"""Number of weights above which those in files stay there, and their mass is not computed."""


def symmetries(
    network: str,
    input: str = "",
    init: dict[str, Any] | None = None,
    checkpoint: str | None = None,
    prefix: str | None = None,
    batch_norm: Literal["carrier", "eval"] = "carrier",
    seed: int = 0,
    explain: str | None = None,
) -> Outcome:
    """Print the symmetries of a network, fixed operations with reasons, the mass and the error.

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
        batch_norm: carrier leaves the weights before a batch norm unchanged; eval treats the norm
            as a fixed affine map.
        seed: random seed of the initialisation and the example input.
        explain: name of a tensor; print the operations that tie or fix its units instead.
    """
    folder = Path(network) if is_hugging_face(Path(network)) else None
    named = Architecture(None if folder else network, input, init, seed=seed)
    model, example, names = build(named, folder)
    source = folder if checkpoint is None else Path(checkpoint)
    if source is not None and is_hugging_face(source) and not has_weights(source):
        source = None  # symmetries need none
    files = [] if source is None else fit_all([open_network(source)], names, prefix, "copy")
    for file in files:
        _load(model, file)
    started = time.perf_counter()
    sym = symmetries_in(model, *example, batch_norm=batch_norm, explain=explain)
    seconds = time.perf_counter() - started
    if explain is not None:
        return Outcome({"network": network, "explained": explain})
    params = P.of(model)
    weights = sum(params[n].numel() for n in P.weight_names(model))
    print(*map(_described, files), sep="\n", end="\n" * len(files))
    print(f"{network}: {weights} weights, read in {seconds:.1f} s\n\n{sym}\n")
    if not sym.frozen:
        print("frozen:               nothing")
    empty = [name for name, t in params.items() if t.is_meta]
    error, at_random = sym.error, ", at random weights" if empty else ""
    if not empty:
        error = verify(model.eval(), sym, *example)
    checked = f"{error:.1e} (relative, float64{at_random})"
    checked = "not checked, see above" if math.isnan(error) else checked
    print(f"error of a random element of the whole group: {checked}")
    if files and weights <= _LARGE:
        params |= {name: files[0].number(name) for name in empty}
    content = _content(network, weights, sym, error)
    if sym.scaling_dof and not any(t.is_meta for t in params.values()):
        smallest = min_mass(params, sym)
        print(*_masses(smallest), sep="\n")
        content |= {"mass": float(smallest.mass), "least mass": float(smallest.minimum)}
    return Outcome(content)


def _load(model: nn.Module, file: FittedNetwork) -> None:
    """Load the tensors of a network into memory."""
    in_file = [name for name, t in P.of(model).items() if name in file.places and not t.is_meta]
    model.load_state_dict({name: file.number(name) for name in in_file}, strict=False)


def _content(network: str, weights: int, sym: Symmetries, error: float) -> dict[str, Any]:
    """Return the groups and their checks as plain data."""
    kinds = {"permutations": sym.permutations, "scalings": sym.scalings, "signs": sym.signs}
    groups = {
        kind: [{"name": g.name, "units": g.units} for g in found] for kind, found in kinds.items()
    }
    linear = [{"name": g.name, "kind": g.kind, "size": g.size} for g in sym.linear]
    frozen = [asdict(operation) for operation in sym.frozen]
    return {
        "network": network, "weights": weights, **groups, "linear": linear,
        "log10_permutations": sym.log10_permutations, "scaling_dof": sym.scaling_dof,
        "frozen": frozen, "error": error,
    }  # fmt: skip


def _masses(smallest: MinMass) -> list[str]:
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


def _described(file: FittedNetwork) -> str:
    """Describe the source of the weights, and the prefix of their names."""
    first = next(iter(file.places))
    prefix = file.places[first].removesuffix(first)
    return f"weights from {file.stored.path}" + (f", names behind {prefix!r}" if prefix else "")

"""Export of a reference in the format of posteriordb."""

from __future__ import annotations

import datetime
import itertools
import os
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_bnn.metrics.convergence import (
    effective_sample_size,
    rhat,
    tail_effective_sample_size,
)
from lightning_bnn.references.shipped import read_reference, reference_folder
from weightsym import params as P
from weightsym.files import json_text, read_settings

_COMMENTS = (
    "Weights of a neural network: permutations of its units, and for some activations "
    "signs and scales, preserve the posterior, so that raw weights mix far more slowly "
    "than functions."
)


def posteriordb(name: str, folder: str) -> None:
    """Write a reference in the format of posteriordb: information, data, draws, diagnostics.

    Args:
        name: name of the reference, such as digits.
        folder: a database, possibly with other posteriors; files of the same names are replaced.
    """
    files = export_posteriordb(name, folder)
    print(f"wrote {len(files)} files to {Path(folder).resolve()}")


def export_posteriordb(name: str, folder: str | os.PathLike[str]) -> list[Path]:
    """Write a reference in the format of posteriordb, readable by its packages for Python and R.

    Args:
        name: of the reference.
        folder: a database, possibly with other posteriors; files of the same names are replaced.

    Returns:
        The files: information on posterior, model, data and draws, the data, and the draws.

    >>> import tempfile
    >>> len(export_posteriordb("two_gaussians", tempfile.mkdtemp()))
    7
    """
    stored, problem, card = read_reference(name)
    chains = stored.stacks()
    names = [n for n in P.weight_names(problem.network) if n in chains[0]]
    labels = [label for n in names for label in _labels(n, chains[0][n].shape[1:])]
    draws = torch.stack([P.ravel(chain, names, stacked=True)[0].double() for chain in chains])
    inputs, targets = zip(*problem.training_set(10**9), strict=True)
    model, full = f"{name}_network", f"{name}-{name}_network"
    added = {"added_by": "lightning_bnn", "added_date": str(datetime.date.today())}
    about = {"title": card.about, "description": f"{card.about} ({card.licence})", **added}
    data = {"x": torch.cat(inputs).tolist(), "y": torch.cat(targets).tolist()}
    content: dict[str, Any] = {
        f"posteriors/{full}.json": {
            "name": full,
            "model_name": model,
            "data_name": name,
            "reference_posterior_name": full,
            "dimensions": {n: chains[0][n][0].numel() for n in names},
            "keywords": ["neural network"],
            **added,
        },
        f"data/info/{name}.info.json": {
            "name": name,
            "data_file": f"data/data/{name}.json",
            **about,
        },
        f"data/data/{name}.json.zip": {"N": len(data["x"]), **data},
        f"models/info/{model}.info.json": {
            "name": model,
            "model_implementations": {
                "lightning_bnn": {"model_code": f"models/lightning_bnn/{model}.json"}
            },
            **about,
        },
        f"models/lightning_bnn/{model}.json": read_settings(reference_folder(name) / "config.yaml"),
        f"reference_posteriors/draws/info/{full}.info.json": {
            "name": full,
            "inference": {
                "method": card.made["sampler"],
                "method_arguments": {**card.made["settings"], "chains": len(draws)},
            },
            **_diagnostics(draws, labels),
            "comments": _COMMENTS,
            **added,
            "versions": {"lightning_bnn": card.made["versions"]},
        },
        f"reference_posteriors/draws/draws/{full}.json.zip": [
            dict(zip(labels, chain.T.tolist(), strict=True)) for chain in draws
        ],
    }
    return [_written(Path(folder) / path, value) for path, value in content.items()]


def _labels(name: str, shape: torch.Size) -> list[str]:
    """Name the entries of a tensor as Stan does, counted from one."""
    places = itertools.product(*(range(1, size + 1) for size in shape))
    return [f"{name}[{','.join(map(str, place))}]" if place else name for place in places]


def _diagnostics(draws: Tensor, labels: list[str]) -> dict[str, Any]:
    """Return the diagnostics that posteriordb requires for every number."""
    bulk, tail, reduction = (
        f(draws) for f in (effective_sample_size, tail_effective_sample_size, rhat)
    )
    count = draws[..., 0].numel()
    return {
        "diagnostics": {
            "diagnostic_information": {"names": labels},
            "ndraws": count,
            "nchains": len(draws),
            "effective_sample_size_bulk": bulk.tolist(),
            "effective_sample_size_tail": tail.tolist(),
            "r_hat": reduction.tolist(),
        },
        "checks_made": {
            "ndraws_is_10k": count == 10_000,
            "nchains_is_gte_4": len(draws) >= 4,
            "r_hat_below_1_01": bool((reduction < 1.01).all()),
        },
    }


def _written(path: Path, content: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json_text(content) + "\n"
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(path.stem, text)
    else:
        path.write_text(text, encoding="utf-8")
    return path

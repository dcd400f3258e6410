"""Posteriors, banks and references on the Hub of Hugging Face: tensors, JSON and a card."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

from lightning_bnn.bank import CheckpointBank
from lightning_bnn.bank.shipped import digest_of_networks, missing_data
from lightning_bnn.bundles import INDEX, TENSORS, read_bundle, write_bundle
from lightning_bnn.posteriors import Posterior
from lightning_bnn.posteriors.base import check_fit
from lightning_bnn.posteriors.saving import posterior_of
from lightning_bnn.references.cards import Card
from lightning_bnn.references.shipped import reference_folder, reference_names
from weightsym import needed
from weightsym.files import json_text, read_json, read_settings
from weightsym.params import Params, stack_size

__all__ = ["from_hub", "push_to_hub", "write_folder"]

_CARD = """\
---
{metadata}---
# {title}

{about}

```python
from lightning_bnn.hub import from_hub

{load}
```

Made with lightning_bnn. The files are safetensors and JSON with their SHA-256; loading them runs no
code.
"""
_TYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
_LOAD = {
    "posterior": 'posterior = from_hub("{title}", network=network)  # a module of its kind',
    "bank": 'bank = from_hub("{title}", folder="bank")  # where its networks are written',
    "reference": 'draws = from_hub("{title}", folder="reference")  # and its card, to this folder',
}


def push_to_hub(
    source: Posterior | CheckpointBank | str | os.PathLike[str],
    repo_id: str,
    *,
    about: str = "",
    licence: str | None = None,
    revision: str | None = None,
    token: bool | str | None = None,
    private: bool | None = None,
    commit_message: str | None = None,
) -> str:
    """Upload a posterior, a bank or a reference, with a card, to a repository that may be new.

    Args:
        source: see `write_folder`.
        repo_id: ``user/name``.
        about: what it is of, for the card.
        licence: its identifier on the Hub, such as ``"apache-2.0"``, for the card.
        revision: a branch that exists; by default the main one.
        token: of the Hub; by default the one of ``hf auth login``.
        private: whether a new repository is private.
        commit_message: by default it says what was uploaded.

    Returns:
        The address of the commit.

    >>> push_to_hub("digits", "user/digits-hmc", licence="apache-2.0")  # doctest: +SKIP
    'https://huggingface.co/user/digits-hmc/commit/...'
    """
    with needed("push_to_hub"):
        from huggingface_hub import HfApi
    api = HfApi(token=token, library_name="lightning_bnn")
    with tempfile.TemporaryDirectory() as folder:
        kind = write_folder(source, folder, title=repo_id, about=about, licence=licence)
        repo = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        commit = api.upload_folder(
            repo_id=repo,
            folder_path=folder,
            revision=revision,
            commit_message=commit_message or f"Upload {kind} with lightning_bnn",
            delete_patterns=[TENSORS],  # those of what was there before
        )
    return str(commit.commit_url)


def from_hub(
    repo_id: str | os.PathLike[str],
    *,
    revision: str | None = None,
    token: bool | str | None = None,
    network: nn.Module | None = None,
    folder: str | os.PathLike[str] | None = None,
) -> Posterior | CheckpointBank:
    """Get what `push_to_hub` has uploaded. Other files of the repository are not downloaded.

    Args:
        repo_id: ``user/name``, or a folder of `write_folder`.
        revision: a branch, a tag or the hash of a commit, which pins what you get.
        token: of the Hub; by default the one of ``hf auth login``.
        network: refuse networks of another kind than this one.
        folder: where the networks of a bank or of a reference are written, which is new.

    Returns:
        A posterior; or a bank, which for a reference holds its draws, beside ``card.json`` and the
        configuration ``config.json``. That one is a program, see SECURITY.md: read it before use.

    >>> from lightning_bnn.posteriors import DiagonalGaussian
    >>> folder = tempfile.mkdtemp()
    >>> write_folder(DiagonalGaussian({"w": torch.zeros(3)}), folder)
    'posterior'
    >>> from_hub(folder)
    DiagonalGaussian(3 weights)
    """
    if Path(repo_id).is_dir():
        return _opened(Path(repo_id), network, folder)
    with needed("from_hub"):
        from huggingface_hub import snapshot_download
        from huggingface_hub.utils import HFValidationError
    try:
        snapshot = snapshot_download(
            os.fspath(repo_id),
            revision=revision,
            token=token,
            library_name="lightning_bnn",
            allow_patterns=[INDEX, TENSORS, "README.md"],
        )
    except HFValidationError:
        raise ValueError(
            f"`repo_id` must be user/name, or a folder that is there, got {os.fspath(repo_id)!r}."
        ) from None
    return _opened(Path(snapshot), network, folder)


def write_folder(
    source: Posterior | CheckpointBank | str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    title: str = "",
    about: str = "",
    licence: str | None = None,
) -> str:
    """Write what `push_to_hub` uploads: tensors, ``contents.json`` and a card.

    Args:
        source: a posterior that can be saved, see `Posterior.save`; a bank; or the name of a
            reference, or the folder of one that ``lightning-bnn reference`` has made.
        folder: where no other is; it is made.
        title: of the card.
        about: what it is of.
        licence: its identifier on the Hub.

    Returns:
        ``"posterior"``, ``"bank"`` or ``"reference"``.

    >>> folder = Path(tempfile.mkdtemp())
    >>> write_folder("two_gaussians", folder, about="For a first look.")
    'reference'
    >>> sorted(path.name for path in folder.iterdir())
    ['README.md', 'contents.json', 'tensors-00000.safetensors']
    """
    root = Path(folder)
    if isinstance(source, Posterior):
        source.save(root)
        kind, summary = "posterior", f"A posterior over the weights of a network: {source}."
    elif isinstance(source, CheckpointBank):
        kind, summary = "bank", _write_bank(source, root, {})
    else:
        if not isinstance(source, (str, os.PathLike)):
            raise ValueError(
                "`source` must be a posterior (`Posterior.of` makes one of networks), a bank, or "
                f"the name or folder of a reference, got a {type(source).__name__}."
            )
        name = os.fspath(source)
        path = reference_folder(name) if name in reference_names() else Path(name)
        kind, summary = "reference", _write_reference(path, root)
    tags = ["bayesian-neural-networks", "lightning_bnn", kind]
    metadata = {"library_name": "lightning_bnn", "tags": tags}
    metadata |= {} if licence is None else {"license": licence}
    text = _CARD.format(
        metadata=yaml.safe_dump(metadata, sort_keys=False),
        title=title or root.name,
        about="\n\n".join(filter(None, (about, summary))),
        load=_LOAD[kind].format(title=title or root.name),
    )
    (root / "README.md").write_text(text, encoding="utf-8")
    return kind


# ------------------------------------------------------------ banks and references
def _write_bank(bank: CheckpointBank, root: Path, more: dict[str, Any]) -> str:
    content = {
        "kind": "bank",
        "order": list(bank.names),
        "weights": list(bank.shapes),
        "stored_as": bank.stored_as and str(bank.stored_as).removeprefix("torch."),
        "records": bank.records,
    }
    if not len(bank):
        raise ValueError(f"{bank!r} holds no network.")
    write_bundle(root, content | more, bank.blocks())
    size = sum(shape.numel() for shape in bank.shapes.values())
    return f"A bank of {len(bank)} networks of {size} weights, one row of every tensor each."


def _write_reference(path: Path, root: Path) -> str:
    if not (path / "card.json").is_file():
        names = ", ".join(reference_names())
        if not names:
            raise missing_data(f"`source`: {path} is no folder, and a reference")
        raise ValueError(
            f"`source`: {path} is no folder of a reference, which has a card.json; choose from "
            f"{names}."
        )
    card = Card.read(path / "card.json")
    more = {
        "kind": "reference",
        "card": read_json(path / "card.json"),
        "configuration": read_settings(path / "config.yaml"),
    }
    summary = _write_bank(CheckpointBank(path / "bank", "r"), root, more)
    return (
        f"{card.about[:1].upper()}{card.about[1:]} ({card.verdict}; {card.licence}).\n\n{summary}"
    )


def _opened(
    path: Path, network: nn.Module | None, folder: str | os.PathLike[str] | None
) -> Posterior | CheckpointBank:
    content, parts = read_bundle(path)
    kind = content["kind"]
    if kind == "posterior":
        return posterior_of(content, parts, network)
    if kind not in ("bank", "reference"):
        raise ValueError(f"{path} holds {kind!r}, which this version does not know.")
    if folder is None:
        raise ValueError("`folder` is missing: name a new one, where the networks are written.")
    root = Path(folder)
    if root.exists() and (not root.is_dir() or any(root.iterdir())):
        raise ValueError(f"`folder`: there is something in {root}; name a new one.")
    try:
        bank = (_read_bank if kind == "bank" else _read_reference)(content, parts, root)
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        shutil.rmtree(root, ignore_errors=True)
        raise ValueError(f"{path} is damaged, it makes no {kind}: {error}") from None
    if network is not None:
        try:
            check_fit(bank[:1], network)
        except ValueError:
            shutil.rmtree(root, ignore_errors=True)
            raise
    return bank


def _read_bank(content: dict[str, Any], parts: Iterator[Params], root: Path) -> CheckpointBank:
    records, order, start = list(content["records"]), list(content["order"]), 0
    dtype = content["stored_as"] and _TYPES[content["stored_as"]]
    with CheckpointBank(root, dtype=dtype, weights=list(content["weights"])) as bank:
        for networks in parts:
            stop = start + stack_size(networks)
            if sorted(order) != sorted(networks):
                raise ValueError("`order` does not name each of its tensors once.")
            bank.extend({name: networks[name] for name in order}, records[start:stop])
            start = stop
        if start != len(records):
            raise ValueError(f"it has {len(records)} records of {start} networks.")
    return bank


def _read_reference(content: dict[str, Any], parts: Iterator[Params], root: Path) -> CheckpointBank:
    bank = _read_bank(content, parts, root / "bank")
    (root / "card.json").write_text(json_text(content["card"]) + "\n", encoding="utf-8")
    if digest_of_networks(bank.path) != Card.read(root / "card.json").sha256:
        raise ValueError("its draws are not those of its card.")
    text = json_text(content["configuration"]) + "\n"
    (root / "config.json").write_text(text, encoding="utf-8")
    return bank

"""Posteriors, banks and references on the Hub of Hugging Face: tensors, JSON and a card."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from torch import nn

from lightning_bnn.bank import CheckpointBank
from lightning_bnn.bank.manifest import type_named
from lightning_bnn.bank.shipped import digest_of_networks, missing_data
from lightning_bnn.bundles import DAMAGES, INDEX, TENSORS, Damaged, read_bundle, write_bundle
from lightning_bnn.extras import needed
from lightning_bnn.posteriors import Posterior
from lightning_bnn.posteriors.base import check_fit
from lightning_bnn.posteriors.saving import posterior_of, save_posterior
from lightning_bnn.references.cards import Card
from lightning_bnn.references.shipped import reference_folder, reference_names
from weightsym.files import draft_of, json_text, read_json, read_settings
from weightsym.params import Params, first_line, stack_size

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
        about: description for the card.
        licence: identifier of the Hub, such as ``"apache-2.0"``, for the card.
        revision: an existing branch; by default the main one.
        token: of the Hub; by default the one of ``hf auth login``.
        private: whether a new repository is private.
        commit_message: by default it names the upload.

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
    """Download a `push_to_hub` upload, and no other files of the repository.

    Args:
        repo_id: ``user/name``, or a folder of `write_folder`.
        revision: a branch, a tag, or a commit hash, which pins the result.
        token: of the Hub; by default the one of ``hf auth login``.
        network: module whose architecture the posterior must have.
        folder: a new folder for the networks of a bank or of a reference.

    Returns:
        A posterior; or a bank, which for a reference holds its draws, beside ``card.json`` and the
        configuration ``config.json``. That one is a program, see SECURITY.md: read it before use.

    >>> import torch
    >>> from lightning_bnn.posteriors import DiagonalGaussian
    >>> folder = tempfile.mkdtemp()
    >>> write_folder(DiagonalGaussian({"w": torch.zeros(3)}), folder)
    'posterior'
    >>> from_hub(folder)
    DiagonalGaussian(3 weights)
    """
    if Path(repo_id).is_dir():
        return _opened(*read_bundle(repo_id), network, folder)
    with needed("from_hub"):
        from huggingface_hub import snapshot_download
        from huggingface_hub.utils import HFValidationError
    download = partial(
        snapshot_download,
        os.fspath(repo_id),
        revision=revision,
        token=token,
        library_name="lightning_bnn",
        allow_patterns=[INDEX, TENSORS, "README.md"],
    )
    try:
        bundle = _downloaded_bundle(download)
    except HFValidationError:
        raise ValueError(
            f"`repo_id` must be user/name, or an existing folder, got {os.fspath(repo_id)!r}."
        ) from None
    return _opened(*bundle, network, folder)


def _downloaded_bundle(download: Callable[..., str]) -> tuple[dict[str, Any], Iterator[Params]]:
    """Download a bundle, and once more if its copy in the Hub's cache is damaged."""
    try:
        return read_bundle(download())
    except Damaged as damage:
        try:
            snapshot = download(force_download=True)
        except Exception as error:  # whatever the client raises where there is no Hub
            raise damage from error
        return read_bundle(snapshot)


def write_folder(
    source: Posterior | CheckpointBank | str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    title: str = "",
    about: str = "",
    licence: str | None = None,
) -> str:
    """Write the files for `push_to_hub`: tensors, ``contents.json`` and a card.

    Args:
        source: a posterior that can be saved, see `Posterior.save`; a bank; or the name of a
            reference, or the folder of one.
        folder: a new folder, or one without a bundle.
        title: of the card.
        about: description for the card.
        licence: identifier of the Hub.

    Returns:
        ``"posterior"``, ``"bank"`` or ``"reference"``.

    >>> folder = Path(tempfile.mkdtemp())
    >>> write_folder("two_gaussians", folder, about="For a first look.")
    'reference'
    >>> sorted(path.name for path in folder.iterdir())
    ['README.md', 'contents.json', 'tensors-00000.safetensors']
    """
    root = Path(folder)
    kind, summary, write = _bundle_of(source)
    tags = ["bayesian-neural-networks", "lightning_bnn", kind]
    metadata = {"library_name": "lightning_bnn", "tags": tags}
    metadata |= {} if licence is None else {"license": licence}
    card = _CARD.format(
        metadata=yaml.safe_dump(metadata, sort_keys=False),
        title=title or root.name,
        about="\n\n".join(filter(None, (about, summary))),
        load=_LOAD[kind].format(title=title or root.name),
    )
    write(root, {"README.md": card})
    return kind


Write = Callable[[Path, Mapping[str, str]], None]
"""Writes a bundle with texts to a folder."""


def _bundle_of(source: Any) -> tuple[str, str, Write]:
    """Return the kind of a source, a paragraph about it, and a function that writes it."""
    if isinstance(source, Posterior):
        summary = f"A posterior over the weights of a network: {source}."
        return "posterior", summary, partial(save_posterior, source)
    if isinstance(source, CheckpointBank):
        return "bank", _summary(source), partial(_write_bank, source, {"kind": "bank"})
    if not isinstance(source, (str, os.PathLike)):
        raise ValueError(
            "`source` must be a posterior (see `Posterior.of`), a bank, or the name or "
            f"folder of a reference, got a {type(source).__name__}."
        )
    name = os.fspath(source)
    return _reference(reference_folder(name) if name in reference_names() else Path(name))


# ------------------------------------------------------------ banks and references
def _summary(bank: CheckpointBank) -> str:
    size = sum(shape.numel() for shape in bank.shapes.values())
    return f"A bank of {len(bank)} networks of {size} weights, one row of every tensor each."


def _write_bank(
    bank: CheckpointBank, more: Mapping[str, Any], root: Path, texts: Mapping[str, str]
) -> None:
    content = {
        "order": list(bank.names),
        "weights": list(bank.shapes),
        "stored_as": bank.stored_as and str(bank.stored_as).removeprefix("torch."),
        "records": bank.records,
    }
    if not len(bank):
        raise ValueError(f"{bank!r} is empty.")
    write_bundle(root, content | dict(more), bank.blocks(), texts)


def _reference(path: Path) -> tuple[str, str, Write]:
    if not (path / "card.json").is_file():
        names = ", ".join(reference_names())
        if not names:
            raise missing_data(f"`source`: {path} is not a folder, and a reference")
        raise ValueError(
            f"`source`: {path} is not a folder of a reference, which has a card.json; "
            f"choose from {names}."
        )
    card, bank = Card.read(path / "card.json"), CheckpointBank(path / "bank", "r")
    more = {
        "kind": "reference",
        "card": read_json(path / "card.json"),
        "configuration": read_settings(path / "config.yaml"),
    }
    about = f"{card.about[:1].upper()}{card.about[1:]} ({card.verdict}; {card.licence})."
    return "reference", f"{about}\n\n{_summary(bank)}", partial(_write_bank, bank, more)


def _opened(
    content: dict[str, Any],
    parts: Iterator[Params],
    network: nn.Module | None,
    folder: str | os.PathLike[str] | None,
) -> Posterior | CheckpointBank:
    kind, path = content["kind"], content["folder"]
    if kind == "posterior":
        return posterior_of(content, parts, network)
    if kind not in ("bank", "reference"):
        raise ValueError(f"{path} holds {kind!r}, which this version does not support.")
    root = _new_folder(folder)
    with draft_of(root) as draft:
        reader = _read_bank if kind == "bank" else _read_reference
        try:
            bank = reader(content, parts, draft)
        except DAMAGES as error:
            reason = first_line(error)
            raise ValueError(f"{path} is damaged and does not define a {kind}: {reason}") from None
        if network is not None:
            check_fit(bank[:1], network)
    return CheckpointBank(root / bank.path.relative_to(draft), "r")


def _new_folder(folder: str | os.PathLike[str] | None) -> Path:
    """Refuse a folder that is not empty, or cannot be replaced."""
    if folder is None:
        raise ValueError("`folder` is missing: name a new folder for the networks.")
    root = Path(folder)
    if root.exists() and (not root.is_dir() or any(root.iterdir())):
        raise ValueError(f"`folder`: {root} is not empty; name a new one.")
    if not root.name or root.is_symlink() or os.path.ismount(root):
        raise ValueError(f"`folder` must be a new one, got {root}.")
    root.parent.mkdir(parents=True, exist_ok=True)
    return root


def _read_bank(content: dict[str, Any], parts: Iterator[Params], root: Path) -> CheckpointBank:
    records, order, start = list(content["records"]), list(content["order"]), 0
    dtype = content["stored_as"] and type_named(content["stored_as"])
    with CheckpointBank(root, dtype=dtype, weights=list(content["weights"])) as bank:
        for networks in parts:
            stop = start + stack_size(networks)
            if sorted(order) != sorted(networks):
                raise ValueError("`order` does not name each of its tensors once.")
            bank.extend({name: networks[name] for name in order}, records[start:stop])
            start = stop
        if start != len(records):
            raise ValueError(f"it has {len(records)} records for {start} networks.")
    return bank


def _read_reference(content: dict[str, Any], parts: Iterator[Params], root: Path) -> CheckpointBank:
    bank = _read_bank(content, parts, root / "bank")
    (root / "card.json").write_text(json_text(content["card"]) + "\n", encoding="utf-8")
    if digest_of_networks(bank.path) != Card.read(root / "card.json").sha256:
        raise ValueError("its draws do not match its card.")
    text = json_text(content["configuration"]) + "\n"
    (root / "config.json").write_text(text, encoding="utf-8")
    return bank

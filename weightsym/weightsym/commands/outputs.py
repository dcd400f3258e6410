"""Networks that commands write, with names, types and settings of a file that is there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weightsym.files import write_like
from weightsym.networks.files.drafts import draft_of
from weightsym.networks.files.fitting import FittedNetwork, are_finite
from weightsym.networks.files.loading import load
from weightsym.networks.files.safetensors_format import save_tensors
from weightsym.networks.files.writing import check_path, check_target

_SETTINGS = (
    "epoch", "global_step", "pytorch-lightning_version", "loops", "hyper_parameters",
    "hparams_name", "datamodule_hyper_parameters", "datamodule_hparams_name",
)  # fmt: skip
"""Entries of a checkpoint that another network retains."""


@dataclass(frozen=True)
class Output:
    """A file or folder to write.

    Attributes:
        target: its path.
        form: what provides names, types and other tensors, if a file does.
        overwrite: whether what is there may be replaced.
    """

    target: Path
    form: FittedNetwork | None
    overwrite: bool

    @classmethod
    def checked(
        cls,
        out: str | None,
        form: FittedNetwork | None,
        files: Iterable[FittedNetwork],
        overwrite: bool,
    ) -> Output | None:
        """Check `--out` before the computation begins; without it nothing is written.

        Args:
            out: the path.
            form: of the output.
            files: inputs, which stay.
            overwrite: whether what is there may be replaced.
        """
        if out is None:
            return None
        target = Path(out)
        if any(target.exists() and target.samefile(file.stored.path) for file in files):
            raise ValueError(f"`--out`: {target} is one of the input networks.")
        output = cls(target, form, overwrite)
        output._check()
        return output

    def _check(self) -> None:
        if self.form is not None and self._is_like:
            check_target(self.target, self.form.stored, self.overwrite)
            return
        if self.target.suffix not in (".safetensors", ".pt", ".ckpt"):
            raise ValueError(f"`--out` must end in .safetensors, .pt or .ckpt, got {self.target}.")
        check_path(self.target, self.overwrite)
        if self.target.suffix == ".ckpt" and (
            self.form is None or self.form.stored.path.suffix != ".ckpt"
        ):
            raise ValueError(
                "`--out` can end in .ckpt only if one of the networks is a .ckpt without a "
                "stack of members, whose settings are copied: name one by `--like` of `merge`, "
                "or write .safetensors or .pt."
            )

    @property
    def _is_like(self) -> bool:
        """True if the output has the format of the form, too."""
        return self.target.suffix not in (".pt", ".ckpt")

    def write(self, names: Iterable[str], value: Callable[[str], Tensor]) -> None:
        """Write a network, and say so.

        Args:
            names: of its tensors.
            value: gives one of them, of which only one is held at a time where the format allows.
        """
        if self.form is not None and self._is_like:
            write_like(self.form.stored, self.target, self._stored(value), self.overwrite)
        else:
            with draft_of(self.target) as draft:
                self._write_whole(draft, list(names), value)
        print(f"wrote {self.target}")

    def _write_whole(
        self, draft: Path, names: Sequence[str], value: Callable[[str], Tensor]
    ) -> None:
        if self.form is not None:
            names, value = list(self.form.stored.tensors), self._stored(value)
        if self.target.suffix == ".ckpt" and self.form is not None:
            torch.save(_checkpoint(self.form.stored.path, value), draft)
        elif self.target.suffix == ".pt":
            torch.save({name: value(name) for name in names}, draft)
        else:
            save_tensors(draft, {n: value(n).contiguous() for n in names}, {"format": "pt"})

    def _stored(self, value: Callable[[str], Tensor]) -> Callable[[str], Tensor]:
        """Return what gives tensors by their names in the file of the form, in their types."""
        assert self.form is not None
        stored, names = self.form.stored.tensors, self.form.names

        def of(key: str) -> Tensor:
            tensor = stored[key]
            if key not in names:
                return tensor.read()
            return _converted(names[key], value(names[key]), tensor.dtype)

        return of


def _converted(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    written = tensor.to(dtype)
    if written.is_floating_point() and not are_finite(written):
        raise ValueError(f"The average of {name!r} is too large for {dtype}.")
    return written.contiguous()


def _checkpoint(path: Path, value: Callable[[str], Tensor]) -> dict[str, Any]:
    """Write a network to a checkpoint, without the optimizers of another one."""
    content = load(path)
    if not isinstance(content, dict) or not isinstance(content.get("state_dict"), dict):
        raise ValueError(f"`--like`: {path} is not a checkpoint of a LightningModule.")
    state = {name: value(name.replace("_orig_mod.", "")) for name in content["state_dict"]}
    return {**{k: content[k] for k in _SETTINGS if k in content}, "state_dict": state}

"""`lightning-bnn fit | validate | test | predict`: LightningCLI over all modules and data."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import lightning as L
from lightning.pytorch.cli import LightningCLI

# Imported so that YAML can name their classes without a path.
import lightning_bnn.callbacks
import lightning_bnn.datamodules
import lightning_bnn.modules  # noqa: F401

__all__ = ["TrainingCLI", "training"]


class TrainingCLI(LightningCLI):
    """LightningCLI that prints the results of a test once, one row for each set."""

    def before_instantiate_classes(self) -> None:
        """Lightning's own table repeats all numbers for every test set."""
        if self.subcommand == "test":
            self.config.test.verbose = False

    def after_test(self) -> None:
        """Print the numbers of every set."""
        if self.trainer.is_global_zero:
            print(table(self.trainer.callback_metrics))


def table(values: Mapping[str, Any]) -> str:
    """Numbers with names such as ``test/acc`` and ``test/svhn/AUROC``: a row for each set.

    >>> print(table({"test/acc": 0.9, "test/svhn/AUROC": 0.8}))
    set    acc      AUROC
    test   0.9000
    svhn            0.8000
    """
    rows: dict[str, dict[str, str]] = {}
    for name, value in values.items():
        parts = name.split("/")[-2:]
        rows.setdefault(parts[0], {})[parts[1]] = f"{float(value):.4f}"
    columns = list(dict.fromkeys(key for row in rows.values() for key in row))
    lines = [
        ["set", *columns],
        *([n, *(row.get(c, "") for c in columns)] for n, row in rows.items()),
    ]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "   ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def training(args: Sequence[str]) -> Any:
    """Run one of the four: the first argument says which."""
    return TrainingCLI(
        L.LightningModule,
        L.LightningDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        auto_configure_optimizers=False,
        save_config_kwargs={"overwrite": True},
        seed_everything_default=0,
        args=None if list(args) == sys.argv[1:] else list(args),
        parser_kwargs={
            "prog": "lightning-bnn",
            "description": _DESCRIPTION,
            "exit_on_error": False,
            **{name: {"exit_on_error": False} for name in TrainingCLI.subcommands()},
        },
    )


_DESCRIPTION = """Train, validate, test and predict with any posterior, network and data set.

A configuration in YAML says what: `lightning-bnn presets` lists those that come with the package,
`lightning-bnn presets NAME > my.yaml` copies one, `lightning-bnn fit -c my.yaml` runs it. Any
value can be overridden: `--model.init_args.members 5`, `--trainer.callbacks+ MassGap`."""

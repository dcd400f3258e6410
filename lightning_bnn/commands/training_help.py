"""What `fit`, `validate`, `test` and `predict` say about themselves, on one screen."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Sequence
from typing import Any

from lightning_bnn.commands.class_help import class_asked_for, help_of_class, rows

__all__ = ["WHOLE", "help_of_training"]

WHOLE = "--help.all"
"""The option that prints every option of the four commands."""
_TRAINER = "--help.trainer"
_OPTIONS = {
    "-c, --config FILE": "what to run, in YAML; later files override earlier ones",
    "--model.KEY VALUE": "change a setting of the model, such as --model.init_args.members 5",
    "--data.KEY VALUE": "change a setting of the data, such as --data.init_args.batch_size 32",
    "--trainer.KEY VALUE": "change a setting of the Trainer, such as --trainer.max_epochs 3",
    "--trainer.callbacks+ CLASS": "add a callback, such as MassGap",
    "--seed_everything N": "the seed of all random numbers (0)",
    "--ckpt_path FILE": "the checkpoint to begin from; `test` and the like use the newest",
    "--weights_only false": "execute what is in a checkpoint; only for checkpoints of your own",
    "--print_config": "print everything that would be run, as YAML, and stop",
}
_MORE = {
    "--model.help CLASS": "the arguments of a model, such as MFVI or SWAG",
    "--data.help CLASS": "the arguments of a data set, such as Digits",
    _TRAINER: "the arguments of the Trainer, one line each",
    WHOLE: "every option, as Lightning describes it (some 480 lines)",
}


def help_of_training(name: str, args: Sequence[str], about: str) -> str | None:
    """The help that a command line asks for; None if it asks for none, or for all of it.

    Args:
        name: of the command.
        args: what follows it.
        about: what the command does.
    """
    if _TRAINER in args:
        return f"lightning-bnn {name} --trainer.KEY VALUE:\n\n{rows(_of_the_trainer())}"
    asked = class_asked_for(args)
    if asked is not None:
        return help_of_class(*asked)
    if not {"-h", "--help"} & set(args):
        return None
    first = (
        f"usage: lightning-bnn {name} -c CONFIG [options]\n\n{about[0].upper()}{about[1:]}.\n\n"
        "`lightning-bnn presets` lists the configurations that come with the package,\n"
        "`lightning-bnn presets NAME > my.yaml` copies one."
    )
    return f"{first}\n\noptions:\n{rows(_OPTIONS)}\n\nmore:\n{rows(_MORE)}"


def _of_the_trainer() -> dict[str, str]:
    """The arguments of the Trainer with their defaults and the first sentence about them."""
    kind: Any = importlib.import_module("lightning.pytorch").Trainer
    told = inspect.getdoc(kind.__init__) or ""
    return {
        f"--trainer.{name}": f"{_first_sentence(told, name)} ({parameter.default})"
        for name, parameter in inspect.signature(kind).parameters.items()
    }


def _first_sentence(told: str, name: str) -> str:
    found = re.search(rf"^\s*{name}: (.*?)(?:\.\s|\n\s*\n|\Z)", told, re.MULTILINE | re.DOTALL)
    return " ".join(found[1].split()).rstrip(".") if found else "as Lightning says"

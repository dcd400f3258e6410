"""The console script: a table of commands, each imported when it is called."""

from __future__ import annotations

import os
from collections.abc import Sequence

from weightsym import Script, described, imported, signature_of

CORE = Script.commands
COMMANDS = {
    "demo": "start here: compare seven posteriors with references on digits, in one report",
    "presets": "list the configurations of the package, or print one",
    "population": "train thousands of independent networks into one bank, on one machine or many",
    "bank": "show a bank of networks, import networks into it, or export them",
    "compare": "measure posteriors against a reference, in weights and in predictions",
    "calibrate": "calibrate the predictions of any posterior, and make prediction sets",
    "doctor": "diagnose a posterior (run, bank, folder): faults, reasons and remedies",
    "references": "check the sampled posteriors themselves: do their chains agree?",
    "fidelity": "score your posteriors by their distance to a sampled one, closest first",
    **CORE,
}
"""Commands, whose functions live in ``commands/<name>.py`` here or in `weightsym`."""
TRAINING = {
    "fit": "train a posterior over the weights of a network, as configured in YAML",
    "validate": "evaluate a posterior on the validation data",
    "test": "evaluate a posterior on the test data, and on out-of-distribution data",
    "predict": "predict with a posterior, and write the predictions to a file",
}
"""The commands of LightningCLI."""
EVERY = {**dict.fromkeys(["demo", "presets"], ""), **TRAINING, **COMMANDS}


def main(args: Sequence[str] | None = None) -> None:
    """Run one command. A mistake of the user ends it with one sentence and exit code 2."""
    Commands().main(args)


class Commands(Script):
    """The console script of this package, with the commands of `weightsym` and of LightningCLI."""

    program, commands = "lightning-bnn", EVERY
    headings = {
        "demo": "begin", "fit": "train", "compare": "judge posteriors", "symmetries": "networks",
    }  # fmt: skip
    resumed = "population", "demo"

    def module_of(self, name: str) -> str:
        """Name the module of a command."""
        if name in TRAINING:
            return "lightning_bnn.commands.training"
        if name in CORE:
            return super().module_of(name)
        return f"lightning_bnn.commands.{name}"

    def run(self, name: str, args: Sequence[str]) -> None:
        """Run the function of a command, or LightningCLI."""
        module = self.module_of(name)
        if name not in TRAINING:
            super().run(name, args)
        elif {"-h", "--help"} & set(args):
            first = f"usage: lightning-bnn {name} -c CONFIG [options]\n\n{TRAINING[name]}"
            print(f"{first}\n\n{described(signature_of(module, 'training'))}")
            raise SystemExit(0)
        else:
            _check_configs(args)
            imported(module).training(args)


def _check_configs(args: Sequence[str]) -> None:
    """Refuse an unreadable configuration before the heavy imports."""
    settings = imported("weightsym.files")
    for name in settings.named_configs(args):
        if not os.path.exists(name):
            hint = imported("lightning_bnn.commands.presets").HINT
            raise ValueError(f"`config`: there is no file {name}. {hint}")
        settings.read_settings(name)


if __name__ == "__main__":
    main()

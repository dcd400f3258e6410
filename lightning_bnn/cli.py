"""The console script: one table of commands, each imported when it is called."""

from __future__ import annotations

import os
from collections.abc import Sequence

from weightsym import Script, described, imported

CORE = Script.commands
COMMANDS = {
    "demo": "start here: a reference and seven posteriors on the digits, and one page about them",
    "presets": "list the configurations that come with the package, or copy one",
    "population": "train thousands of independent networks into one bank, on one machine or many",
    "bank": "show what is in a bank of networks, import into it, export from it",
    "compare": "measure posteriors against a reference, in weights and in predictions",
    "calibrate": "calibrate the predictions of any posterior, and make prediction sets",
    "doctor": "say whether a posterior (run, bank, folder) is any good, and what is wrong with it",
    "references": "show how good the sampled posteriors are, computed from their draws",
    "fidelity": "score posteriors by their distance to one that was sampled, closest first",
    **CORE,
}
"""Commands, whose functions live in ``commands/<name>.py`` here or in `weightsym`."""
TRAINING = {
    "fit": "train a posterior over the weights of a network, as a YAML file says",
    "validate": "judge a posterior on the validation data",
    "test": "judge a posterior on the test data, and on data that are out of distribution",
    "predict": "predict with a posterior, and write the predictions to a file",
}
"""The commands of LightningCLI."""
EVERY = {**TRAINING, **COMMANDS}


def main(args: Sequence[str] | None = None) -> None:
    """Run one command, and end mistakes of the user in one sentence and exit code 2."""
    Commands().main(args)


class Commands(Script):
    """The console script of this package, with the commands of `weightsym` and of LightningCLI."""

    program, commands = "lightning-bnn", EVERY
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
            print(f"{first}\n\n{described(imported(module).training)}")
            raise SystemExit(0)
        else:
            _check_configs(args)
            imported(module).training(args)


def _check_configs(args: Sequence[str]) -> None:
    """Refuse a configuration that cannot be read, before anything heavy is imported."""
    settings = imported("weightsym.files")
    for name in settings.named_configs(args):
        if not os.path.exists(name):
            hint = imported("lightning_bnn.commands.presets").HINT
            raise ValueError(f"`config`: there is no file {name}. {hint}")
        settings.read_settings(name)


if __name__ == "__main__":
    main()

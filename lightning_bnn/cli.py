"""The console script: one table of commands, each imported when it is called."""

from __future__ import annotations

import os
from collections.abc import Sequence

from weightsym import Script, declared, described, imported

__all__ = ["Commands", "main"]

CORE = Script.commands
COMMANDS = {
    "presets": "list the configurations that come with the package, or copy one",
    "population": "train thousands of independent networks into one bank, on one machine or many",
    "bank": "show what is in a bank of networks, import into it, export from it",
    "symmetries": CORE["symmetries"],
    "doctor": "say whether a posterior (run, bank, folder) is any good, and what is wrong with it",
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
STUDIES = {
    "demo": "start here: a reference and seven posteriors on the digits, and one page about them",
    "compare": "P1, tables 1 and 2: posteriors against a reference, in weights and predictions",
    "calibrate": "calibrate the predictions of any posterior, and make prediction sets",
    "toy": "P1, figures 1 and 5: ten thousand perceptrons of two units, raw, scaled, sorted",
    "mass": "P1, figure 2: mass of networks, and its minimum over all rescalings",
    "collapse": "P1, figures 3, 7, 8: mutual information of all pairs of an ensemble",
    "permutations": "P1, figure 4: how often units change places while networks train",
    "marginals": "P1, figure 9: marginals with and without symmetries, and tests of them",
    "interpolation": "P2, section 3: one Gaussian for two modes, between them or on one",
    "width": "P2, table 1: symmetrized VI by the width of the network",
    "transpositions": "P3, figures 1 and 2: barriers, distances and swaps between networks",
    "compact": "P3, table 1 and figure 3: posteriors as one Gaussian, matched or not; pruning",
    "tractable": "P2, tables 2 and 3: two ReLU units, with and without symmetrization",
    "reproduce": "run all of these, and judge every claim of the papers by the numbers",
}
"""Tables and figures of the papers; the functions live in ``studies/<name>.py``."""
REFERENCES = {
    "references": "show how good the sampled posteriors are, computed from their draws",
    "reference": "sample one of them yourself by long chains, and see how far to trust it",
    "fidelity": "score posteriors by their distance to one that was sampled, closest first",
    "leaderboard": "score all methods against the sampled posteriors, at equal cost in gradients",
    "uci": "all methods on the UCI tables and their published splits, beside published results",
}
"""Commands about references, whose functions live in ``studies/<name>.py``, too."""
EVERY = {**TRAINING, **COMMANDS, **REFERENCES, **STUDIES}


def main(args: Sequence[str] | None = None) -> None:
    """Run one command, and end mistakes of the user in one sentence and exit code 2."""
    Commands().main(args)


class Commands(Script):
    """The console script of this package, with the commands of `weightsym` and of LightningCLI."""

    program, commands = "lightning-bnn", EVERY
    resumed = (
        "population", "demo", "toy", "mass", "collapse", "marginals", "permutations", "width",
        "compact", "reproduce", "reference", "leaderboard",
    )  # fmt: skip

    def module_of(self, name: str) -> str:
        """Name the module of a command."""
        if name in TRAINING:
            return "lightning_bnn.commands.training"
        if name in CORE:
            return super().module_of(name)
        return f"lightning_bnn.{'commands' if name in COMMANDS else 'studies'}.{name}"

    def run(self, name: str, args: Sequence[str]) -> None:
        """Run the function of a command, or LightningCLI."""
        module = self.module_of(name)
        if name not in TRAINING:
            super().run(name, args)
        elif {"-h", "--help"} & set(args):
            first = f"usage: lightning-bnn {name} -c CONFIG [options]\n\n{TRAINING[name]}"
            print(f"{first}\n\n{described(declared(module))}")
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

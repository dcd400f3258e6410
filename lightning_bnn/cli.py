"""The console script: one table of commands, each imported when it is called."""

from __future__ import annotations

import ast
import gc
import importlib
import inspect
import os
import sys
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["main"]

COMMANDS = {
    "presets": "list the configurations that come with the package, or copy one",
    "population": "train thousands of independent networks into one bank, on one machine or many",
    "bank": "show what is in a bank of networks, import into it, export from it",
    "symmetries": "show what can be permuted, rescaled and flipped without changing the function",
    "doctor": "say whether a posterior (run, bank, folder) is any good, and what is wrong with it",
    "match": "bring a network in a file into the frame of another, so that they can be averaged",
    "merge": "bring networks of files, banks and runs into one frame, and average them",
    "diff": "tell whether two networks in files are the same, one trained further, or unrelated",
}
"""Commands, whose functions live in ``commands/<name>.py``."""
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
    "correlation": "P1's open question: does a better posterior predict better?",
    "interpolation": "P2, section 3: one Gaussian for two modes, between them or on one",
    "width": "P2, table 1: symmetrized VI by the width of the network",
    "transpositions": "P3, figures 1 and 2: barriers, distances and swaps between networks",
    "compact": "P3, table 1 and figure 3: posteriors as one Gaussian, matched or not; pruning",
    "tractable": "P2, tables 2 and 3: two ReLU units, with and without symmetrization",
    "reproduce": "run all of these, and judge every claim of the papers by the numbers",
}
"""Tables and figures of the papers; the functions live in ``studies/<name>.py``."""
REFERENCES = {
    "references": "show how good the sampled posteriors of the package are, from their draws",
    "reference": "sample one of them yourself by long chains, and see how far to trust it",
    "fidelity": "score posteriors by their distance to one that was sampled, closest first",
    "leaderboard": "score all methods against the sampled posteriors, at equal cost in gradients",
}
"""Commands about references, whose functions live in ``studies/<name>.py``, too."""
_LIGHT = ("__future__", "typing", "collections.abc", "lightning_bnn.commands.architecture")
_SEVERAL = {"sources": str, "weights": float}
"""Arguments that take several words."""
EVERY = {**TRAINING, **COMMANDS, **REFERENCES, **STUDIES}


def main(args: Sequence[str] | None = None) -> None:
    """Run one command, and end mistakes of the user in one sentence and exit code 2."""
    args = list(sys.argv[1:] if args is None else args)
    _let_threads_rest()
    try:
        _run(args[0] if args else "--help", args)
        sys.stdout.flush()
    except BrokenPipeError:  # whoever reads has seen enough; what is left must go somewhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(141) from None
    except KeyboardInterrupt:
        print("\nstopped; the same command goes on from its last checkpoint", file=sys.stderr)
        raise SystemExit(130) from None
    except Exception as error:
        message = _imported("commands.mistakes").mistake(error, args)
        if message is None:
            raise
        _fail(message)


def _let_threads_rest() -> None:
    """Let torch's threads wait awake for a tenth of a millisecond, not for several.

    They wait for the next operation of torch, and hinder meanwhile what runs between two of them,
    such as the stacks of small networks. OpenMP reads this when torch is imported, which it is not
    yet; what a user has set stays.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def _check_name(name: str) -> None:
    if name not in EVERY:
        meant = _imported("commands.parsers").did_you_mean(name, EVERY)
        choice = f"; choose from: {', '.join(EVERY)}."
        _fail(f"there is no command {name!r}{meant or choice}")


def _run(name: str, args: Sequence[str]) -> None:
    if name in ("-h", "--help"):
        print(_usage())
        return
    if name == "--version":
        print(importlib.import_module("lightning_bnn").__version__)
        return
    _check_name(name)
    if os.getcwd() not in sys.path:  # classes of the user; "" would be the folder of a YAML file
        sys.path.insert(0, os.getcwd())
    if name not in TRAINING:
        folder = "commands" if name in COMMANDS else "studies"
        values = _parsed(_declared(f"{folder}.{name}", name), name, args[1:])
        getattr(_imported(f"{folder}.{name}"), name)(**values)
    elif {"-h", "--help"} & set(args):
        first = f"usage: lightning-bnn {name} -c CONFIG [options]\n\n{TRAINING[name]}"
        print(f"{first}\n\n{_text(_declared('commands.training', 'training'))}")
        raise SystemExit(0)
    else:
        _imported("commands.training").training(args)


def _imported(name: str) -> ModuleType:
    """Import a module without collecting garbage, which takes a second and finds nothing."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        return importlib.import_module(f"lightning_bnn.{name}")
    finally:
        if collecting:
            gc.enable()


def _declared(module: str, name: str) -> Callable[..., Any]:
    """Read the signature and docstring of a command without importing what the command needs.

    The names in its signature are built in, from `typing` or `collections.abc`, or literal types
    at the top of its file.
    """
    file = Path(__file__).parent.joinpath(*module.split(".")).with_suffix(".py")
    tree = ast.parse(file.read_text(encoding="utf-8"))
    light: list[ast.stmt] = [
        node
        for node in tree.body
        if (isinstance(node, ast.ImportFrom) and node.module in _LIGHT)
        or (isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("Literal["))
    ]
    functions = (node for node in tree.body if isinstance(node, ast.FunctionDef))
    function = next(node for node in functions if node.name == name)
    function.body = function.body[:1]  # its docstring
    space: dict[str, Any] = {"__name__": "lightning_bnn"}
    exec(compile(ast.Module([*light, function], []), str(file), "exec"), space)
    command: Callable[..., Any] = space[name]
    return command


def _parsed(command: Callable[..., Any], name: str, args: Sequence[str]) -> dict[str, Any]:
    """Read the arguments of a command from the command line, or from files of ``--config``."""
    import docstring_parser

    parsers, settings = _imported("commands.parsers"), _imported("settings_files")
    for file in settings.config_files(args):
        settings.read_settings(file)
    parameters = inspect.signature(command).parameters
    optional = {p.name for p in parameters.values() if p.default is not p.empty}
    texts = {
        p.arg_name: p.description for p in docstring_parser.parse(command.__doc__ or "").params
    }
    parser = parsers.StrictParser(prog=f"lightning-bnn {name}", description=_text(command))
    positional = "config" not in parameters
    if positional:
        parser.add_argument("--config", action="config", help="a file with any of these options")
    for option in parameters.keys() & _SEVERAL.keys():
        flag = f"--{option}" if option in optional else option
        parser.add_argument(flag, nargs="+", type=_SEVERAL[option], help=texts[option])
    group = typing.get_type_hints(command).get("architecture")
    skip = {*_SEVERAL, "architecture"}
    parser.add_function_arguments(command, as_positional=positional, skip=skip)
    if group is not None:
        parser.add_class_arguments(group)
    if "name" in optional and args and not args[0].startswith("-"):
        args = ["--name", *args]  # a name may come first, whether it is needed or not
    given = vars(parser.parse_args(list(args)))
    if group is not None:
        given["architecture"] = group(**{option: given[option] for option in vars(group())})
    return {option: given[option] for option in parameters}


def _text(command: Callable[..., Any]) -> str:
    return (inspect.getdoc(command) or "").partition("\n\nArgs:")[0]


def _usage() -> str:
    rows = "\n".join(f"  {name:<15} {text}" for name, text in EVERY.items())
    usage = "usage: lightning-bnn COMMAND ..."
    return f"{usage}\n\n{rows}\n\n`lightning-bnn COMMAND --help` explains one."


def _fail(message: str) -> None:
    print(f"lightning-bnn: {message}", file=sys.stderr)
    raise SystemExit(2)

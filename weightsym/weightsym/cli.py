"""The console script, and the base of such scripts: tables of commands that are functions."""

from __future__ import annotations

import ast
import contextlib
import gc
import importlib.util
import inspect
import io
import os
import re
import sys
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

COMMANDS = {
    "symmetries": "show the permutations, scales and signs that preserve the function of a network",
    "match": "bring a network in a file into the frame of another, so that they can be averaged",
    "merge": "bring networks of files, banks and runs into one frame, and average them",
    "mergeable": "tell whether two networks can be averaged, and by which command",
    "rebase": "move what fine-tuning has changed to another base",
    "adapters": "merge low-rank adapters with each other, or into their base",
    "diff": "tell whether two networks are the same function, related, or independent",
    "scan": "tell which networks of a folder were made from which, as a family tree",
}
"""Commands, whose functions live in ``commands/<name>.py``."""
_SEVERAL = {"sources": str, "weights": float}
"""Arguments with several words."""
_FLAGS = {
    "--json": "print all numbers as JSON; text goes to standard error",
    "--quiet": "print no text",
}
"""Options of commands that return an `Outcome`."""


def main(args: Sequence[str] | None = None) -> None:
    """Run one command. A mistake of the user ends it with one sentence and exit code 2."""
    Script().main(args)


class Script:
    """A console script: a table of commands, each a function in a module of its name."""

    program = "weightsym"  # with underscores this is the name of the package
    commands: Mapping[str, str] = COMMANDS
    headings: Mapping[str, str] = {}
    """Headings in the list of commands, each by the first command below it."""
    resumed: Collection[str] = ()
    """Commands that continue from their last checkpoint."""

    def module_of(self, name: str) -> str:
        """Return the module name of a command."""
        return f"weightsym.commands.{name}"

    def main(self, args: Sequence[str] | None = None) -> None:
        """Run one command. A mistake of the user ends it with one sentence and exit code 2.

        Args:
            args: the command line; by default that of this process.
        """
        args = list(sys.argv[1:] if args is None else args)
        _let_threads_rest()
        os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # fewer page faults of large tensors
        if not sys.stderr.isatty():
            os.environ.setdefault("TQDM_DISABLE", "1")  # a log would hold every state of a bar
        try:
            self._choose(args[0] if args else "--help", args)
            sys.stdout.flush()
        except BrokenPipeError:  # whoever reads has seen enough; what is left must go somewhere
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise SystemExit(141) from None
        except KeyboardInterrupt:
            more = "; the same command continues from its last checkpoint"
            print(f"\nstopped{more if args and args[0] in self.resumed else ''}", file=sys.stderr)
            raise SystemExit(130) from None
        except Exception as error:
            message = imported("weightsym.commands.mistakes").mistake(error, args, self.program)
            if message is None:
                raise
            self._fail(message)

    def run(self, name: str, args: Sequence[str]) -> None:
        """Run the function of a command.

        Args:
            name: of the command.
            args: the whole command line.
        """
        module = self.module_of(name)
        signature = signature_of(module, name)
        flags = _FLAGS.keys() & set(args) if _has_outcome(signature) else set()
        arguments = _parsed(signature, self.program, [a for a in args[1:] if a not in flags])
        with _text_elsewhere(flags):
            outcome = getattr(imported(module), name)(**arguments)
        if "--json" in flags:
            print(outcome.json())
        if outcome is not None and outcome.exit_code:
            raise SystemExit(outcome.exit_code)

    def _choose(self, name: str, args: Sequence[str]) -> None:
        if name in ("-h", "--help"):
            print(self._usage())
        elif name == "--completion":
            print(self._completion())
        elif name == "--version":
            print(importlib.import_module(self.program.replace("-", "_")).__version__)
        elif name not in self.commands:
            meant = imported("weightsym.commands.parsers").did_you_mean(name, self.commands)
            choice = f"; choose from: {', '.join(self.commands)}."
            self._fail(f"there is no command {name!r}{meant or choice}")
        else:
            folder = os.getcwd()  # of classes of the user; "" would be that of a YAML file
            if folder not in sys.path:
                sys.path.insert(0, folder)
            self.run(name, args)

    def _usage(self) -> str:
        rows = "\n".join(
            f"{self._heading(name)}  {name:<15} {text}" for name, text in self.commands.items()
        )
        explains = f"`{self.program} COMMAND --help` explains one; `--completion` is for bash."
        return f"usage: {self.program} COMMAND ...\n\n{rows}\n\n{explains}"

    def _completion(self) -> str:
        """Return a script with which bash completes commands and their options."""
        cases = []
        for name in self.commands:
            with contextlib.redirect_stdout(io.StringIO()) as text, contextlib.suppress(SystemExit):
                self.run(name, [name, "--help"])
            options = dict.fromkeys(re.findall(r"(?<![\w-])--\w[\w.]*", text.getvalue()))
            cases.append(f"    {name}) words='{' '.join(options)}';;")
        names, function = " ".join(self.commands), f"_{self.program.replace('-', '_')}"
        return "\n".join([
            f"{function}() {{", f"  local words='{names}'",
            "  [ $COMP_CWORD = 1 ] || case ${COMP_WORDS[1]} in", *cases, "  esac",
            '  COMPREPLY=($(compgen -W "$words" -- "${COMP_WORDS[COMP_CWORD]}"))', "}",
            f"complete -o default -F {function} {self.program}",
        ])  # fmt: skip

    def _heading(self, name: str) -> str:
        return f"\n{self.headings[name]}:\n" if name in self.headings else ""

    def _fail(self, message: str) -> None:
        print(f"{self.program}: {message}", file=sys.stderr)
        raise SystemExit(2)


def _let_threads_rest() -> None:
    """Let torch's threads spin for a tenth of a millisecond, instead of several.

    Spinning threads wait for the next operation of torch, and slow down the work between two of
    them, such as that of stacks of small networks. OpenMP reads this when torch is imported, which
    happens later. A setting of the user is kept.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def imported(name: str) -> ModuleType:
    """Import a module without garbage collection, which would take a second and free nothing."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        return importlib.import_module(name)
    finally:
        if collecting:
            gc.enable()


def signature_of(module: str, name: str) -> Callable[..., Any]:
    """Return a function without its body, from its source: imports only for its arguments.

    Args:
        module: with the function.
        name: of the function.
    """
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    future, *_ = (node for node in tree.body if isinstance(node, ast.ImportFrom))
    definitions = {word: node for node in tree.body for word in _defined_by(node)}
    definitions.pop("Outcome", None)  # a result, with imports of its own
    function = definitions[name]
    assert isinstance(function, ast.FunctionDef)
    del function.body[1:]
    chosen = {id(future)}
    waiting: list[ast.stmt] = [function]
    while waiting:
        node = waiting.pop()
        chosen.add(id(node))
        words = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
        waiting += [n for w, n in definitions.items() if w in words and id(n) not in chosen]
    tree.body = [node for node in tree.body if id(node) in chosen]
    light = ModuleType(f"signature of {module}".replace(".", " "))
    sys.modules[light.__name__] = light  # where parsers look for the types of arguments
    light.__dict__["Outcome"] = None
    exec(compile(tree, spec.origin, "exec"), light.__dict__)
    signature: Callable[..., Any] = getattr(light, name)
    return signature


def _defined_by(node: ast.stmt) -> list[str]:
    """Return the names that a statement of a module defines."""
    if isinstance(node, ast.ImportFrom):
        return [alias.asname or alias.name for alias in node.names]
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    return [node.name] if isinstance(node, ast.FunctionDef | ast.ClassDef) else []


def _has_outcome(command: Callable[..., Any]) -> bool:
    return command.__annotations__.get("return") == "Outcome"  # without its imports


@contextlib.contextmanager
def _text_elsewhere(flags: Collection[str]) -> Iterator[None]:
    """Print text to standard error beside JSON, or nowhere."""
    with contextlib.ExitStack() as stack:
        if "--quiet" in flags:
            nowhere = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
            stack.enter_context(contextlib.redirect_stdout(nowhere))
        elif flags:
            stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        yield


def _parsed(command: Callable[..., Any], program: str, args: Sequence[str]) -> dict[str, Any]:
    """Read the arguments of a command from the command line, or from files of ``--config``."""
    import docstring_parser

    parsers = imported("weightsym.commands.parsers")
    settings = imported("weightsym.networks.files.settings")
    for file in settings.config_files(args):
        settings.read_settings(file)
    parameters = inspect.signature(command).parameters
    optional = {p.name for p in parameters.values() if p.default is not p.empty}
    texts = {
        p.arg_name: p.description for p in docstring_parser.parse(command.__doc__ or "").params
    }
    parser = parsers.StrictParser(prog=f"{program} {command.__name__}")
    parser.description = described(command)
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
    for flag, text in _FLAGS.items() if _has_outcome(command) else ():
        parser.add_argument(flag, action="store_true", help=text)
    if "name" in optional and args and not args[0].startswith("-"):
        args = ["--name", *args]  # a name may come first, whether it is needed or not
    options = vars(parser.parse_args(list(args)))
    if group is not None:
        options["architecture"] = group(**{option: options[option] for option in vars(group())})
    return {option: options[option] for option in parameters}


def described(command: Callable[..., Any]) -> str:
    """Return the docstring of a command before its arguments."""
    return (inspect.getdoc(command) or "").partition("\n\nArgs:")[0]


if __name__ == "__main__":
    main()

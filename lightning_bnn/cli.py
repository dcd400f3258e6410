"""The console script: one table of commands, each imported when it is called."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

__all__ = ["main"]

COMMANDS = {
    "bank": "look into a bank of networks, fill it from checkpoints, write it to files",
    "symmetries": "what can be permuted, rescaled and flipped in a network without changing it",
}
"""Name of a command -> what it does; the function of that name lives in ``commands/<name>.py``."""


def main(args: Sequence[str] | None = None) -> None:
    """Run one command; mistakes of the user end in one sentence and exit code 2."""
    args = list(sys.argv[1:] if args is None else args)
    if not args or args[0] in ("-h", "--help"):
        print(_usage())
        return
    name, *rest = args
    if name == "--version":
        print(importlib.import_module("lightning_bnn").__version__)
        return
    if name not in COMMANDS:
        _fail(f"there is no command {name!r}; choose from: {', '.join(COMMANDS)}.")
    from jsonargparse import auto_cli

    command = getattr(importlib.import_module(f"lightning_bnn.commands.{name}"), name)
    try:
        auto_cli(command, args=rest, prog=f"lightning-bnn {name}")
    except (ValueError, OSError) as error:
        _fail(" ".join(str(error).split()))


def _usage() -> str:
    rows = "\n".join(f"  {name:<12} {text}" for name, text in COMMANDS.items())
    usage = "usage: lightning-bnn COMMAND ..."
    return f"{usage}\n\n{rows}\n\n`lightning-bnn COMMAND --help` explains one."


def _fail(message: str) -> None:
    print(f"lightning-bnn: {message}", file=sys.stderr)
    raise SystemExit(2)

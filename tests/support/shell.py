"""Commands as a shell calls them: the code that they end with, and what they refuse."""

from bnn_research import cli as research
from lightning_bnn.cli import EVERY, main


def script_of(command):
    """The console script that has a command."""
    return main if command in EVERY else research.main


def code_of(*args, script=main):
    """What the shell is told."""
    try:
        script([str(a) for a in args])
    except SystemExit as end:
        return end.code
    return 0


def failure(capture, *args, script=main):
    """The one line that says why a command is refused."""
    assert code_of(*args, script=script) == 2
    message = capture.readouterr().err.strip()
    assert "Traceback" not in message
    assert "\n" not in message
    return message

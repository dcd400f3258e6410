"""Commands as a shell calls them: the code that they end with, and what they refuse."""

from lightning_bnn.cli import main


def code_of(*args):
    """What the shell is told."""
    try:
        main([str(a) for a in args])
    except SystemExit as end:
        return end.code
    return 0


def failure(capture, *args):
    """The one line that says why a command is refused."""
    assert code_of(*args) == 2
    message = capture.readouterr().err.strip()
    assert "Traceback" not in message
    assert "\n" not in message
    return message
